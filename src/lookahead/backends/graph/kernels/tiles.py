"""How attention cuts a step into programs: rows, keys and splits of each, so that a GPU is filled.

An invariant step is cut the same way whatever K and the batch are (see `attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

REACH = 16
"""In an invariant step, keys nearer to a row than this are added one by one: as far as a guess may be from the root."""

FAR = 32
"""From this block of keys on, all splits of a cut take their turns; before it, if it says so, only the first few."""


@dataclass(frozen=True)
class Tiles:
    """How one shape of step is cut: rows per program, keys per inner block, splits of the prefix, warps, stages.

    With `reach` the keys that are nearer to a row than that are added one by one, in a split of their own.
    `near_splits`, if not 0: so many splits share the first `FAR` blocks; few are joined sooner, many read a long
    context faster. `registers`: the most that a thread may have.
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
    registers = 168 if dim <= 64 else None
    return Tiles(block_m, 128 if block_m == 16 and dim <= 64 else 64, splits, stages=3, registers=registers)


def invariant_tiles(count: int, heads: int, kv_heads: int, dim: int, *, processors: int = 132) -> Tiles:
    """Tiles with which a row is added up in one order whatever K and the batch: the same blocks of keys and splits.

    All splits of a step of 128 tokens, and the programs for what is near, have room at once up to `FAR`: else some
    would wait for others, and take twice as long. That is three programs per multiprocessor with heads of 64, two with
    heads of 128.
    """
    rows = count * (heads // kv_heads)
    room = processors * (3 if dim <= 64 else 2)
    near = max(2, min(4, room // (2 * heads) - 1))
    cut = {"splits": max(near, min(15, processors // 2 // kv_heads)), "near_splits": near, "reach": REACH}
    if dim > 128:
        return Tiles(16 if rows <= 16 else 32, 32, warps=8, stages=1, **cut)
    return Tiles(16 if rows <= 16 else 64, 64, stages=3, registers=168 if dim <= 64 else None, **cut)
