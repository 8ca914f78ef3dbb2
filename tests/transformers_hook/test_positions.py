"""Contexts that end: a table of learned positions, rotary positions that do not end, factors that change midway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import decoding, ids, output_of

PROMPT = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1]
"""10 tokens; gpt2 has 32 positions."""


@pytest.mark.parametrize("count", [20, 21, 22])
@pytest.mark.thinned(1, most=1)
def test_up_to_the_last_learned_position(both: Any, gpt2: Any, count: int) -> None:
    """A window or guess that would stand behind the last position is left out, not looked up."""
    both(gpt2, ids(PROMPT), max_new_tokens=count).same()
    both(gpt2, ids(PROMPT, PROMPT[:4], PROMPT[:1]), max_new_tokens=count).same()


def test_one_token_more_needs_no_position(both: Any, gpt2: Any) -> None:
    """The last token is never run: stock gives 23 after 10, with 32 positions."""
    both(gpt2, ids(PROMPT), max_new_tokens=23).same()
    both(gpt2, ids([*range(1, 33)]), max_new_tokens=1).same()


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.1}, {"do_sample": True}], ids=str)
@pytest.mark.thinned(1, most=1)
def test_past_the_last_learned_position(gpt2: Any, more: dict[str, Any]) -> None:
    """Stock fails in the embedding table, with an IndexError."""
    with pytest.raises(IndexError):
        gpt2.generate(**ids(PROMPT), max_new_tokens=24, **more)
    with pytest.raises(ValueError, match=r"32 positions.*max_new_tokens"):
        gpt2.generate(**ids(PROMPT), max_new_tokens=24, **more, custom_generate=decoding())


def test_end_before_the_last_learned_position(both: Any, gpt2: Any) -> None:
    """A limit that is never reached is nobody's mistake."""
    text = output_of(ids(PROMPT), gpt2.generate(**ids(PROMPT), max_new_tokens=20, do_sample=False))[0]
    pair = both(gpt2, ids(PROMPT), max_new_tokens=100, eos_token_id=text[8], pad_token_id=0).same()
    assert pair.hook.stats[0].generated_tokens <= 9


def test_prompt_longer_than_the_positions(gpt2: Any) -> None:
    with pytest.raises(ValueError, match=r"33 tokens.*32"):
        gpt2.generate(**ids([7] * 33), max_new_tokens=1, custom_generate=decoding())


def test_rotary_positions_do_not_end(both: Any, make_model: Any, prompt: dict[str, Any]) -> None:
    model = make_model(eos_token_id=None, max_position_embeddings=16)
    pair = both(model, prompt, max_new_tokens=60).same()
    assert pair.compression > 1


def test_longrope_below_its_first_context(both: Any, phi3: Any) -> None:
    both(phi3, ids(PROMPT), max_new_tokens=22).same()


def test_longrope_beyond_its_first_context(phi3: Any) -> None:
    """The factors change for every token of a pass that reaches further: refused before the first token."""
    hook = decoding()
    with pytest.raises(ValueError, match=r"'phi3'.*32 positions.*longrope"):
        phi3.generate(**ids(PROMPT), max_new_tokens=40, custom_generate=hook)
    assert not hook.stats


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.thinned(1, most=1)
def test_scaled_rotary_positions(both: Any, make_model: Any, prompt: dict[str, Any], kind: str) -> None:
    """Factors that are the same for every position are no obstacle."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": 16}
    model = make_model(eos_token_id=None, max_position_embeddings=64, rope_parameters=rope)
    assert torch.is_tensor(both(model, prompt, max_new_tokens=24).same().ours)
