"""Experts: the matrices of every class, and the module that replaces a quantised one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from marks import slow_but
from mixtures import KINDS, dequantised, experts_of, mixture
from torch import nn

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.number_formats import Codes, Format, rounded
from lookahead.models.quantised import QuantisedLinear, formats_of
from lookahead.models.quantised_experts import QuantisedExperts, expert_matrices, is_experts, quantised_experts, stacked
from lookahead.models.rounding import quantise

CPU = torch.device("cpu")
FORMATS = {
    "fp8": Format(Codes.E4M3, 0),
    "int8": Format(Codes.INT8, 16),
    "int4": Format(Codes.INT4, 128),
    "mxfp4": Format(Codes.E2M1, 32),
}


def quantised_model(name: str, format: Format, **changes: Any) -> Any:
    """A tiny mixture whose experts alone are quantised."""
    model = mixture(name, **changes)
    for path, module in experts_of(model).items():
        made = quantised_experts(module, format, CPU)
        assert made is not None
        model.set_submodule(path, made)
    return model


def routed(module: Any, rows: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x, and random choices and weights of a router."""
    source = torch.Generator().manual_seed(rows)
    hidden = expert_matrices(module)[0].shape[1]
    chosen = torch.stack([torch.randperm(module.num_experts, generator=source)[:top_k] for _ in range(rows)])
    return torch.randn(rows, hidden, generator=source), chosen, torch.rand(rows, top_k, generator=source)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.thinned(1, most=6)
