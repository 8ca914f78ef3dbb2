"""The paper's tables in pieces: measured by one command, merged, and written as pages; with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paper
import pytest
import torch

from lookahead.bench.paper.pages import read_words
from lookahead.bench.paper.plots import PLOTS
from lookahead.bench.paper.presets import PRESETS
from lookahead.bench.run.results import Results

SMALL = ("--limit", "2", "--baseline-limit", "1", "--max-tokens", "6")


@pytest.fixture
def command(lm: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a verb on the tiny model, whatever model is named; returns what it said."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "cache"))

    def run(verb: str, *words: str) -> list[str]:
        said: list[str] = []
        data = () if verb == "merge" else ("--data-dir", str(data_dir), *SMALL)
        args = paper.parser().parse_args([verb, *words, *data])
        if verb == "measure":
            paper.measure(args, said.append, lambda args, say: lambda dtype=None, backend=None: lm)
        else:
            getattr(paper, verb)(args, said.append)
        return said

    return run


def test_tables_in_pieces_become_pages(command: Callable[..., list[str]], tmp_path: Path) -> None:
    tables, folders = "identity,overhead", [str(tmp_path / name) for name in "ab"]
    assert re.match(
        r"\d+ of \d+ answers to go",
        command("measure", "7b", "--tables", tables, "--minutes", "0", "--out", folders[0])[-1],
    )
    assert command("measure", "7b", "--tables", "identity", "--out", folders[0])[-1] == "all measured"
    said = command("measure", "7b", "--tables", tables, "--out", folders[1])
    assert said[-1] == "all measured"
    assert "identity: 7 answers, at most 84 new tokens" in said, "one of transformers', two of each of ours"
    planned = command("plan", "7b", "--device", "cpu", "--out", folders[1])
    assert "identity: 7 answers, 7 measured, 0 new ones of at most 0 tokens" in planned, "end-to-end has them, too"
    assert re.fullmatch(r"\d+ of \d+ answers to go, about \d+ (s|minutes)", planned[-1])
    records = tmp_path / "records"
    assert command("merge", *folders, "--out", str(records))[0].startswith("7b: ")
    merged = Results(records / "7b" / "results.jsonl")
    assert set(merged.records) == set(Results(tmp_path / "b" / "7b" / "results.jsonl").records)
    assert not any("tokens" in record or "error" in record for record in merged.records.values())
    words = tmp_path / "words.md"
    words.write_text("# Sentences\n\n## identity\n\nAll texts are the same.\n\n## overhead\nFlat.\n")
    out = tmp_path / "pages"
    wrote = command("pages", "--records", str(records), "--words", str(words), "--out", str(out))
    assert [line.partition(": ")[2] for line in wrote] == ["7b"] * 2, "what tables share makes no page of a third one"
    page = (out / "identity.md").read_text()
    assert page.startswith("# Appendix E: texts in half precision\n\nAll texts are the same.\n\n```sh\n")
    assert "paper.py measure MODEL --tables identity" in page
    assert "| (5,15,15) + prompt | 0 of 2 | 0 of 4 |" in page
    assert "7 of 7 answers." in page
    assert "![Figure 8: S and speedup against W](overhead-7b.svg)" in (out / "overhead.md").read_text()


def test_what_a_model_has_no_table_of_is_refused(command: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tables ablation: 34b has end-to-end, configs"):
        command("measure", "34b", "--tables", "ablation", "--out", str(tmp_path))
    with pytest.raises(ValueError, match=r"no MODEL/results\.jsonl in"):
        command("merge", str(tmp_path), "--out", str(tmp_path / "records"))


@pytest.mark.slow
def test_every_table_has_its_page_and_plot(
    command: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "flash", replace(PRESETS["flash"], cuda=False))
    for model in ("7b", "34b", "small"):
        assert command("measure", model, "--out", str(tmp_path))[-1] == "all measured"
    out = tmp_path / "pages"
    wrote = dict(line.split(": ", 1) for line in command("pages", "--records", str(tmp_path), "--out", str(out)))
    assert {Path(path).stem for path in wrote} == set(paper.TABLES)
    assert {
        len(parts.split(", ")) for path, parts in wrote.items() if Path(path).stem in ("configs", "end-to-end")
    } == {2}
    for name, table in paper.TABLES.items():
        plots = sorted(out.glob(f"{name}-*.svg"))
        assert bool(plots) == (table.preset in PLOTS), name
        for plot in plots:
            ET.fromstring(plot.read_text())


def test_sentences_by_page(tmp_path: Path) -> None:
    assert read_words(paper.WORDS).keys() <= {*paper.TABLES, "parallel"}, "no sentences without a page"


@pytest.mark.slow
def test_ranks_on_cpus_become_a_projection(
    make_model: Callable[..., Any], tokenizer: Any, data_dir: Path, tmp_path: Path
) -> None:
    """The command for several GPUs, on two CPU ranks: stopped by its time, gone on with, and projected."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    model, records = tmp_path / "model", tmp_path / "records"
    make_model().save_pretrained(model)
    tokenizer.save_pretrained(model)
    asked = f"bench --preset parallel --ranks 2 --model {model} --data-dir {data_dir} --out {records}/ranks-2"
    command = [sys.executable, "-m", "lookahead", *asked.split(), *SMALL]
    environment = {**os.environ, "LOOKAHEAD_CACHE": str(tmp_path / "cache")}

    def run(*more: str) -> Any:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=500, env=environment)

    stopped = run("--minutes", "0")
    assert stopped.returncode == 0, stopped.stderr
    assert "out of time, 57 of 57 answers to go" in stopped.stderr
    whole = run()
    assert whole.returncode == 0, whole.stderr
    wrote: list[str] = []
    pages = f"pages --data-dir {data_dir} --records {records} --out {tmp_path}/pages"
    paper.pages(paper.parser().parse_args([*pages.split(), *SMALL]), wrote.append)
    assert [line.partition(": ")[2] for line in wrote] == ["ranks-2"]
    page = (tmp_path / "pages" / "parallel.md").read_text()
    for title in ("A step of several ranks", "Projected"):
        section = page.split(f"### {title}\n")[1].split("###")[0]
        rows = [line for line in section.splitlines() if line.startswith("| mt-bench")]
        assert len(rows) == 4, "the paper's method and the default, at two sizes each"
    assert "A projection, not a measurement on several GPUs" in page
