"""Models that prepare their passes in their own way: what they return is honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from pairs import decoding, ids
from tiny import tiny
from transformers import DynamicCache, GPT2LMHeadModel, LlamaForCausalLM

from lookahead.backends.graph.kv import MOST_SHIFT
from lookahead.models.facts import UnsupportedModelError

PROMPT = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9])
ROWS = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9], [4, 8, 4, 8], [3])

MORE = pytest.mark.parametrize(
    "more", [{}, {"do_sample": True}, pytest.param({"repetition_penalty": 1.3}, marks=pytest.mark.slow)], ids=str
)


def changed(change: Callable[[Any, dict[str, Any]], dict[str, Any]], base: type = LlamaForCausalLM) -> Any:
    """A tiny model whose preparation changes what goes into a pass."""
    model = tiny({LlamaForCausalLM: "Llama", GPT2LMHeadModel: "GPT2"}[base], seed=0)
    usual = model.prepare_inputs_for_generation

    @wraps(usual)
    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return change(model, usual(*args, **kwargs))

    model.prepare_inputs_for_generation = prepare  # as PEFT does
    return model


def add_to_positions(amount: int) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    def change(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "position_ids": inputs["position_ids"] + amount}

    return change


def without_positions(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The model then counts the places of its cache, padding included."""
    return {name: value for name, value in inputs.items() if name != "position_ids"}


def virtual_tokens(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Three vectors before the prompt, as a prompt-tuning adapter has them."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        inputs["attention_mask"] = torch.cat([torch.ones(len(mask), 3, dtype=mask.dtype), mask], dim=1)
    inputs.pop("position_ids")
    if not inputs["past_key_values"].get_seq_length():
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        before = torch.linspace(-1, 1, 3 * embeds.shape[-1]).reshape(1, 3, -1).expand(len(embeds), -1, -1)
        inputs["inputs_embeds"] = torch.cat([before, embeds], dim=1)
    return inputs


@pytest.mark.parametrize("inputs", [PROMPT, ROWS], ids=["one row", "three rows"])
@MORE
@pytest.mark.parametrize("base", [LlamaForCausalLM, GPT2LMHeadModel])
@pytest.mark.parametrize(
    "change", [add_to_positions(3), without_positions, virtual_tokens], ids=["further", "places", "virtual tokens"]
)
@pytest.mark.thinned(1, most=1)
def test_honoured(both: Any, base: type, change: Any, inputs: dict[str, Any], more: dict[str, Any]) -> None:
    model = changed(change, base)
    pair = both(model, inputs, max_new_tokens=24, pad_token_id=0, **more).same()
    assert pair.compression > 1 or more
    plain = tiny({LlamaForCausalLM: "Llama", GPT2LMHeadModel: "GPT2"}[base], seed=0)
    if change is virtual_tokens:
        torch.manual_seed(0)
        stock = plain.generate(**inputs, max_new_tokens=24, pad_token_id=0, **{"do_sample": False, **more})
        assert stock.tolist() != pair.ours.tolist()


@pytest.mark.parametrize("change", [add_to_positions(3), virtual_tokens], ids=["further", "virtual tokens"])
@pytest.mark.thinned(1, most=1)
def test_a_second_turn_on_the_cache(change: Any) -> None:
    model = changed(change)
    turns = {}
    for hook in ({}, {"custom_generate": decoding()}):
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **hook}
        first = model.generate(**PROMPT, **options, past_key_values=DynamicCache(config=model.config))
        longer = torch.cat([first.sequences, torch.tensor([[7, 9]])], dim=1)
        if change is virtual_tokens:  # stock takes no whole text behind a cache that holds more than it
            turns[len(turns)] = first.sequences.tolist(), first.past_key_values.get_seq_length()
            continue
        second = model.generate(longer, **options, past_key_values=first.past_key_values)
        turns[len(turns)] = second.sequences.tolist(), second.past_key_values.get_seq_length()
    assert turns[0] == turns[1]


