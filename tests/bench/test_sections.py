"""Markdown tables of a report, and the scores of texts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lookahead.bench.paper.rouge import rouge
from lookahead.bench.report.sections import Section, markdown
from lookahead.bench.run.methods import named
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.runner import Job
from lookahead.bench.run.summary import BenchRun

METHOD = named("autoregressive")


def test_cells_are_escaped() -> None:
    section = Section("a < b", ("m|n", "v"), [["two\nlines", "1.0"]], ["see `x`"])
    expected = "# t\n\n## a < b\n\n| m\\|n | v |\n| --- | --- |\n| two lines | 1.0 |\n\nsee `x`\n"
    assert markdown("t", [section]) == expected


def test_rouge_of_a_text_against_itself() -> None:
    """By the package; the text of the last turn counts."""
    prompt = Prompt("a", ("Summarise.",), reference="the cat sat on the mat")
    other = Prompt("b", ("Summarise.",), reference="a bird flew away")
    jobs = [Job("xsum", number, one, METHOD, 8) for number, one in enumerate((prompt, other))]
    results = SimpleNamespace(records={job.key: {"texts": ["no", "the cat sat on the mat"]} for job in jobs})
    (section,) = rouge(BenchRun(jobs, results))  # type: ignore[arg-type]
    assert [row[:3] for row in section.rows] == [["xsum", "0", METHOD.label]]
    assert all(cell.startswith("50.00 (0.00-100.00)") for cell in section.rows[0][3:])


def test_without_the_package_for_rouge_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    (section,) = rouge(BenchRun([], SimpleNamespace(records={})))  # type: ignore[arg-type]
    assert not section.rows
    assert "pip install" in section.notes[0]
