"""Tuning on a scripted model: what is predicted is what the script would take, and the right one is chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted import ScriptedBackend, ScriptedModel, curve

from lookahead.algorithm.sources import SharedMemory
from lookahead.cli.tune import bars
from lookahead.config import LookaheadConfig
from lookahead.engine.settings import RequestSettings
from lookahead.generate import LookaheadModel
from lookahead.tune.candidates import BUDGETS, FILLED, FITTED, PAPERS, all_candidates, default_s, follow
from lookahead.tune.predict import Prediction
from lookahead.tune.scaling_law import ScalingLaw
from lookahead.tune.trials import weave
from lookahead.tune.tuner import ANCHORS, TOGETHER, Result, Tuner, tune

TRUE = ScalingLaw(0.5, 2.0)
PROMPTS = ["one", "two", "three"]


def accepts(config: LookaheadConfig) -> float:
    """The paper's method by a law of its own, the rest by the log of its budget."""
    if not config.sources:
        return 1.0
    if config.sources == ("jacobi", "prompt"):
        return TRUE.predict(config.window, config.ngram, config.guesses)
    return 1.0 + 0.3 * math.log2(config.budget)


def flat(size: int) -> float:
    return 0.02 + 1e-6 * size


def steep(size: int) -> float:
    return 0.02 * size


def mild(size: int) -> float:
    return 0.02 + 2e-4 * size


def truth(model: ScriptedModel, one: Prediction, tokens: int) -> float:
    """Speedup over many fresh answers of a quiet machine."""
    quiet = ScriptedModel(model.takes, model.accepts)

    def seconds(config: LookaheadConfig) -> float:
        settings = RequestSettings(config=config, max_tokens=tokens)
        return sum([list(quiet.steps("x", settings))[-1].forward_seconds for _ in range(20)])

    return seconds(LookaheadConfig.autoregressive()) / seconds(one.candidate.config)


def named(result: Result, name: str) -> Prediction:
    return next(p for p in result.predictions if p.candidate.name == name)


