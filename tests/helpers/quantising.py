"""Layers of any format with random codes, descriptions whose matrices are quantised, and int8 by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from lookahead.loading.formats import CPU_INT8
from lookahead.models.feed_forward import Router
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.number_formats import Codes, Format
from lookahead.models.packing import packed
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.rounding import quantise


def quantised(part: Any, format: Format = CPU_INT8) -> Any:
    """A description, or a part of one, with all matrices rounded to this format, but those of routers."""
    if isinstance(part, Router):
        return part
    if isinstance(part, ExpertMatrix):
        rows = torch.cat([part.weight(expert, torch.float32) for expert in range(part.experts)])
        return ExpertMatrix(quantise(rows, format), part.experts, part.bias)
    if isinstance(part, Matrix):
        pieces = [Matrix((one,), part.transposed) for one in part.parts]
        return Matrix(tuple(quantise(one.weight(), format, one.bias()) for one in pieces), part.transposed)
    if isinstance(part, Sequence) and not isinstance(part, str):
        return type(part)(quantised(item, format) for item in part)  # type: ignore[call-arg]
    if not is_dataclass(part) or isinstance(part, type):
        return part
    made = {field.name: quantised(getattr(part, field.name), format) for field in fields(part)}
    changed = {name: value for name, value in made.items() if value is not getattr(part, name)}
    return replace(part, **changed) if changed else part


def random_layer(
    format: Format,
    out: int,
    width: int,
    seed: int = 0,
    scales: torch.dtype | None = None,
    offsets: torch.dtype = torch.float16,
) -> QuantisedLinear:
    """A layer of this format with random codes. `scales` and `offsets` are the dtypes of these; uint8 for e8m0."""
    source = torch.Generator().manual_seed(seed)
    shape = -(-out // format.rows), format.groups(width)
    codes = torch.randint(0, 256, (out, width * format.codes.bits // 8), generator=source, dtype=torch.uint8)
    if format.codes is Codes.E4M3:
        codes = torch.randn(out, width, generator=source).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = scales or (torch.uint8 if format.codes is Codes.E2M1 else torch.bfloat16)
    if scales is torch.uint8:
        steps = torch.randint(120, 130, shape, generator=source, dtype=torch.uint8)
    else:
        steps = torch.rand(shape, generator=source).to(scales)
    zeros = torch.randint(0, 16, shape, generator=source, dtype=torch.uint8) if format.zeros else None
    added = torch.randn(shape, generator=source).to(offsets) if format.offsets else None
    order = torch.randperm(width, generator=source) if format.ordered else None
    return QuantisedLinear(format, codes, steps, zeros=zeros, offsets=added, order=order, dtype=torch.float32)


def cancelling_layer(format: Format, out: int, width: int, rows: int) -> tuple[QuantisedLinear, torch.Tensor]:
    """A layer and x [rows, width] whose products are all rounding errors, as of `products.cancelling`.

    Every group of columns occurs a second time, negated and shuffled, and so does x, which is zero in the columns left.
    """
    layer, group = random_layer(format, out, width), format.group or width // 2
    half = width // 2 // group * group
    source = torch.Generator().manual_seed(1)
    shuffled = torch.cat([start + torch.randperm(group, generator=source) for start in range(0, half, group)])
    if format.codes.bits == 8:
        if format.codes is Codes.INT8:
            layer.codes[layer.codes == 128] = 127  # -128 has no negative
        codes = layer.codes[:, :half].clone()
        negated = 256 - codes.int() if format.codes is Codes.INT8 else codes ^ 128
        layer.codes[:, half : 2 * half] = negated.to(torch.uint8)[:, shuffled]
    else:
        codes = torch.randint(1, 16, (out, width), generator=source)
        negated = 16 - codes if format.codes is Codes.INT4 else codes ^ 8
        codes[:, half : 2 * half] = negated[:, shuffled]
        layer.codes = packed(codes)
    if format.zeros:
        layer.zeros = torch.full_like(layer.scales, 8, dtype=torch.uint8)
    first, second = slice(half // group), slice(half // group, 2 * half // group)
    if format.group:
        layer.scales[:, second] = layer.scales[:, first]
    if layer.offsets is not None:
        layer.offsets[:, second] = -layer.offsets[:, first]
    x = torch.zeros(rows, width, dtype=torch.bfloat16)
    x[:, :half] = torch.randn(rows, half, generator=source)
    x[:, half : 2 * half] = x[:, shuffled]
    if layer.order is not None:
        x = torch.empty_like(x).index_copy_(1, layer.order, x)
    return layer, x


def int8_by_hand(weight: Any) -> tuple[Any, Any]:
    """W [out, in] of NumPy -> int8 [out, in] and the scales [out], so that W is about codes * scales[:, None]."""
    largest = np.maximum(np.abs(weight).max(axis=1), np.float32(1e-30))
    scales = (largest / np.float32(127)).astype(np.float32)
    return np.rint(weight / scales[:, None]).clip(-127, 127).astype(np.int8), scales
