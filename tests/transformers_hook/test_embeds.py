"""`inputs_embeds`: a prompt without ids, or with ids that are there to be looked at only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import Recorder, decoding, output_of
from transformers import DynamicCache

MANY = 14


def embedded(model: Any, inputs: dict[str, Any], *, keep_ids: bool = False) -> dict[str, Any]:
    """The same prompt as embeddings, a little off any token's."""
    with torch.no_grad():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        embeds = embeds + 0.3 * embeds.roll(1, dims=-1)
    ids = {"input_ids": inputs["input_ids"]} if keep_ids else {}
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], **ids}


@pytest.mark.parametrize("keep_ids", [False, True], ids=["alone", "with ids"])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "temperature": 0.7}], ids=str)
@pytest.mark.thinned(1, most=2)
def test_embeds(both: Any, llama: Any, inputs: dict[str, Any], keep_ids: bool, more: dict[str, Any], text: Any) -> None:
    """Alone, the output is the new tokens only, and processors see no prompt."""
    pair = both(llama, embedded(llama, inputs, keep_ids=keep_ids), max_new_tokens=MANY, **more).same()
    assert pair.tokens.shape[1] == MANY + (inputs["input_ids"].shape[1] if keep_ids else 0)
    assert pair.tokens[:, -MANY:].tolist() != [row[:MANY] for row in text[: len(pair.tokens)]]


@pytest.mark.parametrize(
    "ends", [{"max_new_tokens": 1}, {"max_new_tokens": 6, "eos_token_id": list(range(200))}], ids=str
)
@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
@pytest.mark.thinned(1, most=3)
def test_the_first_token_is_the_last(
    both: Any, llama: Any, inputs: dict[str, Any], ends: dict[str, Any], given: bool
) -> None:
    """Nothing is decoded after the embeddings' own pass, and the cache holds what that pass left."""

    def fresh() -> dict[str, Any]:
        return {"past_key_values": DynamicCache(config=llama.config)} if given else {}

    options = {"pad_token_id": 0, "return_dict_in_generate": True, **ends}
    pair = both(llama, embedded(llama, inputs), fresh=fresh, **options).same()
    stock, ours = (one.past_key_values for one in (pair.stock, pair.ours))
    assert ours.get_seq_length() == stock.get_seq_length() == inputs["attention_mask"].shape[1]
    torch.testing.assert_close(ours.layers[0].keys, stock.layers[0].keys)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma"])
