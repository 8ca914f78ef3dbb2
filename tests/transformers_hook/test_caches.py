"""K/V caches: the one that comes back is stock's, and one that is given is continued, by either of the two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import decoding, ids, output_of, same_cache
from transformers import DynamicCache, StaticCache

TURN = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
MODELS = ["llama", "gpt2", "mistral", "gemma"]
LONG = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1, 5, 9, 2, 44, 17, 3, 30]
"""Twice the sliding models' window; with two turns it still fits gpt2's positions."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def longer(mask: torch.Tensor, by: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (0, by), value=1)


# What comes back


@pytest.mark.parametrize("implementation", [None, "dynamic", "static"])
@pytest.mark.thinned(1, most=3)
def test_cache_comes_back(both: Any, model: Any, implementation: str | None) -> None:
    """Everything but the last token's K/V, as in stock: that token was never run."""
    prompt = ids(LONG)
    pair = both(model, prompt, cache_implementation=implementation, **TURN).same()
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values)
    assert pair.ours.past_key_values.get_seq_length() == len(LONG) + 11


@pytest.mark.parametrize("count", [1, 2])
def test_cache_of_few_tokens(both: Any, llama: Any, batch: dict[str, Any], count: int) -> None:
    """After one token it holds the prompt, and nothing else."""
    pair = both(llama, batch, **{**TURN, "max_new_tokens": count}).same()
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values, longer(batch["attention_mask"], count - 1))


def test_some_model_skips_steps(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    """The rows of an accepted block are next to each other, wherever in the step's tree they stood."""
    pair = both(counting, count_up, **TURN).same()
    assert pair.compression > 4
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values)


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.thinned(1, most=2)
def test_cache_of_a_padded_batch(both: Any, model: Any, implementation: str | None, ends: bool) -> None:
    """Rows that have ended are followed by padding, which stock runs through the model like any token."""
    batch = ids(LONG, LONG[:5], LONG[3:12])
    more: dict[str, Any] = {}
    if ends:
        text = output_of(batch, model.generate(**batch, max_new_tokens=12, do_sample=False))
        more = {"eos_token_id": [text[0][2], text[1][6]], "pad_token_id": 0}
    pair = both(model, batch, cache_implementation=implementation, **TURN, **more).same()
    assert len({stats.generated_tokens for stats in pair.hook.stats}) == 1 or ends
    length = pair.tokens.shape[1] - 1
    mask = longer(batch["attention_mask"], length - batch["attention_mask"].shape[1])
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values, mask)


def test_room_of_a_static_cache(both: Any, llama: Any, prompt: dict[str, Any]) -> None:
    pair = both(llama, prompt, cache_implementation="static", max_cache_len=64, **TURN).same()
    assert pair.ours.past_key_values.layers[0].keys.shape[2] == 64
    same_cache(pair.stock.past_key_values, pair.ours.past_key_values)


# What is given


def static(model: Any, rows: int = 1) -> Any:
    return StaticCache(config=model.config, max_cache_len=96)


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def bare(model: Any) -> Any:
    """Without a config it keeps everything, also of a sliding layer."""
    return DynamicCache()


@pytest.mark.parametrize(("make", "returned"), [(dynamic, True), (static, False), (bare, False)])
@pytest.mark.thinned(1, most=2)
def test_empty_cache_is_filled(both: Any, model: Any, make: Any, returned: bool) -> None:
    """It is the caller's: changed in place, as stock does, whether or not it is asked for as an output."""
    turn = {**TURN, "return_dict_in_generate": returned}
    pair = both(model, ids(LONG), fresh=lambda: {"past_key_values": make(model)}, **turn).same()
    mine = pair.made_ours["past_key_values"]
    same_cache(pair.made_stock["past_key_values"], mine)
    assert not returned or pair.ours.past_key_values is mine


@pytest.mark.parametrize(
    ("make", "new_only", "by"),
    [
        (dynamic, False, "ours then ours"),
        (dynamic, True, "ours then stock"),
        (dynamic, True, "stock then ours"),
        (static, True, "ours then ours"),
        (static, False, "ours then stock"),
        (static, False, "stock then ours"),
    ],
)
@pytest.mark.thinned(1, most=3)
def test_second_turn(model: Any, make: Any, new_only: bool, by: str) -> None:
    """A conversation that is continued is the one that is started anew, by whichever of the two each turn is done.

    Either all ids are passed again, or the new ones and a mask over all.
    """
    first, second = by.split(" then ")
    hooks: dict[str, dict[str, Any]] = {"stock": {}, "ours": {"custom_generate": decoding()}}
    prompt, cache = ids(LONG[:9]), make(model)
    turn = {**TURN, "max_new_tokens": 6}
    said = model.generate(**prompt, **turn, **hooks[first], past_key_values=cache).sequences
    whole = torch.cat([said, torch.tensor([LONG[9:13]])], dim=1)
    mask = torch.ones_like(whole)
    known = cache.get_seq_length()
    assert known == said.shape[1] - 1
    given = whole[:, known:] if new_only else whole
    output = model.generate(given, attention_mask=mask, **turn, **hooks[second], past_key_values=cache)
    anew = model.generate(whole, attention_mask=mask, **turn)
    assert output_of({"input_ids": given}, output) == output_of({"input_ids": whole}, anew)
    assert torch.equal(output.sequences[:, : given.shape[1]], given)
    if make is dynamic:
        same_cache(anew.past_key_values, cache)


