"""Time on the device: of a captured step, of any call, and of reading what a step has to read."""

from __future__ import annotations

import random
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import SamplingParams
from lookahead.loading.timing import timing_tree

REPEATS = 30
ROOM = 4 * REPEATS
"""Tokens that the context may grow by while a step is timed."""
AHEAD_TICKS = 4_000_000
"""The device waits this many ticks (about 2 ms) before a timed call, so that launching is no part of its time."""


def median_ms(run: Callable[[], Any], after: Callable[[Any], Any] = lambda _: None, repeats: int = REPEATS) -> float:
    """Median device time of a call in milliseconds; `after` is called with its result and not timed.

    Without a GPU it is wall time.
    """
    if not torch.cuda.is_available():
        return wall_ms(lambda: after(run()), 3)
    taken = []
    for number in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_TICKS)
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        after(result)
        if number >= 3:  # the first ones warm up
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """How many bytes per second a copy on the device reads and writes."""
    source = torch.randn(1 << (28 if torch.device(device).type == "cuda" else 20), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3


def bytes_read(model: GraphModel, sequences: int, context: int) -> int:
    """What a step of one token per sequence has to read at least: the matrices, and every sequence's K/V."""
    cached = 0
    for group in model.groups:
        seen = context if group.window is None else min(context, group.window)
        cached += seen * group.page_bytes(model.like.element_size()) // PAGE
    return sum(matrix.nbytes for matrix in model.matrices) + sequences * cached


def wall_ms(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    return 1e3 * statistics.median(timeit.repeat(run, number=1, repeat=repeats))


def tree_of(count: int, vocabulary: int = 1000) -> TokenTree:
    """A tree about as deep and as wide as the default makes them, of random tokens."""
    rng, tree = random.Random(count), timing_tree(count)
    return TokenTree([rng.randrange(vocabulary) for _ in range(count)], tree.parents, tree.depths, tree.needed)


def step_ms(backend: GraphBackend, count: int, context: int, sequences: int = 1) -> tuple[float, float]:
    """Device time of a captured step of this many tokens per sequence at this context, and wall time with the host's.

    Only the root is kept of a step, so that the context grows by one token with each.
    """
    backend.check_room(sequences, context + ROOM)
    if sequences == 1:
        backend.prepare(context + ROOM, count)
    slots, rng = [backend.open() for _ in range(sequences)], random.Random(0)
    vocabulary = min(1000, backend.vocab_size)

    def item(slot: int, size: int, chunk: Sequence[int] = ()) -> StepInput:
        return StepInput(slot, chunk, tree_of(size, vocabulary), SamplingParams(), (), top=8)

    def collect(launched: Any, slots: Sequence[int] = slots) -> None:
        backend.collect(launched)
        backend.commit([(slot, ()) for slot in slots])

    try:
        for slot in slots:
            prompt = [rng.randrange(vocabulary) for _ in range(context - 1)]
            collect(backend.launch(run_prompt_chunks(backend, [item(slot, 1, prompt)])), [slot])
        timed = [item(slot, count) for slot in slots]
        device = median_ms(lambda: backend.launch(timed), collect)
        return device, wall_ms(lambda: collect(backend.launch(timed)), REPEATS if torch.cuda.is_available() else 3)
    finally:
        for slot in slots:
            backend.close(slot)
