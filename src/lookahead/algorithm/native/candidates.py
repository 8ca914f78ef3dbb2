"""`CandidatesInC`: a sequence's candidates as C's `Candidates`, and one step as C's `Step`."""

from __future__ import annotations

from array import array
from struct import pack
from typing import Any

from lookahead.algorithm.draft import MAX_DRAFT_TOKENS, RECYCLE_BONUS, CachedInputs, Candidates, Draft, Limits
from lookahead.algorithm.native.layout import CANDIDATES, STEP
from lookahead.algorithm.successors import SuccessorTable
from lookahead.algorithm.tree import DraftTokens

NO_TRUST = array("d", (1.0,))
"""For a search of one sequence, which does not use trust."""


class CandidatesInC:
    """C's `Candidates` and the memory they point at, for all steps of a sequence."""

    def __init__(self, candidates: Candidates, capacity: int) -> None:
        self.tables, self.rates, self.capacity = candidates.tables, candidates.rates, capacity
        self.text = candidates.text
        # The draft tokens: tokens, parents, depths and origins in one array, and their scores.
        self.numbers, self.scores = array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity))
        tables = candidates.tables
        known = [None] * 4 if tables is None else [tables.last, tables.own, tables.shared, tables.bigrams]
        packed = CANDIDATES.pack(
            *map(_handle, known),
            0 if candidates.text is None else candidates.text.handle,
            address_of(candidates.rates), address_of(self.numbers), address_of(self.scores),
            0.0 if tables is None else RECYCLE_BONUS, len(candidates.rates),
            0 if tables is None else tables.first_origin, capacity, candidates.chain,
        )  # fmt: skip
        self._packed = array("B", packed)
        self.address = address_of(self._packed)

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
        max_text: int = 0,
        root: int = 0,
    ) -> bytes:
        """C's `Step`. Without candidates it has no end of the text and no chains."""
        most = min(limits.max_tokens, MAX_DRAFT_TOKENS)
        address, count = table_of(times)
        text_end = (0, 0, 0) if candidates is None else candidates.text_end
        chains = (0, 0) if candidates is None else (len(candidates.chain_tokens), len(candidates.chain_lengths))
        return STEP.pack(
            self.address, address, address_of(trust), bonus, floor,
            all_taken, count, most, min(limits.max_depth, most), branch,
            *text_end, *chains, max_text, root,
        )  # fmt: skip

    def cache(self, draft: Draft, cached: CachedInputs, times: array[float] | None) -> int:
        """Store the `Step` of a cached draft. Returns its address."""
        packed = self.step(
            draft, times, cached.trust, bonus=draft.bonus, all_taken=draft.all_taken, max_text=cached.max_text
        )
        memory = array("B", packed)
        cached.step, cached.memory = address_of(memory), (memory, times, cached.trust, self)
        return cached.step

    def first_tokens(self, n: int) -> DraftTokens:
        """A copy of the first n draft tokens."""
        numbers, second, third, fourth = self.numbers, self.capacity, 2 * self.capacity, 3 * self.capacity
        return DraftTokens(
            numbers[:n], numbers[second : second + n], numbers[third : third + n], numbers[fourth : fourth + n],
            self.scores[:n],
        )  # fmt: skip


def candidates_in_c(candidates: Candidates, most: int) -> CandidatesInC:
    """The candidates in C, created again if they refer to other objects or need more capacity."""
    packed: CandidatesInC | None = candidates.in_c
    if (
        packed is None
        or packed.capacity < most
        or packed.tables is not candidates.tables
        or packed.text is not candidates.text
        or packed.rates is not candidates.rates
    ):
        packed = candidates.in_c = CandidatesInC(candidates, min(most, MAX_DRAFT_TOKENS))
    return packed


def chains_of(candidates: Candidates) -> bytes:
    """The tokens, origins and lengths of the candidates' chains, as C reads them."""
    numbers = [*candidates.chain_tokens, *candidates.chain_origins, *candidates.chain_lengths]
    return pack(f"{len(numbers)}i", *numbers)


def table_of(times: array[float] | None) -> tuple[int, int]:
    """The address and length of a table of times."""
    return (0, 0) if times is None else times.buffer_info()


def address_of(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _handle(table: SuccessorTable | None) -> int:
    if table is not None and not table.handle:
        raise TypeError(f"the C drafter cannot read a {type(table).__name__}; make tables with its new_table()")
    return 0 if table is None else table.handle
