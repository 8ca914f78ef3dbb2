"""GPTQ: 4-bit weights in groups, with or without zero points, and 8-bit ones without. `quant_method` gptq.

qweight int32 [in x bits / 32, out], packed along its columns; qzeros int32 [groups, out x bits / 32], packed along the
rows of W; scales [groups, out]; g_idx [in], the group of each column. w = (code - zero) * scale. Version 1 stores zero
points less one (`checkpoint_format` gptq, the usual one), version 2 as they are (gptq_v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lookahead.loading.quantised.weights import (
    Reader,
    Tensors,
    Weights,
    bytes_down,
    bytes_of,
    check_size,
    group_of,
    nibbles_of,
    required,
    signed,
    sorted_by_group,
)
from lookahead.models.quantised import Codes, Format


def gptq_reader(config: Mapping[str, Any]) -> Reader:
    bits, layout = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise ValueError(f"GPTQ of {bits} bits")
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ of checkpoint_format {layout!r}")
    size, symmetric, less = config.get("group_size", 128), bool(config.get("sym", True)), layout == "gptq"

    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        qweight, qzeros, scales = (required(tensors, one) for one in ("qweight", "qzeros", "scales"))
        out, width = shape
        own = 32 * len(qweight) // width  # a layer may have more bits than the config says
        if own not in (4, 8):
            raise ValueError(f"it has {own} bits")
        kind = Codes.INT4 if own == 4 else Codes.INT8
        check_size("qweight", qweight, width * own // 32, out)
        check_size("scales", scales, len(scales), out)
        check_size("qzeros", qzeros, len(scales), -(-out * own // 32))
        group, codes = group_of(width, len(scales), size), bytes_down(qweight)
        zeros = zero_points(qzeros, own, less)[:, :out].T
        centred = bool((zeros == 2 ** (own - 1)).all())
        if own == 8:
            if not centred:
                raise ValueError("its 8-bit weights have zero points, which are read for 4 bits only")
            codes = signed(codes)
        order = None
        if "g_idx" in tensors:
            codes, *sorting = sorted_by_group(codes, kind, group, tensors["g_idx"])
            order = sorting[0] if sorting else None
        plain = own == 8 or (symmetric and centred)
        format = Format(kind, group, zeros=not plain, ordered=order is not None)
        return Weights(format, codes, scales.T, zeros=None if plain else zeros, order=order)

    return Reader(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales", "g_idx"}), read)


def zero_points(words: torch.Tensor, bits: int, less: bool) -> torch.Tensor:
    """The zero points uint8 [n, columns] of words, which may be stored `less` one (0 as the largest code)."""
    stored = bytes_of(words) if bits == 8 else nibbles_of(bytes_of(words))
    return (stored + less) & (2**bits - 1)
