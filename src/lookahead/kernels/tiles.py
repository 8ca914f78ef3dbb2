"""How attention cuts a step into programs: rows, keys and splits of each, so that a GPU is filled.

An invariant step is cut the same way whatever K and the batch are (see `attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

REACH = 16
"""In an invariant step, keys nearer to a row than this are added one by one: as far as a guess may be from the root."""

MOST = 128
"""The most tokens of an invariant step."""


@dataclass(frozen=True)
class Tiles:
    """How one shape of step is cut: rows per program, keys per inner block, splits of the prefix, warps, stages.

    With `reach` the keys that are nearer to a row than that are added one by one, in a split of their own.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 2
    reach: int = 0


def tiles_for(batch: int, count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles that give every multiprocessor about two programs.

    Measured on an H200 with an earlier version of the kernel, at 2048 and 16384 keys, 64 heads of 64: for one token
    16 x 128 with 4 splits and 3 stages was the best of 24 (15.7 and 67.6 us), for 121 tokens 64 x 64 with 2 splits and
    3 stages the best of 48.
    """
    rows = count * (heads // kv_heads)
    block_m = min(64 if dim <= 128 else 32, max(16, triton.next_power_of_2(rows)))
    programs = batch * kv_heads * triton.cdiv(rows, block_m)
    splits = max(1, min(64, 2 * (processors + 4) // programs))
    if dim > 128:
        return Tiles(block_m, 32, splits, warps=8, stages=1)
    return Tiles(block_m, 128 if block_m == 16 and dim <= 64 else 64, splits, stages=3)


def invariant_tiles(count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles with which a row is added up in the same order whatever K and the batch: all but `block_m` is the same."""
    splits = max(1, min(16, (processors + 4) // heads))
    block_m = 16 if count * (heads // kv_heads) <= 16 else 64 if dim <= 128 else 32
    if dim > 128:
        return Tiles(block_m, 32, splits, warps=8, stages=1, reach=REACH)
    return Tiles(block_m, 64, splits, stages=3, reach=REACH)
