"""Markdown tables of a report."""

from __future__ import annotations

from lookahead.bench.report.sections import Section, markdown


def test_cells_are_escaped() -> None:
    section = Section("a < b", ("m|n", "v"), [["two\nlines", "1.0"]], ["see `x`"])
    expected = "# t\n\n## a < b\n\n| m\\|n | v |\n| --- | --- |\n| two lines | 1.0 |\n\nsee `x`\n"
    assert markdown("t", [section]) == expected
