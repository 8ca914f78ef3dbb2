"""Profiles: saved by tuning, picked up by `load()`, and by nothing that they were not made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import curve

import lookahead
from lookahead import LookaheadConfig
from lookahead.cache import cache_dir
from lookahead.generate import LookaheadModel
from lookahead.loading import fitting, profiles
from lookahead.tune.tuner import save, tune

FITTED = LookaheadConfig(window=0, budget=24, step_cost=tuple(1.0 + 0.1 * k for k in range(24)))
CONFIGS = [FITTED, LookaheadConfig.paper(3, 4, 3), LookaheadConfig.autoregressive(), LookaheadConfig(budget=64)]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache. A step's cost, which `load` measures where there is no profile, is a curve that is ready."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(fitting, "measure", lambda backend, sizes, quick: curve(lambda size: 0.02 + 1e-5 * size))
    return tmp_path


def keep(lm: LookaheadModel, config: LookaheadConfig, name: str = "chosen") -> Path:
    return profiles.save(lm.name, lm.backend, config, name, {"speedup": 2.0}, cache_dir())


def load(model: Any, tokenizer: Any, **options: Any) -> tuple[LookaheadModel, list[str]]:
    said: list[str] = []
    return lookahead.load((model, tokenizer), log=said.append, **options), said


@pytest.mark.parametrize("config", CONFIGS, ids=["fitted", "paper", "autoregressive", "whole"])
@pytest.mark.thinned(1, most=1)
def test_load_uses_a_saved_profile_and_the_text_stays_the_same(
    model: Any, tokenizer: Any, plain: Callable[[Any, Sequence[int], int], list[int]], config: LookaheadConfig
) -> None:
    lm, said = load(model, tokenizer, config=LookaheadConfig())
    keep(lm, config)
    assert said == []
    lm, said = load(model, tokenizer)
    assert lm.default_config == config
    assert said == ["using the tuned profile: chosen"]
    answer = lm.generate("the fox and the dog", max_tokens=40)
    assert answer.config == config
    assert answer.token_ids == plain(model, lm.encode("the fox and the dog"), 40)
    for seed in range(3):
        drawn, expected = (
            lm.generate("the fox", max_tokens=30, temperature=0.9, seed=seed, method=method).token_ids
            for method in ("lookahead", "autoregressive")
        )
        assert drawn == expected


def test_the_last_saved_one_counts_and_a_given_config_beats_it(model: Any, tokenizer: Any) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    assert keep(lm, CONFIGS[1]) == keep(lm, CONFIGS[2])
    assert load(model, tokenizer)[0].default_config == CONFIGS[2]
    given, said = load(model, tokenizer, config=CONFIGS[3])
    assert (given.default_config, said) == (CONFIGS[3], [])


def test_another_model_name_dtype_device_or_backend_finds_none(
    model: Any, make_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    keep(lm, FITTED)
    said: list[str] = []

    def found(label: str = lm.name, backend: Any = lm.backend) -> LookaheadConfig | None:
        return profiles.find(label, backend, folder, said.append)

    assert found() == FITTED
    said.clear()
    other = LookaheadModel(make_model(num_hidden_layers=1), tokenizer, lm.name)
    half = LookaheadModel(make_model().bfloat16(), tokenizer, lm.name)
    graph = LookaheadModel(model, tokenizer, lm.name, backend="graph")
    for backend in (other.backend, half.backend, graph.backend):
        assert found(backend=backend) is None
    assert found("another name") is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(profiles, "processor", lambda: "another processor")
        assert found() is None
    with monkeypatch.context() as split:
        split.setattr(lm.backend, "capabilities", replace(lm.backend.capabilities, ranks=2))
        assert found() is None
    assert said == []
    assert found() == FITTED


def test_a_file_of_another_model_under_this_ones_name_is_ignored(model: Any, tokenizer: Any) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    path = keep(lm, FITTED)
    stored = json.loads(path.read_text())
    stored["of"]["device"] = "another"
    path.write_text(json.dumps(stored))
    loaded, said = load(model, tokenizer)
    assert loaded.default_config != FITTED
    assert not [line for line in said if "profile" in line]


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: "",
        lambda stored: "{",
        lambda stored: "[]",
        lambda stored: "null",
        lambda stored: json.dumps({**stored, "version": profiles.VERSION + 1}),
        lambda stored: json.dumps({k: v for k, v in stored.items() if k != "version"}),
        lambda stored: json.dumps({**stored, "config": None}),
        lambda stored: json.dumps({k: v for k, v in stored.items() if k != "config"}),
        lambda stored: json.dumps({**stored, "config": {**stored["config"], "budget": -1}}),
        lambda stored: json.dumps({**stored, "config": {**stored["config"], "colour": "red"}}),
        lambda stored: json.dumps({**stored, "config": {**stored["config"], "step_cost": [0.0]}}),
        lambda stored: json.dumps({**stored, "config": {**stored["config"], "step_cost": "fast"}}),
    ],
)
@pytest.mark.thinned(1, most=1)
def test_a_corrupt_profile_gives_one_line_and_the_default(
    model: Any, tokenizer: Any, damage: Callable[[dict[str, Any]], str]
) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    path = keep(lm, FITTED)
    expected = load(model, tokenizer, config=None)[0]  # also measures, so that no line about that follows
    assert expected.default_config == FITTED
    path.write_text(damage(json.loads(path.read_text())))
    loaded, said = load(model, tokenizer)
    told = [line for line in said if "profile" in line]
    assert len(told) == 1
    assert str(path) in told[0]
    assert "lookahead tune --save" in told[0]
    assert "\n" not in told[0]
    assert loaded.default_config.sources == LookaheadConfig().sources


def test_a_folder_that_cannot_be_written_is_named(model: Any, tokenizer: Any, folder: Path) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    (folder / "profiles").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot save the profile .*LOOKAHEAD_CACHE"):
        keep(lm, FITTED)


def test_a_folders_relative_and_absolute_names_are_one(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    lm = LookaheadModel(model, tokenizer, "here", LookaheadConfig())
    keep(lm, FITTED)
    assert profiles.find(str(tmp_path / "here"), lm.backend, cache_dir()) == FITTED


@pytest.mark.parametrize(("slope", "pays"), [(1e-6, True), (0.02, False)])
def test_what_tuning_saves_is_what_load_gives(model: Any, tokenizer: Any, slope: float, pays: bool) -> None:
    lm, _ = load(model, tokenizer, config=LookaheadConfig())
    result = tune(lm, [], acceptance=False, cost=curve(lambda size: 0.02 + slope * (size - 1)))
    assert result.pays is pays
    path = save(lm, result, cache_dir())
    assert json.loads(path.read_text())["measured"]["verdict"] == result.verdict()
    loaded, said = load(model, tokenizer)
    assert loaded.default_config == result.best.candidate.config
    assert said == [f"using the tuned profile: {result.best.candidate.name}"]


def test_settings_that_are_asked_for_still_guess_after_a_profile_that_does_not() -> None:
    tuned = LookaheadConfig.autoregressive()
    assert tuned.adapted() == tuned
    assert tuned.adapted(budget=64) == LookaheadConfig().adapted(budget=64)
    assert tuned.adapted(sources=("suffix",)).sources == ("suffix",)
