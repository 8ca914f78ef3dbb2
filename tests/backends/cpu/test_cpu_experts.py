"""Mixtures of experts are lowered: logits of `models.reference`, the same bits in every step, and no expert in vain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")

from described import HIDDEN, VOCABULARY
from knobs import Maker
from marks import slow_but
from mixture_knobs import EXPERTS, MIXTURES, TOP, mixture, router
from quantising import quantised, random_layer
from tiny import PROMPTS, greedy, outputs, random_tree, tiny

from lookahead import LookaheadConfig
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.cpu.cells import HOME, SPARE
from lookahead.backends.cpu.invariance import invariant_nodes, parts_of, reduced_model
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE, Scoring
from lookahead.models.number_formats import Codes, Format
from lookahead.models.reference import forward_tree, route
from lookahead.models.spec import Decoder

INT8 = Format(Codes.INT8, 0, activations=Codes.INT8)
FP8 = Format(Codes.E4M3, 0)
MXFP4 = Format(Codes.E2M1, 32)


@cache
def carrier() -> Any:
    """A model that lends a described decoder its vocabulary and context."""
    return tiny("Llama", max_position_embeddings=2048)


@cache
def decoder(knob: str) -> Decoder:
    return MIXTURES[knob](Maker())


def backend(described: Decoder) -> CpuBackend:
    return CpuBackend(carrier(), probed=False, description=described)


def tokens(count: int) -> list[int]:
    return [(11 * i + i // 7) % VOCABULARY for i in range(count)]


def error(described: Decoder, other: Decoder | None = None) -> float:
    """How far logits of a tree behind a prefix are from the reference's, of the same description or of another."""
    made, tree = backend(described), random_tree(20, 4)
    (found,) = made.step([greedy(made.open(), tokens(30), tree, logits=True)])
    expected = forward_tree(other or described, tokens(30), tree.tokens, tree.parents)
    return float((found.logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("knob", MIXTURES)
@pytest.mark.thinned(1, most=5)
def test_logits_are_those_of_the_description(knob: str) -> None:
    assert error(decoder(knob)) < 1e-5


@pytest.mark.parametrize("format", [FP8, MXFP4], ids=str)
@pytest.mark.parametrize("knob", ["softmax", "transposed", "alternating, clamped", "shared expert behind a gate"])
@pytest.mark.thinned(1, most=2)
def test_quantised_experts_are_expanded(knob: str, format: Format) -> None:
    rounded = quantised(decoder(knob), format)
    assert error(rounded) < 1e-5
    assert error(rounded, decoder(knob)) > 1e-3


@pytest.mark.parametrize("knob", ["softmax", "biases"])
def test_int8_experts_multiply_integers(knob: str) -> None:
    """Rounded activations may turn a close choice of experts, but not in most rows."""
    described, tree = quantised(decoder(knob)), random_tree(20, 4)
    made = backend(described)
    assert made.dtype is torch.int8
    (found,) = made.step([greedy(made.open(), tokens(30), tree, logits=True)])
    expected = forward_tree(described, tokens(30), tree.tokens, tree.parents)
    assert ((found.logits - expected).norm(dim=1) / expected.norm(dim=1)).median() < 1e-3


# The same bits in every step


@pytest.mark.parametrize("knob", slow_but(MIXTURES, "softmax", "groups", "sparse mixer", "alternating, clamped"))
@pytest.mark.thinned(1, most=2)
def test_a_row_has_the_same_bits_in_every_step(knob: str) -> None:
    small = reduced_model(decoder(knob))
    assert invariant_nodes(backend(small), (1, HOME - 2)) == SPARE + 1


@pytest.mark.parametrize("format", [None, INT8, MXFP4], ids=str)
@pytest.mark.thinned(1, most=1)
def test_wide_experts_have_the_same_bits_in_every_step(format: Format | None) -> None:
    """Sums of more terms than one piece of a packed product."""
    make = Maker()
    wide = mixture(make)
    weights = [make.random(EXPERTS, 2 * 800, HIDDEN), make.random(EXPERTS, HIDDEN, 800)]
    gate_up, down = (replace(old, weights=own) for old, own in zip((wide.gate_up, wide.down), weights, strict=True))
    described = make.decoder(make.block(feed_forward=MoE(wide.router, gate_up, down)))
    described = described if format is None else quantised(described, format)
    assert invariant_nodes(backend(described), (1, HOME - 2)) == SPARE + 1


def test_the_check_runs_a_layer_of_each_kind() -> None:
    """Mixtures of one kind differ in numbers alone."""
    assert parts_of(decoder("softmax").blocks[1]) == parts_of(MIXTURES["softmax"](Maker(seed=2)).blocks[1])
    kinds = [parts_of(decoder(knob).blocks[1]) for knob in MIXTURES if knob not in ("scaled", "norms behind")]
    assert len(set(kinds)) == len(kinds)
    assert len(reduced_model(decoder("softmax")).blocks) == 2


@pytest.mark.parametrize("knob", ["softmax, weights with sum 1", "groups", "alternating, clamped"])
@pytest.mark.thinned(1, most=1)
def test_texts_are_those_of_single_tokens(knob: str, settings: LookaheadConfig) -> None:
    made = backend(decoder(knob))
    assert outputs(made, PROMPTS, settings) == outputs(made, PROMPTS, LookaheadConfig.autoregressive())


# Which experts run


def sent(make: Maker, favourites: list[int]) -> Decoder:
    """Every row goes to these experts, by a bias alone."""
    bias = torch.full((EXPERTS,), -5.0)
    bias[favourites] = 5.0
    own = router(make, scoring=Scoring.SIGMOID, choice_bias=bias)
    return make.decoder(make.block(feed_forward=mixture(make, own)))


@pytest.mark.parametrize("favourites", [[0, 1, 2], [5, 6, 7], [0, 3, 7]])
def test_every_row_to_the_same_experts(favourites: list[int]) -> None:
    """And none to the others, whose weights are not numbers."""
    described = sent(Maker(), favourites)
    spec = described.blocks[0].feed_forward
    for matrix in (spec.gate_up, spec.down):
        for expert in set(range(EXPERTS)) - set(favourites):
            matrix.weights[expert] = torch.nan
    assert error(described) < 1e-5


def test_rows_to_experts_of_their_own() -> None:
    """Tokens whose vectors choose disjoint experts, in one step and each in a step of its own."""
    make = Maker()
    own = router(make, experts=24, top_k=1)
    described = make.decoder(make.block(feed_forward=mixture(make, own)))
    chosen, _ = route(own, torch.randn(500, HIDDEN, generator=torch.Generator().manual_seed(0)))
    assert len(chosen.unique()) == 24
    assert error(described) < 1e-5
    assert invariant_nodes(backend(described), (1,)) == SPARE + 1


def test_ties_go_to_the_first_experts() -> None:
    make = Maker()
    own = router(make)
    own.logits.parts[0].weight.data.zero_()
    described = make.decoder(make.block(feed_forward=mixture(make, own)))
    assert route(own, torch.ones(2, HIDDEN))[0].tolist() == [list(range(TOP))] * 2
    assert error(described) < 1e-5


# Refusals


def test_formats_whose_rows_cannot_be_taken_apart_are_refused() -> None:
    blocks = Format(Codes.E4M3, 16, rows=8)
    assert error(quantised_in_blocks(decoder("biases"), blocks)) < 1e-5
    rounding = replace(blocks, activations=Codes.E4M3)
    with pytest.raises(UnsupportedModelError, match="the cpu backend does not run this model: its experts are in"):
        backend(quantised_in_blocks(decoder("softmax"), rounding))


def quantised_in_blocks(described: Decoder, format: Format) -> Decoder:
    """With random experts in a format whose scales are of blocks."""
    block = described.blocks[1]
    spec = block.feed_forward
    made = {}
    for name, matrix in (("gate_up", spec.gate_up), ("down", spec.down)):
        out, width = matrix.shape
        made[name] = replace(matrix, weights=random_layer(format, matrix.experts * out, width))
    return replace(described, blocks=[described.blocks[0], replace(block, feed_forward=replace(spec, **made))])
