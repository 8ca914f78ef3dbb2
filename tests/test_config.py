"""Settings: every refusal names the value and what to change; the presets; what gives way to what."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from lookahead.algorithm.tree import window_layout
from lookahead.config import METHODS, SCOPES, SOURCES, LookaheadConfig, SamplingParams, StopRules

CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"window": -1}, "window=-1 must be a whole number of at least 0"),
    ({"window": 2.0}, "window=2.0 must be a whole number of at least 0"),
    ({"window": True}, "window=True must be a whole number of at least 0"),
    ({"window": None}, "window=None must be a whole number of at least 0"),
    ({"ngram": 1}, "ngram=1 must be a whole number of at least 2"),
    ({"ngram": "5"}, "ngram='5' must be a whole number of at least 2"),
    ({"guesses": -3}, "guesses=-3 must be a whole number of at least 0"),
    ({"budget": 0}, "budget=0 must be a whole number of at least 1"),
    ({"suffix_key": 0}, "suffix_key=0 must be a whole number of at least 1"),
    ({"suffix_branches": 0}, "suffix_branches=0 must be a whole number of at least 1"),
    ({"suffix_length": 0}, "suffix_length=0 must be a whole number of at least 1"),
    (
        {"sources": ("jacobi", "medusa", "eagle")},
        "unknown source 'medusa'; choose from jacobi, prompt, suffix, recycle",
    ),
    ({"sources": ("suffix", "jacobi", "suffix")}, "sources name 'suffix' twice; name each once"),
    ({"recycle_scope": "user"}, "recycle_scope='user'; choose from off, request, model"),
    (
        {"window": 20, "ngram": 5, "budget": 64},
        "window=20 with ngram=5 fills 80 tokens of a step, more than budget=64; lower the window or raise the budget",
    ),
    ({"shared": "yes"}, "shared='yes' must be True or False"),
    ({"step_cost": ()}, "step_cost needs positive times, one per step size"),
    ({"step_cost": (1.0, 0.0, 2.0)}, "step_cost needs positive times, one per step size"),
    ({"step_cost": (-1.0,)}, "step_cost needs positive times, one per step size"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_a_refused_config_says_what_to_change(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        LookaheadConfig(**fields)


def test_fixed_point_stands_alone() -> None:
    assert LookaheadConfig(window=0, sources=("fixed-point",)).sources == ("fixed-point",)
    for others in (("fixed-point", "suffix"), ("jacobi", "fixed-point")):
        with pytest.raises(ValueError, match="'fixed-point'"):
            LookaheadConfig(sources=others)


SAMPLING_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1 must be a number from 0 (greedy) up, such as 0.8"),
    ({"temperature": float("nan")}, "temperature=nan must be a number from 0 (greedy) up"),
    ({"temperature": float("inf")}, "temperature=inf must be a number from 0 (greedy) up"),
    ({"top_k": -1}, "top_k=-1 must be a whole number of at least 0"),
    ({"top_k": 1.5}, "top_k=1.5 must be a whole number of at least 0"),
    ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
    ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
    ({"top_p": float("nan")}, "top_p=nan must be above 0 and at most 1"),
    ({"min_p": -0.1}, "min_p=-0.1 must be between 0 (keeps every token) and 1"),
    ({"min_p": 1.01}, "min_p=1.01 must be between 0 (keeps every token) and 1"),
    ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0 (1 changes nothing)"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf must be above 0 (1 changes nothing)"),
    ({"repetition_penalty": None}, "repetition_penalty=None must be a number"),
    ({"presence_penalty": "1"}, "presence_penalty='1' must be a number"),
    ({"presence_penalty": float("nan")}, "presence_penalty=nan must be a finite number (0 changes nothing)"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty=inf must be a finite number (0 changes nothing)"),
    ({"logit_bias": 5}, "logit_bias=5 must map token ids to numbers, such as {42: -1.5}"),
    ({"logit_bias": {"a": 1.0}}, "a token id of logit_bias='a' must be a whole number of at least 0"),
    ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias=-1 must be a whole number of at least 0"),
    ({"logit_bias": {3: "x"}}, "logit_bias={3: 'x'} must be a number; -inf bans the token"),
    ({"logit_bias": {3: float("inf")}}, "logit_bias={3: inf} must be a number; -inf bans the token"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias={3: nan} must be a number; -inf bans the token"),
    ({"logprobs": -1}, "logprobs=-1 must be a whole number of at least 0"),
    ({"logprobs": 21}, "logprobs=21 must be at most 20"),
    ({"logprobs": True}, "logprobs=True must be a whole number of at least 0"),
]


@pytest.mark.parametrize(("fields", "message"), SAMPLING_ERRORS)
def test_refused_sampling_says_what_to_change(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SamplingParams(**fields)


def test_sampling_at_its_limits() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.01, top_p=1.0, min_p=1.0, top_k=0).greedy
    assert SamplingParams(repetition_penalty=0.5, logprobs=20, logit_bias={0: -float("inf")}).penalised
    assert not SamplingParams(logit_bias={4: 1}).penalised


def test_a_bias_is_kept_as_sorted_pairs() -> None:
    """So that equal params are equal and can be hashed; a bias of 0 changes nothing."""
    params = SamplingParams(logit_bias={7: -1, 2: 3.5, 4: 0.0})
    assert params.bias == params.logit_bias == ((2, 3.5), (7, -1.0))
    assert hash(params) == hash(SamplingParams(logit_bias=((7, -1.0), (2, 3.5))))
    assert SamplingParams(logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -5, 2.5, None])
def test_max_tokens_is_at_least_one(count: Any) -> None:
    with pytest.raises(ValueError, match=f"^max_tokens={re.escape(repr(count))} must be a whole number of at least 1"):
        StopRules(max_tokens=count)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert StopRules(5, min_tokens=5).min_tokens == 5
    with pytest.raises(ValueError, match=r"^min_tokens=6 must be at most max_tokens=5"):
        StopRules(5, min_tokens=6)
    with pytest.raises(ValueError, match=r"^min_tokens=-1 must be a whole number of at least 0"):
        StopRules(min_tokens=-1)


@pytest.mark.parametrize(
    ("max_tokens", "max_length", "prompt", "room"),
    [(10, None, 500, 10), (10, 100, 20, 10), (10, 30, 20, 10), (10, 29, 20, 9), (10, 20, 20, 0), (10, 19, 20, -1)],
)
def test_room_is_what_request_and_context_leave(max_tokens: int, max_length: int | None, prompt: int, room: int):
    assert StopRules(max_tokens=max_tokens, max_length=max_length).room(prompt) == room


# What a config means.


@pytest.mark.parametrize("scope", SCOPES)
def test_scope_off_switches_recycling_off(scope: str) -> None:
    config = LookaheadConfig(recycle_scope=scope)
    assert config.sources == SOURCES
    assert config.active_sources == (SOURCES[:3] if scope == "off" else SOURCES)


@pytest.mark.parametrize("ngram", range(2, 7))
@pytest.mark.parametrize("window", range(7))
def test_window_tokens_are_those_of_the_layout(window: int, ngram: int) -> None:
    assert LookaheadConfig(window, ngram).window_tokens == window_layout(window, ngram).size
    assert LookaheadConfig(window, ngram, sources=("prompt", "suffix")).window_tokens == 1


@pytest.mark.parametrize("guesses", [0, 1, 15])
@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("window", [0, 1, 15])
def test_paper_has_room_for_the_window_and_every_guess(window: int, ngram: int, guesses: int) -> None:
    config = LookaheadConfig.paper(window, ngram, guesses)
    assert (config.window, config.ngram, config.guesses) == (window, ngram, guesses)
    assert config.active_sources == ("jacobi",)
    assert config.budget >= config.window_tokens + guesses * (ngram - 1)
    assert LookaheadConfig.paper(window, ngram, guesses, prompt=True).active_sources == ("jacobi", "prompt")


def test_the_papers_own_size() -> None:
    assert LookaheadConfig.paper(15, 5, 15).budget == 121


def test_autoregressive_is_the_empty_tree() -> None:
    config = LookaheadConfig.autoregressive()
    assert (config.active_sources, config.budget, config.window_tokens) == ((), 1, 1)


def test_jacobi_fills_its_block_and_the_root() -> None:
    assert LookaheadConfig.jacobi().budget == 17
    config = LookaheadConfig.jacobi(3)
    assert (config.active_sources, config.budget, config.window_tokens) == (("fixed-point",), 4, 1)
    with pytest.raises(ValueError, match=r"^block=0 must be a whole number of at least 1"):
        LookaheadConfig.jacobi(0)


def test_prompt_lookup_is_one_old_match() -> None:
    config = LookaheadConfig.prompt_lookup(tokens=7, key=1)
    assert (config.active_sources, config.budget) == (("suffix",), 8)
    assert (config.suffix_key, config.suffix_branches, config.suffix_length, config.suffix_oldest) == (1, 1, 7, True)
    default = LookaheadConfig.prompt_lookup()
    assert (default.suffix_length, default.suffix_key) == (10, 2)
    with pytest.raises(ValueError, match=r"^tokens=0 must be a whole number of at least 1"):
        LookaheadConfig.prompt_lookup(tokens=0)
    with pytest.raises(ValueError, match="key=0 must be a whole number of at least 1"):
        LookaheadConfig.prompt_lookup(key=0)


def test_every_method_has_a_config() -> None:
    made = {method: LookaheadConfig.for_method(method) for method in METHODS}
    assert made == {
        "lookahead": LookaheadConfig(),
        "autoregressive": LookaheadConfig.autoregressive(),
        "jacobi": LookaheadConfig.jacobi(),
        "prompt-lookup": LookaheadConfig.prompt_lookup(),
    }


def test_overrides_of_a_method() -> None:
    assert LookaheadConfig.for_method("lookahead", window=3, ngram=None) == LookaheadConfig(window=3)
    assert LookaheadConfig.for_method("lookahead", window=0) == LookaheadConfig(window=0)
    assert LookaheadConfig.for_method("jacobi", window=None) == LookaheadConfig.jacobi()
    with pytest.raises(ValueError, match=r"^guesses=0 belongs to method 'lookahead', not 'jacobi'; leave it out"):
        LookaheadConfig.for_method("jacobi", window=None, guesses=0)


def test_an_unknown_method_is_answered_with_the_known_ones() -> None:
    message = "unknown method 'medusa'; choose from lookahead, autoregressive, jacobi, prompt-lookup"
    with pytest.raises(ValueError, match=re.escape(message)):
        LookaheadConfig.for_method("medusa", window=3)


# `adapted`: the default window fills 5 * 4 = 20 tokens.


@pytest.mark.parametrize(("budget", "window"), [(128, 5), (40, 5), (39, 0), (20, 0), (2, 0), (1, 0)])
def test_the_window_gives_way_to_a_small_budget(budget: int, window: int) -> None:
    assert LookaheadConfig().adapted(budget=budget) == LookaheadConfig(window=window, budget=budget)


def test_the_window_is_weighed_with_the_new_ngram() -> None:
    assert LookaheadConfig().adapted(budget=16, ngram=2) == LookaheadConfig(window=5, ngram=2, budget=16)
    assert LookaheadConfig().adapted(budget=64, ngram=9) == LookaheadConfig(window=0, ngram=9, budget=64)


@pytest.mark.parametrize(("window", "budget"), [(0, 128), (5, 128), (23, 128), (24, 129), (40, 193)])
def test_the_budget_grows_for_a_large_window(window: int, budget: int) -> None:
    assert LookaheadConfig().adapted(window=window) == LookaheadConfig(window=window, budget=budget)


def test_the_budget_grows_with_the_new_ngram() -> None:
    assert LookaheadConfig().adapted(window=20, ngram=11).budget == 281


def test_a_window_and_a_budget_that_were_both_asked_for_stand_or_fall() -> None:
    assert LookaheadConfig().adapted(window=5, budget=20) == LookaheadConfig(window=5, budget=20)
    with pytest.raises(ValueError, match="lower the window or raise the budget"):
        LookaheadConfig().adapted(window=5, budget=19)


def test_adapting_validates_and_changes_nothing_else() -> None:
    config = LookaheadConfig(guesses=3, recycle_scope="request", sources=("jacobi", "suffix"))
    assert config.adapted() == config
    assert config.adapted(window=40) == LookaheadConfig(40, 5, 3, 173, ("jacobi", "suffix"), "request")
    for change in ({"ngram": 1, "budget": 8}, {"window": -1}, {"budget": 0}, {"window": 40.5}):
        with pytest.raises(ValueError, match="must be a whole number"):
            config.adapted(**change)


def test_shared_is_deprecated_and_still_means_that_sequences_share() -> None:
    with pytest.warns(DeprecationWarning, match="shared"):
        config = LookaheadConfig(window=0, budget=8, shared=True)
    assert config == LookaheadConfig(window=0, budget=8, step_cost=(1.0,) * 8)
    with pytest.warns(DeprecationWarning, match="shared"):
        assert LookaheadConfig(window=0, budget=8, shared=False) == LookaheadConfig(window=0, budget=8)
    with pytest.warns(DeprecationWarning, match="shared"):
        assert replace(config, step_cost=(1.0, 2.0), shared=True).step_cost == (1.0, 2.0)
    for changed in (LookaheadConfig().adapted, lambda **given: LookaheadConfig.for_method("lookahead", **given)):
        with pytest.warns(DeprecationWarning, match="shared"):
            assert changed(budget=64, shared=True).step_cost == (1.0,) * 64


@pytest.mark.parametrize("shared", [None, True, False])
@pytest.mark.parametrize("times", [None, (1.0, 1.5)])
def test_configs_that_were_stored_before_are_read(shared: bool | None, times: tuple[float, ...] | None) -> None:
    fields = {**asdict(LookaheadConfig(window=0, budget=4)), "step_cost": times and list(times)}
    config = LookaheadConfig.from_json(fields if shared is None else {**fields, "shared": shared})
    assert config.step_cost == (times or ((1.0,) * 4 if shared else None))
    assert replace(config, step_cost=None) == LookaheadConfig(window=0, budget=4)


def test_a_size_that_is_asked_for_is_taken_at_its_word() -> None:
    assert hash(LookaheadConfig(step_cost=[1.0, 2.0])) == hash(LookaheadConfig(step_cost=(1.0, 2.0)))  # type: ignore[arg-type]
    config = LookaheadConfig(window=0, step_cost=(1.0, 2.0, 3.0))
    assert config.adapted(budget=16).step_cost is None
    assert config.adapted(window=3).step_cost is None
    assert config.adapted(guesses=3, sources=("suffix",)).step_cost == (1.0, 2.0, 3.0)
    assert config.adapted(sources=("suffix",)).window == 0
    assert config.adapted(sources=("jacobi",)).window == LookaheadConfig().window
