"""Sampling: after the same `torch.manual_seed` the tokens of stock `generate`, whatever reshapes the distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import decoding, output_of

from lookahead.transformers_hook import draws

MANY = 16
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 3e-4},
}


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.thinned(1, most=3)
def test_warper(both: Any, llama: Any, inputs: dict[str, Any], warper: str) -> None:
    """The kept scores show that it was at work: something was cut off, or all was stretched."""
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = both(llama, inputs, max_new_tokens=MANY, do_sample=True, **{"top_k": 0, **WARPERS[warper]}, **wants).same()
    kept, raw = torch.stack(pair.ours.scores), torch.stack(pair.ours.logits)
    if warper == "temperature":
        torch.testing.assert_close(kept, raw / 0.3)
        assert pair.compression > 1 or len(inputs["input_ids"]) > 1
    else:
        assert kept.isneginf().any()


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.thinned(1, most=3)
def test_a_whole_tree_is_drawn_at_once(
    both: Any, llama: Any, inputs: dict[str, Any], warper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is kept, the processors see a step's nodes together, and each position's draw is stock's."""
    drawn = []
    draw = draws.TreeSampler._draw
    monkeypatch.setattr(draws.TreeSampler, "_draw", lambda self: drawn.append(1) or draw(self))
    options = {"max_new_tokens": MANY, "do_sample": True, "top_k": 0, "pad_token_id": 0, **WARPERS[warper]}
    pair = both(llama, inputs, eos_token_id=[3, 9, 27], **options).same()
    assert drawn
    assert pair.hook.stats[0].generated_tokens <= MANY


@pytest.mark.parametrize("levels", [1, 2, 4, 50])
@pytest.mark.thinned(1, most=2)
def test_draws_at_any_depths(
    both: Any, counting: Any, count_up: dict[str, Any], levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long blocks need several draws; the tokens and the generator's state do not depend on how they are cut."""
    monkeypatch.setattr(draws, "LEVELS", levels)
    pair = both(counting, count_up, max_new_tokens=30, do_sample=True, temperature=0.5, seed=3).same()
    assert pair.compression > 4


@pytest.mark.thinned(1, most=1)
def test_seeds(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    """Another seed, another text, the same as stock's; and torch's generator is left as stock leaves it (`both`)."""
    texts = [
        both(llama, inputs, max_new_tokens=MANY, do_sample=True, seed=seed).same().tokens.tolist() for seed in range(3)
    ]
    assert all(text not in texts[:number] for number, text in enumerate(texts))


def test_guesses_are_accepted_while_sampling(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    """A text that mostly counts on, with a slip now and then."""
    sampled = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7}
    pairs = [both(counting, count_up, **sampled, seed=seed).same() for seed in range(2)]
    assert any(pair.compression > 4 for pair in pairs)
    assert any(output_of(count_up, pair.ours)[0] != list(range(11, 41)) for pair in pairs)


def test_rows_that_end(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """Stock draws for rows that have ended, too; the draws of the others must not shift."""
    ends = {"eos_token_id": list(range(20, 30)), "pad_token_id": 1}
    pair = both(llama, batch, max_new_tokens=30, do_sample=True, seed=3, **ends).same()
    assert len({stats.generated_tokens for stats in pair.hook.stats}) > 1


@pytest.mark.thinned(1, most=1)
def test_several_answers(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    pair = both(llama, inputs, max_new_tokens=MANY, do_sample=True, num_return_sequences=3, temperature=0.7).same()
    rows = output_of(inputs, pair.ours)
    assert len(rows) == 3 * len(inputs["input_ids"])
    assert rows[0] != rows[1]


@pytest.mark.thinned(1, most=1)
def test_generator(llama: Any, inputs: dict[str, Any]) -> None:
    """`generator=` takes the place of torch's own, which it leaves alone. Stock `generate` has no such argument."""
    torch.manual_seed(11)
    stock = llama.generate(**inputs, max_new_tokens=MANY, do_sample=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    source = torch.Generator().manual_seed(11)
    ours = llama.generate(**inputs, max_new_tokens=MANY, do_sample=True, generator=source, custom_generate=decoding())
    assert ours.tolist() == stock.tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_draws_nothing(llama: Any, prompt: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    llama.generate(**prompt, max_new_tokens=4, do_sample=False, custom_generate=decoding())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.thinned(1, most=1)
def test_one_token_and_one_choice(both: Any, llama: Any, inputs: dict[str, Any], text: list[list[int]]) -> None:
    pair = both(llama, inputs, max_new_tokens=MANY, do_sample=True, top_k=1).same()
    assert output_of(inputs, pair.ours) == [row[:MANY] for row in text[: len(inputs["input_ids"])]]


def test_errors_of_the_warpers_come_through(llama: Any, prompt: dict[str, Any]) -> None:
    for hook in ({}, {"custom_generate": decoding()}):
        with pytest.raises(ValueError, match="strictly positive float"):
            llama.generate(**prompt, max_new_tokens=4, do_sample=True, temperature=0.0, **hook)
