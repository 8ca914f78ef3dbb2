"""Products with quantised matrices: the kernel, whose sums are those of `quantised_sums`, and its launches.

A row's bits depend on that row only, at any number of rows. K is cut into the same splits for every number of rows, the
sum of a split runs in the order of the columns, and the splits are added in their order: by one program that runs
all of them, or by the last of several to finish. Every tile is multiplied by the same matrix instructions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.experts import ExpertRows, pairs_of_tile
from lookahead.backends.graph.kernels.quantised_sums import group_scales, sum_interleaved, sum_plain
from lookahead.backends.graph.kernels.quantised_tiles import (
    HOPPER_SHARED,
    QuantisedWeights,
    Tile,
    fitted,
    splits_of,
    tile_of,
)
from lookahead.backends.graph.kernels.splits import SplitMemory, sum_of_splits
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.number_formats import Codes

KINDS = {Codes.E4M3: 0, Codes.INT8: 1, Codes.INT4: 2, Codes.E2M1: 3}


@triton.jit
def _multiply(
    x, codes, scales, zeros, offsets, order, bias, out, tiles, counts, table, numbers, partials, arrived,
    rows, capacity, N, K, x_stride, codes_stride, scale_row, scale_group, out_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr,
    HALF: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr, PTX: tl.constexpr, PER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of N x splits if PARALLEL, tiles of rows). A tile is out^T [BLOCK_N, BLOCK_M]."""
    if PARALLEL:
        tile, first_split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
        last_split = first_split + 1
    else:
        tile, first_split, last_split = tl.program_id(0), 0, SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if table is not None:
        if tl.program_id(1) >= tl.load(numbers):
            return
        expert, m, is_row = pairs_of_tile(tl.program_id(1), tiles, counts, table, capacity, BLOCK_M)
        codes += expert.to(tl.int64) * N * codes_stride
        first_scale = expert.to(tl.int64) * (N // ROWS) * scale_row
        scales += first_scale
        if zeros is not None:
            zeros += first_scale
        if offsets is not None:
            offsets += first_scale
    else:
        expert, m = 0, tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = m < rows
    known = is_row[None, :]
    at = x + (m // PER).to(tl.int64)[None, :] * x_stride
    blocks = tl.cdiv(K, 256 if KIND >= 2 else 128)
    per = tl.cdiv(blocks, SPLITS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(first_split, last_split):
        first, last = split * per, tl.minimum((split + 1) * per, blocks)
        if INTERLEAVED:
            total += sum_interleaved(
                at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row,
                scale_group, KIND, ROWS, GROUP, AFTER, E8M0, HALF, WORDS, PADDED, PTX, BLOCK_N, BLOCK_M, WARPS, CHUNKS,
            )  # fmt: skip
        else:
            total += sum_plain(
                at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row,
                scale_group, KIND, ROWS, GROUP, E8M0, PTX, BLOCK_N, BLOCK_M,
            )  # fmt: skip
    if PARALLEL:
        number = tl.program_id(1) * tl.cdiv(N, BLOCK_N) + tile
        total, is_last = sum_of_splits(total, partials, arrived, number, first_split, SPLITS, BLOCK_N, BLOCK_M)
        if is_last == 0:
            return
    if AFTER and GROUP == 0:
        total *= group_scales(scales, n, n * 0, n < N, K, scale_row, scale_group, ROWS, GROUP, E8M0)[:, None]
    if bias is not None:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0).to(tl.float32)[:, None]
    target = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & known)


class QuantisedProducts:
    """Plans products with quantised matrices on a device, which share memory for the sums of splits."""

    def __init__(self, device: torch.device) -> None:
        self.shared = HOPPER_SHARED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.shared = getattr(properties, "shared_memory_per_block_optin", HOPPER_SHARED)
        self.memory = SplitMemory.new(device)

    def reserve(self, weights: QuantisedWeights) -> None:
        """Make room for products of any number of rows."""
        for rows in ROW_SIZES:
            tile = self.tile(weights, rows, splits_of(weights))
            if tile.parallel:
                tiles = triton.cdiv(weights.out, tile.block_n) * triton.cdiv(rows, tile.block_m)
                self.memory.reserve(tiles, splits_of(weights), tile.block_n, tile.block_m)

    def plan(self, weights: QuantisedWeights, rows: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A function of (x [rows, K], out [rows, N])."""
        splits = splits_of(weights)
        tile = self.tile(weights, rows, splits)

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            multiply(x, weights, out, tile, splits, self.memory)

        return run

    def tile(self, weights: QuantisedWeights, rows: int, splits: int) -> Tile:
        """How a product of this many rows is launched."""
        return fitted(tile_of(weights, rows, splits), weights, self.shared)


def multiply(
    x: torch.Tensor,
    weights: QuantisedWeights,
    out: torch.Tensor,
    tile: Tile,
    splits: int,
    memory: SplitMemory,
    *,
    bias: torch.Tensor | None = None,
    experts: ExpertRows | None = None,
    per: int = 1,
    tiles: int = 0,
    ptx: bool | None = None,
) -> None:
    """out [R, N] = x [R, K] W^T + bias [N], in sums of fp32. `splits` of K are a property of the matrix, not of the
    step. With `experts`, weights of E x N rows, bias [E, N], `per` and `tiles` as in `grouped.multiply`."""
    rows, width = len(x), weights.width
    columns = triton.cdiv(weights.out, tile.block_n) * (splits if tile.parallel else 1)
    listed = (None,) * 4 if experts is None else (experts.tiles, experts.counts, experts.table, experts.numbers)
    codes, words = weights.read_codes, weights.words is not None
    scales = weights.scales if weights.words is None else weights.words
    if ptx is None:
        ptx = x.is_cuda and torch.version.hip is None and x.dtype is torch.bfloat16
    limits = {"maxnreg": tile.most_registers} if ptx and tile.most_registers else {}
    _multiply[(columns, tiles or triton.cdiv(rows, tile.block_m))](
        x, codes, scales, weights.zeros, weights.offsets, weights.order, bias, out, *listed,
        memory.partials, memory.arrived, rows, 0 if experts is None else experts.capacity, weights.out, width,
        x.stride(0), codes.stride(0), *scales.stride(), out.stride(0),
        KIND=KINDS[weights.format.codes], ROWS=weights.format.rows, GROUP=weights.format.group,
        AFTER=weights.scales_after, E8M0=weights.scales.dtype is torch.uint8,
        HALF=weights.scales.dtype is torch.float16, WORDS=words, PADDED=weights.is_padded,
        INTERLEAVED=weights.interleaved, SPLITS=splits, PARALLEL=tile.parallel, PTX=ptx, PER=per, BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m, WARPS=tile.warps, CHUNKS=tile.chunks, num_warps=tile.warps,
        num_stages=tile.stages, **limits,
    )  # fmt: skip
