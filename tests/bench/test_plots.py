"""The report's drawings and page: all that was measured is drawn, names are escaped, matplotlib may be missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lookahead.bench.report import plots
from lookahead.bench.report.plots import Bars, Curves, draw
from lookahead.bench.report.sections import Section, comparison, html, markdown
from lookahead.bench.run.methods import named
from lookahead.bench.run.summary import Compared, Line
from lookahead.stats import Stats

GUESSED = Stats(generated_tokens=8, steps=4, accepted_by_depth=[3, 1], accepted_by_source={"jacobi": 4})
KIN = {"a": [(1.0, 1.0), (32.0, 2.0)], "a, paper": [(1.0, 1.2), (32.0, 2.2)]}
PLOTS = (
    Bars("one", ["a"], {"x": [1.0]}),
    Bars("gaps", ["a", "b"], {"x": [1.0, None], "y": [None, 2.5]}, "x", 1.0),
    Bars("many", [f"a rather long label {i}" for i in range(15)], {f"series {i}": [float(i)] * 15 for i in range(9)}),
    Curves("one point", "x", "y", {"a": [(3.0, 2.0)]}),
    Curves("log", "x", "y", KIN, ["a, paper"], True),
)


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


def test_plots_stand_below_each_other_in_one_element(matplotlib: Any) -> None:
    svg = draw(PLOTS)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    for plot in PLOTS:
        assert f">{plot.title}<" in svg
        assert "a rather long label 14" in svg
    assert svg == draw(PLOTS)  # so that a page made again is the same file


@pytest.mark.parametrize("plot", [Bars("t", ["a"], {"x": [None]}), Bars("t", [], {}), Curves("t", "x", "y", {"a": []})])
def test_nothing_measured_is_said(matplotlib: Any, plot: Bars | Curves) -> None:
    assert "nothing measured yet" in draw([plot])
    assert "nothing measured yet" not in draw(PLOTS[:1])


def test_kin_share_a_colour_and_the_papers_are_dashed(matplotlib: Any) -> None:
    drawn = re.findall(
        r"stroke(-dasharray: [\d. ,]+; stroke-dashoffset: 0; stroke)?: (#\w+); stroke-width: 1.5", draw(PLOTS[4:])
    )
    assert {colour for _, colour in drawn} == {"#1f77b4"}
    assert {bool(dash) for dash, _ in drawn} == {True, False}


def test_without_matplotlib_a_report_has_no_plots_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = html("t", [Section("s", plots=[PLOTS[0]])])
    assert "<svg" not in page
    assert page.count("lookahead-decoding[bench]") == 1
    with pytest.raises(ValueError, match="lookahead-decoding"):
        plots.write(PLOTS, tmp_path / "p.svg")


def test_methods_beyond_the_colours_have_a_bar_each() -> None:
    def drawn(count: int) -> list[Any]:
        lines = [
            Line("set", named(f"paper:{i + 1},3,3"), 0.0, 1, GUESSED, reference=Compared(speedup=1.5))
            for i in range(count)
        ]
        return comparison(lines).plots

    few, many = drawn(9), drawn(10)
    assert [len(plot.series) for plot in few] == [9, 9, 9, 1]
    assert few[0].labels == ["set"]
    assert [plot.title for plot in many] == ["set: speedup", "set: S", "accepted guesses per step, by source"]
    assert len(many[0].labels) == len(many[1].labels) == 10
    assert len(many[0].series) == 1


def test_the_lowest_temperature_is_plotted() -> None:
    def speedups(*heats: float) -> Any:
        lines = [
            Line("set", named("lookahead"), heat, 1, GUESSED, reference=Compared(speedup=2.0 - heat)) for heat in heats
        ]
        return comparison(lines).plots[0].series["lookahead"]

    assert speedups(0.5) == speedups(1.0, 0.5) == [1.5]
    assert speedups(0.5, 0.0) == [2.0]


def test_names_are_escaped() -> None:
    section = Section("a < b", ("m|n", "v"), [["<script>", "1.0"]], ["see `x` & <y>"])
    page = html("<title>", [section])
    assert "<script>" not in page
    assert "<code>x</code> &amp; &lt;y&gt;" in page
    assert "| m\\|n | v |" in markdown("t", [section])
