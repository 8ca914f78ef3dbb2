"""Mixtures of experts that are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow_but
from mixtures import KINDS, dequantised, experts_of, mixture
from tiny import outputs
from torch import nn

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.graph.backend import GraphBackend
from lookahead.loading.formats import FORMATS, ROUTERS, quantise_model, quantised_copy
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.quantised import QuantisedLinear, formats_of, weights_name
from lookahead.models.quantised_experts import QuantisedExperts

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", slow_but(KINDS, "qwen2", "gpt-oss", "hunyuan", "gemma4"))
def test_of_a_mixture_all_but_routers_norms_and_embeddings_is_quantised(name: str) -> None:
    model, before = mixture(name), mixture(name)
    lines: list[str] = []
    quantise_model(model, "mxfp4", CPU, lines.append)
    experts = experts_of(model)
    assert all(type(module) is QuantisedExperts for module in experts.values())
    assert experts.keys() == experts_of(before).keys()
    assert formats_of(model) == (FORMATS["mxfp4"],)
    matrices = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    inside = 2 * len(experts)
    assert f"rounds the weights of {len(matrices) - inside + 4 * inside} matrices" in lines[0]
    whole = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    routers = {path for path in whole if ROUTERS & set(path.split("."))}
    assert {path for path in whole if ".layers." in path} == routers
    assert "lm_head" in whole
    assert all(torch.equal(model.get_submodule(path).weight, before.get_submodule(path).weight) for path in whole)


@pytest.mark.parametrize("dtype", slow_but([name for name in FORMATS if name not in ("int8", "fp8_dynamic")], "int4"))
def test_the_text_of_a_mixture_is_that_of_the_dequantised_weights(
    dtype: str, tokenizer: Any, settings: LookaheadConfig, plain: Callable[..., list[int]], tmp_path: Path
) -> None:
    """But in formats that round activations on a CPU: see `docs/limits.md`."""
    model = mixture("qwen2", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = lookahead.load(tmp_path, dtype=dtype, device="cpu", backend="eager", config=settings)
    assert lm.weights == dtype
    ids = lm.encode("the quick brown fox", raw=True)
    found = lm.generate(ids, max_tokens=24).token_ids
    assert found == lm.generate(ids, max_tokens=24, method="autoregressive").token_ids == plain(lm.model, ids, 24)
    assert found == plain(dequantised(lm.model, model), ids, 24)


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_fp8_dynamic_rounds_what_linear_layers_read_and_experts_do_not(name: str) -> None:
    """Experts are what they are in fp8, routers stay plain, and the graph backend takes the model."""
    model, fp8 = quantised_copy(mixture(name), "fp8_dynamic"), quantised_copy(mixture(name), "fp8")
    assert weights_name(model, torch.float32) == "fp8_dynamic"
    experts, expected = experts_of(model), experts_of(fp8)
    for path, module in experts.items():
        for matrix in ("gate_up_proj", "down_proj"):
            own, other = getattr(module, matrix), getattr(expected[path], matrix)
            assert own.format == FORMATS["fp8"]
            assert torch.equal(own.codes, other.codes)
    outside = [
        module
        for path, module in model.named_modules()
        if isinstance(module, QuantisedLinear) and not any(path.startswith(inside) for inside in experts)
    ]
    assert len(outside) >= 4
    assert {layer.format for layer in outside} == {FORMATS["fp8_dynamic"]}
    routers = [module for path, module in model.named_modules() if path.endswith("mlp.gate")]
    assert routers
    assert not any(isinstance(module, QuantisedLinear) for router in routers for module in router.modules())
    tokens = [
        outputs(GraphBackend(model, kv_tokens=512), [[3, 4, 5]], config, 6)
        for config in (LookaheadConfig(window=0, budget=8), LookaheadConfig.autoregressive())
    ]
    assert tokens[0] == tokens[1]


def test_experts_that_round_activations_are_refused_on_the_graph_backend() -> None:
    model = quantised_copy(mixture("mixtral"), "fp8_dynamic")
    for module in experts_of(model).values():
        module.down_proj.format = FORMATS["fp8_dynamic"]
    with pytest.raises(
        UnsupportedModelError, match="it rounds activations to fp8; load it with weights alone quantised"
    ):
        GraphBackend(model)


def test_a_mixture_that_is_loaded_is_not_changed() -> None:
    model = mixture("gpt-oss")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = quantised_copy(model, "mxfp4")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.gate_up_proj.ndim == 3 for module in experts_of(model).values())
    assert all(type(module) is QuantisedExperts for module in experts_of(made).values())


def test_experts_go_to_the_device_and_their_biases_stay() -> None:
    model = mixture("gpt-oss")
    quantise_model(model, "int4", torch.device("meta"))
    for module in experts_of(model).values():
        assert (module.down_proj.codes.device.type, module.down_proj_bias.device.type) == ("meta", "cpu")


def test_experts_of_odd_widths_stay_plain_in_int4() -> None:
    model = mixture("mixtral", intermediate_size=33)
    quantise_model(model, "int4", CPU)
    assert all(type(module).__name__ == "MixtralExperts" for module in experts_of(model).values())
    assert type(model.model.layers[0].self_attn.q_proj) is QuantisedLinear
