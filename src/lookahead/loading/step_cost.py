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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.config import FREE, LookaheadConfig, SamplingParams

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PREFIX = 96
FLAT = 1.4
"""A step of the whole budget that costs at most this many times a step of one token: guesses are free, take all.
`benchmarks/taught.py` finds that best at 1.3, and weighing the guesses best at 1.6."""
BRANCHES, DEPTH = 8, 16
"""Of the tree that is timed."""
PATIENCE = 6.0
"""Seconds after which no further round begins."""
HOPELESS = 5.0
"""Sizes beyond a step this many times as dear as one token are not measured: they never pay."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of `sizes[i]` tokens, in `seconds[i]`."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a step cost needs one time per size, not {len(self.seconds)} for {len(self.sizes)}")
        if not all(0 < taken < float("inf") for taken in self.seconds):
            raise ValueError(f"a step cost needs positive times, not {self.seconds}")

    def table(self, budget: int) -> tuple[float, ...]:
        """Entry k is the time of a step of k + 1 tokens: straight lines between the measured sizes, never falling.

        Where a smaller step was measured slower than a larger one it was disturbed, and the larger one's time stands.
        """
        seconds = [min(self.seconds[i:]) for i in range(len(self.seconds))]
        times = []
        for size in range(1, budget + 1):
            i = next((i for i, s in enumerate(self.sizes) if s >= size), len(self.sizes) - 1)
            if i == 0:
                times.append(seconds[0] * max(1.0, size / self.sizes[0]))
                continue
            slope = (seconds[i] - seconds[i - 1]) / (self.sizes[i] - self.sizes[i - 1])
            times.append(seconds[i] + slope * (size - self.sizes[i]))
        return tuple(times)

    def shared(self, ranks: int) -> StepCost:
        """The curve of `ranks` ranks that share a step: each runs the root and its part of the rest."""
        return StepCost(tuple(1 + (size - 1) * ranks for size in self.sizes), self.seconds)


def bush(size: int) -> TokenTree:
    """A tree of this many tokens as drafts make them: eight branches side by side, none deeper than a guess may be.

    Its form matters little but for half-precision steps of the graph backend, which take each depth by itself.
    """
    parents, depths = [-1], [0]
    for node in range(1, size):
        above = node - BRANCHES if node > BRANCHES and depths[node - BRANCHES] < DEPTH else 0
        parents.append(above)
        depths.append(depths[above] + 1)
    return TokenTree([1] * size, parents, depths, list(range(size)))


def measure(backend: Backend, sizes: Sequence[int] = SIZES, rounds: int = 4, patience: float = PATIENCE) -> StepCost:
    """Time real steps: a root with branches of guesses behind a short prefix. A few seconds on a CPU.

    Every round runs all sizes, and the best round counts: a busy neighbour slows some of them, never speeds one up.
    """
    context = backend.max_length or PREFIX + max(sizes) + (rounds + 1) * len(sizes)
    prefix = min(PREFIX, context // 4)
    slot = backend.open()

    def step(size: int, trail: Sequence[int] = ()) -> float:
        tree = bush(size)
        begin = perf_counter()
        backend.step([StepInput(slot, trail, tree, SamplingParams(), (), top=KEPT_TOKENS if size > 1 else 0)])
        taken = perf_counter() - begin
        backend.commit([(slot, ())])
        return taken

    best = dict.fromkeys(sizes, float("inf"))
    try:
        step(1, trail=[1] * prefix)
        begin = perf_counter()
        for number in range(rounds + 1):
            if number > 1 and perf_counter() - begin > patience:
                break
            for size in sizes:
                if backend.length(slot) + size > context or (not number and perf_counter() - begin > patience / 2):
                    break
                taken = step(size)
                if number:  # the first round is the warm-up
                    best[size] = min(best[size], taken)
                if best[size] > HOPELESS * best[sizes[0]]:
                    break
    finally:
        backend.close(slot)
    found = {size: taken for size, taken in best.items() if taken < float("inf")} or {1: 1.0}
    return StepCost(tuple(found), tuple(found.values()))


def suited(config: LookaheadConfig, cost: StepCost) -> LookaheadConfig:
    """The config for a machine with this cost curve.

    Where the whole budget is nearly free it is used whole. Elsewhere the curve goes into the config, so that each step
    takes the guesses worth their time, and the window stays only if its tokens are nearly free. Sequences that run at
    once share the budget: what is free for one is not for eight.
    """
    table = cost.table(config.budget)
    config = replace(config, shared=config.budget > 1)
    if table[-1] <= FLAT * table[0]:
        return config
    window = config.window if table[config.window_tokens - 1] <= FREE * table[0] else 0
    return replace(config, window=window, step_cost=table)


def fitted(
    config: LookaheadConfig, backend: Backend, folder: Path, log: Callable[[str], None] | None = None, ranks: int = 1
) -> LookaheadConfig:
    """The config for a backend's model on this machine; the measured curve is kept in `folder`. `ranks` share a step.

    The ranks of a tensor-parallel model would each measure a curve of their own, plan different trees and wait for each
    other for ever, so they take the config as it is.
    """
    if (getattr(backend.model, "_tp_size", None) or 1) > 1:
        return config
    identity = {**identity_of(backend), "torch": torch.__version__}
    return suited(config, cached(backend, identity, folder, log).shared(ranks))


def identity_of(backend: Backend) -> dict[str, Any]:
    """The model's shape and where it runs: what a step's cost depends on."""
    model, device = backend.model, backend.device
    facts = model.config.to_dict()
    return {
        "model": {k: v for k, v in facts.items() if isinstance(v, (int, float, str)) and k != "_name_or_path"},
        "weights": str(facts.get("quantization_config")),
        "places": {k: str(v) for k, v in (getattr(model, "hf_device_map", None) or {}).items()},
        "dtype": str(backend.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "backend": type(backend).__name__,
    }


def cached(
    backend: Backend, identity: dict[str, Any], folder: Path, log: Callable[[str], None] | None = None
) -> StepCost:
    """The curve of this model on this machine, measured at first and then read from `folder`.

    A folder that cannot be written is no error: the curve is measured again next time.
    """
    facts = {
        **identity,
        "machine": processor(),
        "cores": os.cpu_count(),
        "version": 2,  # 1 was timed with chains
    }
    path = folder / "step-cost" / f"{key_of(facts)}.json"
    try:
        stored = json.loads(path.read_text())
        return StepCost(tuple(map(int, stored["sizes"])), tuple(map(float, stored["seconds"])))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if log is not None:
        log("measuring what a step costs on this machine (once per model) ...")
    cost = measure(backend)
    with suppress(OSError):
        store(path, {"sizes": cost.sizes, "seconds": cost.seconds, "of": facts})
    return cost


def key_of(facts: dict[str, Any]) -> str:
    """A file name for what was measured of this model on this machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def store(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder_of_parts:
        part = Path(folder_of_parts) / path.name
        part.write_text(json.dumps(content))
        os.replace(part, path)


def processor() -> str:
    """The CPU's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
