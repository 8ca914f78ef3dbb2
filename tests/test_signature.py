"""The public functions have signatures: every setting is a parameter that editors show and type checkers know."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lookahead
import lookahead.parallel
from lookahead import LookaheadConfig, LookaheadModel
from lookahead.config import UNCHANGED, SamplingParams, StopRules
from lookahead.engine.settings import RequestSettings
from lookahead.parallel.model import ParallelModel
from lookahead.parallel.model import load as load_ranks

ROOT = Path(__file__).parents[1]
SETTINGS = {one.name: (one.type, one.default) for one in fields(RequestSettings)}
CALLS = [LookaheadModel.generate, LookaheadModel.stream, ParallelModel.generate, ParallelModel.stream]
FOREIGN = {"eos_ids", "max_length", "last_is_free"}
"""Stop rules that the model supplies."""


def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(call).parameters)


def overloads(call: Any) -> list[Callable[..., Any]]:
    if not hasattr(typing, "get_overloads"):
        pytest.skip("Python 3.11 is the first that keeps overloads")
    return list(typing.get_overloads(call))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_every_setting_is_a_parameter_with_the_same_type_and_default(call: Callable[..., Any]) -> None:
    found = {name: one for name, one in parameters(call).items() if name not in ("self", "prompt", "unknown")}
    assert {name: (one.annotation, one.default) for name, one in found.items()} == SETTINGS
    assert {one.kind for one in found.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_overloads_have_the_same_parameters() -> None:
    one, many = overloads(LookaheadModel.generate)
    for call in (one, many):
        found = {name: (p.annotation, p.default) for name, p in parameters(call).items() if name in SETTINGS}
        assert found == SETTINGS
        assert set(parameters(call)) == {"self", "prompt", *SETTINGS}
    assert [inspect.signature(call).return_annotation for call in (one, many)] == ["Completion", "list[Completion]"]


def test_settings_are_those_of_sampling_and_of_stop_rules() -> None:
    """With the defaults of these; None stands for what the model or a random seed supplies."""
    for kind in (SamplingParams, StopRules):
        for one in fields(kind):
            if one.name not in FOREIGN:
                default = SETTINGS[one.name][1]
                assert default == one.default or (default is None and one.name in SUPPLIED)


SUPPLIED = {"seed", "repetition_penalty", "logit_bias"}


@pytest.mark.parametrize("call", [lookahead.decoding, LookaheadConfig.adapted], ids=lambda call: call.__qualname__)
def test_every_field_of_a_config_is_a_parameter_that_changes_it(call: Callable[..., Any]) -> None:
    found = parameters(call)
    for one in fields(LookaheadConfig):
        assert found[one.name].default is UNCHANGED
        assert found[one.name].annotation.replace("Sequence[str]", "tuple[str, ...]") in (one.type, widened(one.type))
    assert {one.name for one in fields(LookaheadConfig)} < set(parameters(LookaheadConfig.for_method))


def widened(kind: Any) -> str:
    return str(kind).replace("tuple[float, ...]", "Sequence[float]")


DIFFERENT: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125, "seed": 11,
    "repetition_penalty": 1.25, "presence_penalty": 0.375, "frequency_penalty": 0.625, "logit_bias": {5: 1.5},
    "logprobs": 4, "stop": "zzz", "raw": True, "method": "jacobi",
}  # fmt: skip


def test_every_setting_arrives(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its own field, from both calls."""
    lm = lookahead.load((model, tokenizer), backend="eager", config=LookaheadConfig(budget=8, window=0))
    asked = []
    answer = lm._answer
    monkeypatch.setattr(lm, "_answer", lambda prompt, settings: asked.append(settings) or answer(prompt, settings))
    assert set(DIFFERENT) == set(SETTINGS) - {"config"}
    done = lm.generate("the fox", **DIFFERENT)
    list(lm.stream("the fox", **DIFFERENT))
    lm.generate("the fox", max_tokens=1, config=LookaheadConfig(budget=4, window=0))
    assert asked[:2] == [RequestSettings(**DIFFERENT)] * 2
    assert asked[2] == RequestSettings(max_tokens=1, config=LookaheadConfig(budget=4, window=0))
    assert (done.seed, done.method, len(done.token_ids)) == (11, "jacobi", 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": 3}, "unknown setting 'windows'; did you mean 'window'"),
        ({"steamer": 3}, "unknown setting 'steamer'; did you mean 'streamer'"),
        ({"max_new_tokens": 3}, "unknown setting 'max_new_tokens'"),
    ],
)
def test_the_hook_names_the_near_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lookahead.decoding(**settings)


def test_none_is_a_value_and_unchanged_is_none_given() -> None:
    config = LookaheadConfig(max_depth=3, step_cost=(1.0, 2.0))
    assert config.adapted() == config
    assert config.adapted(max_depth=None).max_depth is None
    assert config.adapted(step_cost=None).step_cost is None
    assert lookahead.decoding(config).config == config
    assert lookahead.decoding().config is None  # fitted by the first call
    with pytest.raises(ValueError, match="window=None"):
        lookahead.decoding(window=None)  # type: ignore[arg-type]


def test_a_group_that_joined_takes_no_parameters_of_joining() -> None:
    group: Any = object()
    with pytest.raises(ValueError, match="ranks belongs to join"):
        load_ranks("model", group=group, ranks=2)
    joins = parameters(lookahead.parallel.join)
    assert {name: one.default for name, one in joins.items()}.items() <= {
        name: one.default for name, one in parameters(load_ranks).items()
    }.items()


@pytest.mark.slow
def test_mypy_checks_calls() -> None:
    """With an empty cache mypy reads torch first, which takes minutes."""
    api = pytest.importorskip("mypy.api")
    out, err, code = api.run(
        ["--config-file", str(ROOT / "pyproject.toml"), str(ROOT / "tests" / "typed" / "calls.py")]
    )
    assert code == 0, out + err
