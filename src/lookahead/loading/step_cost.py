"""What a step costs: t(K), the time of a forward pass over K tokens, measured once per model and machine.

On a GPU a step of 100 tokens costs about what one token does; on a CPU 8 tokens may cost twice as much. The curve
decides how many guesses a step should carry (`draft.Drafter.grow`), down to none.

How a step is timed (`measure`):

1. One sequence is opened, and an untimed step puts `PREFIX` tokens before its root (fewer in a short context).
2. A timed step runs `bush(K)`, a tree of K tokens, all of them needed, with argmax targets; for K > 1 it also returns
   the top tokens of every node, as steps with guesses do. The clock runs from the call of `backend.step` to its return,
   when the targets are on the host. It does not run while the step is committed. Only the root is committed, so the
   prefix grows by one token per step.
3. A round times every size of `TIMED_SIZES` once, the smallest first. It ends early at a size that took more than
   `DEAREST` times as long as the smallest, that no longer fits the context, or that is above `backend.most_exact`: the
   default config takes no larger steps.
4. The first round is a warm-up and is not counted; it ends early after half of `MAX_SECONDS`. Up to four rounds follow,
   and none begins after `MAX_SECONDS`. The time of a size is that of its fastest step.
5. If most sizes were clearly slower in their second-fastest round, the machine was busy. Such a curve is used, but the
   next load measures again, and keeps the faster time of each size.

`pass_cost` times passes of several sequences, for a backend whose passes are flat lists of tokens: there the time of a
pass depends on how many tokens it has, and not on whose they are.

A `hasty` measurement is for a call that somebody waits for: fewer sizes, a warm-up of two, and one round, which ends
after `HASTE` seconds. Its curve is kept, too, until somebody measures properly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.cache import key_of, write_json
from lookahead.config import FREE, LookaheadConfig, SamplingParams
from lookahead.machine import processor

TIMED_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The step sizes K that are timed; `StepCost.table` draws straight lines between them."""
WIDE_SIZES = (*TIMED_SIZES, 192, 256, 384, 512)
"""For tuning and benchmarks, which may try larger steps than the default."""
PREFIX = 96
"""Tokens before the root of a timed step."""
FLAT = 1.4
"""If a step of the whole budget costs at most this many times a step of one token, every step takes the whole budget.
In simulations that was best at a ratio of 1.3, and weighing each guess against its cost best at 1.6."""
BRANCHES, DEPTH = 8, 16
"""The most branches, and the greatest depth, of the tree that is timed."""
MAX_SECONDS = 6.0
"""No further round begins after this many seconds."""
HASTY_SIZES, HASTE = (1, 2, 4, 8, 16, 32, 64, 128), 1.0
"""What a hasty measurement times, and the seconds after which it times no further size."""
PASS_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""The tokens of a pass that `pass_cost` times."""
LARGEST_TREE, SHORTEST = 64, 128
"""The most tokens that one sequence has in such a pass, and the shortest context that they are timed in."""
CALM = 1.15
"""A machine is calm while the second-fastest round takes at most this many times as long as the fastest."""
ATTEMPTS, DAY = 4, 86400.0
"""How often a machine that is not calm is measured before its curve is taken as it is, for the next so many seconds."""
DEAREST = 5.0
"""Once a step takes this many times as long as a step of one token, larger ones are not timed: they never pay."""


@dataclass(frozen=True)
class StepCost:
    """The measured curve: a step of `sizes[i]` tokens takes `seconds[i]` seconds.

    `calm` is False if the machine was busy with something else meanwhile.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    calm: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a step cost needs one time per size, not {len(self.seconds)} for {len(self.sizes)}")
        if not all(0 < taken < float("inf") for taken in self.seconds):
            raise ValueError(f"a step cost needs positive times, not {self.seconds}")

    def table(self, budget: int) -> tuple[float, ...]:
        """The times of steps of 1 to `budget` tokens, by straight lines between the measured sizes.

        The times never fall. If a small step was measured slower than a larger one, something else disturbed it, and
        it gets the larger step's time.
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

    def with_faster(self, other: StepCost) -> StepCost:
        """This curve with the other's times where those are faster."""
        known = dict(zip(other.sizes, other.seconds, strict=True))
        best = [min(taken, known.get(size, taken)) for size, taken in zip(self.sizes, self.seconds, strict=True)]
        return StepCost(self.sizes, tuple(best), self.calm)

    def shared(self, ranks: int) -> StepCost:
        """The curve of a step that `ranks` ranks share, where each runs the root and its part of the other tokens."""
        return StepCost(tuple(1 + (size - 1) * ranks for size in self.sizes), self.seconds)


