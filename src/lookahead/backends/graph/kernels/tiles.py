"""How attention divides a step among programs, so that they fill a GPU: queries, keys and splits of each.

A query is a pair of row and head. An invariant step's keys are divided the same way whatever the rows are (see
`attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch

NEAR_KEYS = 64
"""In an invariant step, this many keys before a row's block of 16 positions are added with that block, apart from the
prefix (see `attention`). No draft token is deeper in a tree."""

NEAR_BLOCKS = 32
"""The first this many blocks of keys are shared by the first `Tiles.near_splits` splits; later ones by all splits."""


class TileSize(IntEnum):
    """Queries per tile: small tiles for sequences with few rows each, large ones for large trees and for prompts.

    A tile's keys are read once for all of its queries, and a tile of 64 queries takes longer than reading its keys.
    With wide heads a large tile has fewer queries (`WidthTuning.queries`).
    """

    SMALL = 16
    LARGE = 64


class Grid(IntEnum):
    """How the programs of a launch share the tiles of a step.

    SINGLE: every split of a tile has its own program, and there are no more tiles than if one sequence had all rows.
    SPLIT: the same for the tiles of several sequences. UNSPLIT: there are many tiles, and one program handles all
    splits of a tile, one after the other.
    """

    SINGLE = 0
    SPLIT = 1
    UNSPLIT = 2


class Tiling(NamedTuple):
    """How attention is tiled: the size of the tiles, and how programs share them."""

    size: TileSize
    grid: Grid


class HeadShape(NamedTuple):
    """The heads of an attention layer: query heads, K/V heads, and their width."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads


MOST_PROGRAMS = {TileSize.SMALL: 6.5, TileSize.LARGE: 4.5}
"""Up to this many programs per multiprocessor, every split of a tile has its own program. (Splits that only long
contexts have are not counted.) On an H200, a layer's attention of four sequences of one row, with 64 heads of 64 at a
context of 512, takes 17 us that way, and 21 us with one program per tile. With eight sequences it is 28 and 25 us."""

SPARE_PROGRAMS = 64
"""With `Grid.UNSPLIT`, programs beyond the tiles of one sequence with all rows: several sequences have more tiles."""


@dataclass(frozen=True)
class Tiles:
    """The launch parameters of attention for steps of one size.

    block_m, block_n: queries per program and keys per block. part_n: keys per product of an `unsplit` program, and
    nodes of an invariant step's tree per product; it divides a block. splits: programs that share a prefix.
    near_splits: programs that share its first `NEAR_BLOCKS` blocks, 0 for all; few are joined sooner, many read a long
    context faster. near_keys: the last keys of a row, at least this many, are added by a separate program unless
    `unsplit`; 0 if the step is not invariant. unsplit: one program handles all splits of a tile. programs: tiles that
    run at a time; there are no more tiles than that unless `unsplit`. processors: the device's multiprocessors. warps,
    stages, registers (maximum per thread): for Triton's compiler.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 2
    near_keys: int = 0
    near_splits: int = 0
    registers: int | None = None
    programs: int = 1 << 30
    unsplit: bool = False
    part_n: int = 32
    processors: int = 132

    @property
    def parts(self) -> int:
        """Programs per tile and K/V head."""
        return 1 if self.unsplit else self.splits + (self.near_keys > 0)

    def for_layer(self, dim: int, dtype: torch.dtype, span: int) -> Tiles:
        """The parameters for a layer with heads of this width, and rows that see at most `span` keys (0: all of them).

        More near splits than a window has blocks would be idle, and further splits would have next to nothing to read
        unless there are four blocks for each. Wide heads in fp32 leave no shared memory for keys that are loaded ahead.
        In fp16 a weight far below the largest of its product is rounded to fewer digits, so products must have the same
        keys in all invariant steps: whole blocks.
        """
        tiles, blocks = self, (span - 2) // self.block_n + 2
        if span:
            near = min(self.near_splits or self.splits, blocks)
            tiles = replace(tiles, near_splits=near, splits=max(near, min(self.splits, blocks // 4)))
        if dtype is torch.float16 and self.near_keys:
            tiles = replace(tiles, part_n=self.block_n)
        return replace(tiles, stages=1) if dtype is torch.float32 and dim > 128 else tiles


class Launch(NamedTuple):
    """What Triton's compiler is given for one kind of tile: see `Tiles`."""

    part_n: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class WidthTuning:
    """Launch parameters for heads of one width, rounded up to a power of two.

    block_n: keys per block. queries: of a large tile. resident: programs of a step of 128 tokens that fit on a
    multiprocessor. near: the least and the most near splits, and splits: the most splits of an invariant step. Small
    tiles of `Grid.SINGLE`, `Grid.SPLIT` and `Grid.UNSPLIT` have a launch each, large tiles have one. most_programs: a
    factor of `MOST_PROGRAMS`.
    """

    block_n: int
    queries: int
    resident: int
    near: tuple[int, int]
    splits: int
    single: Launch
    split: Launch
    unsplit: Launch
    large: Launch
    most_programs: float = 1.0

    def launch(self, tiling: Tiling) -> Launch:
        """The launch parameters of a tiling."""
        return self.large if tiling.size is TileSize.LARGE else (self.single, self.split, self.unsplit)[tiling.grid]


