"""The readers of quantised formats against packing number by number, for shapes that no tile divides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantised_files import Packer, awq, compressed, fp8, gptq, int8, mxfp4, packed

from lookahead.loading.quantised.methods import reader_of
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised import QuantisedLinear

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def read(config: dict[str, object], packer: Packer, shape: tuple[int, int], seed: int = 0) -> QuantisedLinear:
    """Pack random weights, read them, and compare them with what was packed."""
    tensors, dense = packer(np.random.default_rng(seed), shape)
    tensors.pop("bias", None)
    linear = reader_of(config).read("model.layers.0.q_proj", tensors, shape).linear(None, torch.float32)
    assert (linear.out_features, linear.in_features) == shape
    torch.testing.assert_close(linear.dequantised(), dense, rtol=1e-6, atol=0)
    return linear


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (128, 96), (5, 131), (1, 1)], ids=str)
def test_fp8_in_blocks(shape: tuple[int, int]) -> None:
    for name in ("weight_scale_inv", "weight_scale"):
        assert read(BLOCKS, fp8((128, 128), name=name), shape).format == Format(Codes.E4M3, 128, rows=128)


def test_fp8_with_scales_per_tensor_and_row_are_of_one_format() -> None:
    """So q, k and v, whose tensors have other scales, are one matrix."""
    for per in ("tensor", "row", "column"):
        assert read({"quant_method": "fp8"}, fp8(per=per), (13, 40)).format == Format(Codes.E4M3, 0)


def test_fp8_scales_may_be_powers_of_two() -> None:
    weight = torch.randn(8, 8).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu)
    tensors = {"weight": weight, "weight_scale_inv": scale}
    linear = reader_of(BLOCKS).read("q", tensors, (8, 8)).linear(None, torch.float32)
    assert torch.equal(linear.dequantised(), weight.float() / 4)


@given(
    st.integers(1, 6).map(lambda n: 8 * n),
    st.integers(1, 12).map(lambda n: 8 * n),
    st.sampled_from([8, 16, 24, 128, -1]),
    st.integers(0, 5),
)
def test_awq_of_any_shape(out: int, width: int, group: int, seed: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group}
    linear = read(config, awq(max(group, 0)), (out, width), seed)
    assert linear.format == Format(Codes.INT4, group if 0 < group < width else 0, zeros=True)


@given(
    st.integers(1, 40),
    st.integers(1, 12).map(lambda n: 8 * n),
    st.sampled_from([8, 16, 24, -1]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 5),
)
def test_gptq_of_any_shape(
    out: int, width: int, group: int, symmetric: bool, shuffled: bool, version: int, seed: int
) -> None:
    layout = {1: "gptq", 2: "gptq_v2"}[version]
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "checkpoint_format": layout}
    packer = gptq(max(group, 0), version=version, symmetric=symmetric, shuffled=shuffled)
    linear = read(config, packer, (out, width), seed)
    assert linear.format.zeros is not symmetric
    assert linear.format.group == (group if 0 < group < width else 0)
    if not shuffled:
        assert linear.order is None


@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_of_eight_bits(shuffled: bool) -> None:
    config = {"quant_method": "gptq", "bits": 8, "group_size": 16}
    assert read(config, gptq(16, bits=8, shuffled=shuffled), (9, 40)).format.codes is Codes.INT8
    with pytest.raises(ValueError, match="8-bit weights have zero points"):
        read({**config, "sym": False}, gptq(16, bits=8, symmetric=False), (9, 40))


def test_gptq_layers_may_have_other_bits_and_groups_than_the_config() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert read(config, gptq(16, bits=8), (8, 64)).format == Format(Codes.INT8, 16)


@given(
    st.integers(1, 40),
    st.integers(1, 30).map(lambda n: 2 * n),
    st.sampled_from([8, 16, 0]),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_pack_quantized_of_any_shape(
    out: int, width: int, group: int, bits: int, symmetric: bool, shuffled: bool, seed: int
) -> None:
    symmetric = symmetric or bits == 8
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    config = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)
    linear = read(config, packed(group, bits=bits, symmetric=symmetric, shuffled=shuffled), (out, width), seed)
    assert linear.format.codes is (Codes.INT4 if bits == 4 else Codes.INT8)
    assert linear.format.zeros is not symmetric


@pytest.mark.parametrize("group", [0, 16])
def test_integers_in_bytes(group: int) -> None:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    whole = compressed("int-quantized", num_bits=8, **strategy)
    assert read(whole, int8(group), (11, 45)).format == Format(Codes.INT8, group)
    with pytest.raises(ValueError, match="int8 weights have zero points"):
        read(
            compressed("int-quantized", num_bits=8, symmetric=False, **strategy), int8(group, symmetric=False), (8, 48)
        )
    four = compressed("naive-quantized", symmetric=False, **strategy)
    assert read(four, int8(group, bits=4, symmetric=False), (11, 44)).format == Format(Codes.INT4, group, zeros=True)


def test_one_scale_for_a_whole_tensor_of_integers() -> None:
    weight = torch.randint(-127, 128, (6, 10), dtype=torch.int8)
    config = compressed("int-quantized", num_bits=8, strategy="tensor", group_size=None)
    tensors = {"weight": weight, "weight_scale": torch.tensor([0.5])}
    linear = reader_of(config).read("q", tensors, (6, 10)).linear(None, torch.float32)
    assert torch.equal(linear.dequantised(), weight / 2)


def test_mxfp4() -> None:
    config = compressed("mxfp4-pack-quantized", type="float", group_size=32)
    linear = read(config, mxfp4(), (7, 96))
    assert linear.format == Format(Codes.E2M1, 32)
    assert linear.scales.dtype is torch.uint8


def test_the_most_precise_target_decides() -> None:
    """A group that names a layer, or matches it, before one of all linear layers, whatever their order."""
    all_layers = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
    named = compressed("pack-quantized")["config_groups"]["group_0"]
    for target in ("model.layers.0.q_proj", r"re:.*q_proj$"):
        groups = {**all_layers["config_groups"], "group_1": {**named, "targets": [target], "format": "pack-quantized"}}
        assert read({**all_layers, "config_groups": groups}, packed(16), (8, 32)).format.codes is Codes.INT4
    with pytest.raises(ValueError, match="no group of its config has this layer"):
        read({**all_layers, "config_groups": {"a": {**named, "targets": ["k"]}}, "format": "pack-quantized"},
             packed(16), (8, 32))  # fmt: skip
