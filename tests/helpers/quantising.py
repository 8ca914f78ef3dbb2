"""Layers of any format with random codes, descriptions whose matrices are quantised, and int8 by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from lookahead.loading.formats import CPU_INT8
from lookahead.models.quantised import Codes, Format, QuantisedLinear, quantise
from lookahead.models.spec import Matrix


def quantised(part: Any, format: Format = CPU_INT8) -> Any:
    """A description, or a part of one, with all matrices rounded to this format."""
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


def random_layer(format: Format, out: int, width: int, seed: int = 0) -> QuantisedLinear:
    """A layer of this format with random codes."""
    source = torch.Generator().manual_seed(seed)
    shape = -(-out // format.rows), format.groups(width)
    codes = torch.randint(0, 256, (out, width * format.codes.bits // 8), generator=source, dtype=torch.uint8)
    if format.codes is Codes.E4M3:
        codes = torch.randn(out, width, generator=source).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(shape, generator=source).bfloat16()
    if format.codes is Codes.E2M1:
        scales = torch.randint(120, 130, shape, generator=source, dtype=torch.uint8)
    zeros = torch.randint(0, 16, shape, generator=source, dtype=torch.uint8) if format.zeros else None
    offsets = torch.randn(shape, generator=source).half() if format.offsets else None
    order = torch.randperm(width, generator=source) if format.ordered else None
    return QuantisedLinear(format, codes, scales, zeros=zeros, offsets=offsets, order=order, dtype=torch.float32)


def int8_by_hand(weight: Any) -> tuple[Any, Any]:
    """W [out, in] of NumPy -> int8 [out, in] and the scales [out], so that W is about codes * scales[:, None]."""
    largest = np.maximum(np.abs(weight).max(axis=1), np.float32(1e-30))
    scales = (largest / np.float32(127)).astype(np.float32)
    return np.rint(weight / scales[:, None]).clip(-127, 127).astype(np.int8), scales
