"""Penalties, biases and masks on the device: the tables that a step reads, and the kernels that adjust its logits.

A sequence with penalties or a bias has a slot in two tables: the count of each token in its text, and its logit bias.
Their content comes with packets: see `rules`.
"""

from __future__ import annotations

from typing import Any

import torch

from lookahead.backends.graph.kernels import reference_draw
from lookahead.backends.graph.kernels.rows import TreeRows
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.targets_packet import TargetsPacket

FIRST_TABLE_SLOTS = 64
"""Initial number of table slots, doubled when there are too few. A slot takes 1.2 MB with 150,000 tokens."""


class Adjusting:
    """The tables on the device, and the kernels that use them (see `kernels.adjust` for their shapes).

    Without `compiled` the reference implementations run.
    """

    def __init__(self, vocabulary: int, device: torch.device, compiled: bool) -> None:
        self.counts = torch.zeros(FIRST_TABLE_SLOTS, vocabulary, dtype=torch.int32, device=device)
        self.bias = torch.zeros(FIRST_TABLE_SLOTS, vocabulary, dtype=torch.float32, device=device)
        self.masks = torch.zeros(MOST_NEEDED, -(-vocabulary // 32), dtype=torch.int32, device=device)
        self._kernels: Any = reference_draw
        if compiled:
            from lookahead.backends.graph.kernels import adjust

            self._kernels = adjust

    @property
    def slots(self) -> int:
        """How many sequences the tables have room for."""
        return len(self.counts)

    def grow(self, slots: int) -> None:
        """Replace the tables by larger ones with this number of slots. Captured steps still read the old ones."""
        shape = slots - len(self.counts), self.counts.shape[1]
        grown = [torch.cat([table, table.new_zeros(shape)]) for table in (self.counts, self.bias)]
        self.counts, self.bias = grown

    @torch.inference_mode()
    def receive(self, packet: TargetsPacket) -> None:
        """Write a packet's attachments to the tables, before its step runs."""
        for slot, counts, bias in packet.table_rows:
            self.counts[slot].copy_(torch.from_numpy(counts))
            if bias is not None:
                self.bias[slot].copy_(torch.from_numpy(bias))
        if packet.masks is not None:
            self.masks[: len(packet.masks)].copy_(packet.masks, non_blocking=True)

    # Within a step.

    def count(self, views: dict[str, torch.Tensor]) -> None:
        """Count the accepted tokens of the packet."""
        self._kernels.count_tokens(self.counts, *views["counted"])

    def adjust(self, logits: torch.Tensor, scores: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        """Write the adjusted logits [R, V] to `scores`."""
        rows = TreeRows(views["sequences"], views["sequence_of"], views["parents"])
        packet = (views[name] for name in ("table_slot_of", "rules"))
        tables = self.counts, self.bias, self.masks
        self._kernels.adjust(logits, scores, views["needed"], rows, views["tokens"], *packet, *tables, views["mask_of"])
