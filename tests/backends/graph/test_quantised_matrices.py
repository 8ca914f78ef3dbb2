"""Quantised matrices of the graph backend: parts that become one matrix, and what happens when a part is replaced."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantising import random_layer
from tiny import tiny

from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.matrices.dense import DenseMatrix
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices, SeparateMatrix
from lookahead.backends.graph.matrices.products import Products
from lookahead.backends.graph.matrices.quantised import QuantisedMatrix, fuse_quantised
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.rounding import quantise

CPU = torch.device("cpu")
FORMATS = [
    Format(Codes.E4M3, 0),
    Format(Codes.E4M3, 0, activations=Codes.E4M3),
    Format(Codes.INT8, 32),
    Format(Codes.INT4, 48),
    Format(Codes.INT4, 128, zeros=True),
    Format(Codes.INT4, 32, offsets=True),
    Format(Codes.E2M1, 32),
]
TENSORS = ("codes", "scales", "zeros", "offsets")


def lower(matrix: Matrix) -> LoweredMatrix:
    return Matrices(Products(CPU, torch.float32, True), Ops(CPU)).lower(matrix)


def layers(format: Format, *outs: int, width: int = 512) -> list[QuantisedLinear]:
    return [random_layer(format, out, width, seed) for seed, out in enumerate(outs)]


def check_product(lowered: LoweredMatrix, parts: list[Any], rows: int = 3) -> None:
    """It is that of the parts, without their biases, which are `lowered.bias`."""
    x, out = torch.randn(rows, lowered.width), torch.full((rows, lowered.out), float("nan"))
    lowered.plan(rows)(x, out)
    biases = [part.bias for part in parts]
    expected = torch.cat([part(x) - (0 if bias is None else bias) for part, bias in zip(parts, biases, strict=True)], 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-2)
    if lowered.bias is None:
        assert biases == [None] * len(parts)
    else:
        given = [torch.zeros(p.out_features) if b is None else b for p, b in zip(parts, biases, strict=True)]
        assert torch.equal(lowered.bias, torch.cat(given))


def addresses(lowered: LoweredMatrix) -> list[int]:
    return [tensor.data_ptr() for tensor in lowered.tensors]


@pytest.mark.parametrize("outs", [(16, 8, 8), (24,), (13, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_parts_become_views_of_one_matrix(format: Format, outs: tuple[int, ...]) -> None:
    """Their weights stay the same, and a second lowering finds everything in its place."""
    parts = layers(format, *outs)
    before = [part.dequantised() for part in parts]
    lowered = lower(Matrix(tuple(parts)))
    assert isinstance(lowered, QuantisedMatrix)
    assert (lowered.out, lowered.width, lowered.device) == (sum(outs), 512, CPU)
    assert lowered.nbytes == sum(tensor.nbytes for tensor in lowered.tensors)
    for name in TENSORS:
        found = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
        assert len({tensor.untyped_storage().data_ptr() for tensor in found}) <= 1
    able = format.group != 48 and format.activations is None and all(out % 8 == 0 for out in outs)
    assert {part.is_interleaved for part in parts} == {able}
    for part, weight in zip(parts, before, strict=True):
        assert torch.equal(part.dequantised(), weight)
    check_product(lowered, parts)
    again = lower(Matrix(tuple(parts)))
    assert addresses(again) == addresses(lowered)
    assert {tensor.data_ptr() for tensor in again.tensors} <= {t.data_ptr() for part in parts for t in part.buffers()}
    check_product(again, parts)


@pytest.mark.parametrize("rows", [(8, 8, 8), (32, 8, 16), (12, 12, 12), (32, 32, 32)], ids=str)
@pytest.mark.parametrize("outs", [(32, 8, 16), (20, 4, 12)], ids=str)
def test_scales_that_rows_share(rows: tuple[int, ...], outs: tuple[int, ...]) -> None:
    """Blocks that end where parts do are kept; others, as one scale per part, are given to each row."""
    parts = [random_layer(Format(Codes.E4M3, 128, rows=n), out, 512) for n, out in zip(rows, outs, strict=True)]
    before = [part.dequantised() for part in parts]
    lowered = lower(Matrix(tuple(parts)))
    kept = len(set(rows)) == 1 and all(out % rows[0] == 0 for out in outs[:-1])
    assert {part.format.rows for part in parts} == ({rows[0]} if kept else {1})
    assert all(torch.equal(part.dequantised(), weight) for part, weight in zip(parts, before, strict=True))
    check_product(lowered, parts)
    assert addresses(lower(Matrix(tuple(parts)))) == addresses(lowered)


def test_parts_that_already_lie_side_by_side_by_chance() -> None:
    """Codes that were cut from one tensor, and scales that were not."""
    parts = layers(Format(Codes.INT4, 48, zeros=True), 16, 8)
    before = [part.dequantised() for part in parts]
    both = torch.cat([part.codes for part in parts])
    parts[0].codes, parts[1].codes = both[:16], both[16:]
    lowered = lower(Matrix(tuple(parts)))
    assert all(torch.equal(part.dequantised(), weight) for part, weight in zip(parts, before, strict=True))
    check_product(lowered, parts)


@pytest.mark.parametrize("biased", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("other", ["same", "format", "scales", "order", "plain"])
def test_mixed_parts_and_biases(other: str, biased: tuple[bool, bool]) -> None:
    """Parts of one format are one matrix, others have products of their own. Biases become views of one, too, so that
    a second lowering has the same addresses."""
    format = Format(Codes.INT4, 128, ordered=other == "order")
    first, second = layers(format, 16, 8)
    if other == "same" or other == "scales":
        second.scales = second.scales.to(torch.float16 if other == "scales" else torch.bfloat16)
    elif other == "format":
        second = random_layer(Format(Codes.E4M3, 0), 8, 512)
    parts: list[Any] = [first, torch.nn.Linear(512, 8, bias=False) if other == "plain" else second]
    for part, wanted in zip(parts, biased, strict=True):
        if wanted:
            part.bias = torch.nn.Parameter(torch.randn(part.out_features), requires_grad=False)
    lowered = lower(Matrix(tuple(parts)))
    assert isinstance(lowered, QuantisedMatrix if other == "same" else SeparateMatrix)
    for rows in (1, 3, 130):
        check_product(lowered, parts, rows)
    assert lowered.new_out(5).shape == (5, 24)
    assert addresses(lower(Matrix(tuple(parts)))) == addresses(lowered)
    for part in parts:  # an in-place change is seen
        if part.bias is not None:
            part.bias.data.add_(1)
    check_product(lowered, parts)


def test_only_parts_whose_rows_are_rounded_alike_are_one_matrix() -> None:
    """Rows are rounded once for all parts of a matrix."""
    rounds = Format(Codes.E4M3, 0, activations=Codes.E4M3)
    parts = [random_layer(format, 16, 512) for format in (rounds, replace(rounds, activations=None))]
    for part in parts:
        part.scales.fill_(2**-6)
    first, second = parts
    assert isinstance(lower(Matrix((first, copy.deepcopy(first)))), QuantisedMatrix)
    lowered = lower(Matrix((first, second)))
    assert isinstance(lowered, SeparateMatrix)
    check_product(lowered, parts)
    x = torch.randn(3, 512)
    assert not torch.allclose(first(x), second(x), rtol=1e-3, atol=1e-2)


def test_a_plain_part_has_room_for_padded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product of 192 rows may be one of 256."""
    plan, seen = DenseMatrix.plan, list[int]()

    def padded(matrix: DenseMatrix, rows: int) -> Any:
        run, size = plan(matrix, rows), -(-rows // 128) * 128

        def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
            seen.append(len(out))
            run(x[:size], out[:size])

        return multiply

    monkeypatch.setattr(DenseMatrix, "plan", padded)
    parts = [random_layer(Format(Codes.INT8, 0), 16, 512), torch.nn.Linear(512, 8, bias=False)]
    lowered = lower(Matrix(tuple(parts)))
    x, out = torch.randn(256, 512), torch.full((256, 24), float("nan"))
    lowered.plan(192)(x, out)
    assert seen == [256]
    assert not out[:192].isnan().any()
    assert out[192:].isnan().all()


def test_products_have_the_dtype_of_the_model() -> None:
    """That of a layer may be another since the model was converted."""
    (layer,) = layers(Format(Codes.INT4, 128), 16)
    layer.dtype = torch.float16
    lowered = lower(Matrix((layer,)))
    assert lowered.new_out(2).dtype is torch.float32
    check_product(lowered, [layer])


# Tensors that are moved, copied, saved and loaded


@pytest.mark.parametrize("change", ["copied", "moved", "converted", "one moved"])
@pytest.mark.parametrize("format", [Format(Codes.INT4, 128, zeros=True, ordered=True), Format(Codes.INT4, 48)], ids=str)
def test_a_fused_model_may_be_moved(format: Format, change: str) -> None:
    """Parts that no longer lie side by side are fused again; their codes are interleaved once only."""
    parts = torch.nn.ModuleList(layers(format, 16, 8, 8))
    parts[1].order, parts[2].order = parts[0].order, parts[0].order
    lower(Matrix(tuple(parts)))
    before = [part.dequantised() for part in parts]
    if change == "copied":
        parts = copy.deepcopy(parts)
    else:
        for part in parts if change != "one moved" else parts[1:2]:  # as `Module.to` does for another device
            part._apply(torch.Tensor.clone)
    if change == "converted":
        parts.to(torch.float16).to(torch.bfloat16)
    able = format.group != 48
    for part, weight in zip(parts, before, strict=True):
        assert part.is_interleaved is able
        assert torch.equal(part.dequantised(), weight) or change == "converted"
    expected = [part.dequantised() for part in parts]
    check_product(lower(Matrix(tuple(parts))), list(parts))
    assert all(torch.equal(part.dequantised(), weight) for part, weight in zip(parts, expected, strict=True))


def test_an_interleaved_part_among_others_that_cannot_be() -> None:
    """It had been a matrix of its own."""
    parts = layers(Format(Codes.INT8, 0), 16, 9)
    before = [part.dequantised() for part in parts]
    lower(Matrix((parts[0],)))
    assert parts[0].is_interleaved
    check_product(lower(Matrix(tuple(parts))), parts)
    assert not parts[0].is_interleaved
    assert all(torch.equal(part.dequantised(), weight) for part, weight in zip(parts, before, strict=True))


def test_state_dicts_have_codes_in_the_order_of_columns() -> None:
    """Whether the layer that they come from, or the one that loads them, is interleaved."""
    format = Format(Codes.INT4, 128)
    expected = random_layer(format, 16, 512)
    state = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    source, target = random_layer(format, 16, 512), random_layer(format, 16, 512, seed=1)
    fuse_quantised(Matrix((source,)))
    fuse_quantised(Matrix((target,)))
    assert source.is_interleaved
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.state_dict().items())
    address = target.codes.data_ptr()
    target.load_state_dict(source.state_dict())
    assert (target.codes.data_ptr(), target.is_interleaved) == (address, True)
    assert torch.equal(target.dequantised(), expected.dequantised())
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        target.load_state_dict({**state, "codes": state["codes"][:8]})


