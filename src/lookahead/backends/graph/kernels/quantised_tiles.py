"""How a product with a quantised matrix is launched, by its format and number of rows. No result depends on it.

The splits of K do not depend on the number of rows either: texts depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton

from lookahead.models.number_formats import MXFP4, Format
from lookahead.models.packing import words_of
from lookahead.models.quantised import QuantisedLinear


@dataclass(frozen=True)
class QuantisedWeights:
    """The tensors of a quantised matrix, or of stacked ones; see `models.quantised.QuantisedLinear`. `order` is int32,
    `out` the rows of one matrix. `words` int32: the scales of MXFP4 in fours (`words_of_powers`), or scales and zero
    points as `packing.in_words` joins them; the kernel reads them in place of both. `number_bytes`: of the numbers that
    it is multiplied by.
    """

    format: Format
    out: int
    width: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    interleaved: bool = False
    words: torch.Tensor | None = None
    number_bytes: int = 2

    @classmethod
    def of(cls, layer: QuantisedLinear, out: int, tensors: Mapping[str, torch.Tensor]) -> QuantisedWeights:
        """Of a layer, or of one that it is fused into, whose tensors these are."""
        words = None
        if layer.is_interleaved and layer.format == MXFP4:
            words = words_of_powers(tensors["scales"])
        elif layer.is_interleaved and layer.format.zeros:
            words = words_of(tensors["scales"], tensors["zeros"])
        return cls(
            layer.format, out, layer.in_features, **tensors,
            interleaved=layer.is_interleaved, words=words, number_bytes=layer.dtype.itemsize,
        )  # fmt: skip

    @property
    def read_codes(self) -> torch.Tensor:
        """The codes as a kernel reads them: interleaved ones in words int32."""
        return self.codes.view(torch.int32) if self.interleaved else self.codes

    @property
    def is_padded(self) -> bool:
        """Whether rows of codes go on after the last column; see `models.packing.padded`."""
        return self.codes.shape[1] * 8 // self.format.codes.bits > self.width

    @property
    def scales_after(self) -> bool:
        """Whether scales multiply sums of products instead of weights: where the columns of a dot share one."""
        group = self.format.group
        return self.interleaved and self.offsets is None and (group in (0, 64) or group % 128 == 0)


LARGEST_WORD = 128
"""The exponent plus 127 up to which a scale of FP4 is multiplied while codes are expanded (`unpack`)."""


def words_of_powers(scales: torch.Tensor) -> torch.Tensor | None:
    """The scales uint8 [out, groups] of MXFP4, four to a word int32 [out, groups / 4]: those of 128 columns. None if
    they are not in such fours, or some are too large."""
    if scales.dtype is not torch.uint8 or scales.shape[1] % 4 or int(scales.max()) > LARGEST_WORD:
        return None
    return scales.view(torch.int32)


@dataclass(frozen=True)
class Tile:
    """How a product of some rows is launched; the result does not depend on it.

    `chunks`, 1 or 2: 64 bytes of each matrix row that a program takes at once. `parallel`: a program per split.
    """

    block_n: int
    block_m: int
    warps: int
    stages: int
    chunks: int
    parallel: bool

    @property
    def most_registers(self) -> int | None:
        """Of a thread: two programs of 8 warps and 64 rows fit then, and nothing spills. Else the compiler's choice."""
        return 128 if (self.warps, self.block_m) == (8, 64) else None


SPLIT_PROGRAMS, SPLIT_BYTES = 256, 512
"""K is split until a product has this many programs, but into no fewer bytes of a row: constants, because texts depend
on the splits."""
TILE_N = 64
HOPPER_SHARED = 232448
"""Bytes of shared memory that a program may have on an H200."""


def splits_of(weights: QuantisedWeights, matrices: int = 1) -> int:
    """The number of splits of K, for every number of rows. `matrices`: how many a single row is multiplied by."""
    tiles, splits = matrices * triton.cdiv(weights.out, TILE_N), 1
    while tiles * splits < SPLIT_PROGRAMS and weights.codes.shape[1] >= 2 * splits * SPLIT_BYTES:
        splits *= 2
    return splits


def tile_of(weights: QuantisedWeights, rows: int, splits: int) -> Tile:
    """The fastest launch on an H200 (see benchmarks/NOTES.md)."""
    wide = weights.format.codes.bits == 8
    grouped = weights.scales_after and weights.format.group > 0  # its sums need registers twice
    if rows <= 16:
        return Tile(64, 16, 4, 4 if wide or weights.words is not None else 3, 2, parallel=splits > 1)
    if rows <= 32:
        return Tile(64, 32, 4, 6 if wide else 3, 1 if wide else 2, parallel=splits > 1)
    if rows <= 64:
        return Tile(64 if wide else 128, 64, 4 if wide else 8, 4, 1, parallel=splits > 1)
    if rows <= 128 or (rows <= 256 and splits > 2):
        return Tile(64, 128, 4, 4 if wide and grouped else 3, 1, parallel=splits > 2)
    if wide and grouped and rows <= 256:
        return Tile(64, 128, 4, 4, 1, parallel=False)
    return Tile(128, 128 if grouped else 256, 8, 4 if wide and grouped else 3, 1, parallel=splits > 2 and rows <= 512)


def shared_bytes(tile: Tile, weights: QuantisedWeights) -> int:
    """What a launch needs of a multiprocessor's shared memory. In fp32, expanded codes are in it as well."""
    columns, number = 64 * tile.chunks * 8 // weights.format.codes.bits, weights.number_bytes
    stage = tile.block_n * 64 * tile.chunks + tile.block_m * columns * number
    return tile.stages * stage + (tile.block_n * columns * number if number > 2 else 0)


def fitted(tile: Tile, weights: QuantisedWeights, shared: int) -> Tile:
    """A launch for a device whose multiprocessors have this many bytes of shared memory. `tile_of` has those for an
    H200 and numbers of 16 bits."""
    if shared_bytes(tile, weights) <= shared:
        return tile
    if tile.stages > 2:
        return fitted(replace(tile, stages=tile.stages - 1), weights, shared)
    if tile.block_m > 16:
        return fitted(replace(tile, block_m=tile.block_m // 2, stages=3), weights, shared)
    return fitted(replace(tile, chunks=1, stages=3), weights, shared) if tile.chunks > 1 else tile
