"""Memory that attention needs besides its inputs and outputs."""

from __future__ import annotations

import copy

import torch
import triton

from lookahead.backends.graph.kernels.depths import most_nodes_of, order_size
from lookahead.backends.graph.kernels.tiles import Tiles


class Workspace:
    """Memory for the partial sums of splits, a counter of splits per tile and head, and the order of tree nodes.

    One workspace serves all layers and all captured steps, which never run at the same time. It must be large enough
    for the largest of them from the start: a captured graph keeps writing to the memory it was captured with. `part`
    holds the sums of values, `top` the maxima and sums of weights, `arrived` the number of splits that have stored.
    """

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.top = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.order = torch.zeros(1, dtype=torch.int32, device=device)

    def with_own_order(self) -> Workspace:
        """The same memory with a separate `order`, for an attention group with its own pages."""
        other = copy.copy(self)
        other.order = torch.zeros_like(self.order)
        return other

    def reserve(self, rows: int, most_tiles: int, tiles: Tiles, heads: int, kv_heads: int, dim: int) -> None:
        """Make room for steps of up to this many rows and tiles."""
        parts = tiles.parts
        queries = rows * heads
        if parts > 1 and self.part.numel() < queries * parts * padded_dim(dim):
            self.part = self.part.new_empty(queries * parts * padded_dim(dim))
            self.top = self.top.new_empty(queries * parts * 2)
        if self.arrived.numel() < most_tiles * kv_heads:
            self.arrived = self.arrived.new_zeros(most_tiles * kv_heads)
        if tiles.near_keys:
            needed = most_tiles * order_size(most_nodes_of(rows), tiles, heads // kv_heads)
            if self.order.numel() < needed:
                self.order = self.order.new_zeros(needed)


def padded_dim(dim: int) -> int:
    """A head's width in the kernel: a power of two, and at least 16, as Triton's matrix products require."""
    return max(16, triton.next_power_of_2(dim))
