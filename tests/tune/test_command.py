"""`lookahead tune` on a scripted model: what it prints, where it writes, and how mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedModel, curve
from typer.testing import CliRunner

from lookahead.bench.run.prompts import load, read_own
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.cli.tune import choose_prompts
from lookahead.tune import tuner


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    takes = lambda size: 0.02 + 1e-5 * size  # noqa: E731
    monkeypatch.setattr(tuner, "measure", lambda *_, **__: curve(takes))
    return ScriptedModel(takes, lambda config: 2.0 if config.sources else 1.0)


def run(model: ScriptedModel, *args: str) -> Any:
    loaded: list[dict[str, Any]] = []

    def load(name: str | None, **options: Any) -> Any:
        loaded.append({"name": name, **options})
        return model

    result = CliRunner().invoke(app, ["tune", *args], obj=Host(load=load), prog_name="lookahead")
    result.loaded = loaded
    return result


def test_a_table_a_plot_and_a_verdict(model: ScriptedModel) -> None:
    result = run(model, "--model", "m")
    assert result.exit_code == 0, result.output
    assert result.loaded[0]["name"] == "m"
    assert result.loaded[0]["config"] is not None  # nothing measured at loading, no profile in the way
    printed = result.stdout
    for word in ("candidate", "tokens", "S", "ms", "tok/s", "speedup", "autoregressive", "paper W=15 N=5 G=15"):
        assert word in printed
    assert printed.count("####") > 5
    assert "scaling law of the paper's method: alpha" in printed
    assert printed.rstrip().splitlines()[-1].startswith("best here: ")
    (best,) = [line for line in printed.splitlines() if line.strip().startswith("*")]
    assert best.split()[1] in printed.rstrip().splitlines()[-1]
    assert "--save" in result.stderr
    assert {prompt for prompt, _, _ in model.asked} == {prompt.turns[0] for prompt in load("builtin", limit=3)}


def test_json_is_all_there_is_on_stdout(model: ScriptedModel) -> None:
    result = run(model, "--json", "--quick")
    record = json.loads(result.stdout)
    assert record["model"] == "scripted"
    assert (record["prompts"], record["tokens"]) == (2, 32)
    assert record["candidates"][0]["speedup"] >= record["candidates"][-1]["speedup"]


def test_it_says_when_lookahead_does_not_pay(model: ScriptedModel) -> None:
    model.accepts = lambda config: 1.0
    result = run(model)
    assert result.exit_code == 0
    assert result.stdout.rstrip().splitlines()[-1].startswith("lookahead does not pay here: ")


def test_the_prior_runs_no_prompt(model: ScriptedModel) -> None:
    result = run(model, "--prior")
    assert model.asked == []
    assert "none was run" in result.stdout


def test_save_tells_where(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuner, "save", lambda model, result, folder: folder / "profiles" / "x.json")
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    result = run(model, "--save", "--quick")
    assert f"saved: {tmp_path}" in result.stderr


def test_settings_reach_the_runs(model: ScriptedModel) -> None:
    run(model, "--max-tokens", "12", "--temperature", "0.7", "--raw")
    lengths = {settings.max_tokens for _, _, settings in model.asked}
    assert lengths == {tuner.WARM_UP_TOKENS, 12}
    assert all((s.raw, s.temperature, s.seed) == (True, 0.7, 0) for _, _, s in model.asked)


def test_plot_is_deprecated(model: ScriptedModel, tmp_path: Path) -> None:
    result = run(model, "--quick", "--plot", str(tmp_path / "p.svg"))
    assert result.exit_code == 0
    assert "--plot is deprecated and ignored" in result.stderr
    assert not (tmp_path / "p.svg").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "float31"], "did you mean 'float32'"),
        (["--device", "gpu"], "--device does not know 'gpu'"),
        (["--backend", "x"], "--backend does not know 'x'"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--max-tokens", "1"], "use at least 2"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--prompts", "nowhere.txt"], "cannot read the prompts in 'nowhere.txt'"),
    ],
)
@pytest.mark.thinned(1, most=4)
def test_mistakes_are_one_line_before_anything_is_loaded(model: ScriptedModel, args: list[str], message: str) -> None:
    result = run(model, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.loaded == []


def test_prompts_by_line_and_by_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("first\n\n second prompt \n", encoding="utf-8")
    assert choose_prompts(text, 1) == ["first", "second prompt"]
    lines.write_text('{"prompt": "a\\nb", "id": 1}\n\n{"prompt": "café"}\n', encoding="utf-8")
    assert read_own(lines) == ["a\nb", "café"]
    assert choose_prompts(None, 2) == [prompt.turns[0] for prompt in load("builtin", limit=2)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n \n", "no prompts in"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
        ("p.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "line 2"),
        ("p.jsonl", b'{"prompt": 3}\n', "line 1"),
        ("p.txt", b'{"prompt": "x"}\n\nnot json\n', "line 3"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_own(path)
