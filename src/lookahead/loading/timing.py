"""The timing of steps and passes, for `algorithm.cost`.

How a step is timed (`measure`):

1. One sequence is opened, and an untimed step puts `PREFIX` tokens before its root (fewer in a short context).
2. A timed step runs `timing_tree(K)`, a tree of K tokens, all of them needed, with argmax targets; for K > 1 it also
   returns the top tokens of every node, as steps with draft tokens do. The time is that of `backend.step`, which
   returns when the targets are on the host; the commit is not included. Only the root is committed, so the prefix
   grows by one token per step.
3. A round times every size of `TIMED_SIZES` once, the smallest first. It ends early at a size that took more than
   `MAX_SLOWDOWN` times as long as the smallest, that no longer fits the context, or that is above the backend's
   `exact_nodes`: the default config takes no larger steps.
4. A size is timed only after it has run once: its first step may compile, search for or capture something, which takes
   a thousand times as long as a step. Such one-off work does not count as time spent. A time in which the backend's
   `captures` grew is thrown away. There are up to four rounds. No round begins after `MAX_SECONDS` of steps, and within
   the first no size. The time of a size is that of its fastest step.
5. If most sizes were clearly slower in their second-fastest round, or had only one, the curve is not stable: the
   machine may have been busy. Such a curve is used, but the next load measures again, and the faster time of each
   size counts.

Chains are run as they are, without a warm-up: nothing is compiled for them. Those of CHAIN_SIZES come first, because a
pass over several tokens may take as long for 2 as for 64, and seconds on a slow machine.

`measure_passes` times passes of several sequences, for a backend whose passes are flat lists of tokens: there the time
of a pass depends on its number of rows alone.

A `quick` measurement is for a call that must return soon: fewer sizes and one round, which ends after `QUICK_SECONDS`
of steps (`CHAIN_SECONDS` of chains). Its curve is never stable, so the next load measures again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from lookahead.algorithm.cost import CostCurve
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import NO_LIMIT, Backend, StepInput
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.config import SamplingParams

TIMED_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The step sizes K that are timed; `CostCurve.table` interpolates between them."""
WIDE_SIZES = (*TIMED_SIZES, 192, 256, 384, 512)
"""For tuning and benchmarks, which may try larger steps than the default."""
PREFIX = 96
"""Tokens before the root of a timed step."""
BRANCHES, DEPTH = 8, 64
"""The most branches, and the greatest depth, of the tree that is timed."""
MAX_SECONDS = 6.0
"""No further round begins after this many seconds of steps."""
QUICK_SIZES, QUICK_SECONDS = (1, 2, 4, 8, 16, 32, 64, 128), 1.0
"""What a quick measurement times, and the seconds after which it times no further size."""
CHAIN_SECONDS = 1.5
"""As QUICK_SECONDS, for chains: enough for 1, 2, 16 and 64 tokens of a hybrid of 60 layers on one core, which take
0.26, 0.37, 0.61 and 0.97 seconds. The last two show that long chains cost hardly more than short ones."""
CHAIN_SIZES = (1, 2, 16, 64, 4, 8, 32)
"""The first sizes of chains that are timed, the most telling first. Transformers' Mamba-2 pads a pass to chunks of 256
tokens on a CPU: on one busy core, granite with 60 layers took 0.37 seconds for 1 token, 1.35 for 2 and 1.43 for 3. In
ascending order 3 was the last size within MAX_SECONDS, and no step could have more than 4 tokens."""
PASS_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""The tokens of a pass that `measure_passes` times."""
MAX_TREE_TOKENS, MIN_CONTEXT = 64, 128
"""The most tokens of one sequence in such a pass, and the shortest context in which they are timed."""
STABLE = 1.15
"""Times are stable while the second-fastest round takes at most this many times as long as the fastest."""
MAX_SLOWDOWN = 5.0
"""Once a step takes this many times as long as a step of one token, larger ones are not timed: they never pay."""
LEAST_PAY = 3.0
"""A chain may take longer than that, if it takes less than a third of the time of as many single tokens: a copy of the
text is accepted as a whole."""


NO_TIME = float("inf")


def timing_tree(size: int, vocabulary: int = 2, first: int = 0, *, branches: bool = True) -> TokenTree:
    """A tree of `size` tokens, shaped like a draft: eight branches side by side, none deeper than draft tokens are. One
    that has no `branches` is a chain.

    The shape matters little, except for half-precision steps of the graph backend, which run depth by depth. The tokens
    matter for a mixture of experts: equal ones would have the same experts. `first`: the number of the first one.
    """
    parents, depths = ([-1], [0]) if branches else (list(range(-1, size - 1)), list(range(size)))
    for node in range(len(parents), size):
        above = node - BRANCHES if node > BRANCHES and depths[node - BRANCHES] < DEPTH else 0
        parents.append(above)
        depths.append(depths[above] + 1)
    return TokenTree([varied(first + node, vocabulary) for node in range(size)], parents, depths, list(range(size)))


def varied(index: int, vocabulary: int) -> int:
    """Some token, another one for every index."""
    return 1 + index * 7919 % max(1, vocabulary - 1)


def measure(
    backend: Backend,
    sizes: Sequence[int] = TIMED_SIZES,
    rounds: int = 4,
    patience: float = MAX_SECONDS,
    quick: bool = False,
) -> CostCurve:
    """Time real steps of every size, as the module's docstring says; a few seconds on a CPU.

    `patience` is the number of seconds after which no further round begins. The fastest round counts, because other
    programs on the machine can slow a step down and never speed one up.
    """
    if quick:
        sizes, rounds = QUICK_SIZES, 1
        patience = QUICK_SECONDS if backend.capabilities.branches else CHAIN_SECONDS
    chains = not backend.capabilities.branches
    if chains:
        sizes = [*(size for size in CHAIN_SIZES if size in sizes), *(size for size in sizes if size not in CHAIN_SIZES)]
    sizes = [size for size in sizes if size <= (backend.most_nodes or size)]
    context = backend.max_length or PREFIX + max(sizes) + (rounds + 1) * len(sizes)
    prefix = min(PREFIX, context // 4)
    slot = backend.open()

    def step(size: int, chunk: Sequence[int] = ()) -> float:
        top = MAX_SUCCESSORS if size > 1 else 0
        tree = timing_tree(size, backend.vocab_size, branches=not chains)
        step_input = StepInput(slot, chunk, tree, SamplingParams(), (), top=top)
        return time_step(backend, run_prompt_chunks(backend, [step_input]))

    taken_by = {size: list[float]() for size in sizes}
    reads_by = dict[int, float]()
    warm, spent, most = set(sizes) if chains else set[int](), 0.0, NO_LIMIT
    try:
        step(1, chunk=[varied(index, backend.vocab_size) for index in range(prefix)])
        for number in range(rounds):
            if number and spent > patience:
                break
            for size in sizes:
                if size > most or backend.length(slot) + size + 1 + (size not in warm) > context:  # it may run thrice
                    continue
                if not number and spent > patience and size > sizes[1]:
                    break
                first = 0.0 if size in warm else step(size)
                warm.add(size)
                reads = backend.expert_reads
                taken = step(size)
                reads_by[size] = backend.expert_reads - reads
                if taken == NO_TIME:
                    continue
                spent += taken + min(first, taken)
                taken_by[size].append(taken)
                slowdown = max(MAX_SLOWDOWN, size / LEAST_PAY) if chains else MAX_SLOWDOWN
                dearest = slowdown * min(taken_by[sizes[0]], default=taken)
                if min(taken_by[size]) > dearest:
                    taken_by[size].append(step(size))  # it may have been disturbed
                    if min(taken_by[size]) > dearest:
                        most = size
    finally:
        backend.close(slot)
    found = {size: min(taken_by[size]) for size in sorted(sizes) if taken_by[size]} or {1: 1.0}
    return with_reads(CostCurve(tuple(found), tuple(found.values()), is_stable(taken_by.values())), backend, reads_by)


def with_reads(curve: CostCurve, backend: Backend, reads: Mapping[int, float]) -> CostCurve:
    """The curve of a mixture of experts, with the experts that its passes have read by size."""
    experts = backend.capabilities.experts
    if not experts or any(size not in reads for size in curve.sizes):
        return curve
    return replace(curve, reads=tuple(reads[size] for size in curve.sizes), experts=experts)


def time_step(backend: Backend, inputs: Sequence[StepInput]) -> float:
    """Run a step, and commit its roots. Returns the seconds that it took, or NO_TIME if something was compiled,
    searched for or captured meanwhile."""
    before, begin = backend.captures, perf_counter()
    backend.step(inputs)
    taken = perf_counter() - begin
    backend.commit([(item.slot, ()) for item in inputs])
    return taken if backend.captures == before else NO_TIME


def is_stable(rounds: Iterable[Sequence[float]]) -> bool:
    """Whether, for most sizes, the second-fastest round took hardly longer than the fastest. A size with one round is
    not stable."""
    timed = [sorted(taken) for taken in rounds if taken]
    stable = [taken for taken in timed if len(taken) > 1 and taken[1] <= STABLE * taken[0]]
    return bool(timed) and 2 * len(stable) >= len(timed)


def sizes_to_time(backend: Backend) -> list[int]:
    """The sizes of TIMED_SIZES that the default config may use on this backend."""
    return [size for size in TIMED_SIZES if size <= (backend.capabilities.exact_nodes or size)]


def measure_passes(backend: Backend, sizes: Sequence[int] = PASS_SIZES, rounds: int = 2) -> CostCurve:
    """Time passes of each size, twice after a warm-up, with trees of up to MAX_TREE_TOKENS tokens (fewer in a short
    context) of as many sequences as needed, each with `PREFIX` tokens before its root. Sizes above the backend's
    `most_rows` and `most_nodes`, and those for whose sequences there is no memory, are left out."""
    most, context = min(backend.most_rows, backend.most_nodes or NO_LIMIT), backend.max_length or 4 * PREFIX
    largest, prefix = min(MAX_TREE_TOKENS, context // 4), min(PREFIX, most - 1, context // 4)
    slots = [backend.open() for _ in range(-(-min(most, max(sizes)) // largest))]
    full = prefix + (rounds + 1) * len(sizes) + largest  # the root of every pass stays
    reserved = [slot for slot in slots if backend.reserve(slot, full)]
    sizes = [size for size in sizes if size <= min(most, len(reserved) * largest)] or [1]

    def inputs(size: int) -> list[StepInput]:
        """The size in trees that are as equal as possible."""
        count = -(-size // largest)
        parts = [size // count + (index < size % count) for index in range(count)]
        branches = backend.capabilities.branches
        trees = [
            timing_tree(part, backend.vocab_size, index * largest, branches=branches)
            for index, part in enumerate(parts)
        ]
        top = MAX_SUCCESSORS if size > 1 else 0
        return [
            StepInput(slot, (), tree, SamplingParams(), (), top) for slot, tree in zip(reserved, trees, strict=False)
        ]

    best, reads = dict.fromkeys(sizes, NO_TIME), dict[int, float]()
    try:
        for index, slot in enumerate(reserved):
            text = [varied(index * prefix + number, backend.vocab_size) for number in range(prefix)]
            time_step(backend, [StepInput(slot, text, timing_tree(1), SamplingParams(), ())])
        for number in range(rounds + 1):
            for size in sizes:
                before = backend.expert_reads
                taken = time_step(backend, inputs(size))
                reads[size] = backend.expert_reads - before
                if number:  # the first round is the warm-up
                    best[size] = min(best[size], taken)
    finally:
        for slot in slots:
            backend.close(slot)
    found = {size: taken for size, taken in best.items() if taken != NO_TIME}
    if not found:
        return CostCurve((1,), (1.0,), stable=False)
    return with_reads(CostCurve(tuple(found), tuple(found.values())), backend, reads)