TUNED = {
    64: WidthTuning(
        64, 64, 3, (2, 4), 15, Launch(64, 4, 3, 168), Launch(64, 2, 3), Launch(32, 1, 3), Launch(64, 4, 3, 168)
    ),
    128: WidthTuning(64, 64, 2, (2, 4), 15, Launch(64, 4, 3), Launch(64, 4, 2), Launch(32, 2, 3), Launch(64, 4, 3)),
    256: WidthTuning(
        64, 32, 2, (4, 8), 31, Launch(64, 4, 2), Launch(64, 4, 2), Launch(32, 4, 3), Launch(64, 4, 2), most_programs=0.7
    ),
    512: WidthTuning(32, 32, 1, (4, 8), 31, Launch(32, 8, 3), Launch(32, 8, 3), Launch(16, 8, 3), Launch(32, 8, 2)),
}
"""The tuning of heads of up to this width, measured on an H200 up to 256: see benchmarks/NOTES.md for the narrow ones,
and `benchmarks/attention_tiles.py`, which measures others. 16 heads of 256 with 8 K/V heads at a context of 512 take 10
us for one row; 28 us for 16 sequences of a row in unsplit programs, 32 us in split ones, 40 us with three stages; and
41 us for a tree of 121 rows, 44 us with eight warps. 512 has the largest blocks whose K/V fit into shared memory
together with the next block's, so that one program per multiprocessor keeps the memory busy. 32 heads of 128 with 8 K/V
heads take 16 us for 16 sequences of a row with two stages, of which more programs fit, and 21 us with three."""

WIDEST_HEAD = max(TUNED)
"""Attention runs heads of up to this width."""


@cache
def tuning_for(dim: int) -> WidthTuning:
    """The tuning of heads of this width."""
    for width, tuning in TUNED.items():
        if dim <= width:
            return tuning
    raise ValueError(f"heads of {dim} columns; attention runs up to {WIDEST_HEAD}")


def queries_per_tile(dim: int, size: TileSize) -> int:
    """Queries per tile, with heads of this width."""
    return tuning_for(dim).queries if size is TileSize.LARGE else int(size)


@cache
def most_split(shape: HeadShape, processors: int, size: TileSize) -> int:
    """Maximum number of tiles whose splits have their own programs; with more tiles, each has one program."""
    near, _ = _invariant_splits(shape, processors)
    most = MOST_PROGRAMS[size] * tuning_for(shape.dim).most_programs
    return int(most * processors / ((near + 1) * shape.kv_heads))


def tiles_for(rows: int, shape: HeadShape, tiling: Tiling, *, invariant: bool, processors: int = 132) -> Tiles:
    """The launch parameters for a step of this many rows. Unless it is `Grid.UNSPLIT`, it has at most `most_split`
    tiles."""
    tuning, launch, (size, grid) = tuning_for(shape.dim), tuning_for(shape.dim).launch(tiling), tiling
    block_m = queries_per_tile(shape.dim, size)
    tiles = -(-rows * shape.group // block_m)
    near, splits = _invariant_splits(shape, processors)
    if grid is Grid.SINGLE and not invariant:  # about two programs per multiprocessor
        near, splits = 0, max(1, min(64, 2 * (processors + 4) // (shape.kv_heads * tiles)))
    # Programs without a tile take time, too, so no more are launched than may be needed.
    split = most_split(shape, processors, size)
    programs = {Grid.SINGLE: min(tiles, split), Grid.SPLIT: split, Grid.UNSPLIT: tiles + SPARE_PROGRAMS}
    return Tiles(
        block_m,
        tuning.block_n,
        splits,
        near_splits=near,
        near_keys=NEAR_KEYS if invariant else 0,
        unsplit=grid is Grid.UNSPLIT,
        programs=programs[grid],
        processors=processors,
        **launch._asdict(),
    )


def _invariant_splits(shape: HeadShape, processors: int) -> tuple[int, int]:
    """Near splits and splits of an invariant step: the same for all steps of layers with these heads.

    Near splits are few enough that all programs of a step of 128 tokens fit on the GPU at once. Otherwise some would
    wait for others, and the step would take twice as long. Wide heads have at least four: their blocks take longer to
    read, and a single row has few programs.
    """
    tuning = tuning_for(shape.dim)
    fewest, most = tuning.near
    room = processors * tuning.resident * tuning.queries // (128 * shape.heads)
    near = max(fewest, min(most, room - 1))
    return near, max(near, min(tuning.splits, processors // 2 // shape.kv_heads))
