"""The report as one HTML file: tables and plots in it, nothing fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from lookahead.bench.report.plots import MISSING, available, draw
from lookahead.bench.report.sections import Section

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
    body = "\n".join(map(_section, sections))
    if any(section.plots for section in sections) and not available():
        body = f"<p>{_note(MISSING)}</p>\n{body}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.rows:
        parts.append(_table(section))
    parts += [f"<p>{_note(note)}</p>" for note in section.notes]
    if section.plots and available():
        parts.append(draw(section.plots))
    return "\n".join(parts)


def _note(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(section: Section) -> str:
    """Columns of words to the left, of numbers to the right."""
    words = [any(not _number(row[i]) for row in section.rows) for i in range(len(section.head))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="word"' if word else "" for word in words]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    rows = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in section.rows)
    return f'<div class="table"><table>\n<tr>{line(section.head, "th")}</tr>\n{rows}\n</table></div>'


def _number(cell: str) -> bool:
    return cell in ("-", "") or cell.rstrip("x%").replace(".", "").replace("/", "").replace(" ", "").isdigit()
