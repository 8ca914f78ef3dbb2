"""One page for each table or figure: a few sentences, the command, and for each model the plot, tables and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.bench.paper.options import BenchOptions
from lookahead.bench.paper.plots import plot
from lookahead.bench.report.runs import about_sections
from lookahead.bench.report.sections import Section, markdown
from lookahead.bench.run.summary import BenchRun


@dataclass(frozen=True)
class Measured:
    """What one model gave: `name` is that of its folder of records, `more` sections stand below the table's own."""

    name: str
    options: BenchOptions
    run: BenchRun
    more: tuple[Section, ...] = ()

    @property
    def model(self) -> str:
        about = self.run.results.about or {}
        return f"{about.get('model')}, {about.get('dtype')}, {str(about.get('device')).partition(': ')[2]}"


def write_page(out: Path, name: str, title: str, words: str, command: str, parts: Sequence[Measured]) -> Path:
    """Write `name`.md and its plots into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    whole = [f"# {title}\n", f"{words}\n" if words else "", f"```sh\n{command}\n```\n"]
    for part in parts:
        drawing = plot(part.options.preset.name, part.run, f"{title}: {part.name}")
        if drawing is not None:
            (out / f"{name}-{part.name}.svg").write_text(drawing, encoding="utf-8")
        sections = [*part.options.sections(part.run), *part.more, *about_sections(part.run)]
        report = markdown(part.model, sections, level=2)
        heading, _, rest = report.partition("\n\n")
        image = f"![{title}]({name}-{part.name}.svg)\n\n" if drawing is not None else ""
        whole.append(f"{heading}\n\n{image}{rest}")
    path = out / f"{name}.md"
    path.write_text("\n".join(part for part in whole if part), encoding="utf-8")
    return path


def read_words(path: Path) -> dict[str, str]:
    """The sentences of each page, from a file in which a heading `## NAME` stands above them."""
    parts = re.split(r"^## (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
