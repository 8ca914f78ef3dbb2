"""`NativeDrafter`: the drafter in C (`drafter.h` lists its parts) behind the interface of `draft.Drafter`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import pack
from typing import Any, NamedTuple

import numpy as np

from lookahead.algorithm.draft import (
    MAX_DRAFT_TOKENS,
    NO_LIMITS,
    Candidates,
    Draft,
    Drafts,
    Limits,
    StepLimits,
    TextSettings,
)
from lookahead.algorithm.native.build import check_result
from lookahead.algorithm.native.candidates import address_of, candidates_in_c, chains_of, table_of
from lookahead.algorithm.native.layout import STEP, STEP_LIMITS
from lookahead.algorithm.native.memory import NativeTable, NativeText, Numbers
from lookahead.algorithm.native.verification import NativeVerification
from lookahead.algorithm.tree import NO_DRAFT_TOKENS, DraftTokens, Forest, TokenTree, WindowLayout
from lookahead.algorithm.verify import Verification
from lookahead.machine import cores

_NO_DRAFT = STEP.with_only("branch", "root")
"""A `Step` without candidates."""

MAX_WORKERS, CORES_EACH = 4, 4
"""The most search threads, and the cores of the machine per search thread."""
MIN_PARALLEL_SEARCHES = 4
"""Threads are used for at least this many sequences with draft tokens."""


class StepsInC(NamedTuple):
    """C's inputs for the drafts of a step: the addresses of their `Step`s, and the integers that come with these.

    `rows` are those of all layouts, `drafted` the most draft tokens, and `searched` the number of sequences with any.
    C writes the trees to `trees`, which grows as needed. `memory` must outlive the call.
    """

    addresses: bytes
    numbers: bytes
    layouts: list[WindowLayout]
    rows: int
    drafted: int
    searched: int
    trees: array[int]
    memory: list[Any]


class NativeDrafter:
    """`PythonDrafter` in C: the same draft tokens and the same trees, bit for bit."""

    def __init__(self, library: Any, workers: int | None = None) -> None:
        """`workers` is the number of search threads; None chooses it by the machine's cores."""
        self._c = library
        self._cost: tuple[Sequence[float], array[float]] = (), array("d")
        self._max_workers = min(MAX_WORKERS, cores() // CORES_EACH) if workers is None else workers
        self._workers = 0
        self._searched = 0  # sequences searched since the last `prepare_search`

    def new_table(self) -> NativeTable:
        return NativeTable(self._c)

    def new_text(self, settings: TextSettings) -> NativeText | None:
        """None for settings that C does not support: large numbers, and the oldest match first."""
        if (
            settings.oldest
            or max(settings.ngram, settings.guesses, settings.key, settings.branches) >= MAX_DRAFT_TOKENS
        ):
            return None
        return NativeText(self._c, settings) if settings.reach < MAX_DRAFT_TOKENS else None

    def prepare_search(self) -> None:
        searched, self._searched = self._searched, 0
        if searched >= MIN_PARALLEL_SEARCHES and self._max_workers:
            # A forked process has none of its parent's threads.
            self._workers = _workers(self._c, self._max_workers, os.getpid())
            self._c.workers_wake(self._workers)

    def search(self, candidates: Candidates, limits: Limits) -> DraftTokens:
        if limits.max_tokens < 1 or limits.max_depth < 1:
            return NO_DRAFT_TOKENS
        in_c, times = candidates_in_c(candidates, limits.max_tokens), self._times(limits.cost)
        step = in_c.step(limits, times, branch=limits.branch, floor=limits.floor, candidates=candidates)
        return in_c.first_tokens(check_result(self._c.draft_search(step, chains_of(candidates))))

    def draft_trees(
        self, drafts: Sequence[Draft], limits: StepLimits = NO_LIMITS
    ) -> tuple[list[TokenTree], float | None]:
        # 1. C's inputs for every sequence.
        known: StepsInC | None = drafts.in_c if isinstance(drafts, Drafts) else None
        steps, numbers, layouts, rows, drafted, searched, trees, _ = self._steps(drafts) if known is None else known
        self._searched = searched
        # 2. Search, choose draft tokens, write the trees.
        if isinstance(limits.cost, np.ndarray):  # new in every step
            times: array[float] | None = array("d", limits.cost.astype(np.float64, copy=False).tobytes())
        else:  # from a config
            times = self._times(limits.cost)
        address, count = table_of(times)
        weighed = -1 if limits.max_weighed is None else max(0, limits.max_weighed)
        most = -1 if limits.max_tokens is None else max(0, limits.max_tokens)
        capacity = 4 * (rows + (drafted if most < 0 else min(drafted, most)))
        if len(trees) < capacity:
            trees.frombytes(bytes(4 * (capacity - len(trees))))
        counts, expected = array("i", bytes(4 * len(drafts))), array("d", bytes(8 * len(drafts) + 8))
        packed = STEP_LIMITS.pack(address, limits.floor, count, len(drafts), weighed, most)
        refuses = check_result(
            self._c.draft_trees(
                packed, steps, numbers, address_of(counts), address_of(expected),
                address_of(trees), self._workers if searched >= MIN_PARALLEL_SEARCHES else 0,
            )
        )  # fmt: skip
        # 3. The trees, which share one forest.
        nodes = rows + sum(counts)
        refused = expected.pop()
        forest = Forest(trees[: 4 * nodes], nodes)
        step = forest.trees(layouts, counts, expected)
        return step, refused if refuses else None

    def _steps(self, drafts: Sequence[Draft]) -> StepsInC:
        """C's inputs for these drafts. They are kept for drafts that do not change."""
        steps, numbers, alive = list[int](), list[Numbers](), list[Any]()
        for draft in drafts:
            cached = draft.cached
            steps.append(self._step(draft, numbers, alive) if cached is None else cached.step or self._cache(draft))
        layouts = [draft.layout for draft in drafts]
        mosts = [draft.max_tokens for draft in drafts if draft.max_tokens > 0 and draft.candidates is not None]
        in_c = StepsInC(
            pack(f"{len(steps)}P", *steps), b"".join(numbers), layouts, sum([layout.size for layout in layouts]),
            sum(mosts), len(mosts), array("i"), alive,
        )  # fmt: skip
        if isinstance(drafts, Drafts):
            drafts.in_c = in_c
        return in_c

    def _step(self, draft: Draft, numbers: list[Numbers], alive: list[Any]) -> int:
        """The address of a draft's `Step`. Its integers are added to `numbers`, and its memory to `alive`."""
        layout, branch, candidates = draft.layout, draft.branch, draft.candidates
        layout.check_branch(branch)
        if candidates is None or draft.max_tokens < 1 or draft.max_depth < 1:
            packed = _NO_DRAFT.pack(layout.size, branch[0])
        else:
            times, trust = self._times(draft.cost), array("d", (draft.trust,))
            packed = candidates_in_c(candidates, draft.max_tokens).step(
                draft, times, trust, layout.size, candidates=candidates, bonus=draft.bonus, all_taken=draft.all_taken,
                root=branch[0],
            )  # fmt: skip
            numbers.append(chains_of(candidates))
            alive += times, trust
        if layout.size > 1:
            numbers += pack(f"{layout.size}i", *branch), layout.parents_and_depths
        step = array("B", packed)
        alive.append(step)
        return address_of(step)

    def _cache(self, draft: Draft) -> int:
        """Store the `Step` of a cached draft. Returns its address."""
        if draft.candidates is None or draft.candidates.text is None or draft.cached is None or draft.layout.size > 1:
            raise ValueError("a cached draft needs candidates with a text in C, and no window")
        return candidates_in_c(draft.candidates, draft.max_tokens).cache(draft, draft.cached, self._times(draft.cost))

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        return NativeVerification(self._c, trees, learners)

    def _times(self, cost: Sequence[float] | None) -> array[float] | None:
        """The table as C reads it. The last one is cached, because most sequences have the same."""
        if cost is None:
            return None
        given, times = self._cost
        if given is not cost:
            times = array("d", cost)
            self._cost = cost, times
        return times


@lru_cache(maxsize=8)
def _workers(library: Any, count: int, process: int) -> int:
    """The search threads of this process, which live as long as it does."""
    handle: int | None = library.workers_new(count)
    return handle or 0
