"""Ranks without processes, and a backend without weights: what parallel decoding does, apart from what carries it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import NO_LIMIT, CacheUse, Capabilities, StepInput
from lookahead.backends.sampling import adjusted, log_probs, pick, top_tokens
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

VOCABULARY = 23


@cache
def logits_after(context: tuple[int, ...]) -> tuple[float, ...]:
    rng = random.Random(repr(context))
    return tuple(2.0 * rng.gauss(0, 1) for _ in range(VOCABULARY))


class ToyBackend:
    """Keeps each slot's tokens in place of their K/V; a row's logits are a random function of the last three tokens.

    Whoever commits the wrong nodes or forgets a token gets other logits.
    """

    capabilities = Capabilities("toy", pads=True)
    max_length: int | None = None
    most_rows = NO_LIMIT
    most_nodes: int | None = None
    captures = 0
    expert_reads = 0
    vocab_size = VOCABULARY
    model = device = dtype = None

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}
        self._last: dict[int, StepInput] = {}
        self._next = 0

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        self._next += 1
        self.slots[self._next] = []
        return self._next

    def close(self, slot: int) -> None:
        del self.slots[slot]

    def length(self, slot: int) -> int:
        return len(self.slots[slot])

    def reserve(self, slot: int, tokens: int) -> bool:
        return True

    def holds(self) -> int | None:
        return None

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def remember(self, slot: int, tokens: Sequence[int]) -> None: ...

    def reload_weights(self) -> None: ...

    def launch(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        self._last.update({item.slot: item for item in inputs})
        return [self._read(item) for item in inputs]

    def collect(self, launched: list[StepOutput]) -> list[StepOutput]:
        return launched

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, path in accepted:
            item = self._last.pop(slot)
            parents = [item.tree.parents[node] for node in path]
            assert parents == [0, *path][: len(path)], "the accepted nodes are no path"
            self.slots[slot] += [*item.chunk, item.tree.tokens[0], *(item.tree.tokens[node] for node in path)]

    def logits_of(self, item: StepInput) -> torch.Tensor:
        """[len(needed), V]"""
        tree, rows = item.tree, []
        prefix = [*self.slots[item.slot], *item.chunk]
        for row in tree.needed:
            path, node = [], row
            while node >= 0:
                assert tree.parents[node] < node
                path.insert(0, tree.tokens[node])
                node = tree.parents[node]
            assert len(path) == tree.depths[row] + 1
            rows.append(logits_after(tuple([*prefix, *path][-3:])))
        return torch.tensor(rows)

    def _read(self, item: StepInput) -> StepOutput:
        logits = scores = self.logits_of(item)
        if item.adjustment is not None:
            assert [*self.slots[item.slot], *item.chunk, item.tree.tokens[0]] == list(item.adjustment.text)
            paths = [item.tree.path_tokens(node) for node in item.tree.needed]
            scores = adjusted(logits, item.sampling, item.adjustment, paths)
        targets = pick(scores, item.sampling, item.uniforms)
        output = StepOutput(targets.tolist(), top_tokens(scores, item.top).numpy() if item.top else None)
        if item.logprobs is not None:
            output.likely, output.logprobs = log_probs(logits, targets, item.logprobs)
        return output


def decode(
    backend: Any,
    prompts: Sequence[Sequence[int]],
    config: LookaheadConfig,
    sampling: SamplingParams | None = None,
    tokens: int = 24,
) -> list[DecodingSequence]:
    """All prompts in one batch, to their ends; the second half joins when the first has had three steps."""
    rules = StopRules(tokens, frozenset(), backend.max_length)
    sequences = [DecodingSequence(prompt, config, sampling, rules) for prompt in prompts]
    engine = Engine(backend)
    half = (len(sequences) + 1) // 2
    for sequence in sequences[:half]:
        engine.submit(Request(sequence))
    for _ in range(3):
        engine.step()
    for sequence in sequences[half:]:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return sequences


class ThreadGroup:
    """One of R ranks that are threads of this process; `exchange` is a barrier on either side of a list."""

    copies, check = 1, False

    def __init__(self, rank: int, size: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank = self.share = rank
        self.size = self.shares = size
        self._said, self._barrier = said, barrier

    def exchange(self, numbers: Any) -> Any:
        self._said[self.rank] = numbers
        self._barrier.wait(60)
        gathered = np.stack(self._said)
        self._barrier.wait(60)
        return gathered

    def guarded(self) -> Any:
        return nullcontext()


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run `work(group)` on every rank, each a thread. The first error is raised here."""
    said, barrier, found, errors = [None] * size, threading.Barrier(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadGroup(rank, size, said, barrier))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return found
