"""What the host sends to the device for sampling a step's targets: sampling parameters, penalties, biases and masks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lookahead.backends.base import MOST_AHEAD, StepInput
from lookahead.backends.graph.packet import MOST_SEQUENCES, SPARE_MOVES, Fields, Packet
from lookahead.backends.graph.records import Draw, Rule, SequenceRecord

NO_MASK = array("i", (-1,))
NO_RULES = (1.0, 0.0, 0.0, 0.0)
"""The `rules` of a sequence without penalties and bias."""
NOT_DRAWN = (0.0, 0.0, 1.0, 0.0)
"""The sampling parameters of a greedy row."""

STEP_FIELDS = ("tokens", "sequence_of", "parents", "sequences", "needed")
"""The fields of the step's `Packet` that are sent again with adjusted logits."""


class TableRow(NamedTuple):
    """A sequence's row in the tables of token counts and biases, at index `slot`: counts [V] int32 (see
    `kernels.adjust`), and bias [V] float32 or None."""

    slot: int
    counts: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32] | None


class TargetsPacket(Fields):
    """The numbers for the targets of N needed rows, as named fields, int32 unless noted.

    If targets are sampled (`drawn`):

    draws [N, 5]       float64: the needed rows' sampling parameters (see `records.Draw`)
    next_uniforms [N, 32]  float64: uniforms of the steps ahead
    noise [N]          the needed rows' row of the noise buffer, -1 for the argmax

    If logits are `adjusted` (see `kernels.adjust`), in steps of at most R rows:

    table_slot_of [B]  the sequences' slots in the tables of counts and biases, or -1
    rules [B, 4]       float32: the sequences' penalties, and whether they have a bias (see `records.Rule`)
    mask_of [N]        the needed rows' masks, -1 for none
    counted [2, C]     tokens accepted since the last step: their table slots, and the tokens
    tokens, sequence_of, parents [R], sequences [B, 5], needed [N]: as in the step's `Packet`, whose device copy belongs
    to the captured forward pass

    Two attachments are too large for a field, and rare. `masks` [M, ceil(V / 32)] int32, in pinned memory, are bit
    masks of the allowed tokens; `table_rows` are table rows to write before the step.
    """

    def __init__(self, needed: int, pinned: bool, *, drawn: bool, adjusted: bool, most_rows: int) -> None:
        int32, float32, float64 = torch.int32, torch.float32, torch.float64
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if drawn:
            parts["draws"] = (needed, len(Draw)), float64
            parts["next_uniforms"] = (needed, MOST_AHEAD), float64
            parts["noise"] = (needed,), int32
        if adjusted:
            sequences = min(most_rows, MOST_SEQUENCES)
            parts["table_slot_of"] = (sequences,), int32
            parts["rules"] = (sequences, len(Rule)), float32
            parts["mask_of"] = (needed,), int32
            parts["counted"] = (2, most_rows + SPARE_MOVES), int32
            parts |= dict.fromkeys(("tokens", "sequence_of", "parents"), ((most_rows,), int32))
            parts["sequences"], parts["needed"] = ((sequences, len(SequenceRecord)), int32), ((needed,), int32)
        super().__init__(parts, pinned)
        self.counted_room = most_rows + SPARE_MOVES
        self.begin()

    def begin(self) -> None:
        """Start a new step without sequences."""
        self._table_slot_of, self._rules, self._mask_of = array("i"), array("f"), array("i")
        self._counted = array("i"), array("i")
        self.masks: torch.Tensor | None = None
        self.table_rows: list[TableRow] = []

    def write_draws(self, inputs: Sequence[StepInput]) -> None:
        """Write the sampling parameters of the needed rows. An input without uniforms and noise is greedy."""
        rows = [len(sequence.tree.needed) for sequence in inputs]
        settings, uniforms, start = list[tuple[float, ...]](), array("d"), 0
        for sequence, count in zip(inputs, rows, strict=True):
            params, drawn = sequence.sampling, sequence.uniforms or sequence.noise
            settings.append((params.temperature, params.top_k, params.top_p, params.min_p) if drawn else NOT_DRAWN)
            uniforms.extend(sequence.uniforms or [0.0] * count)
            if sequence.next_uniforms:
                self.fields["next_uniforms"][start, : len(sequence.next_uniforms)] = sequence.next_uniforms
            if sequence.noise:
                self.fields["noise"][start : start + count] = sequence.noise
            start += count
        draws = self.fields["draws"]
        draws[:start, : Draw.UNIFORM] = settings[0] if len(set(settings)) == 1 else np.repeat(settings, rows, axis=0)
        draws[:start, Draw.UNIFORM] = uniforms
        draws[start:, Draw.TEMPERATURE] = 0.0

    def add_rules(self, table_slot: int, rules: Sequence[float], mask_of: array[int]) -> None:
        """Add the penalties, table slot and masks of the next sequence."""
        self._table_slot_of.append(table_slot)
        self._rules.extend(rules)
        self._mask_of.extend(mask_of)

    def add_counted(self, table_slot: int, tokens: Sequence[int]) -> bool:
        """Add accepted tokens to count at a table slot. False if they do not fit."""
        slots, counted = self._counted
        if len(counted) + len(tokens) > self.counted_room:
            return False
        slots.extend(array("i", (table_slot,)) * len(tokens))
        counted.extend(tokens)
        return True

    def write_rules(self, packet: Packet) -> None:
        """Write the penalties, masks and counted tokens of all sequences, and the fields of the step's packet that the
        kernels need for them."""
        fields, (slots, counted) = self.fields, self._counted
        fields["mask_of"][:] = fields["counted"][0] = -1
        written: list[tuple[np.ndarray[Any, Any], Sequence[float] | np.ndarray[Any, Any]]] = [
            (fields["table_slot_of"], self._table_slot_of),
            (fields["rules"].reshape(-1), self._rules),
            (fields["mask_of"], self._mask_of),
            (fields["counted"][0], slots),
            (fields["counted"][1], counted),
            *((fields[name], packet.fields[name]) for name in STEP_FIELDS),
        ]
        for field, numbers in written:
            field[: len(numbers)] = numbers

    def write_padding(self) -> None:
        """Write a step without sequences: nothing is sampled, adjusted or counted."""
        self.begin()
        for field in self.fields.values():
            field.fill(0)
        for name in ("noise", "table_slot_of", "mask_of", "counted", "parents"):
            if name in self.fields:
                self.fields[name].fill(-1)


class StepPacket(NamedTuple):
    """Everything the host sends to the device for one step: `forward` for the forward pass, `targets` for sampling.
    `queries`: for each head shape, the queries of a row per K/V head, and the queries of a tile."""

    forward: Packet
    targets: TargetsPacket
    queries: Sequence[tuple[int, int]]