def test_the_matrices_are_those_of_the_class(name: str) -> None:
    """What a description computes with them is what the module computes."""
    for module in experts_of(mixture(name)).values():
        (x, chosen, weights), (gate_up, down) = routed(module, 5), expert_matrices(module)
        expected = torch.zeros(5, down.shape[0])
        for row, choice in [(row, choice) for row in range(5) for choice in range(2)]:
            expert = int(chosen[row, choice])
            both = x[row] @ gate_up.weight(expert, torch.float32).T
            both = both if gate_up.bias is None else both + gate_up.bias[expert]
            out = module._apply_gate(both) @ down.weight(expert, torch.float32).T
            expected[row] += weights[row, choice] * (out if down.bias is None else out + down.bias[expert])
        with torch.no_grad():
            torch.testing.assert_close(module(x, chosen, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.thinned(1, most=6)
def test_a_quantised_module_computes_what_the_class_does_with_its_weights(name: str, format: str) -> None:
    model = quantised_model(name, FORMATS[format])
    twin = dequantised(model, mixture(name))
    assert formats_of(model) == (FORMATS[format],)
    plain = experts_of(twin)
    for path, module in experts_of(model).items():
        assert type(module) is QuantisedExperts
        for rows in (1, 7):
            given = routed(module, rows)
            with torch.no_grad():
                expected = plain[path](*given)
            torch.testing.assert_close(module(*given), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", slow_but(KINDS, next(iter(KINDS))))
def test_stock_generation_has_the_tokens_of_the_dequantised_model(name: str) -> None:
    model = quantised_model(name, FORMATS["mxfp4"], intermediate_size=64, moe_intermediate_size=32)
    twin = dequantised(model, mixture(name, intermediate_size=64, moe_intermediate_size=32))
    ids = torch.tensor([[5, 9, 5, 9, 5, 3], [7, 8, 9, 10, 11, 12]])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))


def test_only_chosen_experts_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = next(iter(experts_of(quantised_model("mixtral", FORMATS["fp8"])).values()))
    expanded, original = list[tuple[int, int]](), QuantisedLinear.dequantised_rows

    def note(layer: QuantisedLinear, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        expanded.append((first, last))
        return original(layer, first, last, dtype)

    monkeypatch.setattr(QuantisedLinear, "dequantised_rows", note)
    x = torch.randn(3, 32)
    module(x, torch.tensor([[2, 0], [0, 2], [2, 0]]), torch.ones(3, 2))
    assert expanded == [(0, 128), (0, 32), (256, 384), (64, 96)]


def test_activations_are_rounded_where_the_format_says_so() -> None:
    plain = next(iter(experts_of(mixture("mixtral")).values()))
    module = quantised_experts(copy.deepcopy(plain), Format(Codes.INT8, 0, activations=Codes.INT8), CPU)
    assert module is not None
    x, (gate_up, down) = torch.randn(1, 32), expert_matrices(module)
    inner = module.replaced._apply_gate(module, rounded(x, Codes.INT8) @ gate_up.weight(3, torch.float32).T)
    expected = rounded(inner, Codes.INT8) @ down.weight(3, torch.float32).T
    torch.testing.assert_close(module(x, torch.tensor([[3]]), torch.ones(1, 1)), expected)


def test_in_half_precision_outputs_have_the_dtype_of_x_although_weights_are_wider() -> None:
    """As Mixtral's router gives them."""
    model = quantised_model("mixtral", FORMATS["fp8"])
    twin = dequantised(model, mixture("mixtral")).bfloat16()
    for path, module in experts_of(model).items():
        x, chosen, weights = routed(module, 6)
        found = module(x.bfloat16(), chosen, weights)
        assert found.dtype is torch.bfloat16
        with torch.no_grad():
            expected = experts_of(twin)[path](x.bfloat16(), chosen, weights)
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("width", [24, 27, 130])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.thinned(1, most=4)
def test_modules_are_saved_copied_and_loaded_with_their_bits(format: str, width: int) -> None:
    """Of odd sizes, too; then 4-bit codes do not fit, and the module stays as it is."""
    module = experts_of(mixture("gpt-oss", intermediate_size=width))["model.layers.0.mlp.experts"]
    other = experts_of(mixture("gpt-oss", intermediate_size=width, seed=2))["model.layers.0.mlp.experts"]
    made, second = (quantised_experts(one, FORMATS[format], CPU) for one in (module, other))
    if FORMATS[format].codes.bits == 4 and width % 2:
        assert made is None
        assert is_experts(module)
        return
    assert made is not None
    assert second is not None
    given = routed(made, 4)
    expected = made(*given)
    assert torch.equal(copy.deepcopy(made)(*given), expected)
    assert torch.equal(pickle.loads(pickle.dumps(made))(*given), expected)
    assert not torch.equal(second(*given), expected)
    second.load_state_dict(made.state_dict())
    assert torch.equal(second(*given), expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_each_expert_is_rounded_by_itself(name: str) -> None:
    plain = next(iter(experts_of(mixture(name)).values()))
    before = [[matrix.weight(expert, torch.float32) for expert in range(4)] for matrix in expert_matrices(plain)]
    module = quantised_experts(plain, FORMATS["int4"], CPU)
    assert plain.gate_up_proj is None
    assert plain.down_proj is None
    for weights, matrix in zip(before, expert_matrices(module), strict=True):
        for expert, weight in enumerate(weights):
            assert torch.equal(matrix.weight(expert, torch.float32), quantise(weight, FORMATS["int4"]).dequantised())


@pytest.mark.parametrize("out", [64, 40, 24, 7])
def test_blocks_of_rows_end_with_their_expert(out: int) -> None:
    """FP8 in blocks of 16 x 32, of which an expert's last ones are smaller."""
    format = Format(Codes.E4M3, 32, rows=16)
    layers = [blocks(format, out, 72, seed) for seed in range(3)]
    made = stacked(iter(layers), 3)
    assert torch.equal(made.dequantised(), torch.cat([layer.dequantised() for layer in layers]))
    assert out % made.format.rows == 0
    assert made.format == format or out % 16


def blocks(format: Format, out: int, width: int, seed: int) -> QuantisedLinear:
    source = torch.Generator().manual_seed(seed)
    codes = torch.randn(out, width, generator=source).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantisedLinear(format, codes, torch.rand(-(-out // 16), -(-width // 32), generator=source))


def test_layers_that_differ_are_not_stacked() -> None:
    weight = torch.randn(8, 64)
    first, second = (quantise(weight, FORMATS[name]) for name in ("fp8", "int4"))
    with pytest.raises(ValueError, match="several formats"):
        stacked([first, second], 2)
    with pytest.raises(ValueError, match="several formats"):
        stacked([second, quantise(weight.bfloat16(), FORMATS["int4"])], 2)  # scales of another dtype


def test_other_modules_are_no_experts() -> None:
    for module in (nn.Linear(3, 4), nn.ModuleList([nn.Linear(3, 4)])):
        assert not is_experts(module)
        with pytest.raises(UnsupportedModelError, match="is no stack of gated experts"):
            expert_matrices(module)
