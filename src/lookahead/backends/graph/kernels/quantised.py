"""Products with quantised matrices: codes are expanded within the loop over K, in registers.

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
from lookahead.backends.graph.kernels.quantised_tiles import (
    HOPPER_SHARED,
    QuantisedWeights,
    Tile,
    fitted,
    splits_of,
    tile_of,
)
from lookahead.backends.graph.kernels.splits import SplitMemory, sum_of_splits
from lookahead.backends.graph.kernels.unpack import bytes_to_numbers, nibbles, power_of_two, scaled_nibbles
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.quantised import Codes

KINDS = {Codes.E4M3: 0, Codes.INT8: 1, Codes.INT4: 2, Codes.E2M1: 3}


@triton.jit
def _scales(
    scales, row, column, mask, K, row_stride, group_stride, ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr
):  # fmt: skip
    """The scales of weights, fp32; those of columns beyond K are of the last group."""
    group = tl.minimum(column, K - 1) // GROUP if GROUP else column * 0
    value = tl.load(scales + (row // ROWS) * row_stride + group * group_stride, mask=mask, other=0)
    return power_of_two(value) if E8M0 else value.to(tl.float32)


@triton.jit
def _weights(numbers, scale, offset, E8M0: tl.constexpr):
    """Numbers of codes times scales, plus offsets."""
    if E8M0 and offset is None and numbers.dtype != tl.float16:
        numbers = numbers * scale.to(numbers.dtype)  # exact
    else:
        weight = numbers.to(tl.float32) * scale
        if offset is not None:
            weight += offset
        numbers = weight.to(numbers.dtype)
    return numbers


@triton.jit
def _operand(numbers, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Numbers [ROWS x 4, 16] of interleaved codes as the rows and 64 columns of a matrix instruction's operand.

    Every thread keeps the numbers that it has: this only names them. See `interleaved_row`, and `interleaved` in
    `models.quantised`.
    """
    numbers = tl.reshape(numbers, [ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 2, 1, 3, 5, 6, 4, 7]), [ROWS, 64])


