"""`NativeDrafter`: the drafter in C (`drafter.h` tells its parts) behind the interface of `draft.Drafter`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any

import numpy as np

from lookahead.algorithm.counts import Costs
from lookahead.algorithm.draft import MOST_GUESSES, TAUGHT, Draft, Limits, Offer
from lookahead.algorithm.native.memory import (
    NO_STEP,
    NO_TEXT,
    NativeTable,
    NativeText,
    Numbers,
    check,
    computed_step,
)
from lookahead.algorithm.successors import SuccessorTable
from lookahead.algorithm.tree import NO_GUESSES, Guesses, TokenTree
from lookahead.machine import cores

_DRAFT = Struct("3P P P 2P d 3i")
"""C's `Draft`: last, own, shared; text; rates; guesses, scores; taught; rate_count, first_origin, capacity."""

_STEP = Struct("2P 3d 5i 3i 2i 2i 6i")
"""C's `Step`: draft, cost; floor, trust, bonus; kept, cost_count, room, max_depth, branch; text_end[3];
chain_token_count, chain_count; new_tokens, new_ngrams; last. A `Struct` is packed in a third of the time that a
`ctypes.Structure` takes, and lists of integers in a tenth of the time that an `array` of them takes."""

_NO_DRAFT = Struct(f"40x 16x i {_STEP.size - 60}x")
"""A `Step` without a draft: `branch` alone."""

_SHARE = Struct("P 4i")
"""C's `Share`: cost; cost_count, sequences, most, room."""

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
        self._searched = 0  # the sequences that were searched since `get_ready`

    def new_table(self) -> NativeTable:
        return NativeTable(self._c)

    def new_text(self, *settings: int) -> NativeText:
        return NativeText(self._c, *settings)

    def get_ready(self) -> None:
        searched, self._searched = self._searched, 0
        if searched >= MANY and self._most_workers:
            # A process that was forked has none of its parent's threads.
            self._workers = _workers(self._c, self._most_workers, os.getpid())
            self._c.workers_wake(self._workers)

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        if limits.most < 1 or limits.max_depth < 1:
            return NO_GUESSES
        kept, numbers = _draft_in_c(draft, limits.most), list[Numbers]()
        times = None if limits.cost is None else self._times(limits.cost)
        step = kept.step(draft, limits, limits.branch, times, numbers)
        count = check(self._c.draft_search(step, b"".join(numbers)))
        kept.taken_in()
        return kept.first(count)

    def choose(
        self, offers: Sequence[Offer], cost: Costs | None = None, most: int | None = None, room: int | None = None
    ) -> tuple[list[TokenTree], float | None]:
        # 1. What C needs of every sequence.
        numbers, steps, searched, branches, guesses = list[Numbers](), list[bytes](), list[DraftInC | None](), 0, 0
        tables: list[array[float]] = []  # C reads them, so they must outlive its call
        for offer in offers:
            draft, layout, branch = offer.draft, offer.layout, offer.branch
            layout.check(branch)
            if draft is None or offer.most < 1 or offer.max_depth < 1:
                steps.append(_NO_DRAFT.pack(layout.size))
                searched.append(None)
            else:
                kept = _draft_in_c(draft, offer.most)
                times = None
                if offer.cost is not None:
                    times = self._times(offer.cost)
                    tables.append(times)
                steps.append(kept.step(draft, offer, layout.size, times, numbers, offer.trust, offer.bonus, offer.kept))
                searched.append(kept)
                guesses += offer.most
            numbers += pack(f"{layout.size}i", *branch), layout.parents_and_depths
            branches += layout.size
        self._searched = len(searched) - searched.count(None)
        # 2. Search, choose, write the trees.
        times = None if cost is None else array("d", np.asarray(cost, dtype=np.float64).tobytes())
        if room is not None:
            guesses = min(guesses, max(0, room))
        trees = array("i", bytes(12 * branches + 16 * min(guesses, MOST_GUESSES * len(offers))))
        counts, expected = array("i", bytes(4 * len(offers))), array("d", bytes(8 * len(offers) + 8))
        share = _SHARE.pack(
            *_table(times), len(offers), -1 if most is None else max(0, most), -1 if room is None else max(0, room)
        )
        some = self._c.draft_choose(
            share, b"".join(steps), b"".join(numbers), _address(counts), _address(expected), _address(trees),
            self._workers if self._searched >= MANY else 0,
        )  # fmt: skip
        for one, count in zip(searched, counts, strict=True):
            if one is not None and count >= 0:
                one.taken_in()
        check(some)
        # 3. Cut the trees out of what C wrote.
        made, end = list[TokenTree](), 0
        for offer, count, sum_of_scores in zip(offers, counts, expected, strict=False):
            layout = offer.layout
            nodes = layout.size + count
            tokens, parents, depths, origins = end, end + nodes, end + 2 * nodes, end + 3 * nodes
            end = origins + count
            made.append(
                TokenTree(
                    trees[tokens:parents], trees[parents:depths], trees[depths:origins], layout.needed(count),
                    layout.size, layout.width, trees[origins:end], sum_of_scores,
                )
            )  # fmt: skip
        return made, expected[len(offers)] if some else None

    def _times(self, cost: Sequence[float]) -> array[float]:
        """The table as C reads it. The last one is kept, because most sequences have the same."""
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


