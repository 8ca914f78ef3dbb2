"""Every knob of a description is lowered: logits of `models.reference`, exact texts, the same bits in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")

from described import HIDDEN, VOCABULARY
from knobs import DIM, HEADS, KNOBS, KV_HEADS, Maker
from marks import slow_but
from model_table import build
from onnx import load_from_string
from quantising import quantised
from tiny import PROMPTS, greedy, outputs, random_tree, root, tiny
from transformers import DynamicCache

from lookahead import LookaheadConfig
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.cpu.backend import CpuBackend
from lookahead.backends.cpu.cells import HOME, SPARE
from lookahead.backends.cpu.invariance import invariant_nodes, parts_of, reduced_model
from lookahead.backends.cpu.lower import check_lowers, lower
from lookahead.config import SamplingParams
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.norm import Norm
from lookahead.models.number_formats import Codes, Format
from lookahead.models.read import read
from lookahead.models.reference import forward, forward_tree
from lookahead.models.spec import Attention, Decoder

AUTOREGRESSIVE = LookaheadConfig.autoregressive()
VALUES_NORM = Norm(None, 1e-6)


def attending(make: Maker, **changes: Any) -> Decoder:
    """Plain layers around one whose attention has these fields."""
    return make.decoder(make.block(), make.block(make.attention(**changes)), make.block())


def per_head(make: Maker, heads: int) -> Norm:
    return Norm(1 + make.random(heads, DIM), 0.1, make.random(heads, DIM))


def queries_alone(make: Maker) -> Attention:
    """Queries with a norm and a scale of their own, which read the first layer's keys and values."""
    return make.attention(
        qkv=make.matrix(HEADS * DIM, bias=True),
        kv_layer=0,
        q_norm=make.norm(DIM, 0.1),
        query_scale=lambda positions: 1 + positions / 10,
        sinks=make.random(HEADS),
    )


TOGETHER: dict[str, Callable[[Maker], Decoder]] = {
    "norms with bias that are not centered": lambda make: make.decoder(
        make.block(mixer_norm=Norm(None, 0.1, make.random(HIDDEN))),
        make.block(feed_forward_norm=Norm(make.random(HIDDEN), 0.1, make.random(HIDDEN), offset=1.0)),
    ),
    "norms over all heads, and of each value": lambda make: attending(
        make, q_norm=make.norm(HEADS * DIM), k_norm=make.norm(KV_HEADS * DIM), v_norm=VALUES_NORM, whole_norms=True
    ),
    "norms over all heads after the rotation": lambda make: attending(
        make,
        q_norm=make.norm(HEADS * DIM, 0.1),
        k_norm=make.norm(KV_HEADS * DIM, 0.1),
        whole_norms=True,
        norms_after_rope=True,
    ),
    "norms per head with biases after the rotation": lambda make: attending(
        make, q_norm=per_head(make, HEADS), k_norm=per_head(make, KV_HEADS), norms_after_rope=True, v_norm=VALUES_NORM
    ),
    "a window and chunks": lambda make: attending(make, window=9, chunk=16),
    "queries alone": lambda make: make.decoder(make.block(), make.block(queries_alone(make)), make.block()),
    "a part of the heads, in another order": lambda make: attending(
        make, qkv=make.matrix(10 * DIM, bias=True), head_order=(9, 1, 4, 5, 2, 6, 3, 7)
    ),
    "matrices of several transposed parts": lambda make: attending(
        make, qkv=make.conv(HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), out=make.conv(HIDDEN, width=HEADS * DIM)
    ),
    "values are keys, clipped": lambda make: attending(
        make, qkv=make.matrix(HEADS * DIM, KV_HEADS * DIM), head_order=(0, 1, 2, 3, 4, 5, 4, 5), clip=0.5
    ),
    "parallel halves without norms, scaled twice": lambda make: make.decoder(
        make.block(),
        make.block(
            make.attention(bias=True),
            make.feed_forward(bias=True),
            mixer_norm=None,
            feed_forward_norm=None,
            parallel=True,
            residual_scale=0.3,
            output_scale=make.random(1, size=1.0),
        ),
    ),
    "learned positions and a scale": lambda make: make.decoder(
        make.block(make.attention(rope=None)),
        make.block(mixer_norm=None),
        embedding_scale=3.0,
        position_embedding=make.random(1024, HIDDEN, size=0.5),
    ),
    "learned positions before a block without a norm": lambda make: make.decoder(
        make.block(mixer_norm=None), position_embedding=make.random(1024, HIDDEN, size=0.5)
    ),
    "all of the head's knobs": lambda make: make.decoder(
        make.block(), head_bias=True, norm=make.layer_norm(), logit_scale=-0.3, logit_softcap=1.5
    ),
}
"""Knobs that are lowered to the same nodes."""
ALL = {**KNOBS, **TOGETHER}
TEXTS = [
    "keys and values of earlier layers",
    "sinks, softcap and a window",
    "chunks",
    "learned positions",
    "queries scaled by position",
    "logit scale and softcap",
    "parallel, one norm",
]