@triton.jit
def _per_number(
    values, row, start, N, K, row_stride, group_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales, zeros or offsets of 64 columns from `start` on, for the numbers [BLOCK_N x 4, 16] of `_operand`.

    GROUP: 8, 16 or 32, or a multiple of 64.
    """
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= 64 else 64 // GROUP
    column = start + tl.arange(0, GROUPS)[None, :] * (64 // GROUPS)
    found = _scales(values, row[:, None], column, (row < N)[:, None], K, row_stride, group_stride, ROWS, GROUP, E8M0)
    wide = tl.broadcast_to(found[:, None, :, None], [BLOCK_N, 4, GROUPS, 16 // GROUPS])
    return tl.reshape(wide, [BLOCK_N * 4, 16])


@triton.jit
def _dot_64(
    numbers, at, start, order, known, row, acc, N, K, scales, zeros, offsets, scale_row, scale_group,
    ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """acc + the products of 64 columns from `start` on. With AFTER the caller multiplies by the scale. PADDED: codes
    have columns beyond K."""
    columns = start + tl.arange(0, 64)
    if zeros is not None:
        zero = _per_number(zeros, row, start, N, K, scale_row, scale_group, ROWS, GROUP, False, BLOCK_N)
        numbers = numbers + (8.0 - zero).to(numbers.dtype)
    if not AFTER:
        offset = None
        if offsets is not None:
            offset = _per_number(offsets, row, start, N, K, scale_row, scale_group, ROWS, GROUP, False, BLOCK_N)
        scale = _per_number(scales, row, start, N, K, scale_row, scale_group, ROWS, GROUP, E8M0, BLOCK_N)
        numbers = _weights(numbers, scale, offset, E8M0)
    if order is not None:
        columns = tl.load(order + columns)
    if PADDED:
        known = known & (columns < K)[:, None]
    given = tl.load(at + columns[:, None], mask=known, other=0)
    return tl.dot(_operand(numbers, BLOCK_N, WARPS), given, acc, input_precision="ieee")


@triton.jit
def _sum_interleaved(
    at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row, scale_group,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The sum over pieces first to last of 128 bytes of a matrix row, whose codes are interleaved.

    64 bytes after the other, CHUNKS of them in a turn of the loop, which changes nothing.
    """
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tile * BLOCK_N + interleaved_row(tl.arange(0, BLOCK_N), WARPS)
    # 8 rows of 64 bytes are next to one another, and each thread reads 16 of them.
    piece = tl.arange(0, BLOCK_N * 4)
    from_row = tile * BLOCK_N + interleaved_row(piece // 4, WARPS)
    words = scales + from_row[:, None] * scale_row  # with WORDS
    own = codes + (from_row // 8).to(tl.int64) * 8 * codes_stride + from_row % 8 * 64 + piece % 4 * 16
    own = own[:, None] + tl.arange(0, 16)[None, :]
    inside = (from_row < N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    HALVES: tl.constexpr = 2 if KIND >= 2 else 1
    GROUPED: tl.constexpr = AFTER and GROUP != 0
    for turn in range(first * 2 // CHUNKS, last * 2 // CHUNKS):
        for chunk in tl.static_range(CHUNKS):
            block = turn * CHUNKS + chunk
            start = block * 64 * HALVES
            raw = tl.load(own + block * 512, mask=inside, other=0)
            if WORDS:
                word = tl.load(words + block, mask=inside, other=0)
                low, high = scaled_nibbles(raw, word, PTX, at.dtype.element_ty)
            elif HALVES == 2:
                low, high = nibbles(raw, KIND == 3, PTX, at.dtype.element_ty)
            else:
                low = bytes_to_numbers(raw, KIND == 0, PTX, at.dtype.element_ty)
                high = low
            for half in tl.static_range(HALVES):
                numbers = low if half == 0 else high
                column = start + half * 64
                if GROUPED:
                    if half == 0 or GROUP == 64:
                        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    part = _dot_64(
                        numbers, at, column, order, known, row, part, N, K, scales, zeros, offsets, scale_row,
                        scale_group, ROWS, GROUP, AFTER, E8M0, PADDED, BLOCK_N, WARPS,
                    )  # fmt: skip
                    if half == HALVES - 1 or GROUP == 64:
                        scale = _scales(scales, n, column + n * 0, n < N, K, scale_row, scale_group, ROWS, GROUP, E8M0)
                        acc += part * scale[:, None]
                else:
                    acc = _dot_64(
                        numbers, at, column, order, known, row, acc, N, K, scales, zeros, offsets, scale_row,
                        scale_group, ROWS, GROUP, AFTER or WORDS, E8M0, PADDED, BLOCK_N, WARPS,
                    )  # fmt: skip
    return acc


@triton.jit
def interleaved_row(i, WARPS: tl.constexpr):
    """The matrix row whose codes `_operand` takes at index i: that which the threads of a matrix instruction have."""
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def _sum_plain(
    at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row, scale_group,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same for any number of columns, with codes in their order: slower."""
    HALVES: tl.constexpr = 2 if KIND >= 2 else 1
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    byte = tl.arange(0, 64)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first * 2, tl.minimum(last * 2, tl.cdiv(K, 64 * HALVES))):
        start = block * 64 * HALVES
        half = tl.minimum(64 * HALVES, K - start) // HALVES  # the last block may be shorter
        inside = (n < N) & (byte < half)[None, :]
        raw = tl.load(codes + n.to(tl.int64) * codes_stride + block * 64 + byte[None, :], mask=inside, other=0)
        if HALVES == 2:
            low, high = nibbles(raw, KIND == 3, PTX, at.dtype.element_ty)
        else:
            low = bytes_to_numbers(raw, KIND == 0, PTX, at.dtype.element_ty)
            high = low
        for part in tl.static_range(HALVES):
            own = start + part * half + byte
            column = own[None, :]
            numbers = low if part == 0 else high
            if zeros is not None:
                zero = _scales(zeros, n, column, inside, K, scale_row, scale_group, ROWS, GROUP, False)
                numbers = (numbers.to(tl.float32) + 8.0 - zero).to(numbers.dtype)
            offset = None
            if offsets is not None:
                offset = _scales(offsets, n, column, inside, K, scale_row, scale_group, ROWS, GROUP, False)
            scale = _scales(scales, n, column, inside, K, scale_row, scale_group, ROWS, GROUP, E8M0)
            numbers = _weights(numbers, scale, offset, E8M0)
            given_column = own
            if order is not None:
                given_column = tl.load(order + own, mask=own < K, other=0)
            given = tl.load(at + given_column[:, None], mask=known & (byte < half)[:, None], other=0)
            acc = tl.dot(numbers, given, acc, input_precision="ieee")
    return acc


@triton.jit
def _multiply(
    x, codes, scales, zeros, offsets, order, bias, out, tiles, counts, table, numbers, partials, arrived,
    rows, capacity, N, K, x_stride, codes_stride, scale_row, scale_group, out_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, SPLITS: tl.constexpr,
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
            total += _sum_interleaved(
                at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row,
                scale_group, KIND, ROWS, GROUP, AFTER, E8M0, WORDS, PADDED, PTX, BLOCK_N, BLOCK_M, WARPS, CHUNKS,
            )  # fmt: skip
        else:
            total += _sum_plain(
                at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row,
                scale_group, KIND, ROWS, GROUP, E8M0, PTX, BLOCK_N, BLOCK_M,
            )  # fmt: skip
    if PARALLEL:
        number = tl.program_id(1) * tl.cdiv(N, BLOCK_N) + tile
        total, is_last = sum_of_splits(total, partials, arrived, number, first_split, SPLITS, BLOCK_N, BLOCK_M)
        if is_last == 0:
            return
    if AFTER and GROUP == 0:
        total *= _scales(scales, n, n * 0, n < N, K, scale_row, scale_group, ROWS, GROUP, E8M0)[:, None]
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
    words = weights.words is not None
    scales = weights.scales if weights.words is None else weights.words
    if ptx is None:
        ptx = x.is_cuda and torch.version.hip is None and x.dtype is torch.bfloat16
    _multiply[(columns, tiles or triton.cdiv(rows, tile.block_m))](
        x, weights.codes, scales, weights.zeros, weights.offsets, weights.order, bias, out, *listed,
        memory.partials, memory.arrived, rows, 0 if experts is None else experts.capacity, weights.out, width,
        x.stride(0), weights.codes.stride(0), *scales.stride(), out.stride(0),
        KIND=KINDS[weights.format.codes], ROWS=weights.format.rows, GROUP=weights.format.group,
        AFTER=weights.scales_after, E8M0=weights.scales.dtype is torch.uint8, WORDS=words, PADDED=weights.is_padded,
        INTERLEAVED=weights.interleaved, SPLITS=splits, PARALLEL=tile.parallel, PTX=ptx, PER=per,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, WARPS=tile.warps, CHUNKS=tile.chunks, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
