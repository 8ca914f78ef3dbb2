"""`output_hidden_states` and `output_attentions`: one entry per token, as `generate` returns them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import decoding, ids
from tiny import tiny

PROMPT = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9])
ROWS = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9], [4, 8, 4, 8], [3])
BOTH = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}

MORE = pytest.mark.parametrize(
    "more", [{}, {"do_sample": True}, pytest.param({"repetition_penalty": 1.3}, marks=pytest.mark.slow)], ids=str
)


@pytest.fixture(params=["Llama", "GPT2"])
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny(request.param, seed=0)
    made.set_attn_implementation("eager")
    return made


@pytest.mark.parametrize("inputs", [PROMPT, ROWS], ids=["one row", "three rows"])
@MORE
@pytest.mark.thinned(1)
def test_every_token_has_its_own(both: Any, model: Any, inputs: dict[str, Any], more: dict[str, Any]) -> None:
    found = both(model, inputs, max_new_tokens=16, pad_token_id=0, **BOTH, **more).same()
    assert found.compression > 1 or more
    for name in ("hidden_states", "attentions"):
        stock, ours = getattr(found.stock, name), getattr(found.ours, name)
        assert len(ours) == len(stock) == 16
        for position, (one, other) in enumerate(zip(stock, ours, strict=True)):
            assert len(one) == len(other)
            for theirs, own in zip(one, other, strict=True):
                if position:  # the prompt's padding has values that mean nothing
                    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
                assert own.shape == theirs.shape


def test_a_row_that_ends_early_has_zeros(both: Any) -> None:
    model = tiny("Llama", seed=0)
    text = model.generate(**ROWS, max_new_tokens=16, do_sample=False, pad_token_id=0)[1, -16:].tolist()
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "pad_token_id": 0}
    found = both(model, ROWS, max_new_tokens=16, eos_token_id=text[4], **options).same()
    assert len(found.ours.hidden_states) == len(found.stock.hidden_states)
    ended = next(row for row, stats in enumerate(found.hook.stats) if stats.generated_tokens < 16)
    assert not found.ours.hidden_states[-1][0][ended].any()


def test_only_one_of_them(both: Any) -> None:
    found = both(tiny("Llama", seed=0), PROMPT, return_dict_in_generate=True, output_hidden_states=True).same()
    assert found.ours.attentions is None
    assert found.ours.hidden_states is not None


def test_nothing_is_kept_that_nobody_gets(both: Any) -> None:
    both(tiny("Llama", seed=0), PROMPT, max_new_tokens=8, output_hidden_states=True).same()


def test_weights_of_a_sliding_layer_are_refused(mistral: Any) -> None:
    mistral.set_attn_implementation("eager")
    try:
        with pytest.raises(ValueError, match=r"output_attentions=True cannot be given.*sliding window"):
            mistral.generate(**PROMPT, max_new_tokens=4, **BOTH, custom_generate=decoding())
    finally:
        mistral.set_attn_implementation("sdpa")