@cache
def carrier() -> Any:
    """A model that lends a described decoder its vocabulary and context."""
    return tiny("Llama", max_position_embeddings=2048)


@cache
def decoder(knob: str) -> Decoder:
    return ALL[knob](Maker())


def backend(described: Decoder, *, int8: bool = False) -> CpuBackend:
    return CpuBackend(carrier(), probed=False, description=quantised(described) if int8 else described)


def tokens(count: int) -> list[int]:
    return [(11 * i + i // 7) % VOCABULARY for i in range(count)]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# Logits


@pytest.mark.parametrize("length", slow_but([3, 30, HOME - 2], HOME - 2))
@pytest.mark.parametrize("knob", slow_but(ALL, *list(KNOBS)[1::2], *TOGETHER))
def test_logits_are_those_of_the_description(knob: str, length: int) -> None:
    """A tree behind prefixes shorter and longer than windows and chunks, and one behind what is committed of it beside
    a neighbour."""
    described = decoder(knob)
    made, tree, next_tree = backend(described), random_tree(20, 4), random_tree(7, 1)
    other = made.open()
    made.step([greedy(other, [3] * 20, root(2))])
    made.commit([(other, ())])
    slot, prefix = made.open(), tokens(length)
    (found,) = made.step([greedy(slot, prefix, tree, logits=True)])
    assert error(found.logits, forward_tree(described, prefix, tree.tokens, tree.parents)) < 1e-5
    path = [node for node in range(1, 20) if tree.parents[node] == 0][-1:]
    made.commit([(slot, path)])
    kept = [*prefix, *(tree.tokens[node] for node in [0, *path])]
    found, beside = made.step([greedy(slot, (), next_tree, logits=True), greedy(other, (), root(5), logits=True)])
    assert error(found.logits, forward_tree(described, kept, next_tree.tokens, next_tree.parents)) < 1e-5
    assert error(beside.logits, forward_tree(described, [3] * 20 + [2], [5], [-1])) < 1e-5
    made.close(slot)


def test_positions_behind_the_last_learned_one() -> None:
    """Draft tokens there can never be accepted. The others' logits are right."""
    short = replace(
        decoder("learned positions"), position_embedding=decoder("learned positions").position_embedding[:32]
    )
    made, chain = backend(short), TokenTree([5, 6, 7, 8], [-1, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3])
    (found,) = made.step([greedy(made.open(), tokens(30), chain, logits=True)])
    assert error(found.logits[:2], forward_tree(short, tokens(30), [5, 6], [-1, 0])) < 1e-5


def test_int8_is_near_fp32() -> None:
    """For structures in which a product has another form: transposed, scaled, in another order, of queries alone."""
    for knob in ("transposed weights", "residual scale", "heads in groups", "queries alone", "all of the head's knobs"):
        described, tree = decoder(knob), random_tree(20, 4)
        made = backend(described, int8=True)
        (found,) = made.step([greedy(made.open(), tokens(30), tree, logits=True)])
        assert 0 < error(found.logits, forward_tree(described, tokens(30), tree.tokens, tree.parents)) < 0.1, knob


@pytest.mark.parametrize("knob", slow_but(ALL, "transposed weights", "heads in groups", "all of the head's knobs"))
@pytest.mark.parametrize(
    ("format", "bound"), [(Format(Codes.E4M3, 0), 1e-5), (Format(Codes.E4M3, 0, activations=Codes.E4M3), 0.1)], ids=str
)
def test_quantised_weights_are_expanded(knob: str, format: Format, bound: float) -> None:
    """Where activations are rounded, too, a difference in the last bit may be a step of a code."""
    described, tree = quantised(decoder(knob), format), random_tree(20, 4)
    made = backend(described)
    assert made.dtype is (torch.float32 if format.activations is None else torch.float8_e4m3fn)
    (found,) = made.step([greedy(made.open(), tokens(30), tree, logits=True)])
    assert error(found.logits, forward_tree(described, tokens(30), tree.tokens, tree.parents)) < bound
    assert error(found.logits, forward_tree(decoder(knob), tokens(30), tree.tokens, tree.parents)) > 1e-4


# Texts


def is_greedy(described: Decoder, prompt: list[int], text: list[int]) -> bool:
    """Whether each token is the reference's argmax after those before it."""
    return forward(described, prompt + text)[len(prompt) - 1 : -1].argmax(-1).tolist() == text


@pytest.mark.parametrize("knob", slow_but(TEXTS, "keys and values of earlier layers", "chunks", "learned positions"))
@pytest.mark.thinned(1, most=1)
def test_texts_are_those_of_single_tokens(knob: str, settings: LookaheadConfig) -> None:
    made, prompts, sampling = backend(decoder(knob)), PROMPTS[1:3], SamplingParams(0.9, seed=3)
    found = outputs(made, prompts, settings)
    assert found == outputs(made, prompts, AUTOREGRESSIVE)
    assert all(is_greedy(decoder(knob), prompt, text) for prompt, text in zip(prompts, found, strict=True))
    drawn = outputs(made, prompts, settings, 24, sampling)
    assert drawn == outputs(made, prompts, AUTOREGRESSIVE, 24, sampling) != found


@pytest.mark.parametrize("knob", slow_but(TEXTS, "sinks, softcap and a window"))
def test_int8_has_an_exact_text_of_its_own(knob: str, settings: LookaheadConfig) -> None:
    made = backend(decoder(knob), int8=True)
    assert outputs(made, PROMPTS, settings) == outputs(made, PROMPTS, AUTOREGRESSIVE)


# The same bits in every step


@pytest.mark.parametrize("int8", slow_but([False, True], False))
@pytest.mark.parametrize("knob", slow_but(ALL, *TEXTS, "xielu", "narrow heads", "one K/V head", "wide heads"))
@pytest.mark.thinned(1, most=5)
def test_a_row_has_the_same_bits_in_every_step(knob: str, int8: bool) -> None:
    small = reduced_model(decoder(knob))
    assert invariant_nodes(backend(small, int8=int8), (1, HOME - 2)) == SPARE + 1


def test_the_check_runs_a_layer_of_each_kind() -> None:
    """Kinds differ in parts and shapes, not in numbers; a layer reads the K/V of a layer of the same kind as before."""
    described = decoder("keys and values of earlier layers")
    window, full, reads_full, reads_window = described.blocks
    again = window.with_attention(scale=0.1)
    moved = reads_full.with_attention(kv_layer=2)
    small = reduced_model(replace(described, blocks=[window, again, full, moved, reads_window, moved]))
    assert small.blocks[:2] == [window, full]
    assert [block.attention.kv_layer for block in small.blocks] == [None, None, 1, 0]
    assert parts_of(Maker(seed=1).block(residual_scale=0.5)) == parts_of(Maker(seed=2).block())
    for knob in ("parallel, one norm", "relu without a gate", "layer norm", "norms after", "q norm alone", "clipped"):
        assert parts_of(decoder(knob).blocks[0]) != parts_of(decoder(knob).blocks[1])


# K/V of layers that share them


def test_shared_keys_and_values_are_exported_once() -> None:
    made = backend(decoder("keys and values of earlier layers"))
    first, second = made.open(), made.open()
    made.step([greedy(first, tokens(40), root(3))])
    made.commit([(first, ())])
    layers = made.cached(first)
    assert [tuple(keys.shape) for keys, _ in layers] == [(KV_HEADS, 41, DIM)] * 2
    made.adopt(second, 41, layers)
    tree = random_tree(9, 2)
    expected, found = made.step([greedy(first, (), tree, logits=True), greedy(second, (), tree, logits=True)])
    assert torch.equal(expected.logits, found.logits)


def test_exported_layers_are_those_that_transformers_caches() -> None:
    model = build("gemma4-shared")
    made = CpuBackend(model, probed=False)
    assert any(block.attention.kv_layer is not None for block in made.description.blocks)
    slot = made.open()
    made.step([greedy(slot, tokens(20), root(3))])
    made.commit([(slot, ())])
    with torch.inference_mode():
        cache = model(torch.tensor([[*tokens(20), 3]]), past_key_values=DynamicCache()).past_key_values
    for (keys, values), layer in zip(made.cached(slot), cache.layers, strict=True):
        assert torch.allclose(keys, layer.keys[0], atol=1e-4)
        assert torch.allclose(values, layer.values[0], atol=1e-4)


# Nodes


def nodes_of(described: Decoder) -> list[str]:
    file, _ = lower(described)
    return [node.op_type for node in load_from_string(file).graph.node]


def test_factors_and_orders_of_heads_take_no_nodes() -> None:
    plain = nodes_of(Maker().decoder(Maker().block(), Maker().block(), Maker().block()))
    for knob in ("residual scale", "heads in groups", "scale", "norm weight + 1", "interleaved pairs"):
        assert nodes_of(decoder(knob)) == plain, knob
    assert nodes_of(decoder("logit scale")) == nodes_of(decoder("tied head"))
    assert nodes_of(decoder("norms after, scaled")).count("Mul") == nodes_of(decoder("norms after")).count("Mul") + 1


def test_parallel_halves_share_a_norm_and_its_bytes() -> None:
    one, two = (nodes_of(quantised(decoder(f"parallel, {norms}"))) for norms in ("one norm", "two norms"))
    assert one.count("QuantizeLinear") == 2 * 4 - 1  # of two layers
    assert two.count("QuantizeLinear") == 3 * 4


# Refusals


def test_weights_that_are_not_in_memory_are_refused() -> None:
    """Of a description, only device and dtype are."""
    away = replace(decoder("scale"), embedding=decoder("scale").embedding.to("meta"))
    with pytest.raises(UnsupportedModelError, match="the cpu backend does not run this model: it is on meta"):
        backend(away)


@pytest.mark.parametrize("row", ["qwen3.5", "lfm2"])
def test_recurrent_states_are_refused(row: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match="the cpu backend does not run this model: it keeps a recurrent state"
    ):
        check_lowers(read(build(row), "cpu"))
