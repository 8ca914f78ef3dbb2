"""A sequence that is continued by another engine, after any of its tokens, gives the text of one that was not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.text import SharedTokenizer, StopStrings
from lookahead.serve.keys import KeyRing
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.scoring import ForcedText

TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7),
    "sampled": SamplingParams(temperature=1.3, seed=5),
    "sampled, filters, penalties, bias": SamplingParams(
        temperature=1.2, top_k=40, top_p=0.95, seed=7, frequency_penalty=0.5, logit_bias={3: 2.0}, logprobs=2
    ),
}


@pytest.fixture(scope="module")
def loaded(model: Any, tokenizer: Any, settings: LookaheadConfig) -> Any:
    return lookahead.load((model, tokenizer), config=settings)


def spec_of(loaded: Any, sampling: SamplingParams, **fields: Any) -> RequestSpec:
    prompt = loaded.encode("the quick brown fox jumps over the", raw=True)
    rules = StopRules(max_tokens=TOKENS, eos_ids=loaded.stop_ids, min_tokens=4)
    owner = KeyRing((), loaded.memory).owners[0]
    return RequestSpec(prompt, loaded.default_config, sampling, rules, owner, **fields)


def run(loaded: Any, spec: RequestSpec) -> tuple[list[int], list[Any], str | None]:
    """The output with its log-probabilities, and why it ended."""
    state = RequestState(loaded, SharedTokenizer(loaded.tokenizer), spec, 0)
    events = list(loaded.client.submit(state.request))
    logprobs = [round(one.logprob, 4) for event in events for one in event.logprobs or ()]
    return [token for event in events for token in event.tokens], logprobs, state.sequence.finish_reason


def check_all_cuts(loaded: Any, make: Any) -> None:
    whole, logprobs, reason = run(loaded, make())
    assert len(whole) > 2
    for cut in range(len(whole)):
        rest, more, why = run(loaded, replace(make(), output=whole[:cut]))
        assert [*whole[:cut], *rest] == whole, cut
        assert logprobs[cut:] == more
        assert why == reason


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("config", [None, LookaheadConfig.autoregressive()], ids=["guesses", "plain"])
@pytest.mark.thinned(1, most=1)
def test_every_cut_gives_the_same_text(loaded: Any, name: str, config: LookaheadConfig | None) -> None:
    def make() -> RequestSpec:
        spec = spec_of(loaded, SAMPLINGS[name])
        return spec if config is None else replace(spec, config=config)

    check_all_cuts(loaded, make)


@pytest.mark.parametrize("unsearched", [0, 5])
@pytest.mark.thinned(1, most=1)
def test_a_stop_string_may_begin_before_the_cut(loaded: Any, unsearched: int) -> None:
    sampling = SAMPLINGS["sampled"]
    whole, _, _ = run(loaded, spec_of(loaded, sampling))
    text = loaded.tokenizer.decode(whole)
    stop = next(found[0] for found in re.finditer(r"[^\ufffd]{6}", text) if found.start() > len(text) // 2)

    def make() -> RequestSpec:
        return spec_of(loaded, sampling, stops=StopStrings([stop]), unsearched=unsearched)

    cut_short, _, reason = run(loaded, make())
    assert reason == "stop"
    assert 1 < len(cut_short) < len(whole)
    check_all_cuts(loaded, make)


def test_a_prediction_and_a_mask_follow_what_was_sent(loaded: Any) -> None:
    whole, _, _ = run(loaded, spec_of(loaded, SAMPLINGS["greedy"]))
    predicted = [*whole[:5], 0, *whole[6:]]
    check_all_cuts(loaded, lambda: spec_of(loaded, SAMPLINGS["greedy"], prediction=predicted))
    forced = ForcedText(predicted, loaded.backend.vocab_size)
    check_all_cuts(loaded, lambda: spec_of(loaded, SamplingParams(logprobs=1), mask=forced))


@pytest.mark.slow
def test_the_processors_of_a_generation_config_follow_what_was_sent(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.model.generation_config, "no_repeat_ngram_size", 2)
    for name in ("greedy", "sampled"):
        assert RequestState(
            loaded, SharedTokenizer(loaded.tokenizer), spec_of(loaded, SAMPLINGS[name]), 0
        ).request.verifier
        check_all_cuts(loaded, lambda name=name: spec_of(loaded, SAMPLINGS[name]))


def test_what_was_sent_is_not_counted_as_generated_here() -> None:
    sequence = DecodingSequence([1, 2, 3], rules=StopRules(5), output=[4, 5])
    assert (sequence.generated, sequence.left, sequence.stats.generated_tokens) == (2, 3, 0)
    assert sequence.output == [4, 5]


def test_an_output_that_is_complete_cannot_be_continued() -> None:
    with pytest.raises(ValueError, match="already has 2 of its 2 tokens"):
        DecodingSequence([1, 2, 3], rules=StopRules(2), output=[4, 5])
