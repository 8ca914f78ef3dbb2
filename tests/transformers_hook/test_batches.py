"""Batches: padding on the left, holes in the mask, masks that are inferred, prompts that are run in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import Pair, decoding, ids, output_of
from tiny import tiny

MANY = 14
LONG = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1, 5, 9, 2, 44, 17, 3, 30, 8, 8, 12]
FAMILIES = ["llama", "gpt2", "mistral", "gemma"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def alone(model: Any, pair: Pair, inputs: dict[str, Any], count: int) -> None:
    """Every row says what it says by itself, without padding."""
    for row, text in enumerate(output_of(inputs, pair.ours)):
        single = inputs["input_ids"][row, inputs["attention_mask"][row].bool()][None]
        own = model.generate(single, attention_mask=torch.ones_like(single), max_new_tokens=count, do_sample=False)
        assert text == own[0, single.shape[1] :].tolist()


@pytest.mark.thinned(1, most=2)
def test_padding_on_the_left(both: Any, model: Any) -> None:
    inputs = ids(LONG, LONG[:1], LONG[4:9], LONG[2:18])
    pair = both(model, inputs, max_new_tokens=12).same()
    alone(model, pair, inputs, 12)


def test_rows_part(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """Rows accept different numbers of tokens per step, and need different numbers of steps."""
    pair = both(llama, batch, max_new_tokens=40).same()
    assert pair.compression > 1
    assert len({stats.steps for stats in pair.hook.stats}) > 1


def test_padding_that_is_a_word(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """What the mask hides is not looked at, whatever id stands there; the output shows it as it was given."""
    inputs = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 57)}
    pair = both(llama, inputs, max_new_tokens=MANY).same()
    assert torch.equal(pair.tokens[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.thinned(1, most=1)
def test_mask_of_another_type(both: Any, llama: Any, batch: dict[str, Any], kind: torch.dtype) -> None:
    both(llama, {**batch, "attention_mask": batch["attention_mask"].to(kind)}, max_new_tokens=MANY).same()


def holes() -> dict[str, Any]:
    inputs = ids(LONG, LONG[5:], LONG)
    for row, place in ((0, 3), (0, 4), (1, 9), (2, 0), (2, 15)):
        inputs["attention_mask"][row, place] = 0
    return inputs


@pytest.mark.thinned(1, most=1)
def test_holes_in_the_mask(both: Any, model: Any) -> None:
    """A token that is hidden has no place in its row: those behind it stand one position nearer.

    A sliding layer of stock counts the window in places of the cache, hidden ones included, though positions leave them
    out; we do not follow it there.
    """
    if getattr(model.config, "sliding_window", None) is not None:
        with pytest.raises(ValueError, match=r"sliding window.*padding_side='left'"):
            model.generate(**holes(), max_new_tokens=12, custom_generate=decoding())
        return
    alone(model, both(model, holes(), max_new_tokens=12).same(), holes(), 12)


def test_mask_left_out(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """Without a padding token every token is seen; with one the mask is inferred, unless it is the end token, too."""
    bare = {"input_ids": batch["input_ids"]}
    seen = both(llama, bare, max_new_tokens=MANY).same()
    inferred = both(llama, bare, max_new_tokens=MANY, pad_token_id=0).same()
    both(llama, bare, max_new_tokens=MANY, pad_token_id=0, eos_token_id=0).same()
    assert seen.tokens.tolist() != inferred.tokens.tolist()
    assert inferred.tokens.tolist() == both(llama, batch, max_new_tokens=MANY).tokens.tolist()


@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.thinned(1, most=1)
def test_padding_on_the_right(both: Any, llama: Any, batch: dict[str, Any], given: bool, more: dict[str, Any]) -> None:
    """Stock warns and goes on behind the padding; so do we."""
    inputs = {name: value.flip(1) for name, value in batch.items() if given or name == "input_ids"}
    both(llama, inputs, max_new_tokens=MANY, pad_token_id=0, **more).same()


def test_padding_on_the_right_of_learned_positions(both: Any, gpt2: Any) -> None:
    inputs = ids([5, 9, 2, 5, 9, 2, 5], [4, 4, 6])
    both(gpt2, {name: value.flip(1) for name, value in inputs.items()}, max_new_tokens=12).same()


def test_padding_on_the_right_of_a_sliding_layer(mistral: Any) -> None:
    inputs = {name: value.flip(1) for name, value in ids([5, 9, 2, 5, 9, 2, 5], [4, 4, 6]).items()}
    with pytest.raises(ValueError, match=r"sliding window.*padding_side='left'"):
        mistral.generate(**inputs, max_new_tokens=4, custom_generate=decoding())


def test_padding_on_the_right_of_local_layers() -> None:
    """GPT-Neo's config has other names for its windows."""
    local = {"attention_types": [[["global", "local"], 1]], "window_size": 4}
    model = tiny("GPTNeo", **local)
    inputs = {name: value.flip(1) for name, value in ids([5, 9, 2, 5, 9, 2, 5], [4, 4, 6]).items()}
    same_or_refused("padding_side='left'", model, inputs)


