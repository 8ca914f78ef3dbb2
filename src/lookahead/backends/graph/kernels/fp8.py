"""Products of FP8 rows with FP8 matrices: rows of x are rounded to e4m3 first, and FP8 instructions multiply the codes.

A row's bits depend on that row only, at any number of rows. Its codes and its scale do. K is cut into the same splits
for every number of rows, the sum of a split runs in the order of the columns, and the splits are added in their order:
by one program that runs all of them, or by the last of several to finish. Every tile is multiplied by the same matrix
instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.quantised import QuantisedProducts
from lookahead.backends.graph.kernels.quantised_tiles import QuantisedWeights, splits_of
from lookahead.backends.graph.kernels.splits import SplitMemory, sum_of_splits
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.number_formats import Codes, rounded

BLOCK_K = 128
"""Columns of a dot. Rows of x's codes are padded to a multiple of it."""
ROW_BLOCK, ROW_WARPS = 16384, 16
"""Columns of a row that the rounding kernel keeps in registers, and its warps."""


@triton.jit
def _e4m3(x):
    """The codes, uint8, of the e4m3 numbers nearest to x, fp32 between -448 and 448; of two equally near ones the even
    code.

    In integers: Triton's own cast rounds alike on a GPU, but neither in its interpreter nor on GPUs without FP8.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers, from 2^-6 on: three bits of the fraction are kept, and the exponent's bias is 7 instead of 127.
    code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Smaller ones are multiples of 2^-9, to which fp32 itself rounds what is added to 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, code)
    code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, 0x7E))  # NaN stays NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _round_rows(x, codes, scales, K, x_stride, codes_stride, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows). See `round_rows`."""
    row = tl.program_id(0).to(tl.int64)
    at, to, column = x + row * x_stride, codes + row * codes_stride, tl.arange(0, BLOCK)
    kept = tl.load(at + column, mask=column < K, other=0).to(tl.float32)
    sizes = tl.abs(kept)
    for piece in range(1, PIECES):
        own = piece * BLOCK + column
        sizes = tl.maximum(sizes, tl.abs(tl.load(at + own, mask=own < K, other=0).to(tl.float32)))
    # IEEE's division, here and below: the operator's is one of two roundings.
    scale = tl.div_rn(tl.maximum(tl.max(sizes, 0), 1e-30), 448.0)
    tl.store(to + column, _e4m3(tl.div_rn(kept, scale)), mask=column < codes_stride)
    for piece in range(1, PIECES):
        own = piece * BLOCK + column
        given = tl.load(at + own, mask=own < K, other=0).to(tl.float32)
        tl.store(to + own, _e4m3(tl.div_rn(given, scale)), mask=own < codes_stride)
    tl.store(scales + row, scale)


