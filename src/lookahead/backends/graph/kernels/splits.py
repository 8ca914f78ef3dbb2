"""Sums over splits of K, in the order of the splits, whichever program finishes first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(slots=True)
class SplitMemory:
    """The sums of splits, fp32, and how many programs of a tile have arrived: zero between products."""

    partials: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def new(cls, device: torch.device, numbers: int = 0, tiles: int = 1) -> SplitMemory:
        return cls(torch.empty(numbers, device=device), torch.zeros(tiles, dtype=torch.int32, device=device))

    def reserve(self, tiles: int, splits: int, block_n: int, block_m: int) -> None:
        """Make room for a product of this many tiles. Captured steps keep the memory that they were captured with, so
        a model's products are reserved before its first step."""
        numbers = tiles * splits * block_n * block_m
        if numbers > len(self.partials):
            self.partials = self.partials.new_empty(numbers)
        if tiles > len(self.arrived):
            self.arrived = self.arrived.new_zeros(tiles)


@triton.jit
def sum_of_splits(
    total, partials, arrived, number, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Keeps one split's part [BLOCK_N, BLOCK_M] of tile `number`. Returns the sum of all splits, and True, in the last
    of a tile's programs to arrive; False in the others, which have nothing to write."""
    cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    base = partials + number.to(tl.int64) * SPLITS * BLOCK_N * BLOCK_M
    tl.store(base + split * BLOCK_N * BLOCK_M + cell, total)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + number, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(arrived + number, 0)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in range(SPLITS):
            total += tl.load(base + other * BLOCK_N * BLOCK_M + cell, cache_modifier=".cg")
    return total, is_last
