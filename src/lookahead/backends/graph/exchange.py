"""Importing and exporting a sequence's K/V, outside of any step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.base import Layers
from lookahead.backends.graph.ahead import StepAhead
from lookahead.backends.graph.kv import MOST_SHIFT
from lookahead.backends.graph.runner import Runner
from lookahead.kv.slots import Slot, Slots
from lookahead.models.facts import UnsupportedModelError


class Exchange:
    """Writes and reads the K/V of slots. Without `adopts` it refuses to: K/V do not restore recurrent states."""

    def __init__(self, runner: Runner, slots: Slots, ahead: StepAhead, *, adopts: bool) -> None:
        self._runner, self._slots, self._ahead, self._adopts = runner, slots, ahead, adopts

    @torch.inference_mode()
    def adopt(self, slot: Slot, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Take over a sequence's K/V: per layer that has its own, keys and values [Hkv, n, D] of the last n of `length`
        tokens."""
        self._check_no_states("take over")
        shift = offset[0] if offset else 0
        if any(other != shift for other in offset) or shift > MOST_SHIFT:
            raise ValueError(
                f"the graph backend shifts all axes of positions alike, by at most {MOST_SHIFT}, not by {tuple(offset)}"
            )
        self._move_pending()  # a pending move might write to the pages reserved now
        self._slots.forget_pages(slot, length)
        before, slot.length = slot.length, length
        try:
            self._slots.require_pages([slot], [length])
        except MemoryError:
            slot.length = before
            raise
        self._runner.write_kv(self._slots.device_pages(slot), length, layers)
        self.shift(slot, shift)

    @torch.inference_mode()
    def cached(self, slot: Slot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, length, D]. A layer with a sliding window may
        return only the tokens that it still reads."""
        self._check_no_states("hand out")
        self._move_pending()
        return self._runner.read_kv(self._slots.device_pages(slot), slot.length)

    @torch.inference_mode()
    def shift(self, slot: Slot, shift: int) -> None:
        """Let a sequence add this to its positions from the next step on."""
        if slot.shift != shift:
            self._runner.kv.shifts[slot.table_index] = slot.shift = shift

    def _check_no_states(self, what: str) -> None:
        """Refuse to import or export the K/V of a model that has recurrent states as well."""
        if not self._adopts:
            raise UnsupportedModelError(
                f"the graph backend does not {what} the K/V of a sequence with recurrent states, which K/V do not "
                "restore"
            )

    def _move_pending(self) -> None:
        """Move the accepted K/V of all pending commits now, without a step."""
        self._ahead.drop()
        if self._slots.pending_commits:
            self._runner.move(*self._slots.take_pending())