@pytest.mark.parametrize("by", ["ours then ours", "ours then stock", "stock then ours"])
@pytest.mark.parametrize("new_only", [False, True], ids=["all ids", "new ids"])
@pytest.mark.parametrize("ends", [False, True], ids=["no eos", "eos"])
@pytest.mark.thinned(1, most=1)
def test_second_turn_of_a_padded_batch(llama: Any, batch: dict[str, Any], by: str, new_only: bool, ends: bool) -> None:
    """Padding on the left, and in the middle of rows that ended early: the mask has holes then."""
    first, second = by.split(" then ")
    hooks: dict[str, dict[str, Any]] = {"stock": {}, "ours": {"custom_generate": decoding()}}
    more = {"eos_token_id": [28, 10, 75], "pad_token_id": 0} if ends else {}
    cache = dynamic(llama)
    said = llama.generate(**batch, **TURN, **more, **hooks[first], past_key_values=cache).sequences
    prompt_length = batch["input_ids"].shape[1]
    mask = longer(batch["attention_mask"], said.shape[1] - prompt_length)
    if ends:
        mask[:, prompt_length:] = (said[:, prompt_length:] != 0).long()
        assert not mask[:, prompt_length:].all()
    whole = torch.cat([said, torch.tensor([[40, 41, 42]] * 3)], dim=1)
    mask = longer(mask, 3)
    given = whole[:, cache.get_seq_length() :] if new_only else whole
    output = llama.generate(given, attention_mask=mask, **TURN, **hooks[second], past_key_values=cache)
    anew = llama.generate(whole, attention_mask=mask, **TURN)
    assert output_of({"input_ids": given}, output) == output_of({"input_ids": whole}, anew)
    same_cache(anew.past_key_values, cache, longer(mask, 11))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.thinned(1, most=1)
def test_long_conversation_of_a_sliding_model(
    both: Any, name: str, implementation: str | None, request: pytest.FixtureRequest
) -> None:
    """Many windows long; the cache of a sliding layer has forgotten all but the last."""
    model = request.getfixturevalue(name)
    make = (lambda: dynamic(model)) if implementation is None else (lambda: static(model))
    caches, whole = (make(), make()), torch.tensor([LONG])
    for turn in range(4):
        made = iter(caches)
        pair = both(
            model,
            {"input_ids": whole, "attention_mask": torch.ones_like(whole)},
            fresh=lambda made=made: {"past_key_values": next(made)},
            max_new_tokens=9,
        ).same()
        same_cache(*caches)
        whole = torch.cat([pair.tokens, torch.tensor([[7, 7 + turn, 3]])], dim=1)
    assert whole.shape[1] > 6 * 8


def test_sampling_goes_on_with_a_cache(both: Any, llama: Any, prompt: dict[str, Any]) -> None:
    cache = llama.generate(**prompt, **TURN).past_key_values
    whole = torch.cat([prompt["input_ids"], torch.tensor([[1] * 12])], dim=1)
    both(
        llama,
        {"input_ids": whole, "attention_mask": torch.ones_like(whole)},
        fresh=lambda: {"past_key_values": copy.deepcopy(cache)},
        max_new_tokens=12,
        do_sample=True,
        repetition_penalty=1.2,
    ).same()


# What cannot be continued


def test_cache_that_is_longer_than_the_prompt(llama: Any, prompt: dict[str, Any]) -> None:
    cache = llama.generate(**prompt, **TURN).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values holds \d+ tokens and the prompt \d+"):
        llama.generate(**prompt, max_new_tokens=4, past_key_values=cache, custom_generate=decoding())


def test_cache_of_another_batch(llama: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """Stock fails deep in a layer; here one line says why."""
    cache = llama.generate(**prompt, **TURN).past_key_values
    whole = torch.cat([batch["input_ids"], torch.full((3, 12), 5)], dim=1)
    mask = longer(batch["attention_mask"], 12)
    with pytest.raises(ValueError, match="past_key_values"):
        llama.generate(whole, attention_mask=mask, max_new_tokens=4, past_key_values=cache, custom_generate=decoding())


def test_offloaded_cache(llama: Any, prompt: dict[str, Any]) -> None:
    """Its layers are not where the model is."""
    cache = DynamicCache(config=llama.config)
    cache.offloading = True
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache with offloading=True"):
        llama.generate(**prompt, max_new_tokens=4, past_key_values=cache, custom_generate=decoding())


def test_static_cache_that_is_too_small(llama: Any, prompt: dict[str, Any]) -> None:
    """Stock fails when it is full; so do we, and say so before the first token or after the last."""
    cache = StaticCache(config=llama.config, max_cache_len=16)
    with pytest.raises(ValueError, match="16"):
        llama.generate(**prompt, max_new_tokens=12, past_key_values=cache, custom_generate=decoding())