def same_or_refused(says: str, model: Any, inputs: dict[str, Any], **kwargs: Any) -> None:
    """The promise where the call itself is doubtful: what stock makes of it, or a message; never other tokens."""
    options = {"max_new_tokens": 8, "do_sample": False, **kwargs}
    try:
        ours = model.generate(**inputs, **options, custom_generate=decoding())
    except ValueError as error:
        assert says in str(error)  # noqa: PT017
    else:
        assert ours.tolist() == model.generate(**inputs, **options).tolist()


@pytest.mark.parametrize("change", [3, -3], ids=["longer", "shorter"])
@pytest.mark.parametrize("hidden", [False, True], ids=["all seen", "some hidden"])
def test_mask_of_another_length(llama: Any, prompt: dict[str, Any], change: int, hidden: bool) -> None:
    """Without a cache there is no text before the prompt that it could be about. Stock fails in a layer if it is
    shorter; if longer, it hides what the first places hide."""
    mask = torch.ones(1, prompt["input_ids"].shape[1] + change, dtype=torch.long)
    mask[0, 0] = 0 if hidden else 1
    same_or_refused("attention_mask", llama, {**prompt, "attention_mask": mask})


@pytest.mark.parametrize("change", [3, -3], ids=["longer", "shorter"])
def test_mask_of_another_length_with_a_cache(llama: Any, prompt: dict[str, Any], change: int) -> None:
    """It is as long as the prompt, or as cache and prompt together."""
    first = llama.generate(**prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    mask = torch.ones(1, cache.get_seq_length() + 5 + change, dtype=torch.long)
    inputs = {"input_ids": torch.tensor([[30, 31, 32, 33, 34]]), "attention_mask": mask, "past_key_values": cache}
    with pytest.raises(ValueError, match="attention_mask"):
        llama.generate(**inputs, max_new_tokens=8, custom_generate=decoding())


def test_everything_hidden_is_refused(llama: Any) -> None:
    inputs = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}
    with pytest.raises(ValueError, match="row 1"):
        llama.generate(**inputs, max_new_tokens=4, custom_generate=decoding())


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.thinned(1, most=1)
def test_prefill_in_pieces(both: Any, model: Any, size: int) -> None:
    pair = both(model, ids(LONG), max_new_tokens=12, prefill_chunk_size=size).same()
    plain = model.generate(**ids(LONG), max_new_tokens=12, do_sample=False)
    assert pair.tokens.tolist() == plain.tolist()


def test_prefill_of_a_batch_in_pieces(both: Any, llama: Any, batch: dict[str, Any], text: list[list[int]]) -> None:
    """Stock computes the mask of a padding-only piece wrongly for no row that matters: the last piece decides."""
    pair = both(llama, batch, max_new_tokens=MANY, prefill_chunk_size=4)
    assert output_of(batch, pair.ours) == [row[:MANY] for row in text]


def healing(tokenizer: Any) -> Any:
    """A tokenizer as stock's healing wants it: with padding, on the left, and a beginning of text."""
    special = {"eos_token": "<|end|>", "pad_token": "<|user|>", "bos_token": "<|assistant|>"}
    made = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, **special)
    made.padding_side = "left"
    return made


@pytest.mark.parametrize("words", [["the quick bro"], ["the quick bro", "once more the d", "def f"]], ids=["1", "3"])
@pytest.mark.thinned(1, most=1)
def test_token_healing(both: Any, llama: Any, tokenizer: Any, words: list[str]) -> None:
    """Stock replaces the last token of each prompt by a longer one that begins alike, before it decodes."""
    inputs = ids(*(tokenizer(word).input_ids for word in words), pad=1)
    options = {"token_healing": True, "tokenizer": healing(tokenizer), "pad_token_id": 1}
    pair = both(llama, inputs, max_new_tokens=12, **options).same()
    assert not torch.equal(pair.tokens[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


@pytest.mark.parametrize("words", [["the quick brown fox  "], ["the quick brown fox  ", "once"]], ids=["1", "2"])
def test_token_healing_that_shortens_the_prompt(llama: Any, tokenizer: Any, words: list[str]) -> None:
    """White space at the end is cut off: the prompt that is decoded is shorter than the mask that was given."""
    inputs = ids(*(tokenizer(word).input_ids for word in words), pad=1)
    options = {"token_healing": True, "tokenizer": healing(tokenizer), "pad_token_id": 1}
    same_or_refused("attention_mask", llama, inputs, **options)


def test_many_rows(both: Any, llama: Any) -> None:
    """More rows than fit any small buffer, of every length from 1 on, ending at different places."""
    inputs = ids(*([10 + (7 * row + i) % 90 for i in range(1 + row)] for row in range(17)))
    pair = both(llama, inputs, max_new_tokens=12, eos_token_id=list(range(60, 80)), pad_token_id=3).same()
    assert len({stats.generated_tokens for stats in pair.hook.stats}) > 3
