"""One run as the reports see it: what was asked for, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.bench.jobs import Job
from lookahead.bench.prompts import Prompt
from lookahead.bench.results import Results
from lookahead.bench.summary import Line, lines

if TYPE_CHECKING:
    from lookahead.bench.runner import Models


@dataclass
class Context:
    prompts: dict[str, list[Prompt]]
    jobs: list[Job]
    results: Results
    models: Models
    say: Callable[[str], None]
    max_tokens: dict[str, int]
    step_cost: Path | None = None
    shapes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[Line]:
        return lines(self.jobs, self.results.rows)