@triton.jit
def _sum_of_split(weights, given, is_n, known, first, last, K, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The sum over blocks first to last of K, [BLOCK_N, BLOCK_M]. WHOLE: K is a multiple of BLOCK_K."""
    column = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first, last):
        start = block * BLOCK_K
        inside = is_n if WHOLE else is_n & (start + column < K)[None, :]
        codes = tl.load(weights + start, mask=inside, other=0.0)
        rows = tl.load(given + start, mask=known, other=0.0)
        # `max_num_imprecise_acc` is Triton's default, which depends on the GPU alone: so every launch adds alike. On
        # Hopper it is unlimited: a split is added up in the matrix units, which keep about 14 bits of such sums, where
        # each of the numbers has 4. The launches below were measured with it.
        acc = tl.dot(codes, rows, acc)
    return acc


@triton.jit
def _multiply(
    x, x_scales, codes, scales, out, partials, arrived, rows, N, K, x_stride, codes_stride, out_stride,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr, PARALLEL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of N x splits if PARALLEL, tiles of rows). A tile is out^T [BLOCK_N, BLOCK_M]."""
    if PARALLEL:
        tile, first_split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
        last_split = first_split + 1
    else:
        tile, first_split, last_split = tl.program_id(0), 0, SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    is_n, known = (n < N)[:, None], (m < rows)[None, :]
    weights = codes + n.to(tl.int64)[:, None] * codes_stride + column[None, :]
    given = x + m.to(tl.int64)[None, :] * x_stride + column[:, None]
    blocks = tl.cdiv(K, BLOCK_K)
    per = tl.cdiv(blocks, SPLITS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(first_split, last_split):
        first, last = split * per, tl.minimum((split + 1) * per, blocks)
        total += _sum_of_split(weights, given, is_n, known, first, last, K, WHOLE, BLOCK_N, BLOCK_M, BLOCK_K)
    if PARALLEL:
        number = tl.program_id(1) * tl.cdiv(N, BLOCK_N) + tile
        total, is_last = sum_of_splits(total, partials, arrived, number, first_split, SPLITS, BLOCK_N, BLOCK_M)
        if is_last == 0:
            return
    total *= tl.load(scales + n // ROWS, mask=n < N, other=0).to(tl.float32)[:, None]
    total *= tl.load(x_scales + m, mask=m < rows, other=0)[None, :]
    target = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_n & known)


@dataclass(frozen=True)
class Fp8Tile:
    """How a product of some rows is launched; the result does not depend on it. `parallel`: a program per split."""

    block_n: int
    block_m: int
    warps: int
    stages: int
    parallel: bool

    @property
    def shared(self) -> int:
        """The bytes of shared memory that its stages take."""
        return self.stages * (self.block_n + self.block_m) * BLOCK_K


def launch_of(weights: QuantisedWeights, rows: int, splits: int) -> Fp8Tile:
    """The fastest launch on an H200, measured on the four matrices of a 7B block (12288 x 4096, 4096 x 4096,
    22016 x 4096, 4096 x 11008). Microseconds of all four, in bf16, with FP8 weights alone, and with FP8 rows, too:

        1 row 119, 79, 82; 16 rows 118, 79, 84; 64 rows 119, 104, 93; 128 rows 129, 156, 113; 256 rows 162, 260, 173;
        512 rows 283, 440, 273
    """
    if rows <= 16:
        return Fp8Tile(64, 16, 4, 6, parallel=splits > 1)
    if rows <= 64:
        return Fp8Tile(64, 64, 4, 4, parallel=splits > 1)
    if rows <= 128 and splits > 2:  # 4096 rows of the matrix, of which 64 make too few tiles
        return Fp8Tile(128, 64, 8, 4, parallel=True)
    if rows <= 128:
        return Fp8Tile(64, 64, 4, 4, parallel=False)
    return Fp8Tile(64, 128, 4, 4, parallel=False)


def fitted(tile: Fp8Tile, shared: int) -> Fp8Tile:
    """A launch for a device whose multiprocessors have fewer bytes of shared memory than an H200's."""
    if tile.shared <= shared:
        return tile
    if tile.stages > 2:
        return fitted(replace(tile, stages=tile.stages - 1), shared)
    if tile.block_m > 16:
        return fitted(replace(tile, block_m=tile.block_m // 2, stages=3), shared)
    return fitted(replace(tile, block_n=tile.block_n // 2, warps=tile.warps // 2, stages=3), shared)


@dataclass(slots=True)
class RoundedRows:
    """Memory for the codes uint8 and the scales fp32 of rounded rows. All products of a device share it, because one
    runs after the other, and captured steps keep it: it must be reserved before the first of them."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def new(cls, device: torch.device, rows: int = ROW_SIZES[-1]) -> RoundedRows:
        return cls(torch.empty(0, dtype=torch.uint8, device=device), torch.empty(rows, device=device))

    def reserve(self, width: int) -> None:
        """Make room for all rows of this width."""
        numbers = len(self.scales) * padded_width(width)
        if numbers > len(self.codes):
            self.codes = self.codes.new_empty(numbers)

    def views(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows, padded width] and scales [rows]."""
        padded = padded_width(width)
        return self.codes[: rows * padded].view(rows, padded), self.scales[:rows]


def padded_width(width: int) -> int:
    return triton.cdiv(width, BLOCK_K) * BLOCK_K


def round_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """x [R, K] -> codes uint8 [R, K or more] and scales fp32 [R]: the numbers of `number_formats.rounded`, and zeros in
    the columns after K."""
    rows, width = x.shape
    block = min(ROW_BLOCK, triton.next_power_of_2(codes.shape[1]))
    _round_rows[(rows,)](
        x, codes, scales, width, x.stride(0), codes.stride(0), PIECES=triton.cdiv(codes.shape[1], block), BLOCK=block,
        num_warps=max(1, min(ROW_WARPS, block // 512)),
    )  # fmt: skip


def multiply(
    codes: torch.Tensor,
    row_scales: torch.Tensor,
    weights: QuantisedWeights,
    out: torch.Tensor,
    tile: Fp8Tile,
    splits: int,
    memory: SplitMemory,
) -> None:
    """out [R, N] = x W^T of rows as `round_rows` gives them, in sums of fp32. `splits` of K are a property of the
    matrix, not of the step."""
    rows, width = len(out), weights.width
    columns = triton.cdiv(weights.out, tile.block_n) * (splits if tile.parallel else 1)
    _multiply[(columns, triton.cdiv(rows, tile.block_m))](
        codes.view(torch.float8_e4m3fn), row_scales, weights.codes.view(torch.float8_e4m3fn), weights.scales, out,
        memory.partials, memory.arrived, rows, weights.out, width, codes.stride(0), weights.codes.stride(0),
        out.stride(0), ROWS=weights.format.rows, WHOLE=width % BLOCK_K == 0, SPLITS=splits, PARALLEL=tile.parallel,
        BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=BLOCK_K, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


class Fp8Products:
    """Plans products of rounded rows on a device, beside those with weights alone quantised."""

    def __init__(self, device: torch.device, others: QuantisedProducts) -> None:
        self.memory, self._shared = others.memory, others.shared
        self.rows = RoundedRows.new(device)

    def reserve(self, weights: QuantisedWeights) -> None:
        """Make room for products of any number of rows."""
        self.rows.reserve(weights.width)
        splits = splits_of(weights)
        for rows in ROW_SIZES:
            tile = self.tile(weights, rows, splits)
            if tile.parallel:
                tiles = triton.cdiv(weights.out, tile.block_n) * triton.cdiv(rows, tile.block_m)
                self.memory.reserve(tiles, splits, tile.block_n, tile.block_m)

    def plan(self, weights: QuantisedWeights, rows: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A function of (x [rows, K], out [rows, N])."""
        splits = splits_of(weights)
        tile = self.tile(weights, rows, splits)

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            codes, scales = self.rows.views(len(x), weights.width)
            round_rows(x, codes, scales)
            multiply(codes, scales, weights, out, tile, splits, self.memory)

        return run

    def tile(self, weights: QuantisedWeights, rows: int, splits: int) -> Fp8Tile:
        """How a product of this many rows is launched."""
        return fitted(launch_of(weights, rows, splits), self._shared)


class EmulatedFp8Products:
    """The same on a GPU without FP8 instructions: rows are rounded by PyTorch, and the kernel for quantised weights
    multiplies what their codes stand for."""

    def __init__(self, others: QuantisedProducts) -> None:
        self._others = others

    def reserve(self, weights: QuantisedWeights) -> None:
        """As `Fp8Products.reserve`."""
        self._others.reserve(weights)

    def plan(self, weights: QuantisedWeights, rows: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """As `Fp8Products.plan`."""
        run = self._others.plan(weights, rows)
        return lambda x, out: run(rounded(x, Codes.E4M3), out)


def fp8_products(device: torch.device, others: QuantisedProducts) -> Fp8Products | EmulatedFp8Products:
    """What plans products of rounded rows on a device. NVIDIA's GPUs multiply e4m3 numbers from Ada on."""
    known = device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))
    return Fp8Products(device, others) if known else EmulatedFp8Products(others)
