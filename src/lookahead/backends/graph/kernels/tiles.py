"""How attention cuts a step into programs, so that they fill a GPU: queries, keys and splits of each.

A query is a pair of row and head. An invariant step's keys are cut the same way whatever the rows are (see
`attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

REACH = 16
"""In an invariant step, keys nearer to a row than this are added one by one. No guess is further from the root."""

FAR = 32
"""From this block of keys on, all splits take part; before it, only the first `Tiles.near_splits` of them."""

SMALL, LARGE = 16, 64
"""Queries per tile: small tiles for sequences with few rows each, large ones for large trees and for prompts. A tile's
keys are read once for all of its queries, and a tile of 64 queries takes longer than its keys take to be read."""

SHARED_SMALL, SHARED_LARGE = 6.5, 4.5
"""Up to so many programs per multiprocessor, every split of a small or a large tile has a program of its own. (Splits
that only long contexts have are not counted.) On an H200, a layer's attention of four sequences of one row, with 64
heads of 64 at a context of 512, takes 17 us that way, and 21 us with one program per tile. With eight sequences it is
28 and 25 us."""

SPARE_PROGRAMS = 64
"""Where each tile is done by one program, so many more than if one sequence had all rows: many sequences have more."""


@dataclass(frozen=True)
class Tiles:
    """How a step of one size is cut.

    block_m, block_n: queries per program and keys per block. part_n: keys per product where a program does a tile
    alone, and nodes of an invariant step's tree per product; a block is a multiple of it. splits: how many programs
    share a prefix. near_splits: how many of them share its first `FAR` blocks, 0 for all; few are joined sooner, many
    read a long context faster. reach: keys nearer to a row than this are added one by one, unless `alone` by a program
    of their own; 0 if the step is not invariant. alone: a program does all splits of a tile by itself. programs: how
    many tiles are worked on at a time; there are no more tiles than that unless `alone`. processors: the device's
    multiprocessors. warps, stages, registers (the most per thread): for Triton's compiler.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 2
    reach: int = 0
    near_splits: int = 0
    registers: int | None = None
    programs: int = 1 << 30
    alone: bool = False
    part_n: int = 32
    processors: int = 132

    @property
    def parts(self) -> int:
        """How many programs a tile has per K/V head."""
        return 1 if self.alone else self.splits + (self.reach > 0)


def queries_per_tile(dim: int, *, small: bool) -> int:
    """How many queries a tile has, with heads of this width."""
    return SMALL if small else 32 if dim > 128 else LARGE


@cache
def most_shared(heads: int, kv_heads: int, dim: int, processors: int, *, small: bool) -> int:
    """The most tiles whose splits have programs of their own; of more tiles, each is done by one program."""
    near, _ = _invariant_splits(heads, kv_heads, dim, processors)
    return int((SHARED_SMALL if small else SHARED_LARGE) * processors / ((near + 1) * kv_heads))


def tiles_for(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    small: bool,
    alone: bool,
    invariant: bool,
    one: bool = False,
    processors: int = 132,
) -> Tiles:
    """How to cut a step of so many rows. `small` chooses small tiles; `alone` that each is done by one program; `one`
    that there are no more tiles than if one sequence had all rows. If neither is the case, there are at most
    `most_shared` tiles."""
    block_m = queries_per_tile(dim, small=small)
    tiles = -(-rows * (heads // kv_heads) // block_m)
    near, splits = _invariant_splits(heads, kv_heads, dim, processors)
    if one and not invariant:  # about two programs per multiprocessor
        near, splits = 0, max(1, min(64, 2 * (processors + 4) // (kv_heads * tiles)))
    cut: dict[str, Any] = {"splits": splits, "near_splits": near, "reach": REACH if invariant else 0, "alone": alone}
    # Programs without a tile take time, too, so there are no more of them than may be needed.
    shared = tiles if one else most_shared(heads, kv_heads, dim, processors, small=small)
    cut |= {"programs": tiles + SPARE_PROGRAMS if alone else shared, "processors": processors}
    if dim > 128:
        return Tiles(block_m, 32, warps=8, stages=1, **cut)
    if small and alone:
        return Tiles(block_m, 64, stages=3, warps=1 if dim <= 64 else 2, **cut)
    if small and not one and dim <= 64:
        return Tiles(block_m, 64, part_n=64, stages=3, warps=2, **cut)
    return Tiles(block_m, 64, part_n=64, stages=3, registers=168 if dim <= 64 else None, **cut)


def _invariant_splits(heads: int, kv_heads: int, dim: int, processors: int) -> tuple[int, int]:
    """Near splits and splits of an invariant step: the same for all of a model's steps.

    There are few enough near splits that all programs of a step of 128 tokens fit on the GPU at once. Otherwise some
    would have to wait for others, and the step would take twice as long. With heads of 64 three programs fit on a
    multiprocessor, with heads of 128 two.
    """
    room = processors * (3 if dim <= 64 else 2)
    near = max(2, min(4, room // (2 * heads) - 1))
    return near, max(near, min(15, processors // 2 // kv_heads))
