"""`lookahead bench` on a tiny model: every preset to its report, interrupted and resumed runs, mistakes in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inflate import MODEL_SHAPES, ModelShape, shaped_load
from marks import slow_but
from typer.testing import CliRunner

from lookahead.bench.paper.options import BenchOptions
from lookahead.bench.paper.presets import DEFAULT, PRESETS, Preset, Size
from lookahead.bench.report.sections import COLUMNS
from lookahead.bench.run.methods import Method
from lookahead.bench.run.results import Results
from lookahead.bench.run.runner import Runner
from lookahead.cli import app
from lookahead.cli.bench import GPU_PRESETS, WORKLOADS
from lookahead.cli.common import Host
from lookahead.generate import LookaheadModel
from lookahead.loading.formats import quantised_copy
from lookahead.tune.scaling_law import PAPER, Point, fit

SMALL = ("--limit", "1", "--max-tokens", "6")


@pytest.fixture
def loads() -> list[tuple[str, str]]:
    """The dtypes and backends that `load` was asked for."""
    return []


@pytest.fixture
def load(
    lm: Any, make_model: Callable[..., Any], tokenizer: Any, settings: Any, loads: list[tuple[str, str]]
) -> Callable[..., Any]:
    """As `lookahead.load`: the tiny model, in the dtype asked for."""

    def loaded(name: str | None, *, dtype: str, device: str, backend: str, config: Any = None, **_: Any) -> Any:
        loads.append((dtype, backend))
        if dtype in ("auto", "float32") and backend == "auto":
            return lm
        made = make_model() if dtype in ("auto", "int8") else make_model().to(getattr(torch, dtype))
        made = quantised_copy(made, dtype) if dtype == "int8" else made
        return LookaheadModel(made, tokenizer, "tiny", config or settings, backend)

    return loaded


@pytest.fixture
def run(load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))  # step costs of other backends and shapes

    def command(*args: str, shape: str | None = None) -> Any:
        host = Host(load=load if shape is None else shaped_load(shape, load))
        out = () if "--out" in args else ("--out", str(tmp_path / "out"))
        return CliRunner().invoke(app, ["bench", *args, *out], obj=host, prog_name="lookahead", env={"COLUMNS": "200"})

    return command


SPEEDUP, SAME, OVER_OWN, AS_OWN = (COLUMNS.index(name) for name in ("speedup", "same", "over AR", "as AR"))


def table(text: str, title: str) -> list[list[str]]:
    """The cells of a Markdown section's table, less head and rule."""
    section = text.split(f"## {title}")[1].split("\n## ")[0]
    return [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")][
        2:
    ]


