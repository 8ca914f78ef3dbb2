"""The GPU's parts and their page, end to end on a CPU with a tiny Llama: time on a GPU is too short to debug them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inflate import MODEL_SHAPES, ModelShape, shaped_load
from typer.testing import CliRunner

from lookahead.bench.gpu import batch, parts
from lookahead.bench.gpu.command import PARTS, main
from lookahead.cli import app
from lookahead.cli.bench import GPU_PRESETS

CHAT = ["the quick brown fox jumps over", "once more the dog and the fox", "the café", "a naïve façade"]
CODE = ["def fox(dog): return [dog", "for _ in range(10)]", "the end", "return [fox"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


@pytest.fixture
def files(tmp_path: Path, make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and with prompts; a large shape that is small, and contexts that are short."""
    monkeypatch.setitem(MODEL_SHAPES, "7b", ModelShape(64, 3, 96, 8, 4))
    monkeypatch.setattr(parts, "STEP_COUNTS", (1, 16))
    monkeypatch.setattr(batch, "SEQUENCES", (1, 3))
    make_model(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [json.dumps({"turns": [text], "question_id": i}) for i, text in enumerate(CHAT)]
    (tmp_path / "mt_bench.jsonl").write_text("\n".join(rows), encoding="utf-8")
    rows = [json.dumps({"prompt": text, "task_id": i}) for i, text in enumerate(CODE)]
    (tmp_path / "humaneval.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def measure(files: Path, *words: str, shape: str | None = "7b") -> dict[str, dict[str, Any]]:
    """Run parts, on the model in a larger shape if one is given; what they wrote, by file."""
    common = ["--model", files / "model", "--data-dir", files, "--out", files / "out", "--device", "cpu"]
    given = [*words, *map(str, common), "--dtype", "float32", "--limit", "3", "--max-tokens", "16", "--context", "40"]
    main(given, *(() if shape is None else (shaped_load(shape), shape)))
    return {path.stem: json.loads(path.read_text()) for path in (files / "out").glob("*.json")}


@pytest.mark.slow
def test_every_part(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32 every method's outputs are the same, whatever the shape. The page has all of it."""
    made = measure(files, *PARTS)
    assert set(made) == {f"{part}-7b" for part in PARTS}
    about = made["speed-7b"]["about"]
    assert about["command"].startswith("python benchmarks/inflate.py 7b gpu step speed ")
    assert str(files) not in json.dumps(about)

    assert [record["K"] for record in made["step-7b"]["records"]] == [1, 16]
    assert all(record["device_ms"] > 0 and record["step_wall_ms"] > 0 for record in made["step-7b"]["records"])

    speed = made["speed-7b"]["records"]
    assert {(r["method"], r["set"]) for r in speed} == {
        (method, data)
        for method in ("autoregressive", "paper (5,15,15) + prompt", "default")
        for data in ("mt-bench", "humaneval")
    }
    for record in speed:
        assert record["as_autoregressive"] == record["prompts"] == 3
        assert (record["S"] == record["K"] == 1) == (record["method"] == "autoregressive")

    batches = made["batch-7b"]["records"]
    assert [record["batch"] for record in batches] == [1, 1, 3, 3] * 2
    assert all(record["tok_s"] > 0 and record["as_first_seen"] == record["answers"] > 0 for record in batches)

    page = (files / "out" / "gpu.md").read_text(encoding="utf-8")
    for title in ("A step by K", "Tokens per second", "Batch"):
        assert f"## {title}" in page
    last = capsys.readouterr().out.rstrip().splitlines()
    assert last[-1].endswith("the page of 3 files")
    assert any(line.startswith("| default | mt-bench | 3 |") for line in last)


def test_a_model_as_it_is(files: Path) -> None:
    """Without a shape the parts measure the model that is named."""
    made = measure(files, "step", "speed", shape=None)
    assert set(made) == {"step", "speed"}
    assert made["step"]["about"]["shape"] == "model"
    assert made["step"]["about"]["command"].startswith("lookahead bench --preset gpu-step,gpu-speed ")
    assert all(record["as_autoregressive"] == 3 for record in made["speed"]["records"])
    assert "## Tokens per second: model" in (files / "out" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step"], "there is no CUDA device here"),
        (["step", "--dtype", "nope", "--device", "cpu"], "--dtype does not know 'nope'"),
        (["speed", "--device", "cpu", "--data-dir", "nowhere"], "set 'mt-bench' needs nowhere/mt_bench.jsonl"),
        (["report", "--out", "nowhere"], "holds no JSON of a GPU part"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str], files: Path) -> None:
    if words == ["step"] and __import__("torch").cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main([*words, "--model", str(files / "model")])
    assert message in capsys.readouterr().err


def test_the_presets_are_the_parts() -> None:
    assert set(GPU_PRESETS) == {f"gpu-{part}" for part in (*PARTS, "report")}


def test_the_command_makes_the_page_again(tmp_path: Path) -> None:
    """Of the results in this repository, also those of parts that no longer exist."""
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    result = CliRunner().invoke(app, ["bench", "--preset", "gpu-report", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    for title in ("A step by K: 7B shape", "Tokens per second: 7B shape", "Batch: 7B shape", "Bound: 7B shape"):
        assert f"## {title}\n\n| " in page
    assert "| default | mt-bench | yes | 10 |" in page


@pytest.mark.slow
def test_it_needs_neither_typer_nor_rich() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich'])); "
        "import lookahead.bench.gpu.command as c; c.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(f"\n    {part}" in done.stdout for part in PARTS)
