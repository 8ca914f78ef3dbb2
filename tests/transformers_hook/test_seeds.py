"""`lookahead.decoding(seed=...)`: one uniform per position and row, so that the settings cannot change the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import Recorder, decoding, output_of
from transformers import LogitsProcessor, LogitsProcessorList

MANY = 14
PLAIN = {"window": 0, "guesses": 0, "budget": 1, "sources": ()}
"""Our own autoregressive decoding: a step is one token."""
SAMPLE = {"max_new_tokens": MANY, "do_sample": True, "temperature": 0.7}


def run(model: Any, inputs: dict[str, Any], seed: int, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    """The new tokens and the hook. The state of torch's generator does not matter, so it is never the same."""
    torch.seed()
    hook = decoding(seed=seed, **(settings or {}))
    return output_of(inputs, model.generate(**inputs, **{**SAMPLE, **more}, custom_generate=hook)), hook


def row(inputs: dict[str, Any], number: int) -> dict[str, Any]:
    """One row of a batch by itself, without its padding."""
    real = inputs["attention_mask"][number].bool()
    return {name: value[number : number + 1, real] for name, value in inputs.items()}


@pytest.mark.thinned(1, most=1)
def test_same_seed_same_text(llama: Any, inputs: dict[str, Any]) -> None:
    first, hook = run(llama, inputs, 5)
    assert run(llama, inputs, 5)[0] == first
    assert run(llama, inputs, 6)[0] != first
    assert output_of(inputs, llama.generate(**inputs, **SAMPLE, custom_generate=hook)) == first


def test_torchs_generator_is_left_alone(llama: Any, inputs: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    hook = decoding(seed=1)
    llama.generate(**inputs, **SAMPLE, custom_generate=hook)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2, "top_p": 0.8}, {"eos_token_id": list(range(20, 30))}])
@pytest.mark.thinned(1)
def test_settings_do_not_change_the_text(llama: Any, inputs: dict[str, Any], more: dict[str, Any]) -> None:
    ours, _ = run(llama, inputs, 3, **more)
    plain, hook = run(llama, inputs, 3, PLAIN, **more)
    assert ours == plain
    assert all(stats.steps == stats.generated_tokens for stats in hook.stats)


def test_fewer_steps(counting: Any, count_up: dict[str, Any]) -> None:
    ours, hook = run(counting, count_up, 3)
    assert ours == run(counting, count_up, 3, PLAIN)[0]
    assert hook.stats[0].compression > 2


class Nothing(LogitsProcessor):
    """A processor of the user's: rows have to move together."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(20, 30)), "pad_token_id": 1}], ids=["no eos", "eos"])
@pytest.mark.parametrize("together", ["", "streamer", "processor"])
@pytest.mark.thinned(1, most=1)
def test_row_of_a_batch_is_a_run_with_its_own_seed(
    llama: Any, batch: dict[str, Any], ends: dict[str, Any], together: str
) -> None:
    """Row i draws as a single run with `seed + i` does, also where rows have to move together."""
    how = {
        "": {},
        "streamer": {"streamer": Recorder()},
        "processor": {"logits_processor": LogitsProcessorList([Nothing()])},
    }[together]
    rows, hook = run(llama, batch, 40, **ends, **how)
    for number, text in enumerate(rows):
        alone, _ = run(llama, row(batch, number), 40 + number, **ends)
        assert text[: hook.stats[number].generated_tokens] == alone[0]


def test_several_answers_differ(llama: Any, prompt: dict[str, Any]) -> None:
    rows, _ = run(llama, prompt, 7, num_return_sequences=3)
    assert len({tuple(text) for text in rows}) == 3
    assert [run(llama, prompt, 7 + i)[0][0] for i in range(3)] == rows


def test_greedy_needs_no_seed(llama: Any, prompt: dict[str, Any], text: list[list[int]]) -> None:
    assert run(llama, prompt, 9, do_sample=False, temperature=None)[0][0] == text[0][:MANY]


def test_a_seed_and_a_generator_are_one_too_many(llama: Any, prompt: dict[str, Any]) -> None:
    """Only one of them can be drawn from; the other must not be forgotten in silence."""
    with pytest.raises(ValueError, match="generator"):
        run(llama, prompt, 9, generator=torch.Generator().manual_seed(1))
