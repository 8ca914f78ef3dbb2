"""Logits processors: each one that a GenerationConfig field makes, and the user's own, which may remember things."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow_but
from pairs import Pair, decoding, ids, output_of
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

MANY = 20


def plain(text: list[list[int]], inputs: dict[str, Any]) -> list[list[int]]:
    """What the rows say when no processor has a word."""
    return [row[:MANY] for row in text[: len(inputs["input_ids"])]]


FIELDS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 50},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "guidance_scale": {"guidance_scale": 1.7},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")},
    "watermarking_config, selfhash": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "watermarking_config, SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 1, 4], ngram_len=3)},
}
QUIET = {"renormalize_logits", "remove_invalid_values"}
"""Fields that do not change what a healthy model says when it is greedy."""


@pytest.mark.parametrize("field", slow_but(FIELDS, *FIELDS.keys() - {"watermarking_config, selfhash"}))
@pytest.mark.thinned(1, most=6)
def test_processor_of_a_field(both: Any, llama: Any, text: Any, inputs: dict[str, Any], field: str) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = both(llama, inputs, max_new_tokens=MANY, pad_token_id=1, **FIELDS[field], **wants).same()
    assert (output_of(inputs, pair.ours) != plain(text, inputs)) == (field not in QUIET)
    if len(inputs["input_ids"]) == 1 and field in (*QUIET, "repetition_penalty", "guidance_scale"):
        assert pair.compression > 1


@pytest.mark.parametrize(
    "field", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_eos_token_id"]
)
@pytest.mark.thinned(1, most=3)
def test_processor_of_a_field_about_tokens(
    both: Any, llama: Any, text: Any, inputs: dict[str, Any], field: str
) -> None:
    """Token ids that the text would have, or would not."""
    said = text[0]
    value = {
        "suppress_tokens": said[3:6],
        "begin_suppress_tokens": said[:1],
        "bad_words_ids": [[said[2]], said[5:8]],
        "sequence_bias": {(said[4],): -20.0, (said[0], said[1]): -20.0, (said[0], 33): 20.0},
        "forced_eos_token_id": 77,
    }[field]
    pair = both(llama, inputs, max_new_tokens=MANY, **{field: value}).same()
    assert output_of(inputs, pair.ours)[0] != text[0][:MANY]
    if field == "forced_eos_token_id":
        assert all(row[-1] == 77 for row in output_of(inputs, pair.ours))
        assert pair.compression > 1


@pytest.mark.parametrize("start", [[[30]], [[30], [31], [32]]], ids=["prompt", "batch"])
def test_forced_first_token(both: Any, llama: Any, start: list[list[int]]) -> None:
    """It is forced behind a prompt of one token only."""
    inputs = ids(*start)
    pair = both(llama, inputs, max_new_tokens=12, forced_bos_token_id=44, begin_suppress_tokens=[30, 31]).same()
    assert all(row[0] == 44 for row in output_of(inputs, pair.ours))


@pytest.mark.thinned(1, most=1)
def test_prefix_allowed_tokens(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    """The function is told which row of the batch it is asked about: rows have alphabets of their own."""

    def fresh() -> dict[str, Any]:
        calls: list[Any] = []

        def allowed(row: int, text: torch.Tensor) -> list[int]:
            calls.append((row, text.tolist()))
            return list(range(20 + 10 * row + len(text) % 2, 30 + 10 * row))

        allowed.calls = calls  # type: ignore[attr-defined]
        return {"prefix_allowed_tokens_fn": allowed}

    pair = both(llama, inputs, max_new_tokens=MANY, fresh=fresh).same()
    stock, ours = (made["prefix_allowed_tokens_fn"].calls for made in (pair.made_stock, pair.made_ours))
    assert ours == stock
    for row, text in enumerate(output_of(inputs, pair.ours)):
        assert all(20 + 10 * row <= token < 30 + 10 * row for token in text)
    assert pair.compression > 1


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thinned(1, most=1)
def test_guidance_with_a_negative_prompt(both: Any, llama: Any, text: Any, batch: Any, scale: float, rows: int) -> None:
    inputs = {name: value[:rows] for name, value in batch.items()}
    against = {
        "negative_prompt_ids": torch.tensor([[7, 8, 9, 20], [0, 11, 12, 13], [0, 0, 30, 31]])[:rows],
        "negative_prompt_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]])[:rows],
    }
    pair = both(llama, inputs, max_new_tokens=MANY, guidance_scale=scale, **against).same()
    assert output_of(inputs, pair.ours) != plain(text, inputs)
    assert output_of(inputs, pair.ours) != output_of(
        inputs, llama.generate(**inputs, max_new_tokens=MANY, guidance_scale=scale, do_sample=False)
    )


@pytest.mark.thinned(1, most=1)
def test_all_at_once(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    both(
        llama, inputs, max_new_tokens=MANY, do_sample=True, temperature=0.4, top_p=0.9, repetition_penalty=1.1,
        no_repeat_ngram_size=4, suppress_tokens=[5, 6], min_new_tokens=6, eos_token_id=[40, 41, 42, 43],
        pad_token_id=2, renormalize_logits=True, return_dict_in_generate=True, output_scores=True,
    ).same()  # fmt: skip


# Processors of the user's


class Flip(LogitsProcessor):
    """Remembers nothing: an odd token is not followed by an odd one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        odd = torch.arange(scores.shape[-1], device=scores.device) % 2 == 1
        return scores.masked_fill(odd & (input_ids[:, -1:] % 2 == 1), -torch.inf)


