"""Checkpoints whose layers compressed-tensors itself packed, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_files import Case, Layer, compressed, write

from lookahead.loading.load import load_pretrained
from lookahead.loading.quantised.methods import reader_of
from lookahead.models.quantised import QuantisedLinear

ROWS = {"strategy": "channel"}
GROUPS = {"strategy": "group", "group_size": 16}
FLOAT = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, **GROUPS},
    "pack-quantized, asymmetric": {"num_bits": 4, "symmetric": False, **GROUPS},
    "pack-quantized, rows": {"num_bits": 4, **ROWS},
    "pack-quantized, 8 bits": {"num_bits": 8, **GROUPS},
    "int-quantized": {"num_bits": 8, **ROWS},
    "naive-quantized": {"num_bits": 4, "symmetric": False, **GROUPS},
    "float-quantized": {**FLOAT, **ROWS},
    "float-quantized, tensor": {**FLOAT, "strategy": "tensor"},
    "float-quantized, blocks": {**FLOAT, "strategy": "block", "block_structure": [16, 16]},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.thinned(1, most=4)
def test_layers_packed_by_compressed_tensors(name: str, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    format, arguments = name.partition(",")[0], QuantizationArgs(**SCHEMES[name])
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        weight = torch.from_numpy(draw.normal(0, 0.3, shape).astype(np.float32))
        scale, zero = parameters(weight, arguments, format)
        packed = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"].float()

    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status="compressed")
    dense = write(tmp_path, make_model(), tokenizer, Case(config.model_dump(mode="json"), pack))
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(found) == 14
    for name, layer in found.items():
        torch.testing.assert_close(layer.weight, dense.get_submodule(name).weight.detach(), rtol=1e-6, atol=0, msg=name)


def parameters(weight: torch.Tensor, arguments: Any, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of these weights by compressed-tensors."""
    from compressed_tensors.quantization.utils import calculate_qparams

    out, width = weight.shape
    size = arguments.group_size or width
    blocks = weight.view(out, -1, size)
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.view(out // rows, rows, width // columns, columns).transpose(1, 2).flatten(2)
    if arguments.strategy == "tensor":
        blocks = weight.view(1, 1, -1)
    if format.startswith("mxfp4"):
        scale = torch.exp2((blocks.abs().amax(2) / 6).log2().ceil())
        return scale, torch.zeros_like(scale)
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), arguments)
    if arguments.strategy == "tensor":
        return scale.view(1), zero.view(1)
    return scale, zero


@pytest.mark.parametrize("shape", [(32, 64), (8, 128), (40, 24)], ids=str)
def test_awq_is_unpacked_as_compressed_tensors_does(shape: tuple[int, int]) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    out, width = shape
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**31), 2**31 - 1, (width, out // 8), generator=draw, dtype=torch.int32)
    zeros = torch.randint(-(2**31), 2**31 - 1, (width // 8, out // 8), generator=draw, dtype=torch.int32)
    tensors = {"qweight": codes, "qzeros": zeros, "scales": torch.rand(width // 8, out, generator=draw).half()}
    converter = AutoAWQConverter(group_size=8)
    theirs = converter.process({f"q.{name}": tensor.clone() for name, tensor in tensors.items()})
    local = {name.removeprefix("q."): tensor for name, tensor in theirs.items()}
    one = reader_of({"quant_method": "awq", "bits": 4, "group_size": 8}).read("q", tensors, shape)
    config = compressed("pack-quantized", symmetric=False, group_size=8)
    other = reader_of(config).read("q", local, shape)
    for part in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(one, part), getattr(other, part)), part
    assert one.format == other.format
