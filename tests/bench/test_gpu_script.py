"""`benchmarks/gpu.py` and its report, end to end on a CPU with a tiny Llama: time on a GPU is too short to debug it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHAT = ["the quick brown fox jumps over", "once more the dog and the fox", "the café", "a naïve façade"]
CODE = ["def fox(dog): return [dog", "for _ in range(10)]", "the end", "return [fox"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on a large shape that is small and on contexts that are short."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    from gpu_parts import speed, steps

    from lookahead.bench import inflate

    monkeypatch.setitem(inflate.MODEL_SHAPES, "7b", inflate.ModelShape(64, 3, 96, 8, 4))
    monkeypatch.setitem(inflate.MODEL_SHAPES, "1.5b", inflate.ModelShape(48, 2, 80, 4, 4))
    monkeypatch.setattr(steps, "CONTEXTS", (16, 64))
    monkeypatch.setattr(speed, "BATCHES", (1, 3))
    return gpu


@pytest.fixture
def files(tmp_path: Path, make_model: Callable[..., Any], tokenizer: Any) -> Path:
    """A folder with a model and with prompts."""
    make_model(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [json.dumps({"turns": [text]}) for text in CHAT]
    (tmp_path / "mt_bench.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "humaneval.jsonl").write_text("\n".join(json.dumps({"prompt": t}) for t in CODE), encoding="utf-8")
    return tmp_path


def measure(script: ModuleType, files: Path, *words: str, out: str = "out") -> dict[str, dict[str, Any]]:
    """Run the script; what it wrote, by file."""
    common = ["--model", files / "model", "--data-dir", files, "--out", files / out, "--device", "cpu"]
    common += ["--dtype", "float32", "--prompts", "3", "--baseline-prompts", "2", "--new-tokens", "20"]
    script.main([*words, *map(str, common)])
    return {path.stem: json.loads(path.read_text()) for path in (files / out).glob("*.json")}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_report

    return gpu_report


def targets(page: str) -> dict[str, list[str]]:
    """The table of targets: target -> measured, met, rows."""
    part = page.split("## Targets")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


def test_every_part_but_attention(script: ModuleType, report: ModuleType, files: Path) -> None:
    """In fp32 nothing may drift: every method's outputs are those of transformers, whatever the shape.

    The report reads all of it.
    """
    parts = [part for part in script.PARTS if part != "attention"]
    made = measure(script, files, *parts, "--compile-backend", "eager")
    assert set(made) == {f"{part}-7b" for part in parts}
    about = made["speed-7b"]["about"]
    assert about["part"] == "speed"
    assert str(files) not in about["argv"]
    assert " speed " in about["argv"]

    speed = made["speed-7b"]["rows"]
    assert {(row["method"], row["set"], row["invariant"]) for row in speed} == {
        (method, data, invariant)
        for method in ("autoregressive", "paper (5,15,15) + prompt", "default")
        for data in ("mt-bench", "humaneval")
        for invariant in (True, False)
    }
    for row in speed:
        assert row["device_ms"] == pytest.approx(row["ms_per_step"] - row["gap_ms"], abs=0.002)
        assert sum(row["sizes"].values()) == row["steps"] - row["prompts"]
    assert [set(row["sizes"]) for row in speed if row["method"] == "autoregressive"] == [{"1"}] * 4

    stock = made["baselines-7b"]["rows"]
    assert [row["prompts"] for row in stock] == [2] * 6
    assert {row["method"] for row in stock} == {
        "transformers eager", "transformers static + compile", "transformers prompt lookup",
    }  # fmt: skip
    assert all("warm_up_s" in row and row["tok_s"] > 0 for row in stock)
    static = [row for row in stock if "static" in row["method"]]
    assert all("fullgraph=True" in row["how"] and row["compiled_graphs"] == 1 for row in static)

    steady = made["steady-7b"]["rows"]
    assert len(steady) == 3 * 3
    assert all(row["differ"] == len(row["at"]) == 0 < row["prompts"] for row in steady)

    batches = made["batch-7b"]["rows"]
    assert [row["batch"] for row in batches] == [1] * 4 + [3] * 4
    assert all(row["tok_s"] > 0 for row in batches)

    drift = made["drift-7b"]["rows"]
    assert len(drift) == 15
    assert all(row["equal"] == row["prompts"] > 0 and row["differ"] == 0 for row in drift)

    exact = made["exact-7b"]["rows"]
    assert {row["model"] for row in exact} == {"small", "1.5b"}
    for row in exact:
        assert row.get("identical", row.get("identical_to_own")) == row["prompts"] == 3
    assert all(row["identical_to_eager"] == 3 and row["S_ratio"] > 0.5 for row in exact if "S_eager" in row)
    assert any(row["unlike_greedy"] for row in exact if "unlike_greedy" in row)  # so something was drawn

    one, many = made["context-7b"]["rows"][:2]
    assert (one["K"], many["K"]) == (1, 128)
    assert one["step_mb"] < many["step_mb"] < many["all_steps_mb"]

    assert report.main([str(files / "out"), "--out", str(files)]) == 0
    page = (files / "gpu.md").read_text(encoding="utf-8")
    for title in ("A step by K", "Tokens per second", "Context and memory", "Batch", "Exactness", "Drift", "From run"):
        assert f"## {title}" in page
    identical = targets(page)["fp32: outputs of the graph backend identical to transformers' greedy ones"]
    assert identical[:2] == ["12 of 12 (small), 12 of 12 (1.5b)", "yes"]


def test_a_baseline_that_fails_says_so(script: ModuleType, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is the row, and the next method still runs."""
    made = measure(script, files, "baselines", "--methods", "static,eager", "--compile-backend", "nobody")
    rows = made["baselines-7b-static-eager"]["rows"]
    assert "nobody" in rows[0]["error"]
    assert [row["method"] for row in rows] == ["transformers static + compile", *["transformers eager"] * 2]


