"""GPTQ: 4-bit weights in groups, with or without zero points, and 8-bit ones without. `quant_method` gptq.

qweight int32 [in x bits / 32, out], packed along its columns; qzeros int32 [groups, out x bits / 32], packed along the
rows of W; scales [groups, out]; g_idx [in], the group of each column. w = (code - zero) * scale. Version 1 stores zero
points less one (`checkpoint_format` gptq, the usual one), version 2 as they are (gptq_v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookahead.loading.quantised.weights import (
    Reader,
    Tensors,
    Weights,
    bytes_down,
    bytes_of,
    check_size,
    group_of,
    integers,
    order_of,
    required,
    unpacked_words,
)


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
        check_size("qweight", qweight, width * own // 32, out)
        check_size("scales", scales, len(scales), out)
        check_size("qzeros", qzeros, len(scales), -(-out * own // 32))
        group = group_of(width, len(scales), size)
        zeros = (unpacked_words(bytes_of(qzeros), own)[:, :out].T + less) & (2**own - 1)
        if symmetric and (zeros == 2 ** (own - 1)).all():
            zeros = None
        codes, index = unpacked_words(bytes_down(qweight), own), tensors.get("g_idx")
        order = None if index is None else order_of(index, width, group)
        return integers(codes, own, group, scales.T, zeros, order)

    return Reader(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales", "g_idx"}), read)
