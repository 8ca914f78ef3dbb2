"""How long the output gets: limits from above and below, also where one falls inside an accepted block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pairs import blocks, decoding, inside, output_of
from transformers import GenerationConfig


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
@pytest.mark.thinned(1, most=2)
def test_max_new_tokens(both: Any, llama: Any, inputs: dict[str, Any], count: int) -> None:
    pair = both(llama, inputs, max_new_tokens=count).same()
    assert all(len(row) == count for row in output_of(inputs, pair.ours))
    if count == 32:
        assert pair.compression > 1


@pytest.mark.thinned(1, most=1)
def test_max_length_counts_the_prompt(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    limit = inputs["input_ids"].shape[1] + 9
    assert both(llama, inputs, max_length=limit).same().tokens.shape[1] == limit


def test_max_new_tokens_goes_before_max_length(both: Any, llama: Any, prompt: dict[str, Any]) -> None:
    assert len(output_of(prompt, both(llama, prompt, max_length=100, max_new_tokens=6).same().ours)[0]) == 6


def test_twenty_tokens_without_a_limit(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    assert len(output_of(batch, both(llama, batch).same().ours)[0]) == 20


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 15, 16, 17, 18, 19])
@pytest.mark.thinned(1, most=3)
def test_limit_at_every_place_of_a_block(both: Any, counting: Any, count_up: dict[str, Any], count: int) -> None:
    """The suffix source gives 16 right guesses at once; whatever the limit, not a token more comes out."""
    pair = both(counting, count_up, max_new_tokens=count).same()
    assert output_of(count_up, pair.ours) == [list(range(11, 11 + count))]
    assert pair.hook.stats[0].steps <= 2 + (count - 1) // 17  # the prompt's own pass gives one


def test_limit_inside_a_block_of_a_batch(both: Any, llama: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    count = inside(blocks(llama, prompt, max_new_tokens=40))
    assert both(llama, batch, max_new_tokens=count).same()


@pytest.mark.parametrize(
    "least",
    [{"min_new_tokens": 12}, {"min_length": 40}, {"min_new_tokens": 12, "min_length": 3}, {"min_new_tokens": 30}],
)
@pytest.mark.thinned(1, most=1)
def test_least_length(both: Any, llama: Any, inputs: dict[str, Any], least: dict[str, int], text: Any) -> None:
    """The end token comes early, and is not to be chosen yet."""
    eos = text[0][4]
    pair = both(llama, inputs, max_new_tokens=30, eos_token_id=eos, pad_token_id=0, **least).same()
    assert pair.hook.stats[0].generated_tokens > 5
    assert pair.compression > 1


def test_limits_in_a_generation_config(both: Any, llama: Any, prompt: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=11, do_sample=False)
    assert len(output_of(prompt, both(llama, prompt, generation_config=config).same().ours)[0]) == 11


def test_limits_of_the_model_itself(both: Any, llama: Any, prompt: dict[str, Any], text: Any) -> None:
    """A model's `generation_config.json` sets what the call does not."""
    model = copy.copy(llama)
    model.generation_config = GenerationConfig(max_new_tokens=13, repetition_penalty=1.3)
    said = output_of(prompt, both(model, prompt).same().ours)[0]
    assert len(said) == 13
    assert said != text[0][:13]


def test_no_room_at_all_is_refused_as_ever(llama: Any, prompt: dict[str, Any]) -> None:
    for hook in ({}, {"custom_generate": decoding()}):
        with pytest.raises(ValueError, match="`max_length` is set to 3"):
            llama.generate(**prompt, max_length=3, **hook)
        with pytest.raises(ValueError, match="`max_new_tokens` must be greater than 0"):
            llama.generate(**prompt, max_new_tokens=0, **hook)
