"""`NativeDrafter`: the drafter in C (`drafter.h` tells its parts) behind the interface of `draft.Drafter`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import pack
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import ALONE, MOST_GUESSES, Candidates, Draft, Limits, Share, TextSettings
from lookahead.algorithm.native.candidates import CandidatesInC, address_of, candidates_in_c, chains_of, table_of
from lookahead.algorithm.native.layout import SHARE, STEP
from lookahead.algorithm.native.memory import NativeTable, NativeText, Numbers, check
from lookahead.algorithm.native.verification import NativeVerification
from lookahead.algorithm.tree import NO_GUESSES, Forest, Guesses, TokenTree
from lookahead.algorithm.verify import Verification
from lookahead.machine import cores

_NO_DRAFT = STEP.with_only("branch", "root")
"""A `Step` without candidates."""

MOST_WORKERS, CORES_EACH = 4, 4
"""At most so many threads help to search, and no more than one for so many of the machine's cores."""
MANY = 4
"""From so many sequences on that have guesses, threads help."""


class NativeDrafter:
    """`PythonDrafter` in C: the same guesses and the same trees, bit for bit."""

    def __init__(self, library: Any, workers: int | None = None) -> None:
        """`workers` is how many threads help to search; without it as many as the machine has cores to spare for."""
        self._c = library
        self._cost: tuple[Sequence[float], array[float]] = (), array("d")
        self._most_workers = min(MOST_WORKERS, cores() // CORES_EACH) if workers is None else workers
        self._workers = 0
        self._searched = 0  # the sequences that the last choice searched, until `get_ready`

    def new_table(self) -> NativeTable:
        return NativeTable(self._c)

    def new_text(self, settings: TextSettings) -> NativeText | None:
        """None where C cannot do what the sources do: its numbers are small, and the newest match goes first."""
        if settings.oldest or max(settings.ngram, settings.guesses, settings.key, settings.branches) >= MOST_GUESSES:
            return None
        return NativeText(self._c, settings) if settings.reach < MOST_GUESSES else None

    def get_ready(self) -> None:
        searched, self._searched = self._searched, 0
        if searched >= MANY and self._most_workers:
            # A process that was forked has none of its parent's threads.
            self._workers = _workers(self._c, self._most_workers, os.getpid())
            self._c.workers_wake(self._workers)

    def grow(self, candidates: Candidates, limits: Limits) -> Guesses:
        if limits.most < 1 or limits.max_depth < 1:
            return NO_GUESSES
        in_c, times = candidates_in_c(candidates, limits.most), self._times(limits.cost)
        step = in_c.step(limits, times, branch=limits.branch, floor=limits.floor, candidates=candidates)
        return in_c.first(check(self._c.draft_search(step, chains_of(candidates))))

    def choose(self, drafts: Sequence[Draft], share: Share = ALONE) -> tuple[list[TokenTree], float | None]:
        # 1. What C needs of every sequence.
        steps, numbers, rows, guesses, searched = list[int](), list[Numbers](), 0, 0, 0
        alive = list[Any]()  # what C reads must outlive its call
        for draft in drafts:
            if draft.cached is None:
                steps.append(self._step(draft, numbers, alive))
            else:
                in_c = cast("CandidatesInC | None", draft.candidates and draft.candidates.in_c)
                steps.append(
                    in_c.cached_step if in_c is not None and in_c.cached is draft.cached else self._cache(draft)
                )
            if draft.candidates is not None and draft.most > 0:
                searched += 1
                guesses += draft.most
            rows += draft.layout.size
        self._searched = searched
        # 2. Search, choose, write the trees.
        times: npt.NDArray[np.float64] | array[float] | None
        if isinstance(share.cost, np.ndarray):  # new in every step
            times = np.ascontiguousarray(share.cost, dtype=np.float64)
            address, count = times.__array_interface__["data"][0], len(times)
        else:  # a config's
            times = self._times(share.cost)
            address, count = table_of(times)
        most, room = (-1 if number is None else max(0, number) for number in (share.most, share.room))
        space = MOST_GUESSES * len(drafts) if room < 0 else room
        trees = array("i", bytes(16 * (rows + min(guesses, space))))
        counts, expected = array("i", bytes(4 * len(drafts))), array("d", bytes(8 * len(drafts) + 8))
        shared = SHARE.pack(address, share.floor, count, len(drafts), most, room)
        some = check(
            self._c.draft_choose(
                shared, pack(f"{len(steps)}P", *steps), b"".join(numbers), address_of(counts), address_of(expected),
                address_of(trees), self._workers if searched >= MANY else 0,
            )
        )  # fmt: skip
        # 3. The trees are one forest.
        nodes = rows + sum(counts)
        made, start, forest = list[TokenTree](), 0, Forest(trees[: 4 * nodes], nodes)
        for draft, count, sum_of_scores in zip(drafts, counts, expected, strict=False):
            made.append(TokenTree.of_forest(forest, start, draft.layout, count, sum_of_scores))
            start += draft.layout.size + count
        return made, expected[len(drafts)] if some else None

    def _step(self, draft: Draft, numbers: list[Numbers], alive: list[Any]) -> int:
        """Where C's `Step` of a draft is. What comes with it goes to `numbers`, and what must stay to `alive`."""
        layout, branch, candidates = draft.layout, draft.branch, draft.candidates
        layout.check(branch)
        if candidates is None or draft.most < 1 or draft.max_depth < 1:
            packed = _NO_DRAFT.pack(layout.size, branch[0])
        else:
            times, trust = self._times(draft.cost), array("d", (draft.trust,))
            packed = candidates_in_c(candidates, draft.most).step(
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
        """Where C's `Step` of a cached draft is, from now on."""
        if draft.candidates is None or draft.candidates.text is None or draft.cached is None or draft.layout.size > 1:
            raise ValueError("a cached draft needs candidates with a text in C, and has no window")
        return candidates_in_c(draft.candidates, draft.most).cache(draft, draft.cached, self._times(draft.cost))

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        return NativeVerification(self._c, trees, learners)

    def _times(self, cost: Sequence[float] | None) -> array[float] | None:
        """The table as C reads it. The last one is kept, because most sequences have the same."""
        if cost is None:
            return None
        given, times = self._cost
        if given is not cost:
            times = array("d", cost)
            self._cost = cost, times
        return times


@lru_cache(maxsize=8)
def _workers(library: Any, count: int, process: int) -> int:
    """The threads of this process that help to search. They live as long as it does."""
    made: int | None = library.workers_new(count)
    return made or 0
