"""ModelShape-inflated models: the small model's function, and a large model's work, with as few zeros as that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from inflate import MODEL_SHAPES, ModelShape, inflate
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

Plain = Callable[[Any, Sequence[int], int], list[int]]

VOCABULARY = 97
FIELDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 7,
}
TARGETS = {
    "as it is": ModelShape(48, 2, 80, 6, 3),
    "more layers": ModelShape(48, 5, 80, 6, 3),
    "wider": ModelShape(112, 2, 80, 6, 3),
    "more neurons": ModelShape(48, 2, 200, 6, 3),
    "one K/V head per query head, each copied": ModelShape(48, 2, 80, 12, 12),
    "groups as large": ModelShape(96, 2, 128, 12, 6),
    "groups larger": ModelShape(96, 2, 128, 16, 4),
    "groups larger by a part": ModelShape(96, 2, 128, 9, 3),
    "all of it": ModelShape(160, 4, 200, 16, 16),
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "one K/V head each": {"num_key_value_heads": 6},
}
EMBEDDED = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
)
"""The shape of the embedded model, which the benchmarks inflate."""


def small(**changes: Any) -> Any:
    """A tiny random Llama in fp32 whose norms' gains are random, too."""
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**{**FIELDS, **changes})).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(5))
    return model(ids).logits.double()


# The same function


@pytest.mark.parametrize(
    ("kind", "target"),
    [(kind, t) for kind in KINDS for t in TARGETS if KINDS[kind].get("num_key_value_heads", 3) <= TARGETS[t].kv_heads],
)
@pytest.mark.thinned(1, most=4)
def test_the_same_logits(kind: str, target: str) -> None:
    model, shape = small(**KINDS[kind]), TARGETS[target]
    expected = logits(model)
    large = inflate(model, shape)
    found = logits(large)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(logits(model), expected)  # the small model is as it was
    assert parameters(shape, VOCABULARY, 8) == sum(p.numel() for p in large.parameters())


@pytest.mark.slow
def test_the_same_tokens(plain: Plain) -> None:
    model = small()
    prompt = [5, 9, 2, 7, 5, 9]
    expected = plain(model, prompt, 40)
    assert len(set(expected)) > 10
    for shape in (TARGETS["groups larger"], TARGETS["all of it"]):
        large = inflate(model, shape)
        assert plain(large, prompt, 40) == expected
        # As the benchmarks use it: the graph backend in front.
        sequence = DecodingSequence(prompt, LookaheadConfig(window=3, budget=40), rules=StopRules(40, frozenset({7})))
        engine = Engine(GraphBackend(large))
        engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        assert sequence.output == expected


def test_small_activations_meet_the_right_eps() -> None:
    """RMSNorm's eps counts where the stream is small: the wider mean is smaller, and so its eps must be."""
    model = small(rms_norm_eps=1e-2)
    model.model.embed_tokens.weight.data *= 0.05
    expected = logits(model)
    large = inflate(model, TARGETS["all of it"])
    assert (logits(large) - expected).norm() < 1e-5 * expected.norm()
    large.model.norm.variance_epsilon = large.model.layers[0].input_layernorm.variance_epsilon = 1e-2
    assert (logits(large) - expected).norm() > 1e-3 * expected.norm()


def test_what_comes_along() -> None:
    """dtype as asked for, the ids of the end of text, a config that says what the model is."""
    model = small(tie_word_embeddings=True)
    large = inflate(model, TARGETS["all of it"], dtype=torch.bfloat16)
    assert {p.dtype for p in large.parameters()} == {torch.bfloat16}
    assert large.generation_config.eos_token_id == 7
    config = large.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (160, 4, 200)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 16, 8)
    assert not config.tie_word_embeddings
    assert large.lm_head.weight.data_ptr() != large.model.embed_tokens.weight.data_ptr()
    assert not large.training
    assert model.config.hidden_size == 48
    assert inflate(model, TARGETS["as it is"]).dtype == torch.float32


