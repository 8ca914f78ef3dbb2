"""Weights with one code per byte: FP8 (e4m3) of all its publishers, and int8.

FP8: `weight` float8_e4m3fn [out, in]; its scales are `weight_scale_inv` (DeepSeek, Qwen, Mistral) or `weight_scale`
(compressed-tensors, AutoFP8, FBGEMM, ModelOpt). Both multiply the codes: one number, one per row, one per group
of columns, or one per block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lookahead.loading.quantised.weights import (
    Reader,
    Tensors,
    Weights,
    check_dtype,
    check_size,
    per_row,
    required,
)
from lookahead.models.number_formats import Codes, Format

SCALES = ("weight_scale_inv", "weight_scale")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fp8_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of `quant_method` fp8, fbgemm_fp8 and modelopt. Activations are not rounded, whatever it says."""
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"FP8 of format {config['fmt']!r}")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise ValueError(f"FP8 with weight_block_size {block}")

    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        scale = tensors[SCALES[0]] if SCALES[0] in tensors else required(tensors, SCALES[1])
        return fp8_weights(required(tensors, "weight"), scale, block=None if block is None else tuple(block))

    return Reader(frozenset(SCALES), frozenset({"weight", *SCALES}), read)


def fp8_weights(
    weight: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, ...] | None = None, group: int = 0
) -> Weights:
    """FP8 [out, in] with scales per block (rows, columns), per group of columns, per row, or one for all."""
    check_dtype("weight", weight, torch.float8_e4m3fn)
    out, width = weight.shape
    codes = weight.view(torch.uint8)
    if scale.dtype is torch.float8_e8m0fnu:
        scale = scale.float()  # powers of two
    check_dtype("scale", scale, *FLOATS)
    if block is not None:
        rows, columns = min(block[0], out), min(block[1], width)
        check_size("scale", scale, -(-out // rows), -(-width // columns))
        return Weights(Format(Codes.E4M3, block[1], rows=block[0]), codes, scale)
    if group:
        return Weights(Format(Codes.E4M3, group), codes, grouped(scale, out, width, group))
    return Weights(Format(Codes.E4M3, 0), codes, per_row(scale, out))


def int8_weights(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, *, group: int = 0) -> Weights:
    """int8 [out, in] with scales per group of columns, per row, or one for all."""
    check_dtype("weight", weight, torch.int8)
    check_dtype("scale", scale, *FLOATS)
    if zero is not None and zero.any():
        raise ValueError("its int8 weights have zero points, which are read for 4 bits only")
    out, width = weight.shape
    codes = weight.view(torch.uint8)
    if group:
        return Weights(Format(Codes.INT8, group), codes, grouped(scale, out, width, group))
    return Weights(Format(Codes.INT8, 0), codes, per_row(scale, out))


def grouped(scale: torch.Tensor, out: int, width: int, group: int) -> torch.Tensor:
    """Scales [out, groups], checked."""
    check_size("scale", scale, out, -(-width // group))
    return scale