def test_a_model_is_lowered_in_inference_mode() -> None:
    (layer,) = layers(Format(Codes.INT4, 128), 16)
    state = layer.state_dict()
    with torch.inference_mode():
        fuse_quantised(Matrix((layer,)))
    assert not layer.codes.is_inference()
    layer.load_state_dict(state)


# Of a whole model


def quantised_model() -> Any:
    model = tiny("Qwen2", hidden_size=256, intermediate_size=512)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, torch.nn.Linear):
                    setattr(parent, name, quantise(module.weight, Format(Codes.INT4, 128), module.bias))
    return model


def test_captured_steps_stay_until_a_weight_is_replaced() -> None:
    model = quantised_model()
    backend = GraphBackend(model, kv_tokens=512)
    before = backend.layers.addresses()
    assert not backend.has_computed_weights
    assert backend.reads_weights_of(model)
    backend = GraphBackend(model, kv_tokens=512)
    assert backend.layers.addresses() == before
    attention = model.model.layers[0].self_attn
    attention.k_proj.codes = attention.k_proj.codes.clone()
    assert not backend.reads_weights_of(model)
    assert GraphBackend(model, kv_tokens=512).layers.addresses() != before


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_matrix_that_gets_another_format_is_seen(name: str) -> None:
    """It has another number of tensors."""
    model = tiny("Llama", hidden_size=256)
    backend = GraphBackend(model, kv_tokens=512)
    attention = model.model.layers[0].self_attn
    setattr(attention, name, quantise(getattr(attention, name).weight, Format(Codes.E4M3, 0)))
    assert not backend.reads_weights_of(model)


@pytest.mark.parametrize(
    ("format", "activations"),
    [(None, "int8"), (Format(Codes.E4M3, 128), "fp8"), (Format(Codes.INT8, 0), "fp8")],
    ids=str,
)
def test_rounded_activations_are_refused_before_any_weight_is_changed(format: Format | None, activations: str) -> None:
    """All but those of FP8 weights with a scale per row."""
    model = quantised_model()
    last = model.model.layers[-1].mlp.down_proj
    codes = {"int8": Codes.INT8, "fp8": Codes.E4M3}[activations]
    last.format = replace(format or last.format, activations=codes)
    expected = (
        rf"^the graph backend does not run this model: it rounds activations to {activations}; load it with weights "
        r"alone quantised, for instance dtype='fp8', or use backend='eager'$"
    )
    with pytest.raises(UnsupportedModelError, match=expected):
        GraphBackend(model)
    assert not any(module.is_interleaved for module in model.modules() if isinstance(module, QuantisedLinear))
