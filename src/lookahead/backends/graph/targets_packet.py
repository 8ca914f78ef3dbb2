"""What the host sends the device for the targets of one step: how they are drawn, and how logits are adjusted first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lookahead.backends.base import MOST_AHEAD, StepInput
from lookahead.backends.graph.packet import MOST_ENTRIES, SPARE_MOVES, Fields, Packet
from lookahead.backends.graph.records import Draw, Entry, Rule

NO_MASK = array("i", (-1,))
NO_RULES = (1.0, 0.0, 0.0, 0.0)
"""The `rules` of an entry whose logits are taken as they come."""
NOT_DRAWN = (0.0, 0.0, 1.0, 0.0)
"""The settings of a row whose target is the argmax."""


class TableRow(NamedTuple):
    """A sequence's line in the tables of counts and biases: how often its text has each token [V] int32 (see
    `kernels.adjust`), and its bias [V] float32, if it has one."""

    line: int
    counts: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32] | None


class TargetsPacket(Fields):
    """The numbers for the targets of N needed rows, as named fields, int32 unless noted.

    If targets are `drawn`:

    draws [N, 5]       float64: how each needed row's target is drawn (see `records.Draw`)
    next_uniforms [N, 32]  float64: the uniforms of the steps ahead
    noise [N]          the line of noise that decides a needed row's draw, -1 for the argmax

    If logits are `adjusted` (see `kernels.adjust`), in steps of at most R rows:

    line_of [E]        the entries' lines in the tables of counts and biases, or -1
    rules [E, 4]       float32: the entries' penalties, and whether they have a bias (see `records.Rule`)
    mask_of [N]        the needed rows' masks, -1 for none
    counted [2, C]     tokens that were accepted since the last step: the lines to count them in, and the tokens
    tokens, entry_of, parents [R], entries [E, 5], needed [N]: as in the step's `Packet`, whose own copy on the device
    is where the captured forward pass reads it, and nobody else

    Two attachments are too large for a field, and few steps have them. `masks` [M, ceil(V / 32)] int32, in pinned
    memory, are the bits of the tokens that rows allow, and `table_rows` the lines that are written before the step.
    """

    def __init__(self, needed: int, pinned: bool, *, drawn: bool, adjusted: bool, most_rows: int) -> None:
        whole, single, double = torch.int32, torch.float32, torch.float64
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if drawn:
            parts["draws"] = (needed, len(Draw)), double
            parts["next_uniforms"] = (needed, MOST_AHEAD), double
            parts["noise"] = (needed,), whole
        if adjusted:
            entries = min(most_rows, MOST_ENTRIES)
            parts["line_of"] = (entries,), whole
            parts["rules"] = (entries, len(Rule)), single
            parts["mask_of"] = (needed,), whole
            parts["counted"] = (2, most_rows + SPARE_MOVES), whole
            parts |= dict.fromkeys(("tokens", "entry_of", "parents"), ((most_rows,), whole))
            parts["entries"], parts["needed"] = ((entries, len(Entry)), whole), ((needed,), whole)
        super().__init__(parts, pinned)
        self.counted_room = most_rows + SPARE_MOVES
        self.begin()

    def begin(self) -> None:
        """Start a new step: no entries yet."""
        self._line_of, self._rules, self._mask_of = array("i"), array("f"), array("i")
        self._counted = array("i"), array("i")
        self.masks: torch.Tensor | None = None
        self.table_rows: list[TableRow] = []

    def put_draws(self, items: Sequence[StepInput]) -> None:
        """Write how the targets of the inputs' needed rows are drawn: not at all without uniforms and without noise."""
        rows = [len(item.tree.needed) for item in items]
        settings, uniforms, start = list[tuple[float, ...]](), array("d"), 0
        for item, count in zip(items, rows, strict=True):
            sampling, drawn = item.sampling, item.uniforms or item.noise
            settings.append(
                (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) if drawn else NOT_DRAWN
            )
            uniforms.extend(item.uniforms or [0.0] * count)
            if item.next_uniforms:
                self.fields["next_uniforms"][start, : len(item.next_uniforms)] = item.next_uniforms
            if item.noise:
                self.fields["noise"][start : start + count] = item.noise
            start += count
        draws = self.fields["draws"]
        draws[:start, : Draw.UNIFORM] = settings[0] if len(set(settings)) == 1 else np.repeat(settings, rows, axis=0)
        draws[:start, Draw.UNIFORM] = uniforms
        draws[start:, Draw.TEMPERATURE] = 0.0

    def put_rules(self, line: int, rules: Sequence[float], mask_of: array[int]) -> None:
        """Write how the last entry's logits are adjusted."""
        self._line_of.append(line)
        self._rules.extend(rules)
        self._mask_of.extend(mask_of)

    def put_counted(self, line: int, tokens: Sequence[int]) -> bool:
        """Write tokens that are to be counted in this line of the table. False if there is no room for them."""
        lines, counted = self._counted
        if len(counted) + len(tokens) > self.counted_room:
            return False
        lines.extend(array("i", (line,)) * len(tokens))
        counted.extend(tokens)
        return True

    def end(self, packet: Packet) -> None:
        """Write how the entries' logits are adjusted, what is to be counted, and of the step's packet what is needed
        for that."""
        fields, (lines, counted) = self.fields, self._counted
        fields["mask_of"][:] = fields["counted"][0] = -1
        written: list[tuple[np.ndarray[Any, Any], Sequence[float] | np.ndarray[Any, Any]]] = [
            (fields["line_of"], self._line_of),
            (fields["rules"].reshape(-1), self._rules),
            (fields["mask_of"], self._mask_of),
            (fields["counted"][0], lines),
            (fields["counted"][1], counted),
            *((fields[name], packet.fields[name]) for name in ("tokens", "entry_of", "parents", "entries", "needed")),
        ]
        for field, numbers in written:
            field[: len(numbers)] = numbers

    def put_nothing(self) -> None:
        """Write a step without entries: nothing is drawn, adjusted or counted."""
        self.begin()
        for field in self.fields.values():
            field.fill(0)
        for name in ("noise", "line_of", "mask_of", "counted", "parents"):
            if name in self.fields:
                self.fields[name].fill(-1)


class StepPacket(NamedTuple):
    """All that the host sends the device for one step: `forward` for the forward pass, `targets` for the choice of
    targets. `queries`: for each head shape, how many queries a row has per K/V head, and how many a tile has."""

    forward: Packet
    targets: TargetsPacket
    queries: Sequence[tuple[int, int]]
