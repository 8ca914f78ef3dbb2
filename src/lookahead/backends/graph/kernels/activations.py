"""The activation of a feed-forward, between its two products: one launch for bias, activation and gate. And the gate
behind an attention.

They round after each of these, as the modules of transformers do. A row's result depends on that row only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lookahead.models.feed_forward import Activation


@triton.jit
def _exp_minus_line(x):
    """exp(x) - 1 - x, for x <= 0. Near 0 the terms of the difference cancel, hence its series."""
    series = x / 40320 + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    return tl.where(x > -0.5, series * x * x, tl.exp(x) - 1 - x)


@triton.jit
def _activated(x, a, b, c, d, ACTIVATION: tl.constexpr):
    """The activation of x, both in fp32: see `models.feed_forward.Activation`, also for the constants a, b, c, d."""
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 x (1 + tanh(y / 2)) = x sigmoid(y)
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "quick_gelu":
        x = x / (1 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "xielu")
        low = tl.minimum(x, d)
        x = tl.where(x > 0, a * x * x, (_exp_minus_line(low) + low - x) * b) + c * x
    return x


@triton.jit
def activated(inner, up, a, b, c, d, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of `inner`, and if GATED its product with `up`, in their dtype; with constants a, b, c, d."""
    if GATED and ACTIVATION == "clamped":
        gate = tl.minimum(inner.to(tl.float32), a)
        wide = tl.minimum(tl.maximum(up.to(tl.float32), -a), a)
        active = (gate / (1 + tl.exp(-gate * b)) * (wide + 1)).to(inner.dtype)
    else:
        active = _activated(inner.to(tl.float32), a, b, c, d, ACTIVATION).to(inner.dtype)
        if GATED:
            active = active * up
    return active


@triton.jit
def _activate(
    x, bias, out, a, b, c, d, gate_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, ALTERNATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    start = row * (2 * WIDTH if GATED else WIDTH)
    first, second = (2 * column, 2 * column + 1) if ALTERNATE else (column, WIDTH + column)
    inner = tl.load(x + start + first, mask=inside, other=0.0)
    up = tl.load(x + start + second, mask=inside, other=0.0) if GATED else inner
    if bias is not None:
        inner = inner + tl.load(bias + first, mask=inside, other=0.0)
        if GATED:
            up = up + tl.load(bias + second, mask=inside, other=0.0)
    if SCALED:
        inner = (inner.to(tl.float32) * gate_scale).to(inner.dtype)
    active = activated(inner, up, a, b, c, d, GATED, ACTIVATION)
    tl.store(out + row * WIDTH + column, active, mask=inside)


def activate(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation,
    constants: Sequence[float] = (),
    *,
    gated: bool = True,
    alternate: bool = False,
    gate_scale: float = 1.0,
) -> None:
    """out [M, width] = activation(gate * gate_scale) * up, where x [M, 2 width] has gate and up in its halves, before
    their bias; or, if they `alternate`, in its even and odd columns.

    Not `gated`: out = activation(x + bias), x [M, width]. bias [2 width] or [width], or None. `constants` are those of
    the activation.
    """
    width = out.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    a, b, c, d = (*constants, *[0.0] * (4 - len(constants)))
    _activate[(out.shape[0], triton.cdiv(width, block))](
        x, bias, out, a, b, c, d, gate_scale,
        WIDTH=width, BLOCK=block, SCALED=gate_scale != 1.0, GATED=gated, ALTERNATE=alternate,
        ACTIVATION=activation.value, num_warps=4,
    )  # fmt: skip


@triton.jit
def _apply_gate(x, gate, bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    given = tl.load(gate + at, mask=inside, other=0.0)
    if bias is not None:
        given = given + tl.load(bias + column, mask=inside, other=0.0)
    factor = (1 / (1 + tl.exp(-given.to(tl.float32)))).to(given.dtype)
    tl.store(x + at, tl.load(x + at, mask=inside, other=0.0) * factor, mask=inside)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x [M, width] *= sigmoid(gate + bias), gate [M or more, width], bias [width] or None."""
    rows, width = x.shape
    block = min(1024, triton.next_power_of_2(width))
    _apply_gate[(rows, triton.cdiv(width, block))](x, gate, bias, WIDTH=width, BLOCK=block, num_warps=4)


@triton.jit
def _apply_head_gates(x, source, bias, heads, size, DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HEADS * DIM
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(heads + column // DIM, mask=inside, other=0) * DIM + column % DIM
    given = tl.load(source + row * size + index, mask=inside, other=0.0)
    if bias is not None:
        given = given + tl.load(bias + index, mask=inside, other=0.0)
    factor = (1 / (1 + tl.exp(-given.to(tl.float32)))).to(given.dtype)
    at = x + row * (HEADS * DIM) + column
    tl.store(at, tl.load(at, mask=inside, other=0.0) * factor, mask=inside)


def apply_head_gates(
    x: torch.Tensor, source: torch.Tensor, bias: torch.Tensor | None, heads: torch.Tensor, dim: int
) -> None:
    """x [M, H x dim] *= sigmoid(source + bias), where the gate of head h is head number heads[h] of source.

    source [M or more, sources x dim], bias [sources x dim] or None, heads [H] int32.
    """
    rows, width = x.shape
    block = min(1024, triton.next_power_of_2(width))
    _apply_head_gates[(rows, triton.cdiv(width, block))](
        x, source, bias, heads, source.shape[1], DIM=dim, HEADS=width // dim, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scale(x, bias, out, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if bias is not None:
        value = value + tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + at, (value.to(tl.float32) * factor).to(value.dtype), mask=inside)


def scale(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, factor: float) -> None:
    """out [M, width] = (x + bias) * factor, for x [M or more, width], which may be `out`; bias [width] or None."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _scale[(rows, triton.cdiv(width, block))](x, bias, out, factor, WIDTH=width, BLOCK=block, num_warps=4)