def test_drift_reads_the_outputs_of_other_commands(script: ModuleType, files: Path) -> None:
    """And sees a token that differs: one is changed in the file, and half of the rest is cut off elsewhere."""
    measure(script, files, "speed", "--invariant", "off")
    path = files / "out" / "speed-7b.json"
    kept = json.loads(path.read_text())
    default = next(entry for entry in kept["outputs"] if entry["method"] == "default")
    default["tokens"][0][5] += 1
    default["tokens"][1] = default["tokens"][1][:7]
    path.write_text(json.dumps(kept))
    rows = measure(script, files, "drift", "--outputs", str(files / "out"), out="drift")["drift-7b"]["rows"]
    equal = {(row["of"], row["against"]): (row["equal"], row["prompts"], len(row["margins"])) for row in rows}
    assert equal["default", "autoregressive"] == equal["default", "fp32"] == (4, 6, 2)
    assert equal["autoregressive", "fp32"] == (6, 6, 0)


def test_drift_without_outputs(script: ModuleType, files: Path) -> None:
    with pytest.raises(SystemExit, match="run speed and baselines"):
        measure(script, files, "drift")


def test_the_help_names_every_part(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    words = capsys.readouterr().out
    for part, (_, expected) in script.PARTS.items():
        assert f"\n    {part}" in words
        assert expected in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["baselines", "--methods", "eager,fast"], "unknown name 'fast'; choose from eager, static"),
        (["drift", "--outputs", "nowhere"], "nowhere is no folder"),
    ],
)
def test_bad_options(script: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([*words, "--device", "cpu"])
    assert message in capsys.readouterr().err


# The report


def test_the_report_of_the_first_run(report: ModuleType, tmp_path: Path) -> None:
    """Files of before: without commands and outputs, and without some of the parts."""
    kept = tmp_path / "kept"
    kept.mkdir()
    about = {"shape": "7b", "dtype": "bfloat16", "gpu": "a GPU"}
    rows = [{"invariant": False, "K": k, "context": 1024, "device_ms": ms} for k, ms in ((1, 4.374), (121, 5.057))]
    rows = [{**row, "products_ms": 3.8, "step_wall_ms": 5.2} for row in rows]
    (kept / "step-7b.json").write_text(json.dumps({"about": about, "rows": rows}))
    assert report.main([str(kept), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    found = targets(page)
    assert found.pop("a step of 1 token at context 1024 takes at most 4.3 ms")[:2] == ["4.37 ms", "**no**"]
    assert found.pop("121 tokens at most 1.15 times that")[:2] == ["1.16 times (5.06 ms)", "**no**"]
    assert len(found) > 22
    assert {tuple(row[:2]) for row in found.values()} == {("not measured", "open")}
    assert "not recorded" in page


def test_the_report_compares_on_shared_prompts(report: ModuleType, tmp_path: Path) -> None:
    """The baseline ran one prompt of two, and that one was slow for us as well."""
    about = {"shape": "7b", "dtype": "bfloat16", "gpu": "a GPU", "argv": "python benchmarks/gpu.py speed"}

    def write(part: str, method: str, tok_s: float, prompts: list[str], seconds: list[float]) -> None:
        row = {"method": method, "set": "mt-bench", "tok_s": tok_s, "invariant": False, "gap_percent": 6, "gap_ms": 1}
        kept = {"method": method, "set": "mt-bench", "prompts": prompts, "seconds": seconds}
        kept |= {"tokens": [[1] * 100] * len(prompts), "invariant": False if part == "speed" else None}
        made = {"about": {**about, "part": part}, "rows": [row], "outputs": [kept]}
        (tmp_path / f"{part}-{len(method)}.json").write_text(json.dumps(made))

    write("speed", "default", 700, ["a", "b"], [0.5, 0.1])
    write("baselines", "transformers static + compile", 40, ["a"], [2.5])
    assert report.main([str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "gpu.md").read_text(encoding="utf-8")
    found = targets(page)
    static = found["default, mt-bench: at least 4.5 times transformers' static cache + compile"]
    assert static[:2] == ["5.00 times (200 against 40.0 tok/s, 1 prompts)", "yes"]
    assert found["host and launch at most 5% of a step"][1] == "**no**"
    assert "`python benchmarks/gpu.py speed`" in page


def test_the_plots(report: ModuleType, tmp_path: Path) -> None:
    """Of the results in this repository, whatever they are."""
    pytest.importorskip("matplotlib")
    report.main([str(BENCHMARKS / "results" / "h200"), "--out", str(tmp_path)])
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    for name in ("gpu-step.svg", "gpu-speed.svg", "gpu-context.svg", "gpu-batch.svg"):
        assert "<svg" in (tmp_path / name).read_text(encoding="utf-8")
        assert f"({name})" in page


def test_a_folder_without_results(report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "holds no JSON of gpu.py" in capsys.readouterr().err