def bush(size: int) -> TokenTree:
    """A tree of this many tokens, shaped like a draft: eight branches side by side, none deeper than guesses go.

    The shape matters little, except for half-precision steps of the graph backend, which run depth by depth.
    """
    parents, depths = [-1], [0]
    for node in range(1, size):
        above = node - BRANCHES if node > BRANCHES and depths[node - BRANCHES] < DEPTH else 0
        parents.append(above)
        depths.append(depths[above] + 1)
    return TokenTree([1] * size, parents, depths, list(range(size)))


def measure(
    backend: Backend,
    sizes: Sequence[int] = TIMED_SIZES,
    rounds: int = 4,
    patience: float = MAX_SECONDS,
    hasty: bool = False,
) -> StepCost:
    """Time real steps of every size, as the module's docstring says; a few seconds on a CPU.

    `patience` is the number of seconds after which no further round begins. The fastest round counts, because other
    programs on the machine can slow a step down and never speed one up.
    """
    if hasty:
        sizes, rounds = HASTY_SIZES, 1
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
    taken_by = {size: list[float]() for size in sizes}
    try:
        step(1, trail=[1] * prefix)
        begin = perf_counter()
        for number in range(rounds + 1):
            if number > 1 and perf_counter() - begin > patience:
                break
            for size in sizes[:2] if hasty and not number else sizes:
                spent = perf_counter() - begin
                if backend.length(slot) + size > context or (not number and spent > patience / 2):
                    break
                if hasty and number and size > 2 and spent > HASTE:
                    break
                taken = step(size)
                if number:  # the first round is the warm-up
                    best[size] = min(best[size], taken)
                    taken_by[size].append(taken)
                if best[size] > DEAREST * best[sizes[0]]:
                    break
    finally:
        backend.close(slot)
    found = {size: taken for size, taken in best.items() if taken < float("inf")} or {1: 1.0}
    return StepCost(tuple(found), tuple(found.values()), is_calm(taken_by.values()))


def is_calm(rounds: Iterable[Sequence[float]]) -> bool:
    """Whether, for most sizes, the second-fastest round took hardly longer than the fastest.

    If there was no time for a second round, nobody can tell; then it is not calm.
    """
    timed = [sorted(taken) for taken in rounds if taken]
    calm = [taken for taken in timed if len(taken) > 1 and taken[1] <= CALM * taken[0]]
    return 2 * len(calm) >= len(timed)


def worth_timing(backend: Backend) -> list[int]:
    """The sizes of TIMED_SIZES that the default config may use on this backend."""
    return [size for size in TIMED_SIZES if size <= (backend.most_exact or size)]


