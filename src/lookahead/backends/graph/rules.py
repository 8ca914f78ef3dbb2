"""Penalties, biases and masks on the host: what a step's packet says of the sequences whose logits are adjusted.

A sequence with penalties or a bias has a *line* in two tables on the device (see `adjusting`). The line is written
once, from the text so far. Later the packets of its steps bring the tokens that were accepted meanwhile. Masks are sent
again with every step.
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
class RulesLine:
    """A sequence's line in the tables. The first `counted` tokens of its text are counted there."""

    number: int
    counted: int = 0


class Rules:
    """The lines of the sequences that have one (`by_slot`), and the masks of the next step.

    `reserve_lines(n, slot)` makes sure that the device's tables have n lines, and returns how many they have. If it
    fails, it fails for the sequence in `slot`, or for all.
    """

    def __init__(self, vocabulary: int, reserve_lines: Callable[[int, int | None], int], *, pinned: bool) -> None:
        self.vocabulary, self._reserve_lines, self._pinned = vocabulary, reserve_lines, pinned
        self.by_slot: dict[int, RulesLine] = {}
        self.lines = 0
        self.free_lines: list[int] = []
        self._masks = 0  # how many masks the next step has
        self._bans: dict[frozenset[int], int] = {}  # end tokens -> the next step's mask that allows all others

    # Lines.

    def open(self, item: StepInput) -> None:
        """Give a sequence its line, if it has penalties or a bias, and has none yet."""
        if item.slot in self.by_slot or not (item.sampling.penalised or item.sampling.logit_bias):
            return
        if not self.free_lines:
            self.reserve(max(1, 2 * self.lines), item.slot)
        self.by_slot[item.slot] = RulesLine(self.free_lines.pop())

    def close(self, slot: int) -> None:
        """Take back the line of a sequence that ends, if it has one."""
        if (line := self.by_slot.pop(slot, None)) is not None:
            self.free_lines.append(line.number)

    def reserve(self, lines: int, slot: int | None = None) -> None:
        """Make room for this many sequences in the tables, because of the one in `slot`."""
        if lines > self.lines:
            before, self.lines = self.lines, self._reserve_lines(lines, slot)
            self.free_lines = [*range(self.lines - 1, before - 1, -1), *self.free_lines]

    # A step's packet.

    def put(self, packet: TargetsPacket, items: Sequence[StepInput]) -> None:
        """Write how a step's logits are adjusted, and the tokens of its texts that are not counted yet."""
        packet.begin()
        self._masks = 0
        self._bans.clear()
        for item in items:
            self._put(packet, self.by_slot.get(item.slot), item)
        packet.masks = self._mask_memory[0][: self._masks] if self._masks else None

    def _put(self, packet: TargetsPacket, line: RulesLine | None, item: StepInput) -> None:
        """The part of one input."""
        adjustment = item.adjustment
        if adjustment is None:
            packet.put_rules(-1, NO_RULES, NO_MASK * len(item.tree.needed))
            return
        text = adjustment.text
        if line is not None:
            if not line.counted or not packet.put_counted(line.number, text[line.counted :]):
                packet.table_rows.append(self._row(line.number, item.sampling, adjustment))
            line.counted = len(text)
        number = -1 if line is None else line.number
        packet.put_rules(number, rules_of(item.sampling), self.put_masks(adjustment, item.tree))

    def _row(self, line: int, params: SamplingParams, adjustment: Adjustment) -> TableRow:
        """A sequence's whole line: the tokens of its text, and its bias."""
        text, size = np.asarray(adjustment.text, np.int64), self.vocabulary
        counts = np.bincount(text[adjustment.prompt_tokens :], minlength=size).astype(np.int32)
        counts[text[: adjustment.prompt_tokens]] |= IN_PROMPT
        if not params.bias:
            return TableRow(line, counts, None)
        bias = np.zeros(size, np.float32)
        for token, value in params.bias:
            bias[token] = value
        return TableRow(line, counts, bias)

    def put_masks(self, adjustment: Adjustment, tree: TokenTree) -> array[int]:
        """Note what a sequence allows after its tree's needed nodes. Returns the number of each node's mask, or -1."""
        count, end_depth = len(tree.needed), adjustment.end_depth
        if adjustment.mask is None and end_depth <= 0:
            return NO_MASK * count
        first, depths, rows = self._masks, [tree.depths[node] for node in tree.needed], self._mask_memory[1]
        if adjustment.mask is None:  # all rows that ban the same end tokens have one mask
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
        """Memory for the masks of any step, made when the first step has some, and a view of it. The packet of a step
        with masks has read it before the next such packet is written: no step runs ahead of one that has masks."""
        shape = MOST_NEEDED, -(-self.vocabulary // 32)
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)
        return memory, memory.numpy().view(np.uint32)


def rules_of(params: SamplingParams) -> Sequence[float]:
    """A sequence's `rules`; see `kernels.adjust`."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty, float(bool(params.logit_bias))