@pytest.mark.thinned(1, most=1)
def test_families(both: Any, name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    ids = torch.tensor([[5, 9, 2, 5, 9, 2, 5, 9, 7, 1], [0, 0, 0, 3, 4, 5, 3, 4, 5, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    both(model, embedded(model, inputs), max_new_tokens=20).same()


def test_fewer_steps(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    inputs = embedded(counting, count_up, keep_ids=True)
    pair = both(counting, inputs, max_new_tokens=MANY).same()
    assert pair.compression > 2


@pytest.mark.parametrize("keep_ids", [False, True], ids=["alone", "with ids"])
@pytest.mark.parametrize("limit", [{"max_length": 25}, {"max_length": 25, "min_length": 20}, {}], ids=str)
@pytest.mark.thinned(1, most=2)
def test_lengths(both: Any, llama: Any, prompt: dict[str, Any], keep_ids: bool, limit: dict[str, int]) -> None:
    """`generate` counts the embeddings as prompt."""
    ends = {"eos_token_id": list(range(40, 80)), "pad_token_id": 0}
    both(llama, embedded(llama, prompt, keep_ids=keep_ids), **limit, **ends).same()


def test_end_tokens_stop_strings_and_streamer(both: Any, llama: Any, batch: dict[str, Any], tokenizer: Any) -> None:
    pair = both(
        llama,
        embedded(llama, batch),
        max_new_tokens=MANY,
        eos_token_id=list(range(40, 50)),
        pad_token_id=0,
        stop_strings=["x", "fox"],
        tokenizer=tokenizer,
        fresh=lambda: {"streamer": Recorder()},
    ).same()
    stock, ours = (made["streamer"].puts for made in (pair.made_stock, pair.made_ours))
    assert [put.tolist() for put in ours] == [put.tolist() for put in stock]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.thinned(1, most=1)
def test_outputs(both: Any, llama: Any, inputs: dict[str, Any], static: bool) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    implementation = "static" if static else None
    pair = both(llama, embedded(llama, inputs), max_new_tokens=12, cache_implementation=implementation, **wants).same()
    stock, ours = pair.stock.past_key_values, pair.ours.past_key_values
    assert ours.get_seq_length() == stock.get_seq_length() == inputs["input_ids"].shape[1] + 11
    real = torch.nn.functional.pad(inputs["attention_mask"], (0, 11), value=1).bool()
    for a, b in zip(stock.layers, ours.layers, strict=True):
        for mine, theirs in ((b.keys, a.keys), (b.values, a.values)):
            assert not mine.is_inference()
            for row, slots in enumerate(real):
                held = len(slots)
                torch.testing.assert_close(
                    mine[row, :, :held][:, slots], theirs[row, :, :held][:, slots], rtol=1e-4, atol=1e-4
                )


def test_second_turn(llama: Any, prompt: dict[str, Any]) -> None:
    """All embeddings again, and the cache of the first turn."""
    first = embedded(llama, prompt)
    results = []
    for hook in ({}, {"custom_generate": decoding()}):
        cache = DynamicCache(config=llama.config)
        said = llama.generate(**first, max_new_tokens=8, do_sample=False, past_key_values=cache, **hook)
        with torch.no_grad():
            new = llama.get_input_embeddings()(torch.cat([said, torch.tensor([[30, 31]])], dim=1))
        embeds = torch.cat([first["inputs_embeds"], new], dim=1)
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        again = {"inputs_embeds": embeds, "attention_mask": mask, "past_key_values": cache}
        results.append(llama.generate(**again, max_new_tokens=8, do_sample=False, **hook).tolist())
    assert results[1] == results[0]


def test_seeds(llama: Any, batch: dict[str, Any]) -> None:
    """Row i of a batch is a run by itself with seed + i."""
    sampled = {"max_new_tokens": 12, "do_sample": True}
    whole = llama.generate(**embedded(llama, batch), **sampled, custom_generate=decoding(seed=4))
    for row in range(3):
        real = batch["attention_mask"][row].bool()
        single = {name: value[row : row + 1, real] for name, value in batch.items()}
        own = llama.generate(**embedded(llama, single), **sampled, custom_generate=decoding(seed=4 + row))
        assert own[0].tolist() == whole[row].tolist()


def test_prefill_in_pieces(llama: Any, prompt: dict[str, Any]) -> None:
    """Stock splits ids and not embeddings, and fails; in one piece or several, the tokens are those of one."""
    expected = llama.generate(**embedded(llama, prompt), max_new_tokens=12, do_sample=False)
    options = {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 4, "custom_generate": decoding()}
    assert llama.generate(**embedded(llama, prompt), **options).tolist() == expected.tolist()


def test_learned_positions_end(gpt2: Any) -> None:
    ids = torch.tensor([[5, 9, 2, 5, 9, 2, 5, 9, 7, 1]])
    inputs = embedded(gpt2, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    with pytest.raises(ValueError, match=r"32 positions.*max_new_tokens"):
        gpt2.generate(**inputs, max_new_tokens=30, custom_generate=decoding())


def test_output_of_is_about_ids(llama: Any, prompt: dict[str, Any], text: list[list[int]]) -> None:
    """Exact embeddings say what the ids say."""
    with torch.no_grad():
        embeds = llama.get_input_embeddings()(prompt["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": prompt["attention_mask"], "input_ids": prompt["input_ids"]}
    output = llama.generate(**inputs, max_new_tokens=MANY, do_sample=False, custom_generate=decoding())
    assert output_of(prompt, output)[0] == text[0][:MANY]