class DraftInC:
    """C's `Draft` of a draft and what it points at: the same for all steps of a sequence."""

    def __init__(self, draft: Draft, capacity: int) -> None:
        self.tables, self.rates, self.capacity = draft.tables, draft.rates, capacity
        self.text: NativeText | None = draft.text
        self.last: NativeTable | None = None if draft.tables is None else native(draft.tables.last)
        # Tokens, parents, depths and origins of the guesses, one after the other; and their scores.
        self.numbers, self.scores = array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity))
        tables = draft.tables
        packed = _DRAFT.pack(
            *((0, 0, 0) if tables is None else [_handle(one) for one in (tables.last, tables.own, tables.shared)]),
            0 if draft.text is None else draft.text.handle,
            _address(draft.rates), _address(self.numbers), _address(self.scores), 0.0 if tables is None else TAUGHT,
            len(draft.rates), 0 if tables is None else tables.first_origin, capacity,
        )  # fmt: skip
        self._packed = array("B", packed)
        self.address = _address(self._packed)

    def step(
        self,
        draft: Draft,
        limits: Limits | Offer,
        branch: int,
        times: array[float] | None,
        numbers: list[Numbers],
        trust: float = 1.0,
        bonus: float = 0.0,
        kept: bool = True,
    ) -> bytes:
        """C's `Step` for the draft. What comes with it goes to `numbers`."""
        tokens, lengths, new_text, last_step = draft.chain_tokens, draft.chain_lengths, NO_TEXT, NO_STEP
        if lengths:
            count = 2 * len(tokens) + len(lengths)
            numbers.append(pack(f"{count}i", *tokens, *draft.chain_origins, *lengths))
        if self.text is not None and self.text.waiting is not None:
            new_text, text = self.text.waiting
            numbers.append(pack(f"{len(text)}i", *text))
        if self.last is not None and self.last.waiting is not None:
            last_step, arrays = computed_step(*self.last.waiting, True)
            numbers += arrays
        room = limits.most if limits.most < MOST_GUESSES else MOST_GUESSES
        address, count = (0, 0) if times is None else _table(times)
        return _STEP.pack(
            self.address, address, limits.floor, trust, bonus,
            kept, count, room, limits.max_depth if limits.max_depth < room else room, branch,
            *draft.text_end, len(tokens), len(lengths), *new_text, *last_step,
        )  # fmt: skip

    def taken_in(self) -> None:
        """C has taken in what waited in the text and in the table of the last step."""
        if self.text is not None:
            self.text.waiting = None
        if self.last is not None:
            self.last.waiting = None

    def first(self, n: int) -> Guesses:
        """A copy of the first n guesses."""
        numbers, second, third, fourth = self.numbers, self.capacity, 2 * self.capacity, 3 * self.capacity
        return Guesses(
            numbers[:n], numbers[second : second + n], numbers[third : third + n], numbers[fourth : fourth + n],
            self.scores[:n],
        )  # fmt: skip


def _draft_in_c(draft: Draft, most: int) -> DraftInC:
    """What C keeps of a draft, made anew if the draft points at something else, or needs more room."""
    kept: DraftInC | None = draft.in_c
    if (
        kept is None
        or kept.capacity < most
        or kept.tables is not draft.tables
        or kept.text is not draft.text
        or kept.rates is not draft.rates
    ):
        kept = draft.in_c = DraftInC(draft, min(most, MOST_GUESSES))
    return kept


def _table(times: array[float] | None) -> tuple[int, int]:
    """Address and length of a table of times."""
    return (0, 0) if times is None else times.buffer_info()


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _handle(table: SuccessorTable | None) -> int:
    return 0 if table is None else native(table).handle


def native(table: SuccessorTable) -> NativeTable:
    """The table, if it is one in C; else raise TypeError."""
    if not isinstance(table, NativeTable):
        raise TypeError(f"the C drafter cannot read a {type(table).__name__}; make tables with its new_table()")
    return table
