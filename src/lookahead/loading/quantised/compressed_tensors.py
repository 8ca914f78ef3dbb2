"""compressed-tensors (llm-compressor): `quant_method` compressed-tensors. Groups of layers have schemes of their own.

pack-quantized: weight_packed int32 [out, in x bits / 32], weight_scale, weight_shape, for asymmetric schemes
weight_zero_point int32 [out x bits / 32, groups], and with activation order weight_g_idx [in]. Codes are stored plus
2^(bits - 1). int-quantized, float-quantized, naive-quantized: weight int8 or FP8, weight_scale, weight_zero_point.
mxfp4-pack-quantized: weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lookahead.loading.quantised.eight_bits import fp8_weights, grouped, int8_weights
from lookahead.loading.quantised.mxfp4 import mxfp4_weights
from lookahead.loading.quantised.weights import (
    Reader,
    Tensors,
    Weights,
    bytes_down,
    bytes_of,
    check_dtype,
    check_size,
    integers,
    order_of,
    per_row,
    required,
    unpacked_words,
)

ALLOWED = {
    ("pack-quantized", "int"): (4, 8),
    ("int-quantized", "int"): (4, 8),
    ("naive-quantized", "int"): (4, 8),
    ("float-quantized", "float"): (8,),
    ("naive-quantized", "float"): (8,),
    ("mxfp4-pack-quantized", "float"): (4,),
}
"""(format, type of numbers) -> bits that are read."""
MARKS = frozenset({"weight_packed", "weight_scale"})
KNOWN = frozenset({"weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})


@dataclass(frozen=True)
class Scheme:
    """How the layers of one group are quantised, and the names, regular expressions or classes of these layers."""

    targets: tuple[str, ...]
    format: str
    bits: int
    kind: str
    symmetric: bool
    group: int
    block: tuple[int, ...] | None

    def names(self, name: str) -> bool:
        """Whether a target names this layer."""
        patterns = (target.removeprefix("re:") for target in self.targets if target.startswith("re:"))
        return name in self.targets or any(re.match(pattern, name) for pattern in patterns)


def compressed_reader(config: Mapping[str, Any]) -> Reader:
    """Raises ValueError, naming the format, if some layers have one that is not read."""
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"compressed-tensors with sparsity {sparsity!r}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ValueError("compressed-tensors with transforms of activations")
    schemes = [scheme_of(group, str(config.get("format"))) for group in (config.get("config_groups") or {}).values()]

    def read(name: str, tensors: Tensors, shape: tuple[int, int]) -> Weights:
        named = [scheme for scheme in schemes if scheme.names(name)]
        found = named or [scheme for scheme in schemes if "Linear" in scheme.targets]
        if not found:
            raise ValueError("no group of its config has this layer")
        return weights_of(found[0], tensors, shape)

    return Reader(MARKS, KNOWN, read)


def scheme_of(group: Any, format: str) -> Scheme:
    """A group of the config. `format` is that of groups without one."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not weights:
        raise ValueError("compressed-tensors with a group that does not say how its weights are quantised")
    format, bits, kind = group.get("format") or format, weights.get("num_bits", 8), weights.get("type", "int")
    if bits not in ALLOWED.get((format, kind), ()):
        raise ValueError(f"compressed-tensors {format!r} of {bits} bits ({kind})")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if isinstance(block, str):  # older files: "128x128"
        block = [int(size) for size in block.split("x")]
    if strategy not in (None, "tensor", "channel", "group", "block"):
        raise ValueError(f"compressed-tensors {format!r} with strategy {strategy!r}")
    if strategy == "block" and (kind != "float" or len(block or ()) != 2):
        raise ValueError(f"compressed-tensors {format!r} with blocks {block!r}")
    size = weights.get("group_size") or 0
    return Scheme(
        tuple(group.get("targets") or ()),
        format,
        bits,
        kind,
        bool(weights.get("symmetric", True)),
        max(size, 0) if strategy in (None, "group") else 0,
        tuple(block) if strategy == "block" else None,
    )


def weights_of(scheme: Scheme, tensors: Tensors, shape: tuple[int, int]) -> Weights:
    """A layer's weights by its scheme. Raises ValueError for tensors that are not what the scheme says."""
    scale, zero = required(tensors, "weight_scale"), None if scheme.symmetric else tensors.get("weight_zero_point")
    group = scheme.group if scheme.group < shape[1] else 0
    if scheme.format == "mxfp4-pack-quantized":
        return mxfp4_weights(required(tensors, "weight_packed"), scale, shape)
    if scheme.format == "pack-quantized":
        return packed_weights(scheme.bits, group, not scheme.symmetric, tensors, shape)
    weight = required(tensors, "weight")
    if scheme.kind == "float":
        return fp8_weights(weight, scale, block=scheme.block, group=group)
    if zero is None or scheme.bits == 8:
        return int8_weights(weight, scale, zero, group=group)
    check_dtype("weight", weight, torch.int8)
    scales = grouped(scale, *shape, group) if group else per_row(scale, shape[0])
    zeros = unsigned(zero if group else per_row(zero, shape[0]))
    return integers(unsigned(weight), 4, group, scales, zeros)


def unsigned(nibbles: torch.Tensor) -> torch.Tensor:
    """Signed 4-bit numbers plus 8."""
    return (nibbles.to(torch.int8) + 8).view(torch.uint8)


def packed_weights(bits: int, group: int, asymmetric: bool, tensors: Tensors, shape: tuple[int, int]) -> Weights:
    """pack-quantized: codes of 4 or 8 bits in words along the columns."""
    (out, width), words = shape, required(tensors, "weight_packed")
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [out, width]:
        raise ValueError(f"its weight_shape is {tensors['weight_shape'].tolist()}, and the model's {[out, width]}")
    check_size("weight_packed", words, out, -(-width * bits // 32))
    scale = required(tensors, "weight_scale")
    scales = grouped(scale, out, width, group) if group else per_row(scale, out)
    zeros = None
    if asymmetric:
        zeros = unpacked_words(bytes_down(required(tensors, "weight_zero_point")), bits)[:, :out].T
        check_size("weight_zero_point", zeros, *scales.shape)
    order, index = None, tensors.get("weight_g_idx")
    if index is not None and (index >= 0).all():  # -1: not in use
        order = order_of(index, width, group)
    return integers(unpacked_words(bytes_of(words), bits)[:, :width], bits, group, scales, zeros, order)
