"""`CandidatesInC`: what C keeps of a sequence's candidates, and what it gets of one step."""

from __future__ import annotations

from array import array
from struct import pack
from typing import Any

from lookahead.algorithm.draft import MOST_GUESSES, TAUGHT, Cached, Candidates, Draft, Limits
from lookahead.algorithm.native.layout import CANDIDATES, STEP
from lookahead.algorithm.successors import SuccessorTable
from lookahead.algorithm.tree import Guesses

NO_TRUST = array("d", (1.0,))
"""For a search without a choice, in which trust means nothing."""


class CandidatesInC:
    """C's `Candidates`, and what they point at: the same for all steps of a sequence."""

    def __init__(self, candidates: Candidates, capacity: int) -> None:
        self.tables, self.rates, self.capacity = candidates.tables, candidates.rates, capacity
        self.text = candidates.text
        # Tokens, parents, depths and origins of the guesses, one after the other; and their scores.
        self.numbers, self.scores = array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity))
        tables = candidates.tables
        packed = CANDIDATES.pack(
            *((0, 0, 0) if tables is None else [_handle(one) for one in (tables.last, tables.own, tables.shared)]),
            0 if candidates.text is None else candidates.text.handle,
            address_of(candidates.rates), address_of(self.numbers), address_of(self.scores),
            0.0 if tables is None else TAUGHT, len(candidates.rates), 0 if tables is None else tables.first_origin,
            capacity,
        )  # fmt: skip
        self._packed = array("B", packed)
        self.address = address_of(self._packed)
        # Of the cached draft, and not the draft itself, which refers to the candidates.
        self.cached: Cached | None = None
        self.cached_step = 0  # where C's `Step` of it is

    def step(
        self,
        limits: Limits | Draft,
        times: array[float] | None,
        trust: array[float] = NO_TRUST,
        branch: int = 1,
        *,
        candidates: Candidates | None = None,
        bonus: float = 0.0,
        floor: float = 0.0,
        all_taken: bool = True,
        most_tokens: int = 0,
        root: int = 0,
    ) -> bytes:
        """C's `Step`. Without candidates the end of the text and its chains are left out."""
        room = min(limits.most, MOST_GUESSES)
        address, count = table_of(times)
        text_end = (0, 0, 0) if candidates is None else candidates.text_end
        chains = (0, 0) if candidates is None else (len(candidates.chain_tokens), len(candidates.chain_lengths))
        return STEP.pack(
            self.address, address, address_of(trust), bonus, floor,
            all_taken, count, room, min(limits.max_depth, room), branch,
            *text_end, *chains, most_tokens, root,
        )  # fmt: skip

    def cache(self, draft: Draft, cached: Cached, times: array[float] | None) -> int:
        """Keep C's `Step` of a cached draft. Returns where it is."""
        packed = self.step(
            draft, times, cached.trust, bonus=draft.bonus, all_taken=draft.all_taken, most_tokens=cached.most_tokens
        )
        self._read_by_c = array("B", packed), times, cached.trust
        self.cached, self.cached_step = cached, address_of(self._read_by_c[0])
        return self.cached_step

    def first(self, n: int) -> Guesses:
        """A copy of the first n guesses."""
        numbers, second, third, fourth = self.numbers, self.capacity, 2 * self.capacity, 3 * self.capacity
        return Guesses(
            numbers[:n], numbers[second : second + n], numbers[third : third + n], numbers[fourth : fourth + n],
            self.scores[:n],
        )  # fmt: skip


def candidates_in_c(candidates: Candidates, most: int) -> CandidatesInC:
    """What C keeps of candidates, made again if they point at something else or need more room."""
    packed: CandidatesInC | None = candidates.in_c
    if (
        packed is None
        or packed.capacity < most
        or packed.tables is not candidates.tables
        or packed.text is not candidates.text
        or packed.rates is not candidates.rates
    ):
        packed = candidates.in_c = CandidatesInC(candidates, min(most, MOST_GUESSES))
    return packed


def chains_of(candidates: Candidates) -> bytes:
    """The given chains' tokens, origins and lengths, as C reads them."""
    numbers = [*candidates.chain_tokens, *candidates.chain_origins, *candidates.chain_lengths]
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
