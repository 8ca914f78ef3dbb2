"""A layer of a small model in few launches: matrix products that take in what stands around them.

A product of a small model is over before its launch is paid for: what counts is how many launches a layer has, and how
long one memory access waits for another. Here the norm before a product, and the rotary positions, the K/V write, the
gate or the residual after it are part of the product, so that a layer has five kernels in place of nine:

    norm_rotate_write    q, k, v = rotary(RMSNorm(stream) W^T), k and v into the cache
    (attention)
    add_product          stream += x W^T
    norm_gate            out = silu(gate) * up, with gate and up = RMSNorm(stream) W^T
    add_product          stream += x W^T

Each program owns some columns of the result, for 16 rows. It reads the rows whole, so each norms them anew. The inner
dimension is dealt to the warps, a stretch each, which are added up at the end:

    columns   | warp 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 | ...        a stretch is `Tile.block_k` wide

Each rounds where `fused` and a product of its own would. A program takes 16 rows, however many there are, and is cut by
the same `Tile`: a row is added up in the same order, bit for bit, whatever K and the other rows are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 16
"""Rows per program, the least that the matrix units take. More would be another order of adding."""
SHARED = 160 * 1024
"""Bytes of a multiprocessor's own memory for the blocks on their way, of the 227 KB that an H200 has."""


