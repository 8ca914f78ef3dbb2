"""The residual stream between two layers, in one launch: add what the last layers computed, and norm the sum.

It rounds where the modules of transformers round, so that half-precision results stay close to theirs. A row's result
depends on that row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.delta import Delta
from lookahead.models.norm import Norm

HAS_NORM, CENTERED, ROUNDS_FIRST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""The flags of a norm in a kernel's arguments: see `flags`. 0 for no norm."""


def flags(norm: Norm | None) -> int:
    """The kind of a norm, without its numbers."""
    if norm is None:
        return 0
    return HAS_NORM.value + CENTERED.value * norm.centered + ROUNDS_FIRST.value * norm.rounds_first


@triton.jit
def norm_columns(x, weight, bias, eps, inside, WIDTH: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """The norm of x [BLOCK], whose columns outside of WIDTH are 0, in the dtype of x: see `models.spec.Norm`.

    weight and bias [BLOCK], or None.
    """
    wide = x.to(tl.float32)
    if CENTERED & KIND:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale
    if ROUNDS_FIRST & KIND:
        normed = normed.to(x.dtype)
    if weight is not None:
        gain = weight if ROUNDS_FIRST & KIND else weight.to(tl.float32)
        normed = normed * (gain + OFFSET if OFFSET != 0 else gain)
    if bias is not None:
        normed = normed + (bias if ROUNDS_FIRST & KIND else bias.to(tl.float32))
    return normed.to(x.dtype)


@triton.jit
def _add_delta(
    x, delta, delta_bias, weight, bias, eps, scale, column, inside,
    WIDTH: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """x + scale * norm(delta + delta_bias). x [BLOCK]; the others point to WIDTH columns."""
    added = tl.load(delta + column, mask=inside, other=0.0)
    if delta_bias is not None:
        added = added + tl.load(delta_bias + column, mask=inside, other=0.0)
    if KIND:
        gain = tl.load(weight + column, mask=inside, other=0.0) if weight is not None else None
        shift = tl.load(bias + column, mask=inside, other=0.0) if bias is not None else None
        added = norm_columns(added, gain, shift, eps, inside, WIDTH, KIND, OFFSET)
    if SCALED:
        added = (added.to(tl.float32) * scale).to(x.dtype)
    return x + added


@triton.jit
def _add_norm(
    residual, rows, scale, output_scale,
    delta_1, delta_1_bias, post_1_weight, post_1_bias, post_1_eps,
    delta_2, delta_2_bias, post_2_weight, post_2_bias, post_2_eps,
    out_1, pre_1_weight, pre_1_bias, pre_1_eps,
    out_2, pre_2_weight, pre_2_bias, pre_2_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    POST_1: tl.constexpr, POST_1_OFFSET: tl.constexpr, POST_2: tl.constexpr, POST_2_OFFSET: tl.constexpr,
    PRE_1: tl.constexpr, PRE_1_OFFSET: tl.constexpr, PRE_2: tl.constexpr, PRE_2_OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid: (rows of out). See `add_norm`. Row i of out is of row rows[i]."""
    target = tl.program_id(0).to(tl.int64)
    source = target
    if rows is not None:
        source = tl.load(rows + target).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(pre_1_weight + column, mask=inside, other=0.0) if pre_1_weight is not None else None
    shift = tl.load(pre_1_bias + column, mask=inside, other=0.0) if pre_1_bias is not None else None
    x = tl.load(residual + source * WIDTH + column, mask=inside, other=0.0)
    if delta_1 is not None:
        x = _add_delta(
            x, delta_1 + source * WIDTH, delta_1_bias, post_1_weight, post_1_bias, post_1_eps, scale, column, inside,
            WIDTH, POST_1, POST_1_OFFSET, SCALED,
        )  # fmt: skip
        if delta_2 is not None:
            x = _add_delta(
                x, delta_2 + source * WIDTH, delta_2_bias, post_2_weight, post_2_bias, post_2_eps, scale, column,
                inside, WIDTH, POST_2, POST_2_OFFSET, SCALED,
            )  # fmt: skip
        if output_scale is not None:
            x = (x.to(tl.float32) * tl.load(output_scale).to(tl.float32)).to(x.dtype)
        if rows is None:
            tl.store(residual + source * WIDTH + column, x, mask=inside)
    if rows is None:
        x = x.to(out_1.dtype.element_ty)  # a stream in fp32 is rounded before a block reads it
    normed = x
    if PRE_1:
        normed = norm_columns(x, gain, shift, pre_1_eps, inside, WIDTH, PRE_1, PRE_1_OFFSET)
    tl.store(out_1 + target * WIDTH + column, normed, mask=inside)
    if out_2 is not None:
        normed = x
        if PRE_2:
            gain_2 = tl.load(pre_2_weight + column, mask=inside, other=0.0) if pre_2_weight is not None else None
            shift_2 = tl.load(pre_2_bias + column, mask=inside, other=0.0) if pre_2_bias is not None else None
            normed = norm_columns(x, gain_2, shift_2, pre_2_eps, inside, WIDTH, PRE_2, PRE_2_OFFSET)
        tl.store(out_2 + target * WIDTH + column, normed, mask=inside)


def add_norm(
    residual: torch.Tensor,
    deltas: Sequence[Delta],
    norms: Sequence[Norm | None],
    outs: Sequence[torch.Tensor],
    rows: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    output_scale: torch.Tensor | None = None,
) -> None:
    """residual += scale * delta, for each of up to two deltas; residual *= output_scale; out = norm(residual).

    residual [M, width], output_scale [1]. There are one or two norms, each with its out [M, width]; a norm that is None
    copies the stream. Without a delta the stream is unchanged. With rows [R] int32, each out [R, width] has the norms
    of these rows only, and the stream is unchanged: for the last norm, after which it is not read.
    """
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    arguments: dict[str, Any] = {}
    for number, delta in enumerate((*deltas, None, None)[:2], start=1):
        arguments[f"delta_{number}"] = None if delta is None else delta.values
        arguments[f"delta_{number}_bias"] = None if delta is None else delta.bias
        arguments |= _norm_arguments(f"post_{number}", None if delta is None else delta.norm)
    for number, (norm, out) in enumerate([*zip(norms, outs, strict=True), (None, None)][:2], start=1):
        arguments |= {f"out_{number}": out, **_norm_arguments(f"pre_{number}", norm)}
    _add_norm[(outs[0].shape[0],)](
        residual, rows, scale, output_scale, **arguments,
        WIDTH=width, BLOCK=block, SCALED=scale != 1.0, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip


def _norm_arguments(name: str, norm: Norm | None) -> dict[str, Any]:
    """A kernel's arguments of the norm that it calls `name`."""
    found = norm or Norm(None, 0.0)
    return {
        f"{name}_weight": found.weight,
        f"{name}_bias": found.bias,
        f"{name}_eps": found.eps,
        name.upper(): flags(norm),
        f"{name.upper()}_OFFSET": found.offset,
    }
