"""Mixtures to measure with: the small model's function, routers like trained ones, and true shapes' bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from inflate_experts import (
    MIXTURE_SHAPES,
    UNION,
    UNION_ROWS,
    MixtureShape,
    fit_router,
    inflate_experts,
    unions,
)
from random_experts import RANDOM_SHAPES, bytes_read, random_mixture
from tiny import outputs, tiny

from lookahead import LookaheadConfig
from lookahead.backends.graph.backend import GraphBackend
from lookahead.models.number_formats import MXFP4
from lookahead.models.quantised_experts import QuantisedExperts

Plain = Callable[[Any, Sequence[int], int], list[int]]

VOCABULARY = 61
SHAPE = MixtureShape(48, 3, 96, 8, 4, experts=8, top_k=2, vocabulary=80)


def small() -> Any:
    return tiny("Llama", vocab_size=VOCABULARY, max_position_embeddings=256)


def text(count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(5)).tolist()


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(torch.tensor([text(60)])).logits[0].double()


def made(shape: MixtureShape = SHAPE) -> Any:
    return inflate_experts(small(), shape, text(100))[0]


# The same function


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, hidden=32, vocabulary=VOCABULARY), replace(SHAPE, layers=2)])
def test_the_same_logits(shape: MixtureShape) -> None:
    expected, found = logits(small()), logits(made(shape))
    assert found.shape[1] == shape.vocabulary
    assert (found[:, :VOCABULARY] - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
def test_the_same_tokens_with_lookahead_too(plain: Plain) -> None:
    prompt = [5, 9, 2, 7, 5, 9]
    expected = plain(small(), prompt, 32)
    assert len(set(expected)) > 6
    large = made()
    assert plain(large, prompt, 32) == expected
    assert outputs(GraphBackend(large), [prompt], LookaheadConfig(window=3, budget=40), 32) == [expected]


def test_added_tokens_are_never_chosen_or_drawn() -> None:
    """However the text goes on: also after added tokens themselves, whose embeddings are random."""
    large = made()
    ids = torch.arange(80)[None]
    for found in (logits(large), large(ids).logits[0].double()):
        assert found[:, VOCABULARY:].max() < found[:, :VOCABULARY].max(1).values.min() - 100
        assert not found.softmax(1)[:, VOCABULARY:].float().any()


def test_experts_are_equal_and_choices_are_not() -> None:
    experts = made().model.layers[0].mlp.experts
    assert all(torch.equal(experts.gate_up_proj[0], one) for one in experts.gate_up_proj)
    assert (experts.gate_up_proj == 0).float().mean() < 0.2  # up's rows of added neurons alone


def test_rounded_experts() -> None:
    """MXFP4 has a function of its own, and is that of experts rounded one by one."""
    large = made(replace(SHAPE, rounded=True))
    experts = large.model.layers[0].mlp.experts
    assert isinstance(experts, QuantisedExperts)
    assert experts.gate_up_proj.format == experts.down_proj.format == MXFP4
    exact = made().model.layers[0].mlp.experts
    rounded = experts.down_proj.dequantised().view_as(exact.down_proj)
    assert 0.01 < (rounded - exact.down_proj).norm() / exact.down_proj.norm() < 0.3
    assert logits(large)[:, VOCABULARY:].max() < -100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 1}, "layers=1 is less than the small model's 2"),
        ({"vocabulary": 60}, "vocabulary=60 needs at least the small model's 61 tokens"),
        ({"hidden": 32}, "vocabulary=80 needs .* a hidden size above 32"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(replace(SHAPE, **changes))


# Routers


def test_unions_count_experts_of_rows_in_a_row() -> None:
    chosen = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
    assert unions(chosen, 1, (1, 2, 4)) == [1.0, pytest.approx(5 / 3), 3.0]


@pytest.mark.parametrize(("experts", "top_k"), [(64, 4), (32, 4), (8, 2)])
def test_a_router_repeats_experts_as_trained_ones_do(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 48, generator=generator) + 2 * torch.randn(48, generator=generator)
    router, found = fit_router(x, experts, top_k, generator)
    assert found[UNION_ROWS.index(4)] == pytest.approx(UNION, abs=0.1)
    assert found == sorted(found)
    assert unions(x @ router.T, top_k) == found


def test_the_models_routers_choose_as_it_says() -> None:
    """Measured again, in the large model, by the routers themselves."""
    large, said = inflate_experts(small(), SHAPE, text(100))
    assert said[4] == pytest.approx(UNION, abs=0.15)
    found = [[0.0] * len(UNION_ROWS) for _ in large.model.layers]
    for number, block in enumerate(large.model.layers):
        block.mlp.gate.register_forward_hook(
            lambda _, x, out, number=number: found.__setitem__(number, unions(out[0][4:], 2))
        )
    large(torch.tensor([text(100)]))
    assert torch.tensor(found).mean(0).tolist() == pytest.approx(list(said.values()), abs=0.02)


# Shapes


def test_the_shapes_have_the_bytes_of_what_they_stand_for() -> None:
    qwen3, gpt_oss = MIXTURE_SHAPES["moe-qwen3"], MIXTURE_SHAPES["moe-gpt-oss"]
    fields = RANDOM_SHAPES["qwen3-30b-a3b"][1]
    assert qwen3.experts * qwen3.intermediate == fields["num_experts"] * fields["moe_intermediate_size"]
    assert qwen3.top_k * qwen3.intermediate == fields["num_experts_per_tok"] * fields["moe_intermediate_size"]
    assert qwen3.heads * 64 == fields["num_attention_heads"] * fields["head_dim"]
    assert qwen3.kv_heads * 64 == fields["num_key_value_heads"] * fields["head_dim"]
    fields = RANDOM_SHAPES["gpt-oss-20b"][1]
    assert (gpt_oss.hidden, gpt_oss.intermediate, gpt_oss.experts, gpt_oss.vocabulary) == (2880, 2880, 32, 201088)
    assert gpt_oss.heads == fields["num_attention_heads"]
    for shape in MIXTURE_SHAPES.values():  # the embedded model fits
        assert shape.hidden >= 576
        assert shape.layers >= 30
        assert shape.intermediate >= 1536
        assert shape.heads // shape.kv_heads >= 3
        assert shape.kv_heads >= 3


TINY_FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


def test_bytes_of_a_token_in_mxfp4() -> None:
    """Experts of 4 bits and a byte of scale for 32 numbers; the rest in the model's dtype; no embedding."""
    model = random_mixture(RANDOM_SHAPES["gpt-oss-20b"], "cpu", dtype=torch.float32, **TINY_FIELDS)
    dense, expert = bytes_read(model)
    assert expert == 64 * 64 * (1 / 2 + 1 / 32) + 64 * 32 * (1 / 2 + 1 / 32) + 4 * (64 + 64)  # with two biases
    attention = 64 * 16 * (4 + 2 + 2) + 64 * 64 + 16 * (4 + 2 + 2) + 64 + 4  # sinks
    layer = attention + 2 * 64 + 32 * 64 + 32  # norms, router
    rest = dense - 4 * (2 * layer + 100 * 64 + 64)
    assert 0 <= rest <= 4 * 2 * 16  # buffers of the rotation


def test_bytes_of_a_token_in_plain_numbers() -> None:
    fields = {**TINY_FIELDS, "moe_intermediate_size": 32}
    model = random_mixture(RANDOM_SHAPES["qwen3-30b-a3b"], "cpu", dtype=torch.bfloat16, **fields)
    _, expert = bytes_read(model)
    assert expert == 2 * 3 * 64 * 32
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert all(float(parameter.detach().float().std()) < 0.05 for parameter in model.parameters())


@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_random_mixtures_decode(name: str, plain: Plain) -> None:
    changes = {**TINY_FIELDS, "moe_intermediate_size": 32} if name.startswith("qwen") else TINY_FIELDS
    model = random_mixture(RANDOM_SHAPES[name], "cpu", dtype=torch.float32, **changes)
    assert len(plain(model, [5, 9, 2, 7], 6)) == 6
    assert model.generation_config.eos_token_id is None
