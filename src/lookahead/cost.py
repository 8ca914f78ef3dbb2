"""What a step costs: t(K), the time of a forward pass over K tokens, measured once per model and machine.

On a GPU a step of 100 tokens costs about what one token does; on a CPU 8 tokens may cost twice as much. The curve
decides how many guesses a step should carry (`draft.Draft.grow`), down to none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any

from lookahead.backends.base import Backend, StepInput
from lookahead.config import LookaheadConfig, SamplingParams
from lookahead.tree import TokenTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PREFIX = 96
FLAT = 1.3
"""A step of the whole budget that costs at most this many times a step of one token: guesses are free, take all."""
HOPELESS = 5.0
"""Sizes beyond a step this many times as dear as one token are not measured: they never pay."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of `sizes[i]` tokens, in `seconds[i]`."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def table(self, budget: int) -> tuple[float, ...]:
        """Entry k is the time of a step of k + 1 tokens: straight lines between the measured sizes, never falling."""
        times, best = [], 0.0
        for size in range(1, budget + 1):
            best = max(best, self._at(size))
            times.append(best)
        return tuple(times)

    def _at(self, size: int) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0] * max(1.0, size / sizes[0])
        i = next((i for i, s in enumerate(sizes) if s >= size), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i] + slope * (size - sizes[i])


def measure(backend: Backend, sizes: Sequence[int] = SIZES, repeats: int = 5) -> StepCost:
    """Time real steps: a root with a chain of guesses behind a short prefix. A few seconds on a CPU."""
    context = backend.max_length or PREFIX + max(sizes) + (repeats + 1) * len(sizes)
    prefix = min(PREFIX, context // 4)
    slot = backend.open()

    def step(size: int, trail: Sequence[int] = ()) -> float:
        tree = TokenTree([1] * size, list(range(-1, size - 1)), list(range(size)), list(range(size)))
        begin = perf_counter()
        backend.step([StepInput(slot, trail, tree, SamplingParams(), (), top=8 if size > 1 else 0)])
        taken = perf_counter() - begin
        backend.commit([(slot, ())])
        return taken

    kept: list[int] = []
    times: list[float] = []
    try:
        step(1, trail=[1] * prefix)
        for size in sizes:
            if backend.length(slot) + repeats + 1 + size > context and kept:
                break
            step(size)
            times.append(median(step(size) for _ in range(repeats)))
            kept.append(size)
            if times[-1] > HOPELESS * times[0]:
                break
    finally:
        backend.close(slot)
    return StepCost(tuple(kept), tuple(times))


def suited(config: LookaheadConfig, cost: StepCost) -> LookaheadConfig:
    """The config for a machine with this cost curve.

    Where the whole budget is nearly free it is used whole. Elsewhere the curve goes into the config, so that each step
    takes the guesses worth their time, and the window stays only if its tokens are nearly free.
    """
    table = cost.table(config.budget)
    if table[-1] <= FLAT * table[0]:
        return config
    window = config.window if table[config.window_tokens - 1] <= 1.1 * table[0] else 0
    return replace(config, window=window, step_cost=table)


def cached(
    backend: Backend, identity: dict[str, Any], folder: Path, log: Callable[[str], None] | None = None
) -> StepCost:
    """The curve of this model on this machine, measured at first and then read from `folder`.

    A folder that cannot be written is no error: the curve is measured again next time.
    """
    facts = {
        **identity,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "version": 1,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / "step-cost" / f"{key}.json"
    try:
        stored = json.loads(path.read_text())
        return StepCost(tuple(map(int, stored["sizes"])), tuple(map(float, stored["seconds"])))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if log is not None:
        log("measuring what a step costs on this machine (once per model) ...")
    cost = measure(backend)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"sizes": cost.sizes, "seconds": cost.seconds, "of": facts}, file)
        os.replace(file.name, path)
    except OSError:
        pass
    return cost
