"""`benchmarks/gpu.py` and its report, end to end on a CPU with a tiny Llama: a GPU's minutes are too few to debug it."""

from __future__ import annotations

import json
import sys
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
    from gpu_parts import steps

    from lookahead.bench import inflate

    monkeypatch.setitem(inflate.SHAPES, "7b", inflate.Shape(64, 3, 96, 8, 4))
    monkeypatch.setitem(inflate.SHAPES, "1.5b", inflate.Shape(48, 2, 80, 4, 4))
    monkeypatch.setattr(steps, "CONTEXTS", (16, 64))
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


def test_every_part_but_attention(script: ModuleType, files: Path) -> None:
    """In fp32 nothing may drift: every method's outputs are those of transformers, whatever the shape."""
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
    assert {"fullgraph=True" in row["how"] for row in stock if "static" in row["method"]} == {True}

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