@dataclass(frozen=True)
class Tile:
    """Columns of a program, inner columns of a warp's stretch, warps, and blocks on their way.

    Chosen without a GPU, to be measured: all of a row of 576 is on its way at once, and compiled for an H200 no
    register is spilled. With stretches of less than 64 the gains of a norm would be too few to be fetched ahead.

    `ahead` asks for all of a program's weights before anything else: a norm's loop would ask for them when the rows are
    normed. `early` starts a kernel while the one before it ends (programmatic dependent launch, Hopper and later); with
    `ahead` its weights come meanwhile. Neither runs in Triton's interpreter, and neither has run on a GPU yet.
    """

    block_n: int = 16
    block_k: int = 64
    warps: int = 4
    stages: int = 4
    ahead: bool = False
    early: bool = False

    def stages_of(self, columns: int, element: int) -> int:
        """How many blocks of so many columns find room."""
        return max(1, min(self.stages, SHARED // ((ROWS + columns) * self.warps * self.block_k * element)))

    def options(self, columns: int, element: int) -> dict[str, Any]:
        """What the launches have in common."""
        found = {"BLOCK_M": ROWS, "BLOCK_K": self.block_k, "WARPS": self.warps}
        found |= {"AHEAD": self.ahead, "EARLY": self.early}
        found |= {"num_warps": self.warps, "num_stages": self.stages_of(columns, element)}
        return {**found, "launch_pdl": True} if self.early else found


NORM_TILE = Tile()
ADD_TILE = Tile()


@triton.jit
def _ask_for(weight, n, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Fetch these rows of the weight into the second-level cache, a line of at least 64 bytes at a time."""
    line = tl.arange(0, BLOCK // 32) * 32
    at = weight + tl.where(there, n, 0)[:, None] * WIDTH + tl.minimum(line, WIDTH - 1)[None, :]
    fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(fetch, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _take_turns():
    """Let the next kernel start, and wait for what the one before has written."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def _columns(block, BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """The inner columns [WARPS, BLOCK_K] of a block."""
    return (block * WARPS + tl.arange(0, WARPS)[:, None]) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _rows(x, row, real, column, WIDTH: tl.constexpr):
    """x[row, column] as [WARPS, M, BLOCK_K]."""
    inside = real[None, :, None] & (column < WIDTH)[:, None, :]
    return tl.load(x + row[None, :, None] * WIDTH + column[:, None, :], mask=inside, other=0.0)


@triton.jit
def _matrix(weight, n, there, column, WIDTH: tl.constexpr):
    """weight[n, column] as [WARPS, BLOCK_K, N]."""
    inside = there[None, None, :] & (column < WIDTH)[:, :, None]
    return tl.load(weight + n[None, None, :] * WIDTH + column[:, :, None], mask=inside, other=0.0)


@triton.jit
def _normed_pair(
    stream, gain, weight, row, real, n, there, apart, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """RMSNorm(stream) * gain, times rows n of the weight, and times the rows that stand `apart` from them: two [M, N]
    in the stream's dtype."""
    whole = tl.arange(0, BLOCK)
    inside = real[:, None] & (whole < WIDTH)[None, :]
    wide = tl.load(stream + row[:, None] * WIDTH + whole[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    first = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(WIDTH, WARPS * BLOCK_K)):
        part = _columns(block, BLOCK_K, WARPS)
        x = _rows(stream, row, real, part, WIDTH)
        its_gain = tl.load(gain + part, mask=part < WIDTH, other=0.0)[:, None, :]
        normed = ((x.to(tl.float32) * scale[None, :, None]).to(x.dtype) * its_gain).to(x.dtype)
        first = tl.dot(normed, _matrix(weight, n, there, part, WIDTH), first, input_precision="ieee")
        second = tl.dot(normed, _matrix(weight, n + apart, there, part, WIDTH), second, input_precision="ieee")
    dtype: tl.constexpr = stream.dtype.element_ty
    return tl.sum(first, 0).to(dtype), tl.sum(second, 0).to(dtype)


@triton.jit(do_not_specialize=["size"])
def _norm_gate(
    stream, gain, weight, out, size, eps,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, blocks of columns). A program has the same columns of gate and of up."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < size
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < INNER
    if AHEAD:
        _ask_for(weight, n, there, WIDTH, BLOCK)
        _ask_for(weight, n + INNER, there, WIDTH, BLOCK)
    if EARLY:
        _take_turns()
    gate, up = _normed_pair(
        stream, gain, weight, row, real, n, there, INNER, eps, WIDTH, BLOCK, BLOCK_M, BLOCK_N, BLOCK_K, WARPS
    )
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    at = out + row[:, None] * INNER + n[None, :]
    tl.store(at, (active * up).to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


def norm_gate(
    stream: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    tile: Tile = NORM_TILE,
) -> torch.Tensor:
    """stream [M, width]; gain [width]; weight [2 inner, width], gate above up -> out [M, inner] = silu(gate) * up."""
    size, inner = out.shape
    width = stream.shape[1]
    _norm_gate[(triton.cdiv(size, ROWS), triton.cdiv(inner, tile.block_n))](
        stream, gain, weight, out, size, eps,
        INNER=inner, WIDTH=width, BLOCK=triton.next_power_of_2(width), BLOCK_N=tile.block_n,
        **tile.options(2 * tile.block_n, weight.element_size()),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["size", "count"])
def _norm_rotate_write(
    stream, gain, weight, bias, norms, cosine, sine, rows, lengths, positions, q, keys, values,
    size, count, capacity, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, all heads, blocks of half a head). A program has the same columns of both halves."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = token < size
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < half
    inside = real[:, None] & there[None, :]
    low = head * DIM + column
    is_q, is_v = (low < HEADS * DIM)[None, :], (low >= (HEADS + KV_HEADS) * DIM)[None, :]
    if AHEAD:
        _ask_for(weight, low, there, WIDTH, BLOCK)
        _ask_for(weight, low + half, there, WIDTH, BLOCK)
    if EARLY:
        _take_turns()
    # 1. Where the rows stand, so that nothing waits for it at the end. Values are not turned.
    at = tl.load(positions + token, mask=real, other=0).to(tl.int64)[:, None] * half + column[None, :]
    cos = tl.load(cosine + at, mask=inside & ~is_v, other=1.0)
    sin = tl.load(sine + at, mask=inside & ~is_v, other=0.0)
    place = tl.load(lengths + token // count, mask=real, other=0) + token % count
    base = tl.load(rows + token // count, mask=real, other=0).to(tl.int64) * KV_HEADS
    # 2. The product.
    a, b = _normed_pair(
        stream, gain, weight, token, real, low, there, half, eps, WIDTH, BLOCK, BLOCK_M, BLOCK_N, BLOCK_K, WARPS
    )
    # 3. What `fused.rotate_write` does to it.
    if HAS_BIAS:
        a = a + tl.load(bias + low, mask=there, other=0.0)[None, :]
        b = b + tl.load(bias + low + half, mask=there, other=0.0)[None, :]
    first, second = a.to(tl.float32), b.to(tl.float32)
    if HAS_NORM:  # the program has a whole head
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / DIM + eps)[:, None]
        which = tl.where(head < HEADS, 0, DIM) + column
        gain_a = tl.load(norms + which, mask=there, other=0.0)[None, :]
        gain_b = tl.load(norms + which + half, mask=there, other=0.0)[None, :]
        first = tl.where(is_v, first, ((first * scale).to(a.dtype) * gain_a).to(tl.float32))
        second = tl.where(is_v, second, ((second * scale).to(a.dtype) * gain_b).to(tl.float32))
    a = (first * cos - second * sin).to(a.dtype)
    b = (second * cos + first * sin).to(b.dtype)
    # Queries stay in the step's order; keys and values go behind their row's prefix.
    at = (token * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(q + at, a, mask=inside & is_q)
    tl.store(q + at + half, b, mask=inside & is_q)
    is_k = inside & ~(is_q | is_v)
    at = ((base + head - HEADS) * capacity + place)[:, None] * DIM + column[None, :]
    tl.store(keys + at, a, mask=is_k)
    tl.store(keys + at + half, b, mask=is_k)
    at = ((base + head - HEADS - KV_HEADS) * capacity + place)[:, None] * DIM + column[None, :]
    tl.store(values + at, a, mask=inside & is_v)
    tl.store(values + at + half, b, mask=inside & is_v)


def norm_rotate_write(
    stream: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norms: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
    tile: Tile = NORM_TILE,
) -> None:
    """stream [M, width], M at least B x K; gain [width]; weight [(H + 2 Hkv) D, width]; the rest as in
    `fused.rotate_write`, for which the product would be the `qkv`."""
    batch, count, heads, dim = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    size, width, half = batch * count, stream.shape[1], dim // 2
    block_n = tile.block_n if norms is None else max(16, triton.next_power_of_2(half))
    _norm_rotate_write[(triton.cdiv(size, ROWS), heads + 2 * kv_heads, triton.cdiv(half, block_n))](
        stream, gain, weight, weight if bias is None else bias, weight if norms is None else norms,
        cosine, sine, rows, lengths, positions, q, keys, values, size, count, capacity, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        BLOCK_N=block_n, HAS_BIAS=bias is not None, HAS_NORM=norms is not None,
        **tile.options(2 * block_n, weight.element_size()),
    )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _add_product(
    x, weight, stream, size,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, blocks of columns). A program reads and writes its own part of the stream."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < size
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < COLUMNS
    if AHEAD:
        _ask_for(weight, n, there, WIDTH, BLOCK)
    if EARLY:
        _take_turns()
    at = stream + row[:, None] * COLUMNS + n[None, :]
    inside = real[:, None] & there[None, :]
    before = tl.load(at, mask=inside, other=0.0)
    acc = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(WIDTH, WARPS * BLOCK_K)):
        part = _columns(block, BLOCK_K, WARPS)
        mine = _rows(x, row, real, part, WIDTH)
        acc = tl.dot(mine, _matrix(weight, n, there, part, WIDTH), acc, input_precision="ieee")
    tl.store(at, before + tl.sum(acc, 0).to(before.dtype), mask=inside)


def add_product(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor, tile: Tile = ADD_TILE) -> torch.Tensor:
    """stream [M, columns] += x weight^T, in place; x [M, width]; weight [columns, width]."""
    size, columns = stream.shape
    _add_product[(triton.cdiv(size, ROWS), triton.cdiv(columns, tile.block_n))](
        x, weight, stream, size,
        COLUMNS=columns, WIDTH=x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), BLOCK_N=tile.block_n,
        **tile.options(tile.block_n, weight.element_size()),
    )  # fmt: skip
    return stream
