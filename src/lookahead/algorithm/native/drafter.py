"""`NativeDrafter`: the drafter in C (`drafter.h` tells its parts) behind the interface of `draft.Drafter`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any, cast

import numpy as np

from lookahead.algorithm.counts import Costs
from lookahead.algorithm.draft import (
    MOST_GUESSES,
    TAUGHT,
    Draft,
    Limits,
    Offer,
    PythonVerification,
    Standing,
    Verification,
)
from lookahead.algorithm.native.memory import NativeTable, NativeText, Numbers, check
from lookahead.algorithm.successors import SuccessorTable
from lookahead.algorithm.tree import NO_GUESSES, FlatOutputs, Forest, Guesses, StepOutput, TokenTree
from lookahead.algorithm.verify import NO_VERDICT, Verdict
from lookahead.machine import cores

_DRAFT = Struct("3P P P 2P d 3i")
"""C's `Draft`: last, own, shared; text; rates; guesses, scores; taught; rate_count, first_origin, capacity."""

_STEP = Struct("3P 2d 5i 3i 4i")
"""C's `Step`: draft, cost, trust; bonus, floor; kept, cost_count, room, max_depth, branch; text_end[3];
chain_token_count, chain_count, most_tokens, root. A `Struct` is packed in a third of the time that a `ctypes.Structure`
takes, and lists of integers in a tenth of the time that an `array` of them takes."""

_NO_DRAFT = Struct("40x 16x i 12x 12x i")
"""A `Step` without a draft: `branch` and `root`."""

_RAN = Struct("P 4i")
"""C's `Ran`: draft; nodes, branch, width, needed_count."""

NO_TRUST = array("d", (1.0,))

_SHARE = Struct("P d 4i")
"""C's `Share`: cost; floor; cost_count, sequences, most, room."""

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
        kept, times = _draft_in_c(draft, limits.most), self._times(limits.cost)
        step = kept.step(limits, times, branch=limits.branch, floor=limits.floor, draft=draft)
        return kept.first(check(self._c.draft_search(step, _chains_of(draft))))

    def choose(
        self,
        offers: Sequence[Offer],
        cost: Costs | None = None,
        most: int | None = None,
        room: int | None = None,
        floor: float = 0.0,
    ) -> tuple[list[TokenTree], float | None]:
        # 1. What C needs of every sequence.
        steps, numbers, rows, guesses, searched = list[int](), list[Numbers](), 0, 0, 0
        alive = list[Any]()  # what C reads must outlive its call
        for offer in offers:
            if offer.standing is None:
                steps.append(self._step(offer, numbers, alive))
            else:
                kept = cast("DraftInC | None", offer.draft and offer.draft.in_c)
                steps.append(kept.standing_step if kept is not None and kept.standing is offer else self._stand(offer))
            if offer.draft is not None and offer.most > 0:
                searched += 1
                guesses += offer.most
            rows += offer.layout.size
        self._searched = searched
        # 2. Search, choose, write the trees.
        times = None if cost is None else np.ascontiguousarray(cost, dtype=np.float64)
        if room is not None:
            guesses = min(guesses, max(0, room))
        space = 4 * (rows + min(guesses, MOST_GUESSES * len(offers)))
        trees = self._take_memory(space)
        counts, expected = array("i", bytes(4 * len(offers))), array("d", bytes(8 * len(offers) + 8))
        address, count = (0, 0) if times is None else (times.__array_interface__["data"][0], len(times))
        share = _SHARE.pack(
            address, floor, count, len(offers),
            -1 if most is None else max(0, most), -1 if room is None else max(0, room),
        )  # fmt: skip
        some = check(
            self._c.draft_choose(
                share, pack(f"{len(steps)}P", *steps), b"".join(numbers), _address(counts), _address(expected),
                _address(trees), self._workers if searched >= MANY else 0,
            )
        )  # fmt: skip
        # 3. The trees are one forest.
        nodes = rows + sum(counts)
        made, start, forest = list[TokenTree](), 0, Forest(trees[: 4 * nodes], nodes, rows == len(offers))
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
            kept, times, trust = _draft_in_c(draft, offer.most), self._times(offer.cost), array("d", (offer.trust,))
            packed = kept.step(
                offer, times, trust, layout.size, draft=draft, bonus=offer.bonus, kept=offer.kept, root=branch[0]
            )
            numbers.append(_chains_of(draft))
            alive += times, trust
        if layout.size > 1:
            numbers += pack(f"{layout.size}i", *branch), layout.parents_and_depths
        step = array("B", packed)
        alive.append(step)
        return _address(step)

    def _stand(self, offer: Offer) -> int:
        """Where C's `Step` of a standing offer is, from now on."""
        if offer.draft is None or offer.draft.text is None or offer.standing is None or offer.layout.size > 1:
            raise ValueError("a standing offer needs a draft with a text in C, and has no window")
        return _draft_in_c(offer.draft, offer.most).stand(offer, offer.standing, self._times(offer.cost))

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