def test_the_default_run_ends_with_a_report(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("--quick", "--limit", "2", "--max-tokens", "8")
    assert result.exit_code == 0, result.output
    rows = table(result.stdout, "Methods")
    assert [row[1] for row in rows] == [method.label for method in DEFAULT.methods if method.device != "cuda"]
    assert {row[SAME] for row in rows} == {row[AS_OWN] for row in rows} == {"2/2"}, "every method gives greedy's tokens"
    assert rows[0][SPEEDUP] == "1.00x"
    own = next(row for row in rows if row[1] == "autoregressive")
    assert own[OVER_OWN] == "1.00x"
    over_own, own_speedup = (float(cell.partition("x")[0]) for cell in (rows[0][OVER_OWN], own[SPEEDUP]))
    assert over_own == pytest.approx(1 / own_speedup, rel=0.05)
    assert "builtin: lookahead is " in result.stdout
    assert "2/2 outputs identical" in result.stdout
    out = tmp_path / "out"
    assert (out / "default.md").read_text() == result.stdout
    first = json.loads((out / "results.jsonl").read_text().splitlines()[0])
    assert first["kind"] == "about"
    assert {"model", "dtype", "device", "cores", "torch", "transformers", "lookahead", "revision"} <= set(first)


def test_json_is_the_last_line(run: Callable[..., Any]) -> None:
    result = run("--json", "--method", "hf-greedy", "--method", "lookahead", "--method", "paper:3,3,3", *SMALL)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [line["method"] for line in found["lines"]] == ["hf-greedy", "lookahead", "paper:3,3,3"]
    assert all((line["same"], line["compared"], line["tokens"]) == (1, 1, 6) for line in found["lines"])
    assert Path(found["files"]["markdown"]).is_file()
    assert found["about"]["model"] == "tiny"


def test_a_second_run_goes_on_where_the_first_stopped(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("--limit", "2", "--max-tokens", "6", "--repeats", "2", "--method", "hf-greedy", "--method", "lookahead")
    ran: list[str] = []
    row = Runner.record

    def counting(self: Runner, job: Any, longest: int = 0) -> Any:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(job.key)
        return row(self, job, longest)

    monkeypatch.setattr(Runner, "record", counting)
    first = run(*args)
    assert first.exit_code == 130
    assert "interrupted, 5 of 8 answers to go, about " in first.stderr
    assert " s: the same command resumes from here" in first.stderr
    assert "3 of 8 answers. Not finished. Each is timed 2 times." in first.stdout
    monkeypatch.setattr(Runner, "record", lambda self, job, longest=0: ran.append(job.key) or row(self, job, longest))
    second = run(*args)
    assert second.exit_code == 0, second.output
    assert "3 of 8 answers exist already" in second.stderr
    assert len(ran) == len(set(ran)) == 8
    assert {line[SAME] for line in table(second.stdout, "Methods")} == {"2/2"}
    third = run(*args)
    assert len(ran) == 8
    assert third.stdout == second.stdout


METHODS = ("--method", "hf-greedy", "--method", "autoregressive", "--method", "paper:3,3,3")


def test_a_run_in_pieces_on_several_machines(
    run: Callable[..., Any], load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time nothing is measured. What two runs have is merged, reported without a model, and not made again."""
    args = ("--limit", "3", "--baseline-limit", "1", "--max-tokens", "6", "--repeats", "1", *METHODS)
    first = run(*args, "--minutes", "0")
    assert first.exit_code == 0, first.output
    assert "out of time, 7 of 7 answers to go: the same command resumes" in first.stderr
    folders = [tmp_path / "a", tmp_path / "b"]
    for limit, folder in zip(("1", "3"), folders, strict=True):
        monkeypatch.setattr("lookahead.bench.run.about.revision", lambda limit=limit: f"revision {limit}")
        piece = run("--limit", limit, *args[2:], "--out", str(folder))
        assert piece.exit_code == 0, piece.output
    (row, *others) = table(piece.stdout, "Methods")
    assert [row[2] for row in (row, *others)] == ["1", "3", "3"]
    assert "hf-greedy on builtin: 1 of 3 prompts. Whatever is compared with them is compared on these" in piece.stdout
    path = folders[1] / "results.jsonl"
    monkeypatch.setattr("lookahead.generate.LookaheadModel", None)  # no model is loaded
    merging = (*args, "--merge", str(folders[0]), "--merge", str(folders[1]))
    merged = run(*merging, "--report")
    assert merged.exit_code == 0, merged.output
    assert [row[2] for row in table(merged.stdout, "Methods")] == ["1", "3", "3"]
    runs = table(merged.stdout, "Runs")
    assert [row[-1] for row in runs] == ["3", "4"]
    assert [row[-2] for row in runs] == ["revision 1", "revision 3"]
    assert "Merged from 2 runs. 0 of 3 prompts have answers of more than one of them" in merged.stdout
    assert run(*args).exit_code == 0
    assert len(Results(tmp_path / "out" / "results.jsonl").records) == 7, "nothing is left to measure"
    path.write_text(path.read_text().replace('"model": "tiny"', '"model": "other"'))
    refused = run(*merging, "--report")
    assert refused.exit_code == 2
    assert "does not belong to" in refused.stderr
    assert "its model is 'other', and there it is 'tiny'" in refused.stderr
    empty = run(*args, "--report", "--out", str(tmp_path / "none"))
    assert empty.exit_code == 2
    assert "has no results to report" in empty.stderr


def test_every_beginning_of_a_run_is_a_fair_sample(data_dir: Path) -> None:
    options = BenchOptions("end-to-end", data_dir=data_dir)
    jobs, methods = options.jobs("cpu"), options.methods_on("cpu")
    rounds = [jobs[i : i + len(methods)] for i in range(0, len(jobs), len(methods))]
    assert [tuple(job.method for job in one) for one in rounds] == [methods] * 10, "all methods of a prompt"
    assert all(len({job.prompt for job in one}) == 1 for one in rounds)
    assert [one[0].data for one in rounds] == 2 * ["mt-bench", "humaneval", "mbpp", "gsm8k", "classeval"]
    warm = BenchOptions("end-to-end", data_dir=data_dir, warm=True).jobs("cpu")
    assert list(dict.fromkeys((job.data, job.number) for job in warm))[:3] == [
        ("mt-bench", 0), ("mt-bench", 1), ("humaneval", 0),
    ]  # fmt: skip
    few = BenchOptions("end-to-end", data_dir=data_dir, limit=1).jobs("cpu")
    assert {job.key for job in few} <= {job.key for job in jobs}, "a larger limit has the same prompts and more"


@pytest.mark.slow
def test_presets_share_what_was_measured(run: Callable[..., Any], data_dir: Path, tmp_path: Path) -> None:
    where = ("--sets", "builtin", "--data-dir", str(data_dir), *SMALL)
    assert run("--preset", "overhead", "--quick", *where).exit_code == 0
    before = len(Results(tmp_path / "out" / "results.jsonl").records)
    result = run("--preset", "overhead", "--quick", *where)
    assert result.exit_code == 0
    assert len(Results(tmp_path / "out" / "results.jsonl").records) == before


@pytest.mark.parametrize("name", slow_but([name for name in PRESETS if name != "flash"], "ablation"))
def test_every_preset_reports(name: str, run: Callable[..., Any], data_dir: Path, tmp_path: Path) -> None:
    result = run("--preset", name, "--quick", "--data-dir", str(data_dir), *SMALL)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / f"{name}.md").read_text() == result.stdout
    assert "Traceback" not in result.output
    assert "paper" in result.stdout.lower() or name == "speed"


@pytest.mark.slow
def test_the_scaling_law_is_that_of_tune(run: Callable[..., Any], data_dir: Path) -> None:
    where = ("--quick", "--data-dir", str(data_dir), "--sets", "humaneval", "--limit", "2", "--max-tokens", "40")
    result = run("--preset", "scaling-law", "--json", *where)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (shown,) = found["tables"]
    points = [
        Point(int(row["W = G"]), int(row["N"]), int(row["W = G"]), line["compression"])
        for row, line in zip(shown["rows"], found["lines"], strict=True)
    ]
    assert max(point.compression for point in points) > 1.1, "something to fit"
    for law, column in ((PAPER, "law, paper's alpha = 0.425, f = 3.106"), (fit(points), "law, fitted")):
        expected = [law.predict(point.window, point.ngram, point.guesses) for point in points]
        assert [float(row[column]) for row in shown["rows"]] == pytest.approx(expected, abs=0.006)


@pytest.mark.slow
def test_ablation_has_the_nine_rows_and_every_combination(run: Callable[..., Any], data_dir: Path) -> None:
    result = run("--preset", "ablation", "--data-dir", str(data_dir), *SMALL)
    everything = table(result.stdout, "Methods")
    rows, sources = everything[:9], everything[9:]
    assert [row[1] for row in rows] == [
        "hf-greedy", "hf-prompt-lookup", "(10,1,3) + prompt", "(5,1,10) + prompt", "(5,1,30)", "(5,1,30) + prompt",
        "(5,30,1)", "(5,15,15)", "(5,15,15) + prompt",
    ]  # fmt: skip
    assert rows[-1][-1] == "1.88x, 2.05"
    assert len(sources) == 16
    assert sources[0][1] == "autoregressive"
    assert {row[-1] for row in sources} == {"-"}
    assert {row[SAME] for row in everything} == {row[AS_OWN] for row in everything} == {"1/1"}


@pytest.mark.slow
def test_sampled_texts_are_those_of_autoregressive(run: Callable[..., Any], data_dir: Path) -> None:
    result = run("--preset", "sampling", "--data-dir", str(data_dir), "--limit", "2", "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    rows, methods = table(result.stdout, "Methods"), ("autoregressive", "(5,15,15) + prompt", "lookahead")
    assert rows.pop(0)[:3] == ["cnn-dm", "hf-greedy", "0"], "transformers draws other numbers"
    assert [row[:3] for row in rows[:6]] == [["cnn-dm", method, heat] for heat in ("0", "0.7") for method in methods]
    assert rows.pop(9)[:3] == ["xsum", "hf-greedy", "0"]
    assert len(rows) == 18
    assert {row[SAME + 1] for row in rows} == {"2/2"}
    assert [row[-1] for row in rows if row[1] == "(5,15,15) + prompt"] == [
        "1.57x, 1.72", "-", "1.46x, 1.64", "1.60x, 1.77", "-", "1.50x, 1.67",
    ]  # fmt: skip
    scores = table(result.stdout, "ROUGE")
    assert scores.pop(0)[:3] == ["cnn-dm", "0", "hf-greedy"]
    assert [row[:3] for row in scores[:3]] == [["cnn-dm", "0", method] for method in methods]
    assert scores.pop(9)[:3] == ["xsum", "0", "hf-greedy"]
    assert len(scores) == 18
    for first, *others in (scores[i : i + 3] for i in range(0, 18, 3)):
        assert all(row[3:] == first[3:] for row in others), "equal texts have equal scores"


def test_speed_compares_every_prompt(run: Callable[..., Any], data_dir: Path) -> None:
    result = run("--preset", "speed", "--data-dir", str(data_dir), "--limit", "2", "--max-tokens", "6")
    assert result.exit_code == 0, result.output
    rows = table(result.stdout, "Prompt by prompt")
    assert [row[0] for row in rows] == ["mt-bench"] * 2 + ["humaneval"] * 2
    assert all(row[2] == "6" and row[-1] == "yes" for row in rows), "one turn of each conversation"
    assert "mt-bench: the median of the ratios is" in result.stdout


@pytest.mark.slow
def test_exactness_finds_differences(run: Callable[..., Any], data_dir: Path) -> None:
    result = run("--preset", "exactness", "--data-dir", str(data_dir), "--max-tokens", "24")
    assert result.exit_code == 0, result.output
    rows = {row[0]: row for row in table(result.stdout, "Outputs that differ")}
    assert len(rows) == 11
    assert rows["int8 autoregressive"][1:3] == rows["int8 lookahead"][1:3], "int8 has one text of its own"
    assert rows["int8 lookahead"][3] == "0 of 4"
    for name, row in rows.items():
        assert row[1].endswith(" of 4"), "two conversations of two turns"
        if name.startswith("fp32"):
            own = "0 of 4" if name in ("fp32 lookahead", "fp32 paper (5,15,15)") else "-"
            assert row[1:] == ["0 of 4", "-", own], name
    differ = sum(int(row[1].partition(" ")[0]) for row in rows.values())
    assert differ > 0, "bfloat16 rounds this model's logits far enough"


def test_step_cost_is_deprecated(run: Callable[..., Any]) -> None:
    result = run("--step-cost", "nowhere.json", "--method", "autoregressive", *SMALL)
    assert result.exit_code == 0, result.output
    assert "--step-cost is deprecated and ignored" in result.stderr


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--preset", "ablatoin"), "--preset does not know 'ablatoin': did you mean 'ablation'"),
        (("--sets", "builtn"), "unknown prompt set 'builtn': did you mean 'builtin'"),
        (("--sets", ","), "--sets names none"),
        (("--method", "hf-gredy"), "unknown method 'hf-gredy': did you mean 'hf-greedy'"),
        (("--method", "hf-assisted"), "'hf-assisted' needs --draft-model"),
        (("--sets", "mbpp", "--data-dir", "nowhere"), "set 'mbpp' needs nowhere/mbpp.jsonl"),
        (("--preset", "flash", "--sets", "builtin"), "compares GPU kernels and needs a CUDA device"),
        (("--preset", "exactness", "--sets", "builtin", "--ranks", "2"), "loads several models"),
        (("--preset", "gpu-report", "--json"), "--json is not for presets of a GPU; leave it out"),
        (("--preset", "gpu-step", "--sets", "builtin"), "--sets is not for presets of a GPU; leave it out"),
        (("--preset", "overhead,gpu-step"), "--preset gpu-step cannot be combined with overhead"),
        (("--preset", "gpu-stp"), "--preset does not know 'gpu-stp': did you mean 'gpu-step'"),
    ],
)
@pytest.mark.thinned(1, most=5)
def test_mistakes_are_one_line(args: tuple[str, ...], error: str, run: Callable[..., Any]) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert error in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_corrupt_file_of_results(run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text("{broken\n")
    result = run(*SMALL)
    assert result.exit_code == 2
    assert "results.jsonl, line 1 is no result" in result.stderr
    assert (out / "results.jsonl").read_text() == "{broken\n"


@pytest.mark.slow
def test_flash_compares_the_two_backends(
    run: Callable[..., Any], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the kernels' slow twins: what is compared, not how fast it is."""
    monkeypatch.setitem(PRESETS, "flash", replace(PRESETS["flash"], cuda=False))
    result = run("--preset", "flash", "--quick", "--data-dir", str(data_dir), "--sets", "humaneval", *SMALL)
    assert result.exit_code == 0, result.output
    rows = table(result.stdout, "Methods")
    assert [row[1] for row in rows][:3] == ["hf-greedy", "autoregressive, no kernel", "autoregressive, kernel"]
    assert {row[SAME] for row in rows} == {"1/1"}
    assert [row[OVER_OWN] for row in rows][:3] == ["-", "1.00x", "1.00x"], "each backend's own"


@pytest.mark.slow
def test_backends_share_one_load(
    run: Callable[..., Any],
    data_dir: Path,
    loads: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A 7B is loaded and inflated in half a minute and takes 14 GB: once for each dtype, not for each backend."""
    monkeypatch.setitem(PRESETS, "flash", replace(PRESETS["flash"], cuda=False))
    monkeypatch.setattr("lookahead.bench.paper.options.find_spec", lambda _: None)  # no int8 model beside these
    monkeypatch.setitem(MODEL_SHAPES, "7b", ModelShape(64, 3, 96, 8, 4))
    where = ("--quick", "--data-dir", str(data_dir), "--sets", "humaneval", *SMALL)
    result = run("--preset", "flash,exactness", *where, shape="7b")
    assert result.exit_code == 0, result.output
    assert loads == [("auto", "eager"), ("bfloat16", "eager")], "the small model, to inflate; float32 is there"
    rows = table(result.stdout, "Methods")
    assert {row[SAME] for row in rows} == {"1/1"}
    exact = {row[0]: row for row in table(result.stdout, "Outputs that differ")}
    assert len(exact) == 9
    assert {row[1] for name, row in exact.items() if name.startswith("fp32")} == {"0 of 1"}


@pytest.mark.slow
def test_several_presets_on_one_model(
    run: Callable[..., Any], data_dir: Path, loads: list[tuple[str, str]], tmp_path: Path
) -> None:
    where = ("--quick", "--data-dir", str(data_dir), "--sets", "humaneval", *SMALL)
    result = run("--preset", "speed,overhead, configs,overhead", "--json", *where)
    assert result.exit_code == 0, result.output
    assert loads == [("auto", "auto")]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["preset"] for one in found] == ["speed", "overhead", "configs"], "as asked for, each once"
    for one in found:
        assert Path(one["files"]["markdown"]).is_file()
        assert one["files"]["results"] == str(tmp_path / "out" / "results.jsonl")
    assert "speed: 2 answers, at most 12 new tokens" in result.stderr
    assert "overhead: 9 answers, at most 54 new tokens" in result.stderr
    assert "configs: 8 answers, at most 48 new tokens" in result.stderr
    assert "3 of 8 answers exist already" in result.stderr, "greedy's, autoregressive's and (5,15,15)'s"


@pytest.mark.slow
def test_all_presets_that_the_device_can_run(
    run: Callable[..., Any], data_dir: Path, loads: list[tuple[str, str]]
) -> None:
    result = run("--preset", "all", "--device", "cpu", "--quick", "--json", "--data-dir", str(data_dir), *SMALL)
    assert result.exit_code == 0, result.output
    found = [json.loads(line)["preset"] for line in result.stdout.splitlines()]
    assert found == [name for name in PRESETS if name != "flash"]
    assert loads == [("auto", "auto"), ("bfloat16", "auto"), ("int8", "cpu")]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--preset", "overhead,ablatoin"), "--preset does not know 'ablatoin': did you mean 'ablation'"),
        (("--preset", "overhead,"), "--preset does not know ''"),
        (("--preset", "overhead,list"), "--preset list must be used alone"),
        (("--preset", "overhead,flash", "--device", "cpu"), "'flash' compares GPU kernels and needs a CUDA device"),
        (("--preset", "overhead,end-to-end", "--data-dir", "{half}"), "set 'humaneval' needs"),
        (("--preset", "overhead,exactness", "--ranks", "2"), "preset 'exactness' loads several models"),
    ],
)
def test_a_mistake_in_any_preset_is_told_before_a_model_is_loaded(
    args: tuple[str, ...], error: str, run: Callable[..., Any], data_dir: Path, loads: list[tuple[str, str]]
) -> None:
    (data_dir / "humaneval.jsonl").unlink()
    given = [part.replace("{half}", str(data_dir)) for part in args]
    result = run(*given, *(() if "--data-dir" in given else ("--data-dir", str(data_dir))), "--quick")
    assert result.exit_code == 2, result.output
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
    assert loads == []


def test_an_interrupt_ends_all_presets(
    run: Callable[..., Any], data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = Runner.record
    ran: list[str] = []

    def stopping(self: Runner, job: Any, longest: int = 0) -> Any:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(job.key)
        return row(self, job, longest)

    where = ("--preset", "overhead,configs", "--quick", "--data-dir", str(data_dir), "--sets", "humaneval", *SMALL)
    monkeypatch.setattr(Runner, "record", stopping)
    first = run(*where)
    assert first.exit_code == 130
    assert "interrupted, 11 of 14 answers to go" in first.stderr, "the three that both need count once"
    assert not (tmp_path / "out" / "configs.md").exists()
    monkeypatch.setattr(Runner, "record", row)
    second = run(*where)
    assert second.exit_code == 0, second.output
    assert "3 of 8 answers exist already" in second.stderr
    assert (tmp_path / "out" / "configs.md").exists()


def test_half_precision_is_what_was_asked_for(run: Callable[..., Any], data_dir: Path, tmp_path: Path) -> None:
    args = ("--preset", "exactness", "--quick", "--data-dir", str(data_dir), "--method", "hf-greedy", *SMALL)
    assert run(*args).exit_code == 0
    assert {m.dtype for m in BenchOptions("exactness", data_dir=data_dir, half="float16").methods_on("cuda")} == {
        "float32",
        "float16",
    }


def test_the_presets_are_listed(run: Callable[..., Any]) -> None:
    assert [line.split()[0] for line in run("--preset", "list").stdout.splitlines()] == [
        *PRESETS,
        *WORKLOADS,
        *GPU_PRESETS,
    ]


@pytest.mark.slow
def test_ranks_give_what_one_rank_gives(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    args = ["bench", "--ranks", "2", "--model", str(folder), "--out", str(tmp_path / "out"), "--limit", "2"]
    args += ["--max-tokens", "12", "--repeats", "1", "--method", "hf-greedy", "--method", "paper:3,3,3"]
    args += ["--method", "config:window=3,ngram=4,budget=40"]
    environment = {**os.environ, "LOOKAHEAD_CACHE": str(tmp_path / "cache")}

    command = [sys.executable, "-m", "lookahead", *args]
    first = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert first.returncode == 0, first.stderr
    rows = table(first.stdout, "Methods")
    assert {row[SAME] for row in rows} == {"2/2"}
    assert [row[1] for row in rows[2::2]] == [
        "paper:3,3,3, 2 ranks",
        "config:window=3,ngram=4,budget=40, 2 ranks",
    ]
    for alone, together in zip(rows[1::2], rows[2::2], strict=True):
        assert alone[2:6] == together[2:6], "prompts, tokens, steps and S of one rank"
    counters = [row["ranks"] for row in Results(tmp_path / "out" / "results.jsonl").records.values() if "ranks" in row]
    assert len(counters) == 4
    assert all(counter["collectives"] == counter["steps"] for counter in counters)
    shares = [sum(counter["tokens"][rank] for counter in counters) for rank in range(2)]
    assert max(shares) < sum(counter["tree_tokens"] for counter in counters), "a rank runs less than the tree"


@pytest.mark.slow
def test_larger_shapes(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MODEL_SHAPES, "7b", ModelShape(64, 3, 96, 8, 4))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    where = ("--sets", "builtin", *SMALL)
    found = run("--preset", "configs", "--quick", *where)
    assert found.exit_code == 0, found.output
    rows = table(found.stdout, "Table 4: the best of the grid")
    assert [row[0] for row in rows] == ["builtin"]
    assert rows[0][5].endswith("x")
    args = ("--method", "hf-greedy", "--method", "lookahead", *where)
    small, large = run("--json", *args), run("--json", *args, "--out", str(tmp_path / "large"), shape="7b")
    assert large.exit_code == 0, large.output
    found = json.loads(large.stdout)
    assert found["about"]["model"] == "tiny in 7b shape"
    tokens = [
        [
            row["tokens"]
            for row in Results(Path(json.loads(one.stdout)["files"]["results"])).records.values()
            if "tokens" in row
        ]
        for one in (small, large)
    ]
    assert tokens[1][0] in tokens[0], "the same function"
    assert {line["same"] for line in found["lines"]} == {1}


def test_the_costs_in_the_documentation_are_those_of_the_presets() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for preset in PRESETS.values():
        assert cost_line(preset) in text


def cost_line(preset: Preset) -> str:
    """A preset's row of the documentation's table."""

    def answers(methods: Sequence[Method], size: Size) -> int:
        return sum(1 if method.stock else len(preset.temperatures) for method in methods) * size.repeats

    full, quick = preset.full, preset.quick
    everywhere = [method for method in preset.methods if method.device is None]
    whole = answers(everywhere, full)
    short = answers(preset.quick_methods or everywhere, quick)
    sizes = f"{full.limit or 'by set'}, {full.max_tokens or 'by set'}"
    return f"| `{preset.name}` | {whole} | {sizes} | {short}, {quick.limit}, {quick.max_tokens} |"
