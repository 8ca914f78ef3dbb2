"""`make test-gpu` on a CPU: the table and what it judges, and all parts but the tests, end to end on a tiny model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import gpu_tests
import pytest
import torch
from gpu_check import FAIL, OK, SHOWN, Row, figure_rows, main, random_request, table

from lookahead.engine.settings import RequestSettings

ROOT = Path(__file__).parents[2]
BASELINE = {"figures": {"ms of a step, K=1": 4.0, "tok/s, default": 200.0}}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("ms of a step, K=1", 4.19, OK),
        ("ms of a step, K=1", 4.21, FAIL),
        ("ms of a step, K=1", 2.0, OK),
        ("tok/s, default", 181.0, OK),
        ("tok/s, default", 179.0, FAIL),
        ("tok/s, default", 900.0, OK),
        ("tok/s, 8 at once", 1.0, SHOWN),
    ],
)
def test_a_figure_may_be_a_little_worse(name: str, value: float, verdict: str) -> None:
    (row,) = figure_rows({name: value}, BASELINE, judged=True)
    assert row.verdict == verdict
    assert figure_rows({name: value}, BASELINE, judged=False)[0].verdict == SHOWN


def test_table() -> None:
    rows = [Row("tests", "3 passed", OK), Row("ms of a step, K=1", "5", FAIL, "4", "1.250")]
    assert table(rows).splitlines() == [
        "check              figure    baseline  ratio",
        "tests              3 passed                   ok",
        "ms of a step, K=1  5         4         1.250  FAIL",
    ]


def test_the_baseline_has_all_figures_that_are_measured() -> None:
    baseline, sizes = json.loads(gpu_check.BASELINE.read_text(encoding="utf-8")), gpu_check.Sizes()
    names = [f"ms of a step, K={count}" for count in sizes.steps]
    names += ["tok/s, token by token", "tok/s, default", *(f"tok/s, {count} at once" for count in sizes.together)]
    assert list(baseline["figures"]) == names
    assert {name.split()[0].rstrip(",") for name in names} == set(baseline["tolerances"])


def test_requests_are_of_all_kinds_and_repeatable() -> None:
    made = [random_request(random.Random(seed), ["one two three"], 9) for seed in range(300)]
    assert made == [random_request(random.Random(seed), ["one two three"], 9) for seed in range(300)]
    for _, settings in made:
        RequestSettings(**settings)
    used = {name for _, settings in made for name in settings}
    assert used == {one for one in RequestSettings.__dataclass_fields__ if one != "config"}


def test_marked_files() -> None:
    files = {str(path.relative_to(ROOT)) for path in gpu_tests.marked_files(ROOT / "tests")}
    assert {"tests/backends/graph/test_cuda.py", "tests/backends/graph/test_graph.py", "tests/test_ready.py"} <= files
    assert not [name for name in files if name.startswith("tests/serve")]


def test_files_are_dealt_out_by_their_tests() -> None:
    counts = {"a": 50, "b": 30, "c": 20, "d": 19, "e": 1}
    assert gpu_tests.deal(counts, 3) == [["a"], ["b", "e"], ["c", "d"]]
    assert gpu_tests.deal({"a": 1}, 3) == [["a"]]


@pytest.mark.parametrize(
    ("body", "other", "passed", "figure"),
    [
        ("pass", "import no_such_package", True, "1 passed, 1 skipped"),
        pytest.param("assert 0", "", False, "1 failed, 1 skipped", marks=pytest.mark.slow),
        pytest.param("pass", "import os.nothing", False, "1 passed, 1 skipped", marks=pytest.mark.slow),
    ],
)
def test_tests_run_and_a_file_without_its_package_is_left_out(
    body: str,
    other: str,
    passed: bool,
    figure: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that fails to import for another reason is a failure. No plugin of pytest's is needed, nor imported: that
    would take seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    test = "import pytest\n\n\n@pytest.mark.gpu\ndef test_one():\n    {}\n"
    (tests / "test_one.py").write_text(test.format(body) + "\n\ndef test_two():\n    assert 0\n")
    (tests / "test_other.py").write_text(test.format("pytest.skip('no')"))
    (tests / "test_third.py").write_text(f"{other}\n\n# mark.gpu\n")
    assert gpu_tests.run_tests(tmp_path) == (passed, figure)
    out = capsys.readouterr().out
    assert ("left out: tests/test_third.py needs no_such_package" in out) == ("no_such" in other)
    assert ("os.nothing" in out) == ("nothing" in other)


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main([]) == 2
    assert capsys.readouterr().err == "test-gpu: there is no CUDA device here; nothing was checked\n"
    with pytest.raises(SystemExit):
        main(["--only", "sok"])
    assert "--only does not know 'sok'" in capsys.readouterr().err


@pytest.fixture
def tiny_folder(
    tmp_path: Path, make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))
    make_model(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_everything_but_the_tests(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the kernels' slow twins. Another GPU's baseline is not judged; one that was written here is."""
    baseline = tiny_folder / "baseline.json"
    words = ["--small", "--device", "cpu", "--model", str(tiny_folder), "--baseline", str(baseline), "--seconds", "0.5"]
    assert main([*words, "--only", "identity,soak,figures", "--update"]) == 0
    out = capsys.readouterr().out
    last = out.rstrip().splitlines()
    assert any(line.startswith("identity, 8 at once") and line.endswith("ok") for line in last)
    assert any(line.startswith("soak, as alone") and line.endswith("ok") for line in last)
    assert any(line.split() == ["soak,", "pages", "and", "requests", "left", "0", "and", "0", "ok"] for line in last)
    written = json.loads(baseline.read_text(encoding="utf-8"))
    assert all(value > 0 for value in written["figures"].values())
    assert "figures are not judged" in out
    written["figures"] = dict.fromkeys(written["figures"], 1e-9)  # every step is too slow
    baseline.write_text(json.dumps(written), encoding="utf-8")
    assert main([*words, "--only", "figures"]) == 1
    out = capsys.readouterr().out
    assert "figures are not judged" not in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("ms of a step")] == ["FAIL"] * 2


def test_a_text_that_differs_fails(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    generate = gpu_check.LookaheadModel.generate

    def wrong(lm: Any, prompt: str, **settings: Any) -> Any:
        done = generate(lm, prompt, **settings)
        done.token_ids.append(settings.get("method") == "autoregressive")
        return done

    monkeypatch.setattr(gpu_check.LookaheadModel, "generate", wrong)
    assert main(["--small", "--device", "cpu", "--model", str(tiny_folder), "--only", "identity"]) == 1
    assert "0 of 6" in capsys.readouterr().out


@pytest.mark.slow
def test_it_needs_neither_typer_nor_rich() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich'])); "
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu_check"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
