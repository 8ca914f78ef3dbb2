"""The default config of a call on the eager backend: a curve that is measured quickly, once, and a guarded budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import curve

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.cost import CostCurve
from lookahead.loading import fitting
from lookahead.transformers_hook import facts


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Whether each measurement was quick. The cache is empty."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    found: list[bool] = []

    def measure(backend: Any, sizes: Any, quick: bool) -> CostCurve:
        found.append(quick)
        return curve(lambda size: 0.01 + 0.001 * size)

    monkeypatch.setattr(fitting, "measure", measure)
    return found


def test_the_curve_and_the_budget_outlive_a_call(make_model: Any, prompt: dict[str, Any], measured: list[bool]) -> None:
    model = make_model(eos_token_id=None)
    hook = lookahead.decoding()
    expected = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    budgets = []
    for _ in range(2):
        text = model.generate(**prompt, max_new_tokens=24, do_sample=False, custom_generate=hook)
        assert text.tolist() == expected.tolist()
        budgets.append(facts.known[model].budget)
    assert measured == [True]
    assert budgets[0] is budgets[1]
    assert budgets[0].guarded
    assert budgets[0].cost is not None
    corrected = budgets[0].cost.constant, budgets[0].cost.slope
    assert corrected != (0.0, 1.0), "the passes of the calls have corrected the curve"


def test_a_config_that_is_given_is_not_weighed(make_model: Any, prompt: dict[str, Any], measured: list[bool]) -> None:
    model = make_model(eos_token_id=None)
    hook = lookahead.decoding(window=2, ngram=3, guesses=2, budget=12)
    model.generate(**prompt, max_new_tokens=8, do_sample=False, custom_generate=hook)
    assert measured == []
    assert not facts.known[model].budget.guarded


def test_the_ranks_of_a_tensor_parallel_model_follow_no_clock(
    make_model: Any, prompt: dict[str, Any], measured: list[bool]
) -> None:
    model = make_model(eos_token_id=None)
    model._tp_size = 2
    model.generate(**prompt, max_new_tokens=8, do_sample=False, custom_generate=lookahead.decoding())
    found = facts.known[model]
    assert (measured, found.default, found.budget.guarded) == ([], LookaheadConfig(), False)
