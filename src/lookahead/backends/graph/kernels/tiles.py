"""How attention cuts a step into programs, so that they fill a GPU: queries, keys and splits of each.

A query is a pair of row and head. An invariant step's keys are cut the same way whatever the rows are (see
`attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

REACH = 16
"""In an invariant step, keys nearer to a row than this are added one by one. No guess is further from the root."""

FAR = 32
"""From this block of keys on, all splits take part; before it, only the first `Tiles.near_splits` of them."""


class TileSize(IntEnum):
    """Queries per tile: small tiles for sequences with few rows each, large ones for large trees and for prompts.

    A tile's keys are read once for all of its queries, and a tile of 64 queries takes longer than its keys take to be
    read. With heads wider than 128 a large tile has 32 queries.
    """

    SMALL = 16
    LARGE = 64


class Grid(IntEnum):
    """How the programs of a launch share the tiles of a step.

    SINGLE: every split of a tile has a program of its own, and there are no more tiles than if one sequence had all
    rows. SPLIT: the same for the tiles of several sequences. WHOLE: there are many tiles, and each is done by one
    program, one split after the other.
    """

    SINGLE = 0
    SPLIT = 1
    WHOLE = 2


class Cut(NamedTuple):
    """How attention is cut: into tiles of which size, and how programs share them."""

    size: TileSize
    grid: Grid


class HeadShape(NamedTuple):
    """The heads of an attention layer: query heads, K/V heads, and their width."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        """How many query heads share a K/V head."""
        return self.heads // self.kv_heads


MOST_PROGRAMS = {TileSize.SMALL: 6.5, TileSize.LARGE: 4.5}
"""Up to this many programs per multiprocessor, every split of a tile has a program of its own. (Splits that only long
contexts have are not counted.) On an H200, a layer's attention of four sequences of one row, with 64 heads of 64 at a
context of 512, takes 17 us that way, and 21 us with one program per tile. With eight sequences it is 28 and 25 us."""

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


def queries_per_tile(dim: int, size: TileSize) -> int:
    """How many queries a tile has, with heads of this width."""
    return min(int(size), 32) if dim > 128 else int(size)


@cache
def most_split(shape: HeadShape, processors: int, size: TileSize) -> int:
    """The most tiles whose splits have programs of their own; of more tiles, each is done by one program."""
    near, _ = _invariant_splits(shape, processors)
    return int(MOST_PROGRAMS[size] * processors / ((near + 1) * shape.kv_heads))


def tiles_for(rows: int, shape: HeadShape, cut: Cut, *, invariant: bool, processors: int = 132) -> Tiles:
    """How to cut a step of this many rows. With `Grid.SPLIT` there are at most `most_split` tiles."""
    (size, grid), dim = cut, shape.dim
    block_m = queries_per_tile(dim, size)
    tiles = -(-rows * shape.group // block_m)
    near, splits = _invariant_splits(shape, processors)
    if grid is Grid.SINGLE and not invariant:  # about two programs per multiprocessor
        near, splits = 0, max(1, min(64, 2 * (processors + 4) // (shape.kv_heads * tiles)))
    # Programs without a tile take time, too, so there are no more of them than may be needed.
    programs = {
        Grid.SINGLE: tiles,
        Grid.SPLIT: most_split(shape, processors, size),
        Grid.WHOLE: tiles + SPARE_PROGRAMS,
    }
    known: dict[str, Any] = {"splits": splits, "near_splits": near, "reach": REACH if invariant else 0}
    known |= {"alone": grid is Grid.WHOLE, "programs": programs[grid], "processors": processors}
    small = size is TileSize.SMALL
    if dim > 128:
        return Tiles(block_m, 32, warps=8, stages=1, **known)
    if small and grid is Grid.WHOLE:
        return Tiles(block_m, 64, stages=3, warps=1 if dim <= 64 else 2, **known)
    if small and grid is Grid.SPLIT and dim <= 64:
        return Tiles(block_m, 64, part_n=64, stages=3, warps=2, **known)
    return Tiles(block_m, 64, part_n=64, stages=3, registers=168 if dim <= 64 else None, **known)


def _invariant_splits(shape: HeadShape, processors: int) -> tuple[int, int]:
    """Near splits and splits of an invariant step: the same for all steps of layers with these heads.

    There are few enough near splits that all programs of a step of 128 tokens fit on the GPU at once. Otherwise some
    would have to wait for others, and the step would take twice as long. With heads of 64 three programs fit on a
    multiprocessor, with heads of 128 two.
    """
    room = processors * (3 if shape.dim <= 64 else 2)
    near = max(2, min(4, room // (2 * shape.heads) - 1))
    return near, max(near, min(15, processors // 2 // shape.kv_heads))
