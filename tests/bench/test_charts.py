"""Charts: bars are as long as their values, and axes end at round numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lookahead.bench.report.canvas import Canvas
from lookahead.bench.report.charts import COLOURS, colours_of, columns, figure, lines, nice, stacked


def shapes(canvas: Canvas, kind: str, colour: str) -> list[dict[str, str]]:
    found = ElementTree.fromstring(canvas.done()).iter(f"{{http://www.w3.org/2000/svg}}{kind}")
    return [one.attrib for one in found if colour in (one.get("fill"), one.get("stroke"))]


@pytest.fixture
def canvas() -> Canvas:
    return Canvas(400, 300, "a title", "about <it>")


def test_parts_of_a_bar_are_as_long_as_their_values(canvas: Canvas) -> None:
    colours = colours_of(["one", "two"])
    stacked(canvas, 0, 0, 350, {"a": {"one": 1.0, "two": 3.0}, "b": {"one": 2.0, "two": 0.0}}, colours)
    widths = {name: [int(one["width"]) for one in shapes(canvas, "rect", colour)] for name, colour in colours.items()}
    assert widths == {"one": [50, 100], "two": [150]}


def test_columns_stand_on_their_base(canvas: Canvas) -> None:
    colours = colours_of(["one"])
    base = columns(canvas, 0, 10, 300, 116, ["x", "y", "z"], {"one": [1.0, 0.0, 4.0]}, colours) - 34
    bars = shapes(canvas, "rect", colours["one"])
    assert [int(one["height"]) for one in bars] == [25, 100]
    assert {int(one["y"]) + int(one["height"]) for one in bars} == {base}


def test_a_line_leaves_out_what_was_not_measured(canvas: Canvas) -> None:
    colours = colours_of(["one", "two"])
    lines(canvas, 0, 0, 280, 100, ["1", "2", "4"], {"one": [10.0, None, 5.0], "two": [None, 2.0, None]}, colours)
    (line,) = shapes(canvas, "polyline", colours["one"])
    assert line["points"] == "60,0 260,50"
    assert not shapes(canvas, "polyline", colours["two"])
    assert len(shapes(canvas, "rect", colours["two"])) == 1


def test_axes_end_at_round_numbers() -> None:
    assert [nice(value) for value in (0, 0.7, 1, 2.1, 26, 99, 501)] == [1, 1, 1, 2.5, 50, 100, 1000]
    assert [figure(value) for value in (0, 4.375, 2.0, 17.94, 958.4, 12430.2)] == [
        "0", "4.38", "2", "17.9", "958", "12,430",
    ]  # fmt: skip


def test_there_are_colours_for_any_number_of_names() -> None:
    assert len(set(colours_of([str(i) for i in range(8)]).values())) == len(COLOURS) == 8
    assert len(colours_of([str(i) for i in range(20)])) == 20