class NativeVerification:
    """All trees of a step, as C reads them. C verifies flat outputs; others are verified in Python.

    A draft that C has not searched yet, or that has no text or no table of its last step in C, learns nothing here.
    """

    def __init__(self, library: Any, trees: Sequence[TokenTree], drafts: Sequence[Draft | None]) -> None:
        self._c, self._given, self._rows = library, trees, sum([tree.size for tree in trees])
        self._drafts = [_that_learns(draft) for draft in drafts]
        self._trees = b"".join([tree.packed() for tree in trees])
        self._ran = b"".join(
            [
                _RAN.pack(0 if kept is None else kept.address, tree.size, tree.branch, tree.width, len(tree.needed))
                for tree, kept in zip(trees, self._drafts, strict=True)
            ]
        )
        self._numbers = array("i", bytes(4 * (len(trees) + 2 * self._rows)))
        self._verdicts = [Verdict([], [], None, kept is not None) for kept in self._drafts]

    def accept(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        if not isinstance(outputs, FlatOutputs):
            return PythonVerification(self._given).accept(outputs)
        results, numbers, count, rows = outputs.results, self._numbers, len(self._given), self._rows
        address = _address(numbers)
        self._c.draft_accept(
            self._ran, count, self._trees, results.__array_interface__["data"][0], results.shape[1],
            address, address + 4 * count, address + 4 * (count + rows),
        )  # fmt: skip
        verdicts, flat, start = list[Verdict | Exception](), numbers.tolist(), count
        for accepted, verdict in zip(flat[:count], self._verdicts, strict=True):
            if accepted > 0:
                verdict.tokens = flat[start : start + accepted]
                if accepted > 1:
                    path = start + rows
                    verdict.path = flat[path : path + accepted - 1]
                start += accepted
                verdicts.append(verdict)
            else:
                verdicts.append(NO_VERDICT if not accepted else _error(accepted))
        return verdicts


def _that_learns(draft: Draft | None) -> DraftInC | None:
    """What C has of the draft, if it can learn from a step."""
    kept: DraftInC | None = None if draft is None else draft.in_c
    return None if kept is None or kept.text is None or kept.last is None else kept


def _error(result: int) -> Exception:
    try:
        check(result)
    except (MemoryError, IndexError) as error:
        return error
    raise ValueError(f"{result} is no error")


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
        self.standing: Offer | None = None
        self.standing_step = 0  # where C's `Step` of the standing offer is

    def step(
        self,
        limits: Limits | Offer,
        times: array[float] | None,
        trust: array[float] = NO_TRUST,
        branch: int = 1,
        *,
        draft: Draft | None = None,
        bonus: float = 0.0,
        floor: float = 0.0,
        kept: bool = True,
        most_tokens: int = 0,
        root: int = 0,
    ) -> bytes:
        """C's `Step`. Without a draft the end of the text and its chains are left out."""
        room = min(limits.most, MOST_GUESSES)
        address, count = _table(times)
        text_end = (0, 0, 0) if draft is None else draft.text_end
        chains = (0, 0) if draft is None else (len(draft.chain_tokens), len(draft.chain_lengths))
        return _STEP.pack(
            self.address, address, _address(trust), bonus, floor,
            kept, count, room, min(limits.max_depth, room), branch,
            *text_end, *chains, most_tokens, root,
        )  # fmt: skip

    def stand(self, offer: Offer, standing: Standing, times: array[float] | None) -> int:
        """Keep C's `Step` of a standing offer. Returns where it is."""
        packed = self.step(
            offer, times, standing.trust, bonus=offer.bonus, kept=offer.kept, most_tokens=standing.most_tokens
        )
        self._read_by_c = array("B", packed), times, standing.trust
        self.standing, self.standing_step = offer, _address(self._read_by_c[0])
        return self.standing_step

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


def _chains_of(draft: Draft) -> bytes:
    """The given chains' tokens, origins and lengths, as C reads them."""
    numbers = [*draft.chain_tokens, *draft.chain_origins, *draft.chain_lengths]
    return pack(f"{len(numbers)}i", *numbers)


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
