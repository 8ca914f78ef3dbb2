"""`NativeDrafter`: the drafter in C (`drafter.h` tells its parts) behind the interface of `draft.Drafter`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import pack
from typing import Any, cast

import numpy as np

from lookahead.algorithm.draft import ALONE, MOST_GUESSES, Draft, Limits, Offer, Share, TextSettings
from lookahead.algorithm.native.drafts import DraftInC, address_of, chains_of, draft_in_c
from lookahead.algorithm.native.layout import SHARE, STEP
from lookahead.algorithm.native.memory import NativeTable, NativeText, Numbers, check
from lookahead.algorithm.native.verification import NativeVerification
from lookahead.algorithm.tree import NO_GUESSES, Forest, Guesses, TokenTree
from lookahead.algorithm.verify import Verification
from lookahead.machine import cores

_NO_DRAFT = STEP.with_only("branch", "root")
"""A `Step` without a draft."""

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
        self._memory: list[array[int]] = []  # where C writes trees
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

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        if limits.most < 1 or limits.max_depth < 1:
            return NO_GUESSES
        kept, times = draft_in_c(draft, limits.most), self._times(limits.cost)
        step = kept.step(limits, times, branch=limits.branch, floor=limits.floor, draft=draft)
        return kept.first(check(self._c.draft_search(step, chains_of(draft))))

    def choose(self, offers: Sequence[Offer], share: Share = ALONE) -> tuple[list[TokenTree], float | None]:
        # 1. What C needs of every sequence.
        steps, numbers, rows, guesses, searched = list[int](), list[Numbers](), 0, 0, 0
        alive = list[Any]()  # what C reads must outlive its call
        for offer in offers:
            if offer.standing is None:
                steps.append(self._step(offer, numbers, alive))
            else:
                kept = cast("DraftInC | None", offer.draft and offer.draft.in_c)
                steps.append(
                    kept.standing_step if kept is not None and kept.standing is offer.standing else self._stand(offer)
                )
            if offer.draft is not None and offer.most > 0:
                searched += 1
                guesses += offer.most
            rows += offer.layout.size
        self._searched = searched
        # 2. Search, choose, write the trees.
        times = None if share.cost is None else np.ascontiguousarray(share.cost, dtype=np.float64)
        address, count = (0, 0) if times is None else (times.__array_interface__["data"][0], len(times))
        most, room = (-1 if number is None else max(0, number) for number in (share.most, share.room))
        space = MOST_GUESSES * len(offers) if room < 0 else room
        trees = self._take_memory(4 * (rows + min(guesses, space)))
        counts, expected = array("i", bytes(4 * len(offers))), array("d", bytes(8 * len(offers) + 8))
        shared = SHARE.pack(address, share.floor, count, len(offers), most, room)
        some = check(
            self._c.draft_choose(
                shared, pack(f"{len(steps)}P", *steps), b"".join(numbers), address_of(counts), address_of(expected),
                address_of(trees), self._workers if searched >= MANY else 0,
            )
        )  # fmt: skip
        # 3. The trees are one forest.
        nodes = rows + sum(counts)
        made, start, forest = list[TokenTree](), 0, Forest(trees[: 4 * nodes], nodes)
        self._memory[:] = [trees]
        for offer, count, sum_of_scores in zip(offers, counts, expected, strict=False):
            made.append(TokenTree.of_forest(forest, start, offer.layout, count, sum_of_scores))
            start += offer.layout.size + count
        return made, expected[len(offers)] if some else None

    def _take_memory(self, numbers: int) -> array[int]:
        """Memory for so many numbers: the last call's, unless another thread has taken it, or it is too small."""
        try:
            memory = self._memory.pop()
        except IndexError:
            memory = array("i")
        return memory if len(memory) >= numbers else array("i", bytes(4 * numbers))

    def _step(self, offer: Offer, numbers: list[Numbers], alive: list[Any]) -> int:
        """Where C's `Step` of an offer is. What comes with it goes to `numbers`, and what must stay to `alive`."""
        layout, branch, draft = offer.layout, offer.branch, offer.draft
        layout.check(branch)
        if draft is None or offer.most < 1 or offer.max_depth < 1:
            packed = _NO_DRAFT.pack(layout.size, branch[0])
        else:
            kept, times, trust = draft_in_c(draft, offer.most), self._times(offer.cost), array("d", (offer.trust,))
            packed = kept.step(
                offer, times, trust, layout.size, draft=draft, bonus=offer.bonus, kept=offer.kept, root=branch[0]
            )
            numbers.append(chains_of(draft))
            alive += times, trust
        if layout.size > 1:
            numbers += pack(f"{layout.size}i", *branch), layout.parents_and_depths
        step = array("B", packed)
        alive.append(step)
        return address_of(step)

    def _stand(self, offer: Offer) -> int:
        """Where C's `Step` of a standing offer is, from now on."""
        if offer.draft is None or offer.draft.text is None or offer.standing is None or offer.layout.size > 1:
            raise ValueError("a standing offer needs a draft with a text in C, and has no window")
        return draft_in_c(offer.draft, offer.most).stand(offer, offer.standing, self._times(offer.cost))

    def verification(self, trees: Sequence[TokenTree], drafts: Sequence[Draft | None]) -> Verification:
        return NativeVerification(self._c, trees, drafts)

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
