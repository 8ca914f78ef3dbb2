"""Penalties, biases and masks on the host: the part of a step's packet for sequences whose logits are adjusted.

A sequence with penalties or a bias has a *table slot*: a row in two tables on the device (see `adjusting`). The row is
written once, from the text so far; later packets bring the tokens accepted since. Masks are sent with every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels.reference_draw import IN_PROMPT
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.targets_packet import NO_MASK, NO_RULES, TableRow, TargetsPacket
from lookahead.backends.sampling import allowed_rows
from lookahead.config import SamplingParams


@dataclass(slots=True)
class TableSlot:
    """A sequence's slot in the tables, which count the first `counted` tokens of its text."""

    number: int
    counted: int = 0


class Rules:
    """The table slots of sequences, by their backend slot, and the masks of the next step.

    `reserve_table_slots(n, slot)` makes sure that the device's tables have n slots, and returns their number. If it
    fails, it fails for the sequence in `slot`, or for all.
    """

    def __init__(self, vocabulary: int, reserve_table_slots: Callable[[int, int | None], int], *, pinned: bool) -> None:
        self.vocabulary, self._reserve_table_slots, self._pinned = vocabulary, reserve_table_slots, pinned
        self.by_slot: dict[int, TableSlot] = {}
        self.table_slots = 0
        self.free_table_slots: list[int] = []
        self._masks = 0  # number of masks in the next step
        self._bans: dict[frozenset[int], int] = {}  # end tokens -> the next step's mask that allows all others

    # Table slots.

    def open(self, sequence: StepInput) -> None:
        """Assign a table slot to a sequence with penalties or a bias that has none yet."""
        if sequence.slot in self.by_slot or not (sequence.sampling.penalised or sequence.sampling.logit_bias):
            return
        if not self.free_table_slots:
            self.reserve(max(1, 2 * self.table_slots), sequence.slot)
        self.by_slot[sequence.slot] = TableSlot(self.free_table_slots.pop())

    def close(self, slot: int) -> None:
        """Free the table slot of a sequence that ends."""
        if (table_slot := self.by_slot.pop(slot, None)) is not None:
            self.free_table_slots.append(table_slot.number)

    def reserve(self, count: int, slot: int | None = None) -> None:
        """Make room for `count` sequences in the tables, on behalf of the one in `slot`."""
        if count > self.table_slots:
            before, self.table_slots = self.table_slots, self._reserve_table_slots(count, slot)
            self.free_table_slots = [*range(self.table_slots - 1, before - 1, -1), *self.free_table_slots]

    # A step's packet.

    def write(self, packet: TargetsPacket, inputs: Sequence[StepInput]) -> None:
        """Add the rules and masks of a step's sequences to a packet, and the tokens that are not counted yet."""
        packet.begin()
        self._masks = 0
        self._bans.clear()
        for sequence in inputs:
            self._add(packet, self.by_slot.get(sequence.slot), sequence)
        packet.masks = self._mask_memory[0][: self._masks] if self._masks else None

    def _add(self, packet: TargetsPacket, table_slot: TableSlot | None, sequence: StepInput) -> None:
        """Add one sequence to a packet."""
        adjustment = sequence.adjustment
        if adjustment is None:
            packet.add_rules(-1, NO_RULES, NO_MASK * len(sequence.tree.needed))
            return
        text = adjustment.text
        if table_slot is not None:
            if not table_slot.counted or not packet.add_counted(table_slot.number, text[table_slot.counted :]):
                packet.table_rows.append(self._row(table_slot.number, sequence.sampling, adjustment))
            table_slot.counted = len(text)
        number = -1 if table_slot is None else table_slot.number
        packet.add_rules(number, rules_of(sequence.sampling), self.add_masks(adjustment, sequence.tree))

    def _row(self, slot: int, params: SamplingParams, adjustment: Adjustment) -> TableRow:
        """A sequence's complete row of both tables: the token counts of its text, and its bias."""
        text, size = np.asarray(adjustment.text, np.int64), self.vocabulary
        counts = np.bincount(text[adjustment.prompt_tokens :], minlength=size).astype(np.int32)
        counts[text[: adjustment.prompt_tokens]] |= IN_PROMPT
        if not params.bias:
            return TableRow(slot, counts, None)
        bias = np.zeros(size, np.float32)
        for token, value in params.bias:
            bias[token] = value
        return TableRow(slot, counts, bias)

    def add_masks(self, adjustment: Adjustment, tree: TokenTree) -> array[int]:
        """Add the masks of a tree's needed nodes to the step. Returns the index of each node's mask, or -1."""
        count, end_depth = len(tree.needed), adjustment.end_depth
        if adjustment.mask is None and end_depth <= 0:
            return NO_MASK * count
        first, depths, rows = self._masks, [tree.depths[node] for node in tree.needed], self._mask_memory[1]
        if adjustment.mask is None:  # rows that ban the same end tokens share a mask
            if adjustment.ends not in self._bans:
                self._bans[adjustment.ends] = first
                rows[first] = allowed_rows(adjustment, [0], self.vocabulary)
                self._masks += 1
            ban = self._bans[adjustment.ends]
            return array("i", [ban if depth < end_depth else -1 for depth in depths])
        rows[first : first + count] = allowed_rows(adjustment, depths, self.vocabulary)
        self._masks += count
        return array("i", range(first, first + count))

    @cached_property
    def _mask_memory(self) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Pinned memory for the masks of a step, allocated when first needed, and a NumPy view of it. It can be reused
        for every step: no step runs ahead of one with masks, so the device has read the last masks by then."""
        shape = MOST_NEEDED, -(-self.vocabulary // 32)
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)
        return memory, memory.numpy().view(np.uint32)


def rules_of(params: SamplingParams) -> Sequence[float]:
    """The `rules` of a sequence in a packet; see `records.Rule`."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty, float(bool(params.logit_bias))
