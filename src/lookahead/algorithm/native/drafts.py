"""`DraftInC`: what C keeps of a sequence's draft, and how it is told of one step."""

from __future__ import annotations

from array import array
from struct import pack
from typing import Any

from lookahead.algorithm.draft import MOST_GUESSES, TAUGHT, Draft, Limits, Offer, Standing
from lookahead.algorithm.native.layout import DRAFT, STEP
from lookahead.algorithm.successors import SuccessorTable
from lookahead.algorithm.tree import Guesses

NO_TRUST = array("d", (1.0,))
"""For a search without a choice, in which trust means nothing."""


class DraftInC:
    """C's `Draft` of a draft and what it points at: the same for all steps of a sequence."""

    def __init__(self, draft: Draft, capacity: int) -> None:
        self.tables, self.rates, self.capacity = draft.tables, draft.rates, capacity
        self.text = draft.text
        # Tokens, parents, depths and origins of the guesses, one after the other; and their scores.
        self.numbers, self.scores = array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity))
        tables = draft.tables
        packed = DRAFT.pack(
            *((0, 0, 0) if tables is None else [_handle(one) for one in (tables.last, tables.own, tables.shared)]),
            0 if draft.text is None else draft.text.handle,
            address_of(draft.rates), address_of(self.numbers), address_of(self.scores),
            0.0 if tables is None else TAUGHT, len(draft.rates), 0 if tables is None else tables.first_origin, capacity,
        )  # fmt: skip
        self._packed = array("B", packed)
        self.address = address_of(self._packed)
        # Of the standing offer, and not the offer itself, which refers to the draft.
        self.standing: Standing | None = None
        self.standing_step = 0  # where C's `Step` of it is

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
        address, count = table_of(times)
        text_end = (0, 0, 0) if draft is None else draft.text_end
        chains = (0, 0) if draft is None else (len(draft.chain_tokens), len(draft.chain_lengths))
        return STEP.pack(
            self.address, address, address_of(trust), bonus, floor,
            kept, count, room, min(limits.max_depth, room), branch,
            *text_end, *chains, most_tokens, root,
        )  # fmt: skip

    def stand(self, offer: Offer, standing: Standing, times: array[float] | None) -> int:
        """Keep C's `Step` of a standing offer. Returns where it is."""
        packed = self.step(
            offer, times, standing.trust, bonus=offer.bonus, kept=offer.kept, most_tokens=standing.most_tokens
        )
        self._read_by_c = array("B", packed), times, standing.trust
        self.standing, self.standing_step = standing, address_of(self._read_by_c[0])
        return self.standing_step

    def first(self, n: int) -> Guesses:
        """A copy of the first n guesses."""
        numbers, second, third, fourth = self.numbers, self.capacity, 2 * self.capacity, 3 * self.capacity
        return Guesses(
            numbers[:n], numbers[second : second + n], numbers[third : third + n], numbers[fourth : fourth + n],
            self.scores[:n],
        )  # fmt: skip


def draft_in_c(draft: Draft, most: int) -> DraftInC:
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


def chains_of(draft: Draft) -> bytes:
    """The given chains' tokens, origins and lengths, as C reads them."""
    numbers = [*draft.chain_tokens, *draft.chain_origins, *draft.chain_lengths]
    return pack(f"{len(numbers)}i", *numbers)


def table_of(times: array[float] | None) -> tuple[int, int]:
    """Address and length of a table of times."""
    return (0, 0) if times is None else times.buffer_info()


def address_of(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _handle(table: SuccessorTable | None) -> int:
    if table is not None and not table.handle:
        raise TypeError(f"the C drafter cannot read a {type(table).__name__}; make tables with its new_table()")
    return 0 if table is None else table.handle
