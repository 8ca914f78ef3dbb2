"""The references that tests remember: a model that would say something else is never taken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stock import fingerprint, greedy_text
from tiny import PROMPTS, tiny


def test_equal_models_are_one() -> None:
    assert fingerprint(tiny("Llama")) == fingerprint(tiny("Llama")) != ""


@pytest.mark.parametrize("change", ["weight", "buffer", "config", "generation", "dtype", "attention", "class"])
def test_what_decides_the_text_is_seen(change: str) -> None:
    model = tiny("Llama")
    before = fingerprint(model)
    if change == "weight":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    elif change == "buffer":
        model.model.rotary_emb.inv_freq += 1e-6
    elif change == "config":
        model.config.rms_norm_eps = 1e-3
    elif change == "generation":
        model.generation_config.eos_token_id = 7
    elif change == "dtype":
        model = model.double()
    elif change == "attention":
        model.set_attn_implementation("eager")
    else:
        model.__class__ = type("Other", (type(model),), {})
    assert fingerprint(model) != before


def test_a_shorter_text_begins_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is what the model says when it is asked for that many tokens; after an end there is no more."""
    model = tiny("Llama", seed=23)
    asked: list[int] = []
    generate = model.generate

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(options["max_new_tokens"])
        return generate(*args, **options)

    monkeypatch.setattr(model, "generate", counted)
    texts = {count: greedy_text(model, PROMPTS[0], count) for count in (9, 20, 5, 20)}
    assert asked == [9, 20]
    for count, text in texts.items():
        prompt = torch.tensor([PROMPTS[0]])
        mask = torch.ones_like(prompt)
        output = generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        assert text == output[0, len(PROMPTS[0]) :].tolist()
    model.generation_config.eos_token_id = texts[20][3]
    ended = greedy_text(model, PROMPTS[0], 9)
    assert ended == texts[20][: texts[20].index(texts[20][3]) + 1]
    assert greedy_text(model, PROMPTS[0], 30) == ended
    assert asked == [9, 20, 9]