def test_positions_along_several_axes(both: Any) -> None:
    """As in a model that sees pictures: text has the same position on every axis."""
    model = tiny("Llama", seed=0)

    class Axes(LlamaForCausalLM):
        def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            places = super()._prepare_position_ids_for_generation(*args, **kwargs)
            return torch.stack([places, places + 2, places - 1])

        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            middle = position_ids if position_ids is None else position_ids[1]
            return super().forward(*args, position_ids=middle, **kwargs)

    model.__class__ = Axes
    for inputs in (PROMPT, ROWS):
        assert both(model, inputs, max_new_tokens=24, pad_token_id=0).same().compression > 1


def every_pass(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "cross_states": torch.zeros(1, 3, 32)}


def embeds_always(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    return {**inputs, "inputs_embeds": embeds}


def doubled(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """No step of one: the probe sees what the first position alone does not tell."""
    return {**inputs, "position_ids": inputs["position_ids"] * 2}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (every_pass, "'cross_states' goes into every pass"),
        (embeds_always, "something else than its id"),
        (doubled, "other logits than generate's own passes"),
    ],
)
def test_refused(change: Any, says: str) -> None:
    model = changed(change)
    if change is every_pass:
        forward = model.forward
        model.forward = wraps(forward)(lambda *args, cross_states=None, **kwargs: forward(*args, **kwargs))
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=says) as caught:
        model.generate(**PROMPT, max_new_tokens=4, past_key_values=cache, custom_generate=decoding())
    assert "\n" not in str(caught.value)
    assert not cache.get_seq_length()  # as it was given


def test_the_graph_backend_goes_on_from_virtual_tokens(both: Any) -> None:
    pair = both(changed(virtual_tokens), PROMPT, max_new_tokens=24, hook=decoding(backend="graph")).same()
    assert pair.compression > 1


@pytest.mark.parametrize("change", [add_to_positions(3), doubled], ids=["further", "doubled"])
def test_the_graph_backend_refuses_moved_positions(change: Any) -> None:
    """Nothing checks how they go on, except with a model whose preparation is transformers' own."""
    with pytest.raises(ValueError, match="use backend='auto'"):
        changed(change).generate(**PROMPT, max_new_tokens=4, custom_generate=decoding(backend="graph"))


def moved(shift: int) -> dict[str, Any]:
    return {**PROMPT, "position_ids": torch.arange(PROMPT["input_ids"].shape[1])[None] + shift}


def test_the_graph_backend_takes_given_positions(both: Any) -> None:
    model = tiny("Llama", max_position_embeddings=8192)
    both(model, moved(MOST_SHIFT), max_new_tokens=12, hook=decoding(backend="graph")).same()


def test_the_graph_backend_refuses_positions_that_are_too_far() -> None:
    """Before it takes over the K/V, so that the eager backend can continue from them."""
    model = tiny("Llama", max_position_embeddings=8192)
    cache = DynamicCache(config=model.config)
    hook = decoding(backend="graph")
    with pytest.raises(UnsupportedModelError, match="cannot continue from this prompt"):
        model.generate(**moved(MOST_SHIFT + 1), max_new_tokens=4, past_key_values=cache, custom_generate=hook)
    assert not cache.get_seq_length()


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("held", [0, 4])
def test_a_given_cache_is_restored_if_moved_positions_reach_too_far(backend: str, held: int) -> None:
    """The limit of 128 positions is known before the prompt runs, but not where its positions continue."""
    model = tiny("Llama", max_position_embeddings=128, **DYNAMIC)
    cache = DynamicCache(config=model.config)
    if held:
        model(PROMPT["input_ids"][:, :held], past_key_values=cache)
    before, hook = [layer.keys for layer in cache.layers], decoding(backend=backend)
    with pytest.raises(ValueError, match=r"exactly up to 48 positions.*lower max_new_tokens"):
        model.generate(**moved(80), max_new_tokens=60, past_key_values=cache, custom_generate=hook)
    assert cache.get_seq_length() == held
    if held:
        assert all(layer.keys.equal(keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_a_given_cache_is_restored_if_a_window_counts_hidden_tokens() -> None:
    model = tiny("Mistral", sliding_window=40)
    cache = DynamicCache()
    hidden = torch.tensor([[1] * 6 + [0] + [1] * 3])
    with pytest.raises(ValueError, match="counts the positions that attention_mask hides"):
        model.generate(
            PROMPT["input_ids"],
            attention_mask=hidden,
            max_new_tokens=4,
            past_key_values=cache,
            custom_generate=decoding(),
        )
    assert not cache.get_seq_length()
