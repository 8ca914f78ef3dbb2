"""From the command's options to a run: which prompts, methods and sizes; then the report's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.bench.paper.presets import DEFAULT, HALF, PRESETS, Preset, Size
from lookahead.bench.report.runs import about_sections
from lookahead.bench.report.sections import Section, comparison, markdown
from lookahead.bench.run import prompts
from lookahead.bench.run.methods import Method, named
from lookahead.bench.run.models import Load, Models
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.runner import Job
from lookahead.bench.run.summary import BenchRun
from lookahead.loading.load import load_pretrained


@dataclass(frozen=True)
class BenchOptions:
    """One preset (None is the default run) with the command's options. Mistakes raise ValueError when it is made.

    Of the preset's methods those are run whose labels match `only`, a regular expression. `tokens` are the new tokens
    of some sets, where `max_tokens` is None.
    """

    name: str | None
    sets: str | None = None
    methods: Sequence[str] | None = None
    data_dir: Path | None = None
    quick: bool = False
    limit: int | None = None
    baseline_limit: int | None = None
    max_tokens: int | None = None
    repeats: int | None = None
    temperatures: Sequence[float] | None = None
    seed: int = 0
    warm: bool = False
    draft_model: str | None = None
    ranks: int = 1
    half: str = HALF
    only: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        preset, methods = self.preset, self.chosen
        if self.ranks > 1 and any(method.dtype or method.backend for method in methods):
            raise ValueError(f"preset {preset.name!r} loads several models, which ranks do not; leave --ranks out")
        if any(method.how == "hf-assisted" for method in methods) and self.draft_model is None:
            raise ValueError("method 'hf-assisted' needs --draft-model, a smaller model with the same tokenizer")
        _ = self.prompts  # they are read before a model is loaded for nothing

    @property
    def preset(self) -> Preset:
        return DEFAULT if self.name is None else PRESETS[self.name]

    @property
    def size(self) -> Size:
        size = self.preset.quick if self.quick else self.preset.full
        return Size(self.limit or size.limit, self.max_tokens or size.max_tokens, self.repeats or size.repeats)

    @cached_property
    def chosen(self) -> tuple[Method, ...]:
        preset = self.preset
        if self.methods:
            return tuple(named(method) for method in self.methods)
        chosen = preset.quick_methods if self.quick and preset.quick_methods else preset.methods
        chosen = tuple(method for method in chosen if re.search(self.only, method.label))
        return (*chosen, named("hf-assisted")) if self.draft_model is not None else chosen

    @cached_property
    def prompts(self) -> dict[str, list[Prompt]]:
        names = list(self.preset.sets)
        if self.sets is not None:
            names = list(dict.fromkeys(name.strip() for name in self.sets.split(",") if name.strip()))
            if not names:
                raise ValueError(f"--sets names none: choose from {', '.join(prompts.SETS)}")
        for name in names:
            prompts.check(name)
        samples = {name: one.sample for name, one in prompts.PAPER_SETS.items()}
        limits = {name: self.size.limit or samples.get(name) for name in names}
        return {name: prompts.sample(name, self.data_dir, limits[name], self.preset.turns) for name in names}

    @property
    def starts_warm(self) -> bool:
        return self.warm or self.preset.warm

    def methods_on(self, device: str) -> tuple[Method, ...]:
        """The methods, without the preset's that this device cannot run; on several ranks each twice."""
        self.preset.check(device)
        found = self.chosen
        if not self.methods:
            int8 = find_spec("onnxruntime") is not None
            found = tuple(m for m in found if m.device in (None, device) and (int8 or m.dtype != "int8"))
        found = tuple(replace(m, dtype=self.half) if m.dtype == HALF else m for m in found)
        if self.ranks == 1:
            return found
        both: list[Method] = []
        for method in found:
            many = replace(method, ranks=self.ranks, label=f"{method.label}, {self.ranks} ranks")
            both += [method] if method.stock or method.how == "autoregressive" else [method, many]
        return tuple(both)

    def jobs(self, device: str) -> list[Job]:
        """In an order of which every beginning is a fair sample: all methods answer one prompt of each set, then the
        next of each set. So a machine that slows down slows all of them, too. A warm run, which repeats the set that it
        was in when it ended, takes one set after the other."""
        methods, limits, warm = self.methods_on(device), self.limits, self.starts_warm
        turns = [(number, data) for data, chosen in self.prompts.items() for number in range(len(chosen))]
        return [
            Job(
                data, number, self.prompts[data][number], method, limits[data], temperature,
                self.seed + number if temperature else 0, repeat, warm,
            )
            for repeat in range(self.size.repeats)
            for number, data in (turns if warm else sorted(turns, key=lambda turn: turn[0]))
            for temperature in self.temperatures or self.preset.temperatures
            for method in methods
            if self._answers(method, number, temperature)
        ]  # fmt: skip

    def _answers(self, method: Method, number: int, temperature: float) -> bool:
        """Whether a method answers this prompt: transformers' own answer fewer, and of a preset none that is sampled,
        because transformers draws other numbers."""
        if not method.stock:
            return True
        return (self.methods is not None or not temperature) and (
            self.baseline_limit is None or number < self.baseline_limit
        )

    @property
    def limits(self) -> dict[str, int]:
        """New tokens of each answer, by set."""
        own = {**{name: one.max_tokens for name, one in prompts.PAPER_SETS.items()}, **self.tokens}
        return {data: self.size.max_tokens or own.get(data, 256) for data in self.prompts}

    def sections(self, run: BenchRun) -> list[Section]:
        preset = self.preset
        made = [] if preset.tables is None else preset.tables(run)
        return [*made, comparison(run.lines, preset.paper, preset.notes)] if preset.common else made

    def record(self, run: BenchRun) -> dict[str, Any]:
        tables = [
            {"title": section.title, "rows": [dict(zip(section.head, row, strict=True)) for row in section.rows]}
            for section in self.sections(run)
        ]
        lines = [line.record() for line in run.lines]
        about = {"about": run.results.about, "runs": [{**facts, "answers": count} for facts, count in run.runs]}
        return {"preset": self.preset.name, **about, "lines": lines, "tables": tables}

    def models(self, lm: Any, load: Load, say: Callable[[str], None]) -> Models:

        def draft() -> Any:
            dtype = str(lm.model.dtype).removeprefix("torch.")  # of what is not quantised
            return load_pretrained(self.draft_model, dtype=dtype, device=str(lm.device), log=say)[0]

        return Models(lm, load, draft if self.draft_model is not None else None, say)


def report(options: BenchOptions, run: BenchRun, out: Path) -> dict[str, Path]:
    sections = [*options.sections(run), *about_sections(run)]
    files = {"results": run.results.path, "markdown": out / f"{options.preset.name}.md"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        files["markdown"].write_text(markdown(f"lookahead bench: {options.preset.title}", sections), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the report into {out}: {error.strerror}; the results are kept") from error
    return files
