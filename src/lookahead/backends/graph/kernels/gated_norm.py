"""What a recurrent layer's output projection reads: the gated and normed outputs of its heads, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.convolve import load_column
from lookahead.backends.graph.kernels.norms import HAS_NORM, ROUNDS_FIRST, flags
from lookahead.backends.graph.kernels.state_shapes import Columns
from lookahead.models.norm import Norm


@triton.jit
def _gated_norm(
    x, projected, weight, bias, order, scales, out, width, eps, GATE_AT: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARED: tl.constexpr, NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < PART
    column = part * PART + at
    dtype: tl.constexpr = out.dtype.element_ty
    y = tl.load(x + row * (PARTS * PART) + column, mask=inside, other=0.0).to(tl.float32)
    z = load_column(projected + row * width, GATE_AT + column, bias, order, scales, inside).to(tl.float32)
    factor = z / (1 + tl.exp(-z))
    if not NORM_FIRST:
        y = y * factor
    if HAS_NORM & KIND:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / PART + eps)
        if ROUNDS_FIRST & KIND:
            y = y.to(dtype).to(tl.float32)
        if weight is not None:
            gain = tl.load(weight + (at if SHARED else column), mask=inside, other=0.0).to(tl.float32)
            y = y * (gain + OFFSET if OFFSET != 0 else gain)
            if ROUNDS_FIRST & KIND:
                y = y.to(dtype).to(tl.float32)
    if NORM_FIRST:
        y = y * factor
    tl.store(out + row * (PARTS * PART) + column, y, mask=inside)


def gated_norm(
    x: torch.Tensor,
    projected: torch.Tensor,
    gate_at: int,
    norm: Norm | None,
    parts: int,
    out: torch.Tensor,
    *,
    norm_first: bool,
    columns: Columns,
) -> None:
    """out [R, width] = norm(x) silu(z) if `norm_first`, else norm(x silu(z)), for an RMSNorm of each of `parts` equal
    parts of a row. x [R, width]; a norm that is None is left out.

    z are columns `gate_at` and on of projected [R or more, columns]; see `state_shapes.Columns`. The norm's weight is
    that of all parts [parts, width / parts], or one for each of them [width / parts].
    """
    rows, width = out.shape
    part = width // parts
    block = triton.next_power_of_2(part)
    weight = None if norm is None else norm.weight
    _gated_norm[(rows, parts)](
        x, projected, weight, *columns.tensors, out, projected.shape[1], 0.0 if norm is None else norm.eps,
        GATE_AT=gate_at, PART=part, PARTS=parts, KIND=flags(norm), OFFSET=0.0 if norm is None else norm.offset,
        SHARED=weight is not None and weight.numel() == part, NORM_FIRST=norm_first, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
