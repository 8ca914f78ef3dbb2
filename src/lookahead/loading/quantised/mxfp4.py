"""MXFP4: FP4 numbers (e2m1), two per byte, the low nibble first, and a power of two (e8m0) for 32 columns of a row.

`quant_method` mxfp4, of gpt-oss, has it for experts alone: gate_up_proj_blocks uint8 [experts, out, in / 32, 16],
gate_up_proj_scales uint8 [experts, out, in / 32], gate_up_proj_bias [experts, out], and the same of down_proj.
"""

from __future__ import annotations

import torch

from lookahead.loading.quantised.eight_bits import grouped
from lookahead.loading.quantised.weights import Reader, Tensors, Weights, check_dtype, check_size, nibbles_of, required
from lookahead.models.number_formats import MXFP4
from lookahead.models.packing import packed


def mxfp4_reader() -> Reader:
    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        blocks, scales = required(tensors, "blocks"), required(tensors, "scales")
        check_size("blocks", blocks, shape[0], shape[1] // 32, 16)
        return mxfp4_weights(blocks.flatten(1), scales, shape)

    return Reader(frozenset({"blocks"}), frozenset({"blocks", "scales"}), read)


def mxfp4_weights(codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> Weights:
    """Codes uint8 [out, in / 2] with scales uint8 [out, in / 32]."""
    check_dtype("codes", codes, torch.uint8)
    check_dtype("scale", scale, torch.uint8, torch.float8_e8m0fnu)
    check_size("codes", codes, shape[0], shape[1] // 2)
    return Weights(MXFP4, packed(nibbles_of(codes)), grouped(scale.view(torch.uint8), *shape, 32))
