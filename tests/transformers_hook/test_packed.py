"""Models that transformers loaded with compressed-tensors: the graph backend reads the codes that their modules hold.

On a CPU it runs on the kernels' twins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import decoding
from quantised_files import Case, Layer, compressed, write
from transformers import AutoModelForCausalLM

import lookahead
from lookahead.config import LookaheadConfig
from lookahead.loading.quantised.held import packed_view
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.quantised import QuantisedLinear, formats_of

FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "pack-quantized": ("pack-quantized", {}),
    "pack-quantized, asymmetric": ("pack-quantized", {"symmetric": False}),
    "naive-quantized": ("naive-quantized", FLOAT),
}


def load(name: str, make_model: Any, tokenizer: Any, folder: Path, **group: Any) -> Any:
    """A tiny model whose layers compressed-tensors packed, as transformers loads it, in fp32."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    format, changes = SCHEMES[name]
    config = compressed(format, **changes)
    config["config_groups"]["group_0"] |= group
    config |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    weights = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)

    def pack(draw: np.random.Generator, shape: tuple[int, int]) -> Layer:
        weight = torch.from_numpy(draw.normal(0, 0.3, shape).astype(np.float32))
        blocks = weight.view(shape[0], -1, weights.group_size or shape[1])
        scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), weights)
        compressor = BaseCompressor.get_value_from_registry(format)
        packed = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"].float()

    write(folder, make_model(eos_token_id=None), tokenizer, Case(config, pack), dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def status(model: Any) -> str:
    return str(model.model.layers[0].self_attn.q_proj.quantization_status.value)


@pytest.mark.parametrize("name", SCHEMES)
def test_texts_are_those_of_generate(
    name: str, make_model: Any, tokenizer: Any, prompt: dict[str, Any], tmp_path: Path
) -> None:
    """And of token by token. No call expands the layers, until the model's own forward pass does."""
    model = load(name, make_model, tokenizer, tmp_path)
    settings = {"max_new_tokens": 16, "do_sample": False}
    hook = decoding(backend="graph")
    text = model.generate(**prompt, **settings, custom_generate=hook)
    assert hook.used == "graph"
    again = model.generate(**prompt, **settings, custom_generate=decoding(backend="graph"))
    alone = lookahead.decoding(LookaheadConfig.autoregressive(), backend="graph")
    plain = model.generate(**prompt, **settings, custom_generate=alone)
    assert status(model) == "compressed"
    assert alone.used == "graph"
    assert torch.equal(text, again)
    assert torch.equal(text, plain)
    assert hook.stats[0].compression > 1
    stock = model.generate(**prompt, **settings)
    assert status(model) != "compressed"
    assert torch.equal(text, stock)


def test_a_view_has_the_weights_and_leaves_the_model_as_it_is(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = load("pack-quantized, asymmetric", make_model, tokenizer, tmp_path)
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    view = packed_view(model)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert formats_of(model) == ()
    assert view.lm_head.weight is model.lm_head.weight
    layers = {name: module for name, module in view.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(layers) == 14
    model(torch.tensor([[1, 2, 3]]))  # expands its layers
    for name, layer in layers.items():
        torch.testing.assert_close(layer.weight, model.get_submodule(name).weight, rtol=1e-6, atol=0, msg=name)
    plain = make_model()
    assert packed_view(plain) is plain


def test_rounded_activations_stay_on_the_eager_backend(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    rounded = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    model = load("naive-quantized", make_model, tokenizer, tmp_path, input_activations=rounded)
    with pytest.raises(UnsupportedModelError, match="rounds activations"):
        packed_view(model)