def test_every_call_gives_the_same_weights() -> None:
    model = small()
    states = [inflate(model, TARGETS["all of it"]).state_dict() for _ in range(2)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# Refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ModelShape(40, 2, 80, 6, 3), "hidden=40 is less than the small model's 48"),
        (ModelShape(48, 1, 80, 6, 3), "layers=1 is less than the small model's 2"),
        (ModelShape(48, 2, 79, 6, 3), "intermediate=79 is less than the small model's 80"),
        (ModelShape(48, 2, 80, 4, 4), "heads=4 is less than the small model's 6"),
        (ModelShape(48, 2, 80, 6, 2), "kv_heads=2 is less than the small model's 3"),
        (ModelShape(48, 2, 80, 8, 3), "heads=8 is no multiple of kv_heads=3"),
    ],
)
def test_shapes_that_are_too_small(shape: ModelShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inflate(small(), shape)


def test_no_room_for_copied_heads() -> None:
    """Groups of 3 do not fit groups of 2, and then every query head needs a K/V head of its own."""
    model = small(num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(ValueError, match="kv_heads=5 leaves no room for 6 separate heads"):
        inflate(model, ModelShape(48, 2, 80, 10, 5))
    inflate(model, ModelShape(48, 2, 80, 12, 6))


@pytest.mark.parametrize("kind", ["attention", "mlp", "family"])
def test_what_it_cannot_pad_is_refused(kind: str) -> None:
    """Biases are no part of the recipe: they would be left random, and the function another one."""
    torch.manual_seed(0)
    if kind == "family":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**FIELDS)).float().eval()
    else:
        model = small(**{f"{kind}_bias": True})
    with pytest.raises(ValueError, match=r"bias|Qwen2ForCausalLM"):
        inflate(model, TARGETS["all of it"])


# Work, not zeros


def zeros(tensor: torch.Tensor) -> float:
    return float((tensor == 0).float().mean())


def test_only_the_zeros_it_takes() -> None:
    """A kernel may be faster on zeros; matrices of zeros would flatter the benchmark."""
    large = inflate(small(), TARGETS["all of it"])
    hidden, values = 48 / 160, 6 / 16
    for number, block in enumerate(large.model.layers):
        attention, mlp, added = block.self_attn, block.mlp, number >= 2
        for part in (attention.q_proj, attention.k_proj, mlp.gate_proj):
            assert zeros(part.weight) < 1e-3
        # Of the heads 6 of 16 have values, and 48 of 160 channels are written to.
        assert zeros(attention.v_proj.weight) == pytest.approx(0 if added else 1 - values, abs=1e-3)
        assert zeros(attention.o_proj.weight) == pytest.approx(1 if added else 1 - hidden, abs=1e-3)
        assert zeros(mlp.up_proj.weight) == pytest.approx(0 if added else 1 - 80 / 200, abs=1e-3)
        assert zeros(mlp.down_proj.weight) == pytest.approx(1 if added else 1 - hidden, abs=1e-3)
        assert not zeros(block.input_layernorm.weight)
    assert zeros(large.lm_head.weight) < 1e-3
    assert zeros(large.model.embed_tokens.weight) == pytest.approx(1 - hidden, abs=1e-3)


def test_a_head_beside_a_real_one_shares_its_values_and_has_no_way_out() -> None:
    """Groups of 4 where the small model has 2: of each group two heads are added. Their queries still work."""
    attention = inflate(small(), TARGETS["groups larger"]).model.layers[0].self_attn
    per_head = attention.o_proj.weight[:48].unflatten(1, (16, 8)).abs().sum(dim=(0, 2))
    real = [0, 1, 4, 5, 8, 9]
    assert all((per_head[head] > 0) == (head in real or head >= 12) for head in range(16))
    assert zeros(attention.q_proj.weight) < 1e-3
    values = attention.v_proj.weight.unflatten(0, (4, 8)).abs().sum(dim=(1, 2))
    assert (values > 0).tolist() == [True, True, True, False]


# The shapes of the benchmarks


def parameters(shape: ModelShape, vocabulary: int, dim: int) -> int:
    """Parameters of an untied Llama of this shape."""
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * dim
    block = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * block + 2 * vocabulary * shape.hidden + shape.hidden


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("1.5b", 1.4e9, 1.9e9), ("7b", 6.5e9, 7.2e9), ("13b", 12.5e9, 13.8e9), ("34b", 33e9, 35e9)],
)
def test_shapes_have_the_size_of_their_names(name: str, least: float, most: float) -> None:
    shape = MODEL_SHAPES[name]
    assert least < parameters(shape, EMBEDDED.vocab_size, EMBEDDED.head_dim) < most
    assert shape.heads * EMBEDDED.head_dim == shape.hidden  # square projections, as the models they stand for have


def test_every_shape_is_tested() -> None:
    assert set(MODEL_SHAPES) == {"1.5b", "7b", "13b", "34b"}


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_the_embedded_model_fits_every_shape(name: str) -> None:
    """Without building it: each check of `inflate` by the numbers."""
    shape = MODEL_SHAPES[name]
    assert shape.hidden >= EMBEDDED.hidden_size
    assert shape.layers >= EMBEDDED.num_hidden_layers
    assert shape.intermediate >= EMBEDDED.intermediate_size
    assert shape.heads % shape.kv_heads == 0
    group = shape.heads // shape.kv_heads
    assert group >= 3 or shape.kv_heads >= EMBEDDED.num_attention_heads
