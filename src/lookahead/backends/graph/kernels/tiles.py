"""How attention cuts a step into programs, so that they fill a GPU: queries, keys and splits of each.

A query is a pair of token and head. An invariant step's keys are cut the same way whatever K and the batch are (see
`attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

REACH = 16
"""In an invariant step, keys nearer to a row than this are added one by one. No guess is further from the root."""

FAR = 32
"""From this block of keys on, all splits take part; before it, only the first `Tiles.near_splits` of them."""


@dataclass(frozen=True)
class Tiles:
    """How a step of one size is cut.

    block_m, block_n: queries per program and keys per block. splits: how many programs share a prefix. near_splits: how
    many of them share its first `FAR` blocks, 0 for all; few are joined sooner, many read a long context faster. reach:
    keys nearer to a row than this are added one by one, by a program of their own; 0 if the step is not invariant.
    warps, stages, registers (the most per thread): for Triton's compiler.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 2
    reach: int = 0
    near_splits: int = 0
    registers: int | None = None


def tiles_for(batch: int, count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles of a step that need not be invariant: they give every multiprocessor about two programs.

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
    registers = 168 if dim <= 64 else None
    return Tiles(block_m, 128 if block_m == 16 and dim <= 64 else 64, splits, stages=3, registers=registers)


def invariant_tiles(count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles of an invariant step: whatever K and the batch, they have the same blocks of keys and the same splits.

    There are few enough near splits that all programs of a step of 128 tokens fit on the GPU at once. Otherwise some
    would have to wait for others, and the step would take twice as long. With heads of 64 three programs fit on a
    multiprocessor, with heads of 128 two.
    """
    rows = count * (heads // kv_heads)
    room = processors * (3 if dim <= 64 else 2)
    near = max(2, min(4, room // (2 * heads) - 1))
    cut = {"splits": max(near, min(15, processors // 2 // kv_heads)), "near_splits": near, "reach": REACH}
    if dim > 128:
        return Tiles(16 if rows <= 16 else 32, 32, warps=8, stages=1, **cut)
    return Tiles(16 if rows <= 16 else 64, 64, stages=3, registers=168 if dim <= 64 else None, **cut)
