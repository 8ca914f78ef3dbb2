"""What a report is made of: sections with a table, notes and plots; as Markdown, or as an HTML file with all in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from lookahead.bench.report.plots import MISSING, Bars, Curves, Points, available, draw
from lookahead.bench.run.summary import Line
from lookahead.stats import Stats


@dataclass
class Section:
    title: str
    head: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Bars | Curves] = field(default_factory=list)


def markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        if section.rows:
            lines = [section.head, ["---"] * len(section.head), *section.rows]
            parts.append("\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines))
        parts += section.notes
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8886; }
.word { text-align: left; }
p { max-width: 48rem; }
svg { width: 100%; max-width: 48rem; height: auto; display: block; margin: 1.2rem 0; }
"""


def html(title: str, sections: Sequence[Section]) -> str:
    body = "\n".join(map(_section_html, sections))
    if any(section.plots for section in sections) and not available():
        body = f"<p>{_note(MISSING)}</p>\n{body}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section_html(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.rows:
        parts.append(_table_html(section))
    parts += [f"<p>{_note(note)}</p>" for note in section.notes]
    if section.plots and available():
        parts.append(draw(section.plots))
    return "\n".join(parts)


def _note(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table_html(section: Section) -> str:
    """Columns of words to the left, of numbers to the right."""
    words = [any(not _number(row[i]) for row in section.rows) for i in range(len(section.head))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="word"' if word else "" for word in words]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    rows = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in section.rows)
    return f'<div class="table"><table>\n<tr>{line(section.head, "th")}</tr>\n{rows}\n</table></div>'


def _number(cell: str) -> bool:
    return cell in ("-", "") or cell.rstrip("x%").replace(".", "").replace("/", "").replace(" ", "").isdigit()


MOST_LINES = 9
"""Methods that a plot can tell apart by their colours."""
COLUMNS = ("set", "method", "tokens", "steps", "S", "K", "first ms", "tok/s", "speedup", "same", "over AR", "as AR")
ABOUT_COLUMNS = (
    "S: generated tokens per step. K: mean tokens of a step. first ms: median time to the first token. tok/s: "
    "generated tokens over the wall time from prompt to last token, medians over repeats. speedup and same: "
    "against transformers' greedy search (sampling: our autoregressive with the same seeds); same counts "
    "the conversations whose tokens are identical. over AR and as AR: the same against our own autoregressive "
    "decoding, which runs on the same engine: what lookahead alone gains. In half precision texts differ between "
    "engines by rounding; preset `exactness` says how far."
)


def comparison(lines: Sequence[Line], title: str = "Methods") -> Section:
    """The common table: every method on every set, by the one counter."""
    sampled = any(line.temperature for line in lines)
    section = Section(title, [*COLUMNS[:2], *(["temp."] if sampled else []), *COLUMNS[2:]])
    for line in lines:
        temperature = [f"{line.temperature:g}"] if sampled else []
        section.rows.append([line.data, line.method.label, *temperature, *cells(line)])
    section.notes += [*errors(lines), ABOUT_COLUMNS]
    # Of several temperatures the lowest is shown.
    lowest = min((line.temperature for line in lines), default=0.0)
    shown = [line for line in lines if line.temperature == lowest]
    section.plots += by_set(shown, "speedup", lambda line: line.reference.speedup, "x")
    section.plots += by_set(shown, "S", lambda line: line.compression or None)
    section.plots += [plot for plot in (depths(lines), sources(lines)) if plot.series]
    return section


def by_data(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.data, []).append(line)
    return found


def by_set(
    lines: Sequence[Line], what: str, value: Callable[[Line], float | None], unit: str = "", title: str | None = None
) -> list[Bars]:
    """A group of bars per set, a colour per method; with more methods than colours a plot per set instead."""
    sets = list(dict.fromkeys(line.data for line in lines))
    names = list(dict.fromkeys(line.method.label for line in lines))
    at = {(line.data, line.method.label): value(line) for line in lines}
    if len(names) <= MOST_LINES:
        series: dict[str, Sequence[float | None]] = {n: [at.get((data, n)) for data in sets] for n in names}
        return [Bars(title or f"{what} by set", sets, series, unit, 1.0)]
    return [Bars(f"{data}: {what}", names, {what: [at.get((data, n)) for n in names]}, unit, 1.0) for data in sets]


def cells(line: Line) -> list[str]:
    if not line.prompts:
        return ["-"] * 10
    stats = line.stats
    known = line.method.how not in ("hf-prompt-lookup", "hf-assisted")  # transformers does not say what it fed
    return [
        str(stats.generated_tokens),
        str(stats.steps),
        f"{stats.compression:.2f}",
        f"{stats.tokens_per_step:.1f}" if known else "-",
        f"{line.first_ms:.0f}",
        f"{stats.tokens_per_second:.1f}",
        times(line.reference.speedup),
        line.reference.identity,
        times(line.own.speedup),
        line.own.identity,
    ]


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def errors(lines: Sequence[Line]) -> list[str]:
    return [
        f"{line.method.label} on {line.data}: {len(line.errors)} without an answer: {line.errors[0]}"
        for line in lines
        if line.errors
    ]


def _guessed(lines: Sequence[Line]) -> dict[str, Stats]:
    """The counters of every method that had guesses accepted, over all sets."""
    names = dict.fromkeys(line.method.label for line in lines if line.stats.accepted_by_depth)
    return {name: Stats.total(line.stats for line in lines if line.method.label == name) for name in names}


def depths(lines: Sequence[Line]) -> Curves:
    """How deep guesses were accepted: the share of steps that did at each depth. Of too many methods, nothing."""
    found = _guessed(lines)
    series: dict[str, Points] = {}
    for name, stats in found.items() if len(found) <= MOST_LINES else ():
        series[name] = [(i + 1, count / stats.steps) for i, count in enumerate(stats.accepted_by_depth)]
    return Curves("steps that accepted a guess at a depth", "depth", "share of steps", series)


def sources(lines: Sequence[Line]) -> Bars:
    found = _guessed(lines)
    names = dict.fromkeys(source for stats in found.values() for source in stats.accepted_by_source)
    series: dict[str, Sequence[float | None]] = {}
    for name in names:
        counts = [(stats.accepted_by_source.get(name), stats.steps) for stats in found.values()]
        series[name] = [None if count is None else count / steps for count, steps in counts]
    return Bars("accepted guesses per step, by source", list(found), series)
