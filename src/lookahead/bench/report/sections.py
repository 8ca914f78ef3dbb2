"""The sections of a report, each a table with notes, written as Markdown; and the table that all presets share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lookahead.bench.run.intervals import interval_text
from lookahead.bench.run.summary import Compared, Line

EVEN = 0.02
"""A speedup this close to 1 is called even."""
PaperFigures = Mapping[tuple[str, str, float], str]
"""What the paper reports, by set, label of a method and temperature."""


@dataclass
class Section:
    title: str
    head: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def markdown(title: str, sections: Sequence[Section], level: int = 1) -> str:
    """`level` is that of the title; sections are one below it."""
    parts = [f"{'#' * level} {title}"]
    for section in sections:
        parts.append(f"{'#' * (level + 1)} {section.title}")
        if section.rows:
            lines = [section.head, ["---"] * len(section.head), *section.rows]
            parts.append("\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines))
        parts += section.notes
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


COLUMNS = (
    "set", "method", "n", "tokens", "steps", "S", "K", "first ms", "tok/s", "speedup", "same", "over AR", "as AR",
)  # fmt: skip
ABOUT_COLUMNS = (
    "n: prompts. S: generated tokens per step. K: mean tokens of a step. first ms: median time to the first token. "
    "tok/s: generated tokens over the wall time from prompt to last token, medians over repeats. speedup and same: "
    "against transformers' greedy search (sampling: our autoregressive with the same seeds); same counts "
    "the conversations whose tokens are identical. over AR and as AR: the same against our own autoregressive "
    "decoding, which runs on the same engine: what lookahead alone gains. In half precision texts differ between "
    "engines by rounding; preset `exactness` says how far. In brackets: 95% intervals, by drawing the prompts again "
    "(bootstrap). What they do not separate is not a difference."
)


def comparison(lines: Sequence[Line], paper: PaperFigures | None = None, notes: Sequence[str] = ()) -> Section:
    """Every method on every set; with the column `paper` if the paper reports figures."""
    sampled = any(line.temperature for line in lines)
    head = [*COLUMNS[:2], *(["temp."] if sampled else []), *COLUMNS[2:], *(["paper"] if paper else [])]
    section = Section("Methods", head, notes=[*verdicts(lines), *fewer(lines), *errors(lines), *notes, ABOUT_COLUMNS])
    for line in lines:
        temperature = [f"{line.temperature:g}"] if sampled else []
        reported = [paper.get((line.data, line.method.label, line.temperature), "-")] if paper else []
        section.rows.append([line.data, line.method.label, *temperature, *cells(line), *reported])
    return section


def cells(line: Line) -> list[str]:
    if not line.prompts:
        return ["-"] * 11
    stats = line.stats
    known = line.method.how not in ("hf-prompt-lookup", "hf-assisted")  # transformers does not say what it fed
    return [
        str(line.prompts),
        str(stats.generated_tokens),
        str(stats.steps),
        f"{stats.compression:.2f}{interval_text(line.s_interval)}",
        f"{stats.tokens_per_step:.1f}" if known else "-",
        f"{line.first_ms:.0f}",
        f"{stats.tokens_per_second:.1f}",
        speedup(line.reference),
        line.reference.identity,
        speedup(line.own),
        line.own.identity,
    ]


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def speedup(compared: Compared) -> str:
    """The speedup with its interval."""
    return times(compared.speedup) + interval_text(compared.interval)


def verdicts(lines: Sequence[Line]) -> list[str]:
    """One sentence per set: whether the default is faster than transformers' greedy, with the same tokens."""
    found = []
    for line in lines:
        ratio = line.reference.speedup
        fitted = line.method.how == "lookahead" and line.method.config is None
        if fitted and ratio is not None and not line.temperature:
            word = "even" if abs(ratio - 1) <= EVEN else "faster" if ratio > 1 else "slower"
            found.append(
                f"{line.data}: {line.method.label} is {ratio:.2f}x as fast as the reference ({word}), "
                f"{line.reference.identity} outputs identical, S = {line.compression:.2f}."
            )
    return found


def fewer(lines: Sequence[Line]) -> list[str]:
    """Methods that answered fewer prompts than others did: comparisons with them are of those prompts."""
    most: dict[str, int] = {}
    for line in lines:
        most[line.data] = max(most.get(line.data, 0), line.prompts)
    found: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        if 0 < line.prompts < most[line.data]:
            found.setdefault((line.data, line.prompts), []).append(line.method.label)
    return [
        f"{', '.join(dict.fromkeys(labels))} on {data}: {prompts} of {most[data]} prompts. Whatever is compared with "
        "them is compared on these prompts."
        for (data, prompts), labels in found.items()
    ]


def errors(lines: Sequence[Line]) -> list[str]:
    return [
        f"{line.method.label} on {line.data}: {len(line.errors)} without an answer: {line.errors[0]}"
        for line in lines
        if line.errors
    ]


def by_data(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.data, []).append(line)
    return found
