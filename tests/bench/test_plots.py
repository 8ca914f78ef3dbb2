"""The report's drawings and page: round axes, everything on the card, names escaped."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.bench.report.page import html
from lookahead.bench.report.plots import WIDTH, draw, ticks
from lookahead.bench.report.sections import Bars, Curves, Section, comparison, markdown
from lookahead.bench.run.methods import named
from lookahead.bench.run.summary import Compared, Line
from lookahead.stats import Stats

GUESSED = Stats(generated_tokens=8, steps=4, accepted_by_depth=[3, 1], accepted_by_source={"jacobi": 4})
NUMBERS = st.floats(0, 1e6, allow_nan=False)
HEIGHT = re.compile(r'viewBox="0 0 760 (\d+)"')


@given(NUMBERS, NUMBERS)
def test_ticks_cover_the_values_with_few_numbers(a: float, b: float) -> None:
    low, high = sorted((a, b))
    found = ticks(low, high)
    assert found[0] <= low + 1e-6 * (1 + high)
    assert found[-1] >= high - 1e-6 * (1 + high)
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))


def test_ticks_are_round() -> None:
    assert ticks(0, 2.05) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert ticks(0, 0.36) == [0, 0.1, 0.2, 0.3, 0.4]


def places(svg: str) -> tuple[float, list[tuple[float, float]]]:
    height = float(HEIGHT.search(svg)[1])  # type: ignore[index]
    found = []
    for element in ElementTree.fromstring(svg).iter():
        for x, y in (("x", "y"), ("cx", "cy"), ("x1", "y1"), ("x2", "y2")):
            if x in element.attrib:
                found.append((float(element.attrib[x]), float(element.attrib[y])))
        for pair in element.get("points", "").split():
            left, _, top = pair.partition(",")
            found.append((float(left), float(top)))
    return height, found


PLOTS = (
    Bars("one", ["a"], {"x": [1.0]}),
    Bars("gaps", ["a", "b"], {"x": [1.0, None], "y": [None, 2.5]}, "x", 1.0),
    Bars("many", [f"a rather long label {i}" for i in range(15)], {f"series {i}": [float(i)] * 15 for i in range(9)}),
    Bars("empty", [], {}),
    Curves("one point", "x", "y", {"a": [(3.0, 2.0)]}),
    Curves(
        "log", "x", "y", {"a": [(1.0, 1.0), (32.0, 2.0)], "a, paper": [(1.0, 1.2), (32.0, 2.2)]}, ["a, paper"], True
    ),
    Curves("empty", "x", "y", {}),
)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
def test_everything_is_on_the_card(plot: Bars | Curves) -> None:
    height, found = places(draw(plot))
    for x, y in found:
        assert 0 <= x <= WIDTH
        assert 0 <= y <= height


def test_the_highest_bar_is_the_largest_value() -> None:
    svg = draw(Bars("two", ["a", "b"], {"x": [1.0, 4.0]}))
    low, high = (float(height) for height in re.findall(r'<rect [^>]* height="([\d.]+)"', svg))
    assert high == pytest.approx(4 * low, rel=0.02)


def test_bars_stand_above_their_label_where_some_are_missing() -> None:
    svg = draw(Bars("t", ["left", "right"], {"a": [1.0, None], "b": [None, 2.0], "c": [3.0, 1.0]}))
    bars = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" [^>]*width="([\d.]+)"', svg)]
    labels = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>(?:left|right)<', svg)]
    for (first, _), (second, width), label in zip(bars[::2], bars[1::2], labels, strict=True):
        assert (first + second + width) / 2 == pytest.approx(label, abs=0.2)


def test_a_label_too_long_for_its_place_is_cut_and_told_in_full() -> None:
    labels = [f"config:window=15,ngram=5,guesses=15,budget={i}" for i in range(12)]
    svg = draw(Bars("t", labels, {"a": [1.0] * 12}))
    shown = re.findall(r'<text x="([\d.]+)"[^>]*rotate[^>]*>([^<]*)<title>([^<]*)<', svg)
    assert [full for _, _, full in shown] == labels
    for x, text, _ in shown:
        assert len(text) * 4.8 <= float(x) + 14
    assert shown[0][1].endswith("…")
    assert shown[-1][1] == labels[-1]


@pytest.mark.parametrize("plot", [Bars("t", ["a"], {"x": [None]}), Curves("t", "x", "y", {"a": []})])
def test_nothing_measured_is_said(plot: Bars | Curves) -> None:
    assert "nothing measured yet" in draw(plot)
    assert "nothing measured yet" not in draw(PLOTS[0])


def test_a_name_has_one_colour_in_several_plots() -> None:
    both = draw(Bars("t", ["x"], {"a": [1.0], "b": [2.0]}))
    one = draw(Curves("t", "x", "y", {"b": [(1.0, 2.0)]}, order=["a", "b"]))
    assert re.findall(r'fill="(#\w+)"', both)[1] == re.findall(r'fill="(#\w+)"', one)[0]


def test_methods_beyond_the_colours_have_a_bar_each() -> None:
    def plots(count: int) -> list[Any]:
        lines = [
            Line("set", named(f"paper:{i + 1},3,3"), 0.0, 1, GUESSED, reference=Compared(speedup=1.5))
            for i in range(count)
        ]
        return comparison(lines).plots

    few, many = plots(9), plots(10)
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


def test_kin_share_a_colour_and_the_papers_are_dashed() -> None:
    svg = draw(PLOTS[5])
    lines = re.findall(r"<polyline [^>]*>", svg)
    colours = [re.search(r'stroke="(#\w+)"', line)[1] for line in lines]  # type: ignore[index]
    assert colours[0] == colours[1]
    assert ["dash" in line for line in lines] == [False, True]


def test_names_are_escaped() -> None:
    section = Section(
        "a < b", ("m|n", "v"), [["<script>", "1.0"]], ["see `x` & <y>"], [Bars("<t>", ["<l>"], {"<s>": [1.0]})]
    )
    page = html("<title>", [section])
    assert "<script>" not in page
    assert "<code>x</code> &amp; &lt;y&gt;" in page
    assert "&lt;t&gt;" in page
    assert "| m\\|n | v |" in markdown("t", [section])
