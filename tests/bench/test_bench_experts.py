"""`benchmarks/experts.py`: all verbs end to end on tiny models, and bad input in one line."""

from __future__ import annotations

import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import experts
import pytest
import torch
from experts import Records, main, with_changed_lines
from inflate_experts import MIXTURE_SHAPES, MixtureShape, load_in
from random_experts import WatchedCost, random_mixture

from lookahead.algorithm.cost import CostCurve, PassCost
from lookahead.generate import LookaheadModel

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture
def arguments(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(MIXTURE_SHAPES, "tiny", MixtureShape(48, 2, 96, 8, 4, experts=8, top_k=2, vocabulary=150))
    given = "--shape tiny --limit 2 --max-tokens 6 --edit-tokens 20 --streams 2 --temperatures 0.7 --device cpu"
    return [*given.split(), "--data-dir", str(data_dir), "--backend", "graph"]


@pytest.mark.slow
def test_a_mixture_that_speaks_is_measured(
    arguments: list[str],
    make_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every text equal, each record in the file, the table last."""

    def load_small(*_: Any, **__: Any) -> LookaheadModel:
        return LookaheadModel(make_model(), tokenizer, "tiny", backend="eager")

    monkeypatch.setattr(experts, "FIXED_ROWS", (8,))
    out = tmp_path / "experts.json"
    load = partial(load_in, load=load_small)
    records = main(["texts", "edit", "rule", *arguments, "--json", str(out)], load=load)
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert stored["records"] == json.loads(json.dumps(records.all))
    assert stored["about"]["unions"]["4"] == pytest.approx(2.5, abs=0.2)
    whats = [(record["verb"], record["what"]) for record in records.all]
    texts = [("texts", what) for what in ("mt-bench", "humaneval", "2 streams")]
    edits = [("edit", "without a prediction"), ("edit", "three lines changed")]
    fixed = [("rule", f"{rows} rows") for rows in experts.FIXED_ROWS]
    assert whats == [*texts, *edits, *fixed, ("rule", "default")]
    for record in records.all:
        equal, of = record["equal"].split(" of ")
        assert equal == of != "0"
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("least ratio of texts: ")
    assert len(shown[-2 - len(whats) :]) == len(whats) + 2  # the table's header, its rows, and the verdict
    assert shown[-2 - len(whats)].split() == list(experts.COLUMNS)


def test_random_mixtures_are_measured(arguments: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experts.tokenizer_of", lambda _: tokenizer)
    monkeypatch.setattr("random_experts.PASS_ROWS", (1, 4))
    models = list[Any]()

    def make(*args: Any) -> Any:
        fields = {**TINY, "vocab_size": 150, "moe_intermediate_size": 16, "num_experts": 8}
        model = random_mixture(*args, dtype=torch.float32, **fields)
        models.append(weakref.ref(model))
        return model

    records = main(["speed", *arguments, "--names", "qwen3-30b-a3b", "--model", "tiny"], make=make)
    one, many, passes = records.all
    assert one["GB read"] == many["GB read"]  # experts are counted on a GPU alone
    assert many["plain"] > 0
    assert one["share"] > 0
    assert list(passes["ms"]) == [1, 4]
    assert models[0]() is None  # two of them have no room beside each other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fly"], "unknown verb 'fly'; choose from speed, texts, edit, rule"),
        (["texts"], "--data-dir None: give the folder with the prompts"),
        (["texts", "--data-dir", "nowhere"], "--data-dir nowhere: give the folder"),
        (["speed", "--max-tokens", "1"], "--max-tokens 1: give at least 2"),
        (["speed", "--limit", "0"], "--limit 0: give at least 1"),
        (["speed", "--streams", "4", "0"], "--streams 0: give numbers from 1 on, or none"),
        (["speed", "--temperatures", "-1"], "--temperatures -1.0: give numbers from 0 on"),
        (["speed", "--json", "nowhere/a.json"], "--json nowhere/a.json: there is no folder nowhere"),
        (["texts", "--shape", "7b"], "invalid choice: '7b'"),
    ],
)
def test_bad_input_is_one_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_verdict_is_of_the_worst_text() -> None:
    records = Records(None)
    for what, ratio in (("mt-bench", 1.4), ("16 streams", 0.97)):
        records.add("texts", what, T=0.7, ratio=ratio)
    assert records.table().splitlines()[-1] == (
        "least ratio of texts: 0.97 (16 streams, T=0.7), against the claim of 0.98"
    )


def test_a_watched_cost_learns_as_another() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 1.5, 2.0), reads=(4.0, 7.0, 10.0), experts=32)
    costs = [PassCost(curve.table(4), curve.expert_cost(4)) for _ in range(2)]
    watching = WatchedCost(costs[1])
    for rows, seconds, reads in ((2, 1.6, 6.0), (4, 2.4, 9.0), (1, 1.1, 4.0)):
        expected = costs[0].seconds(rows)
        costs[0].record_pass(rows, seconds, reads)
        watching.record_pass(rows, seconds, reads)
        assert watching.passes[-1] == (rows, expected, seconds, reads)
    assert watching.times_after(0).tolist() == costs[0].times_after(0).tolist()


def test_three_lines_are_changed() -> None:
    lines = [f"line {number}" for number in range(200)]
    changed = with_changed_lines("\n".join(lines)).split("\n")
    assert [index for index in range(200) if changed[index] != lines[index]] == [50, 100, 150]
