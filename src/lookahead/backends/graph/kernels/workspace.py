"""Memory that attention needs besides its inputs and outputs."""

from __future__ import annotations

import copy

import torch
import triton

from lookahead.backends.graph.kernels.paths import list_size, most_nodes_of
from lookahead.backends.graph.kernels.tiles import Tiles


class Workspace:
    """Memory for the partial sums of splits, a counter of splits per tile and head, and lists of paths.

    One workspace serves all layers and all captured steps, which never run at the same time. It must be large enough
    for the largest of them from the start: a captured graph keeps writing to the memory it was captured with. `part`
    holds the sums of values, `top` the maxima and sums of weights, `arrived` the number of splits that have stored.
    """

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.top = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self.paths = torch.zeros(1, dtype=torch.int32, device=device)

    def with_own_paths(self) -> Workspace:
        """The same memory with separate `paths`, for an attention group with its own pages."""
        other = copy.copy(self)
        other.paths = torch.zeros_like(self.paths)
        return other

    def reserve(self, rows: int, most_tiles: int, tiles: Tiles, heads: int, kv_heads: int, dim: int) -> None:
        """Make room for steps of up to this many rows and tiles.

        If splits have programs of their own, there are no more queries than those programs' tiles hold.
        """
        queries = min(rows * heads, tiles.programs * tiles.block_m * kv_heads)
        sums = queries * tiles.parts if tiles.parts > 1 else 0
        self.part = _at_least(self.part, sums * padded_dim(dim))
        self.top = _at_least(self.top, sums * 2)
        self.arrived = _at_least(self.arrived, most_tiles * kv_heads)
        if tiles.near_keys:
            size = list_size(most_nodes_of(rows), tiles, heads // kv_heads)
            self.paths = _at_least(self.paths, most_tiles * size)


def _at_least(memory: torch.Tensor, size: int) -> torch.Tensor:
    """The same memory, or zeros of this size if it is smaller."""
    return memory if memory.numel() >= size else memory.new_zeros(size)


def padded_dim(dim: int) -> int:
    """A head's width in the kernel: a power of two, and at least 16, as Triton's matrix products require."""
    return max(16, triton.next_power_of_2(dim))
