"""AWQ: 4-bit weights in groups, with zero points. `quant_method` awq, version gemm.

qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales [in / group, out]. The nibbles of a word are
the columns 0, 2, 4, 6, 1, 3, 5, 7 of its 8 output columns. w = (nibble - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lookahead.loading.quantised.weights import (
    Reader,
    Tensors,
    Weights,
    bytes_of,
    check_size,
    group_of,
    integers,
    required,
)

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Per output column of a word, the place of its nibble."""


def awq_reader(config: Mapping[str, Any]) -> Reader:
    version = str(config.get("version", "gemm")).lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise ValueError(f"AWQ of {bits} bits")
    if version != "gemm":
        raise ValueError(f"AWQ of version {version!r}")
    if not config.get("zero_point", True):
        raise ValueError("AWQ without zero points")
    size = config.get("group_size", config.get("q_group_size", 128))

    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        qweight, qzeros, scales = (required(tensors, one) for one in ("qweight", "qzeros", "scales"))
        width, out = len(qweight), 8 * qweight.shape[1]
        check_size("scales", scales, len(scales), out)
        check_size("qzeros", qzeros, len(scales), out // 8)
        group = group_of(width, len(scales), size)
        return integers(columns(qweight), 4, group, scales.T, columns(qzeros))

    return Reader(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales"}), read)


def columns(words: torch.Tensor) -> torch.Tensor:
    """The nibbles of words by their output columns: int32 [n, out / 8] -> uint8 [out, n].

    Words are transposed, not nibbles, which takes three times as long.
    """
    stored = bytes_of(words.T).unflatten(1, (-1, 4))  # [out / 8, n, 4]
    return torch.stack([stored[..., place // 2] >> 4 * (place % 2) & 15 for place in PLACES], 1).flatten(0, 1)