@pytest.mark.parametrize(
    ("mood", "stalls"),
    [(lambda _: 1.0, 0.0), (lambda i: 1.0 + (i // 150 % 2), 0.0), (lambda _: 1.0, 0.03)],
    ids=["quiet", "slow and fast", "stalls"],
)
@pytest.mark.thinned(1, most=1)
def test_predictions_hold_on_a_restless_machine(mood: Callable[[int], float], stalls: float) -> None:
    model = ScriptedModel(mild, accepts, mood, stalls)
    result = tune(model, PROMPTS * 2, cost=curve(mild), max_tokens=96)
    measured = [p for p in result.predictions if p.basis == "measured"]
    assert len(measured) >= 6
    for one in measured:
        assert one.speedup == pytest.approx(truth(model, one, 96), rel=0.10), one.candidate.name


def test_what_was_not_run_follows_the_laws() -> None:
    """The paper's shapes by the fitted law, the default's budgets between those that were run."""
    model = ScriptedModel(mild, accepts)
    result = tune(model, PROMPTS, cost=curve(mild), second_looks=0, max_tokens=192)
    assert {p.basis for p in result.predictions} == {"measured", "law"}
    for name in ("paper W=10 N=5 G=10", "paper W=5 N=4 G=5", "default K=32", "default K=64"):
        one = named(result, name)
        assert one.basis == "law"
        assert one.compression == pytest.approx(accepts(one.candidate.config), rel=0.08), name


def test_a_curve_that_is_wrong_is_set_right_by_the_runs() -> None:
    """Steps in use take longer than alone, and plain ones more so: only runs show it."""
    takes = lambda size: mild(size) + (0.02 if size == 1 else 0.01)  # noqa: E731
    model = ScriptedModel(takes, accepts)
    result = tune(model, PROMPTS, cost=curve(mild), max_tokens=96)
    for one in result.predictions:
        if one.basis == "measured":
            assert one.speedup == pytest.approx(truth(model, one, 96), rel=0.10), one.candidate.name


def test_the_best_is_found_and_was_run() -> None:
    result = tune(ScriptedModel(flat, accepts), PROMPTS, cost=curve(flat))
    assert result.pays
    assert result.best.candidate.name == f"default K={BUDGETS[-1]}"
    assert (result.best.basis, result.best) == ("measured", result.predictions[0])
    assert result.best.speedup > 3
    assert result.verdict().startswith("best here: default K=512, expected speedup ")


@pytest.mark.parametrize("acceptance", [True, False])
def test_it_says_when_lookahead_does_not_pay(acceptance: bool) -> None:
    """A step of two tokens takes twice as long as a step of one, and so on."""
    model = ScriptedModel(steep, accepts)
    result = tune(model, PROMPTS, acceptance=acceptance, cost=curve(steep))
    assert not result.pays
    assert result.best.candidate.config == LookaheadConfig.autoregressive()
    assert result.best.speedup == pytest.approx(1.0)
    assert result.verdict().startswith("lookahead does not pay here: ")
    assert all(p.speedup < 1.03 for p in result.predictions)


def test_a_gain_within_the_noise_is_no_gain() -> None:
    model = ScriptedModel(flat, lambda config: 1.02 if config.sources else 1.0)
    assert not tune(model, PROMPTS, cost=curve(flat), max_tokens=400).pays


def test_the_prior_runs_nothing() -> None:
    model = ScriptedModel(flat, accepts)
    result = tune(model, [], acceptance=False, cost=curve(flat))
    assert model.asked == []
    assert {p.basis for p in result.predictions} == {"prior"}
    assert result.pays
    assert result.laws.points == ()


@pytest.mark.parametrize("slope", [0.001, 0.004, 0.02])
def test_the_prior_promises_a_fitted_step_no_more_than_the_best_fixed_one(slope: float) -> None:
    result = tune(ScriptedModel(flat, accepts), [], acceptance=False, cost=curve(lambda size: 0.02 + slope * size))
    (fitted,) = [p for p in result.predictions if p.candidate.kind == FITTED]
    others = [p for p in result.predictions if p.candidate.kind == FILLED and p.candidate.config.budget <= 128]
    assert fitted.speedup == pytest.approx(max(1.0, *(p.speedup for p in others)), rel=0.02)


def test_the_hopeless_are_not_run() -> None:
    """Where a step of many tokens is dear, those that need many are not tried."""
    takes = lambda size: 0.02 + 0.004 * size  # noqa: E731
    model = ScriptedModel(takes, accepts)
    tune(model, PROMPTS, cost=curve(takes))
    configs = [config for _, config, _ in model.asked]
    assert LookaheadConfig.paper(15, 5, 15, prompt=True) not in configs
    assert LookaheadConfig() not in configs
    assert any(config.step_cost is not None for config in configs)


def test_every_prompt_is_run_by_each_with_its_own_memory() -> None:
    model = ScriptedModel(flat, accepts)
    before = model.memory
    tuner = Tuner(model, RequestSettings(max_tokens=16, temperature=0.5, seed=0), cost=curve(flat))
    chosen = tuner.anchors()
    for prompt in PROMPTS:
        tuner.round(prompt, chosen)
    asked = [(prompt, config) for prompt, config, _ in model.asked]
    plain = chosen[0].config
    others = [one.config for one in chosen[1:]]
    expected = [c for i in range(0, len(others), TOGETHER - 1) for c in (plain, *others[i : i + TOGETHER - 1])]
    assert asked == [(prompt, config) for prompt in PROMPTS for config in expected]
    assert len(others) > TOGETHER
    expected_settings = RequestSettings(max_tokens=16, temperature=0.5, seed=0)
    assert all(replace(settings, config=None) == expected_settings for _, _, settings in model.asked)
    assert len({id(trial.memory) for trial in tuner.trials.values()}) == len(chosen)
    assert model.memory is before


def test_an_answer_of_one_step_is_no_error() -> None:
    result = tune(ScriptedModel(flat, accepts), ["x"], cost=curve(flat), max_tokens=1)
    assert not result.pays


def test_steps_are_woven_and_an_error_frees_every_slot(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    """What each config accepts does not depend on the others, and no slot stays open whatever happens."""
    lm = LookaheadModel(model, tokenizer, "tiny", settings)
    configs = [LookaheadConfig.autoregressive(), settings, LookaheadConfig.paper(3, 4, 3)]
    together = weave(lm, "the fox", [(c, SharedMemory()) for c in configs], RequestSettings(max_tokens=20))
    for config, run in zip(configs, together, strict=True):
        (alone,) = weave(lm, "the fox", [(config, SharedMemory())], RequestSettings(max_tokens=20))
        assert (run.sizes, run.tokens, run.steps) == (alone.sizes, alone.tokens, alone.steps)
        assert len(run.sizes) == len(run.seconds) == run.steps - 1
        assert min(run.seconds) > 0
    with pytest.raises(ValueError, match="max_tokens"):
        weave(
            lm, "the fox", [(configs[0], SharedMemory()), (configs[1], SharedMemory())], RequestSettings(max_tokens=0)
        )
    kept, steps = lm.memory, 0

    def failing(inputs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise RuntimeError("out of memory")
        return real(inputs)

    real, lm.backend.launch = lm.backend.launch, failing
    with pytest.raises(RuntimeError, match="out of memory"):
        weave(lm, "the fox", [(c, SharedMemory()) for c in configs], RequestSettings(max_tokens=20))
    assert (lm.memory, lm.backend._index) == (kept, {})


# Candidates.


def test_candidates_of_a_cheap_and_of_a_dear_machine() -> None:
    cheap, dear = all_candidates(curve(flat)), all_candidates(curve(steep))
    assert not [one for one in cheap if one.kind == FITTED]
    (fitted,) = [one for one in dear if one.kind == FITTED]
    assert fitted.config.step_cost is not None
    assert {one.config.budget for one in cheap if one.kind == FILLED} == set(BUDGETS)
    assert sum(one.kind == PAPERS for one in cheap) >= 8
    assert set(ANCHORS) <= {one.name for one in cheap}
    for some in (cheap, dear):
        assert some[0].config == LookaheadConfig.autoregressive()
        assert len({one.name for one in some}) == len({one.config for one in some}) == len(some)


def test_half_precision_and_short_contexts_limit_the_budget() -> None:
    assert max(one.config.budget for one in all_candidates(curve(flat), half=True)) == 128
    assert max(one.config.budget for one in all_candidates(curve(flat), 256)) <= 64
    assert [one.config.budget for one in all_candidates(curve(flat), 2)] == [1]
    widths = {one.config.window for one in all_candidates(curve(flat), bigrams=True) if one.name.startswith("default")}
    assert widths == {0}  # as `load` makes the default there
    assert {5} < {one.config.window for one in all_candidates(curve(flat)) if one.name.startswith("default")}
    exact = all_candidates(curve(steep), nodes=33)
    assert max(one.config.budget for one in exact) == 33
    assert [one.name for one in exact if one.kind == FITTED] == ["default K<=33, fitted"]
    deep = {one.config.deepest for one in all_candidates(curve(flat), nodes=128, depth=16)}
    assert max(deep) == 16
    assert max(one.config.deepest for one in all_candidates(curve(flat), nodes=128, depth=9)) == 9
    backend = ScriptedBackend(dtype=torch.bfloat16)
    tuner = Tuner(ScriptedModel(flat, accepts, backend=backend), RequestSettings(), cost=curve(flat))
    assert max(one.config.budget for one in tuner.candidates) == 128


def test_follow_passes_through_what_is_known() -> None:
    value = follow(lambda x: 10 * x, {4: 20.0, 16: 160.0})
    assert [value(x) for x in (1, 4, 8, 16, 32)] == pytest.approx([5, 20, 60, 160, 320])
    assert follow(lambda x: 10 * x, {})(3) == 30
    assert [default_s(k) for k in (1, 8, 256, 512)] == pytest.approx([1.0, 1.40, 2.94, 3.35])


# What is shown.


def test_the_record_is_plain_data() -> None:
    result = tune(ScriptedModel(flat, accepts), PROMPTS, cost=curve(flat))
    record = json.loads(json.dumps(result.record()))
    assert record["best"] == record["candidates"][0]
    assert (record["pays"], record["prompts"], record["tokens"]) == (True, 3, 64)
    assert [len(record["step_cost"][k]) for k in ("sizes", "seconds")] == [10, 10]
    assert record["law"]["alpha"] == pytest.approx(TRUE.alpha, abs=0.1)
    assert len(record["law"]["measured"]) == 3


def test_bars_are_as_long_as_the_speedups() -> None:
    result = tune(ScriptedModel(mild, accepts), PROMPTS, cost=curve(mild))
    lines = bars(result.predictions, 40).splitlines()
    assert len(lines) == len(result.predictions)
    marks = {line.index("|") for line in lines}
    assert len(marks) == 1
    lengths = [line.count("#") for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    assert lines[0].endswith(f"{result.predictions[0].speedup:.2f}x")


# A real model.


def test_tuning_a_real_model_changes_nothing_of_it(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    lm = LookaheadModel(model, tokenizer, "tiny", settings)
    expected = lm.generate("the fox", max_tokens=24).token_ids
    memory = lm.memory
    result = tune(lm, ["the quick brown", "once more the dog"], cost=curve(mild), max_tokens=12)
    assert {p.basis for p in result.predictions} == {"measured", "law"}
    assert lm.memory is memory
    assert (lm.default_config, lm.backend._index) == (settings, {})
    for one in result.predictions:
        assert lm.generate("the fox", max_tokens=24, config=one.candidate.config).token_ids == expected