def measure_passes(backend: Backend, sizes: Sequence[int] = PASS_SIZES, rounds: int = 2) -> StepCost:
    """Time passes of each size, twice after a warm-up: trees of up to LARGEST_TREE tokens (fewer in a short context) of
    as many sequences as it takes, each with `PREFIX` tokens before its root. Sizes are left out that are above
    `backend.most_rows`, or for whose sequences there is no memory."""
    most, context = backend.most_rows or max(sizes), backend.max_length or 4 * PREFIX
    largest, prefix = min(LARGEST_TREE, context // 4), min(PREFIX, most - 1, context // 4)
    slots = [backend.open() for _ in range(-(-min(most, max(sizes)) // largest))]
    full = prefix + (rounds + 1) * len(sizes) + largest  # the root of every pass stays
    roomy = [slot for slot in slots if backend.reserve(slot, full)]
    sizes = [size for size in sizes if size <= min(most, len(roomy) * largest)] or [1]

    def step(inputs: Sequence[StepInput]) -> float:
        begin = perf_counter()
        backend.step(inputs)
        taken = perf_counter() - begin
        backend.commit([(item.slot, ()) for item in inputs])
        return taken

    def inputs(size: int) -> list[StepInput]:
        """The size in trees that are as equal as possible."""
        count = -(-size // largest)
        trees = [bush(size // count + (place < size % count)) for place in range(count)]
        top = KEPT_TOKENS if size > 1 else 0
        return [StepInput(slot, (), tree, SamplingParams(), (), top) for slot, tree in zip(roomy, trees, strict=False)]

    best = dict.fromkeys(sizes, float("inf"))
    try:
        for slot in roomy:
            step([StepInput(slot, [1] * prefix, bush(1), SamplingParams(), ())])
        for number in range(rounds + 1):
            for size in sizes:
                taken = step(inputs(size))
                if number:  # the first round is the warm-up, which may compile and capture
                    best[size] = min(best[size], taken)
    finally:
        for slot in slots:
            backend.close(slot)
    return StepCost(tuple(best), tuple(best.values()))


def pass_cost(backend: Backend, folder: Path, log: Callable[[str], None] | None = None) -> tuple[float, ...] | None:
    """t of passes of 1 to 512 tokens (or `backend.most_rows`), for `algorithm.choice.choose_trees`: read from `folder`,
    or measured and written there. None for a backend that pads a pass to its longest input, for a tensor-parallel model
    (see `fitted`), and for a context too short to measure in."""
    if backend.most_rows is None or (backend.max_length or SHORTEST) < SHORTEST:
        return None
    if (getattr(backend.model, "_tp_size", None) or 1) > 1:
        return None
    identity = {**identity_of(backend), "torch": torch.__version__, "passes": 1, "most_rows": backend.most_rows}
    cost = cached(backend, identity, folder, log, measured=measure_passes)
    return cost.table(min(PASS_SIZES[-1], backend.most_rows))


def stairs(table: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """The table of a backend that pads a pass to the next of these sizes: tokens up to that size are free."""
    ends = [next((size for size in sizes if size >= tokens), tokens) for tokens in range(1, len(table) + 1)]
    return tuple(table[min(end, len(table)) - 1] for end in ends)


def suited(config: LookaheadConfig, cost: StepCost) -> LookaheadConfig:
    """The config for a machine with this cost curve.

    If a step of the whole budget costs little more than a step of one token, every step takes the whole budget.
    Otherwise the curve goes into the config, so that a step takes only the guesses that are worth their time, and the
    window stays only if its tokens are nearly free. Sequences of one batch share the budget, because tokens that are
    free in a step of one sequence are not free in a step of eight.
    """
    table = cost.table(config.budget)
    config = replace(config, shared=config.budget > 1)
    if table[-1] <= FLAT * table[0]:
        return config
    window = config.window if table[config.window_tokens - 1] <= FREE * table[0] else 0
    return replace(config, window=window, step_cost=table)


def fitted(
    config: LookaheadConfig,
    backend: Backend,
    folder: Path,
    log: Callable[[str], None] | None = None,
    ranks: int = 1,
    hasty: bool = False,
) -> LookaheadConfig:
    """The config for a backend's model on this machine. The measured curve is kept in `folder`; `ranks` share a step.

    A tensor-parallel model gets the config as it is: each of its ranks would measure a curve of its own, choose another
    tree from it, and wait for the others for ever.
    """
    if (getattr(backend.model, "_tp_size", None) or 1) > 1:
        return config
    if backend.most_exact is not None and backend.most_exact < config.budget:
        config = config.adapted(budget=backend.most_exact)
    identity = {**identity_of(backend), "torch": torch.__version__}
    return suited(config, cached(backend, identity, folder, log, hasty).shared(ranks))


def identity_of(backend: Backend) -> dict[str, Any]:
    """What the cost of a step depends on: the model's shape, its dtype, its device and its backend."""
    model, device = backend.model, backend.device
    facts = model.config.to_dict()
    return {
        "model": {k: v for k, v in facts.items() if isinstance(v, (int, float, str)) and k != "_name_or_path"},
        "weights": str(facts.get("quantization_config")),
        "places": {k: str(v) for k, v in (getattr(model, "hf_device_map", None) or {}).items()},
        "dtype": str(backend.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "backend": type(backend).__name__,
        **({"kernels": kernels} if (kernels := getattr(backend, "kernels", None)) else {}),
    }


def cached(
    backend: Backend,
    identity: dict[str, Any],
    folder: Path,
    log: Callable[[str], None] | None = None,
    hasty: bool = False,
    measured: Callable[[Backend], StepCost] | None = None,
) -> StepCost:
    """The curve of this model on this machine: read from `folder`, or measured and written there.

    A hasty curve in the folder is good enough for a hasty call alone. One that was measured while the machine was busy
    is measured again.
    A folder that cannot be written is no error. The curve is then measured again next time.
    """
    facts = {
        **identity,
        "machine": processor(),
        "cores": os.cpu_count(),
        "version": 2,  # version 1 timed chains, not trees
    }
    path = folder / "step-cost" / f"{key_of(facts)}.json"
    try:
        stored = json.loads(path.read_text())
        if stored["hasty"] and not hasty:
            raise ValueError("measured in haste")
        known = StepCost(tuple(map(int, stored["sizes"])), tuple(map(float, stored["seconds"])))
        attempts = int(stored.get("attempts", 0))
        recent = time() - path.stat().st_mtime < DAY
        if hasty or stored.get("calm", True) or (attempts >= ATTEMPTS and recent):
            return known
    except (OSError, ValueError, KeyError, TypeError):
        known, attempts = None, 0
    if log is not None:
        why = "once per model" if known is None else "again: it was busy the last time"
        log(f"measuring what a step costs on this machine ({why}) ...")
    cost = measure(backend, worth_timing(backend), hasty=hasty) if measured is None else measured(backend)
    cost = cost if known is None else cost.with_faster(known)
    content = {"sizes": cost.sizes, "seconds": cost.seconds, "hasty": hasty, "calm": cost.calm}
    with suppress(OSError):
        write_json(path, {**content, "attempts": attempts + 1, "of": facts})
    return cost