class Log(LogitsProcessor):
    """Remembers every text it was asked about; the n-th call favours token n + 20."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert not scores.is_inference()
        self.seen.append(input_ids.tolist())
        self.scores.append(scores.clone())
        scores = scores.clone()
        scores[:, 20 + len(self.seen)] += 1
        return scores


class InPlace(LogitsProcessor):
    """Changes what it is given, as it may: stock hands out a copy."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -1]] = -torch.inf
        scores[:, 60:] -= 1.5
        return scores


class Grammar(LogitsProcessor):
    """As grammar engines do: it steps through the tokens one by one, and will not hear of one behind the end."""

    def __init__(self, eos: int) -> None:
        self.eos, self.length = eos, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.length and input_ids.shape[1] != self.length + 1:
            raise RuntimeError(f"{input_ids.shape[1]} tokens after {self.length}")
        if self.length and input_ids[0, -1] == self.eos:
            raise RuntimeError("asked behind the end")
        self.length = input_ids.shape[1]
        return scores


def processors(*parts: LogitsProcessor) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(parts)}


@pytest.mark.thinned(1, most=1)
def test_processor_without_a_memory(both: Any, llama: Any, text: Any, inputs: dict[str, Any]) -> None:
    pair = both(llama, inputs, max_new_tokens=MANY, **processors(Flip())).same()
    assert output_of(inputs, pair.ours) != plain(text, inputs)
    assert pair.compression > 1


def same_log(pair: Pair) -> None:
    stock, ours = (made["logits_processor"][0] for made in (pair.made_stock, pair.made_ours))
    assert ours.seen == stock.seen
    for position, (a, b) in enumerate(zip(stock.scores, ours.scores, strict=True)):
        live = [row for row, stats in enumerate(pair.hook.stats) if stats.generated_tokens > position]
        torch.testing.assert_close(b[live], a[live], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("end", [{}, {"eos_token_id": [30, 31, 32], "pad_token_id": 1}], ids=["no eos", "eos"])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.thinned(1, most=2)
def test_processor_is_called_once_per_token(
    both: Any, llama: Any, inputs: dict[str, Any], end: Any, sample: bool
) -> None:
    """The same texts and scores in the same order, nothing of the guesses that were refused."""
    fresh = lambda: processors(Log())  # noqa: E731
    same_log(both(llama, inputs, max_new_tokens=MANY, do_sample=sample, fresh=fresh, **end).same())


def test_calls_inside_a_block(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    pair = both(counting, count_up, max_new_tokens=14, fresh=lambda: processors(Log())).same()
    same_log(pair)
    assert pair.hook.stats[0].steps == 2  # one of them is the prompt's own


@pytest.mark.parametrize("wants", [[], ["output_logits"], ["output_scores", "output_logits"]], ids=str)
@pytest.mark.thinned(1, most=1)
def test_processor_that_edits_in_place(
    both: Any, llama: Any, text: Any, inputs: dict[str, Any], wants: list[str]
) -> None:
    """Stock keeps its logits after the processors have run, edited as they are; so do we."""
    keep: dict[str, Any] = dict.fromkeys(wants, True)
    pair = both(
        llama, inputs, max_new_tokens=MANY, return_dict_in_generate=bool(wants), **keep, **processors(InPlace())
    )
    assert output_of(inputs, pair.same().ours) != plain(text, inputs)


def test_processor_that_raises_behind_the_end(both: Any, counting: Any, count_up: dict[str, Any]) -> None:
    """The end falls inside an accepted block, at every place of it."""
    for eos in range(11, 28, 8):
        pair = both(
            counting, count_up, max_new_tokens=MANY, eos_token_id=eos, fresh=lambda e=eos: processors(Grammar(e))
        )
        assert output_of(count_up, pair.same().ours) == [list(range(11, eos + 1))]


def test_error_of_a_processor_comes_through(llama: Any, prompt: dict[str, Any]) -> None:
    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llama.generate(**prompt, logits_processor=LogitsProcessorList([fail]), custom_generate=decoding())


def test_processor_of_the_user_in_place_of_a_field(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """Stock lets a processor of the user's replace one of the same class; what arrives is the list that came of it."""
    from transformers import RepetitionPenaltyLogitsProcessor

    mine = processors(RepetitionPenaltyLogitsProcessor(1.9))
    pair = both(llama, batch, max_new_tokens=MANY, repetition_penalty=1.1, **mine).same()
    assert pair.tokens.tolist() != llama.generate(**batch, max_new_tokens=MANY, repetition_penalty=1.1).tolist()
