"""The two ends of a model: the embedding of tokens and positions; a head's last columns, and what follows its product.

A row's result depends on that row only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _embed(
    table, tokens, aliases, position_table, positions, out, scale, last,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, ALIASES: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    for alias in tl.static_range(ALIASES):
        other = tl.load(aliases + 2 * alias + 1).to(tl.int64)
        token = tl.where(token == tl.load(aliases + 2 * alias), other, token)
    value = tl.load(table + token * WIDTH + column, mask=column < WIDTH)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    if position_table is not None:
        position = tl.minimum(tl.load(positions + row), last).to(tl.int64)
        value = value + tl.load(position_table + position * WIDTH + column, mask=column < WIDTH)
    tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)


def embed(
    table: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    *,
    aliases: torch.Tensor | None = None,
    scale: float = 1.0,
    position_table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """out [M, width] = scale * table[tokens] + position_table[positions]. (`index_select` takes 14 us for 16 tokens.)

    table [vocabulary, width], tokens [M]; aliases [A, 2] int32 are pairs of a token and the one that it is read as.
    With learned positions, position_table [P, width] and positions [M] int32. Positions from P on are clamped: nodes
    there can never be accepted.
    """
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    last = 0 if position_table is None else len(position_table) - 1
    _embed[(len(tokens), triton.cdiv(width, block))](
        table, tokens, aliases, position_table, positions, out, scale, last,
        WIDTH=width, BLOCK=block, SCALED=scale != 1.0, ALIASES=0 if aliases is None else len(aliases),
        enable_fp_fusion=False,  # the scaled embedding is rounded before a position is added, also in fp32
    )  # fmt: skip


@triton.jit
def _last_columns(x, weight, out, x_stride, out_stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, columns). Numbers of `x` at the same offset of different blocks are added first."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, INNER, BLOCK):
        k = start + tl.arange(0, BLOCK)
        factor = tl.load(x + row * x_stride + k, mask=k < INNER, other=0.0).to(tl.float32)
        own = tl.load(weight + column * INNER + k, mask=k < INNER, other=0.0).to(tl.float32)
        total = tl.fma(own, factor, total)
    tl.store(out + row * out_stride + column, tl.sum(total, 0).to(out.dtype.element_ty))


def last_columns(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, n] = x [R, inner] weight [n, inner]^T, for a head's few columns beyond a multiple of its alignment.

    A program has one number, whose bits therefore do not depend on R. On an H200 cuBLASLt's kernels took 77 us for 7
    columns and an inner dimension of 4,096, because their widths suit no fast one.
    """
    columns, inner = weight.shape
    _last_columns[(len(out), columns)](
        x, weight, out, x.stride(0), out.stride(0), INNER=inner, BLOCK=min(4096, triton.next_power_of_2(inner)),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _finish_logits(
    logits, bias, scale, cap, stride, width, BLOCK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    own = logits + row * stride + column
    x = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x *= scale
    if (
        CAPPED
    ):  # cap tanh(x / cap), by a power of 2 that cannot overflow; near 0, where 1 - power cancels, by its series
        y = tl.abs(x) / cap
        power = tl.exp2(y * -2.8853900817779268)
        square = y * y
        series = y * (1 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
        tanh = tl.where(y < 0.25, series, (1 - power) / (1 + power))
        x = cap * tl.where(x < 0, -tanh, tanh)
    tl.store(own, x.to(logits.dtype.element_ty), mask=inside)


def finish_logits(logits: torch.Tensor, bias: torch.Tensor | None, scale: float, cap: float | None) -> None:
    """In place: logits = scale * (logits + bias), limited to cap tanh(logits / cap). In fp32, rounded at the end.

    logits [R, V]; bias [V] or None.
    """
    rows, width = logits.shape
    block = min(2048, triton.next_power_of_2(width))
    _finish_logits[(rows, triton.cdiv(width, block))](
        logits, bias, scale, cap or 1.0, logits.stride(0), width,
        BLOCK=block, SCALED=scale != 1.0, CAPPED=cap is not None, num_warps=4,
    )  # fmt: skip
