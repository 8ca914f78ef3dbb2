"""From the command's options to a run: which prompts, methods and sizes; then the report's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lookahead.bench.paper.presets import DEFAULT, EXACT_ON_CUDA, HALF, PRESETS, STATIC, Preset, Size
from lookahead.bench.paper.rouge import scorer
from lookahead.bench.report import page, ranks
from lookahead.bench.report.sections import Section, markdown
from lookahead.bench.run import costs, prompts
from lookahead.bench.run.bench_run import BenchRun
from lookahead.bench.run.inflate import MODEL_SHAPES
from lookahead.bench.run.jobs import Job
from lookahead.bench.run.methods import Method, named
from lookahead.bench.run.models import Load, Models
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.runner import Runner
from lookahead.loading.load import load_pretrained


@dataclass(frozen=True)
class BenchOptions:
    """One preset with everything that can be settled without a model; made by `of` from the command's options."""

    preset: Preset
    prompts: dict[str, list[Prompt]]
    methods: tuple[Method, ...]
    own_methods: bool
    size: Size
    temperatures: tuple[float, ...]
    seed: int
    warm: bool
    shapes: tuple[str, ...]
    step_cost: Path | None
    draft_model: str | None
    ranks: int
    inflate: str | None
    half: str

    @classmethod
    def of(
        cls,
        name: str | None,
        *,
        sets: str | None = None,
        methods: Sequence[str] | None = None,
        data_dir: Path | None = None,
        quick: bool = False,
        limit: int | None = None,
        max_tokens: int | None = None,
        repeats: int | None = None,
        temperatures: Sequence[float] | None = None,
        seed: int = 0,
        warm: bool = False,
        shapes: str | None = None,
        step_cost: Path | None = None,
        draft_model: str | None = None,
        ranks: int = 1,
        inflate: str | None = None,
        half: str = HALF,
    ) -> BenchOptions:
        preset = PRESETS[name] if name is not None else DEFAULT
        size = preset.quick if quick else preset.full
        size = Size(limit or size.limit, max_tokens or size.max_tokens, repeats or size.repeats)
        chosen = preset.quick_methods if quick and preset.quick_methods else preset.methods
        if methods:
            if not preset.methods:
                raise ValueError(f"preset {preset.name!r} has settings of its own and takes no --method")
            chosen = tuple(named(method) for method in methods)
        known_shapes("--inflate", inflate)
        if ranks > 1 and preset.more is not None:
            raise ValueError(f"preset {preset.name!r} is measured on one rank; leave --ranks out")
        if ranks > 1 and any(method.dtype or method.backend for method in chosen):
            raise ValueError(f"preset {preset.name!r} loads several models, which ranks do not; leave --ranks out")
        if ranks > 1 and inflate is not None:
            raise ValueError("--inflate makes a model on one rank; leave --ranks out")
        if any(method.how == "hf-assisted" for method in chosen) and draft_model is None:
            raise ValueError("method 'hf-assisted' needs --draft-model, a smaller model with the same tokenizer")
        if draft_model is not None and not methods and preset.methods:
            chosen = (*chosen, named("hf-assisted"))
        if preset.name == "sampling":
            scorer()  # before hours of answers that could not be scored
        if step_cost is not None:
            costs.read(step_cost)
        names = _set_names(sets) if sets is not None else list(preset.sets)
        for one in names:
            prompts.check(one)
        loaded = {one: prompts.load(one, data_dir, size.limit, preset.turns) for one in names}
        return cls(
            preset, loaded, chosen, bool(methods), size, tuple(temperatures or preset.temperatures), seed,
            warm or preset.warm, known_shapes("--shapes", shapes), step_cost, draft_model, ranks, inflate, half,
        )  # fmt: skip

    def methods_on(self, device: str) -> tuple[Method, ...]:
        """The methods, without those this device cannot run, with those only it can; on several ranks each twice."""
        self.preset.check(device)
        found = self.methods
        if not self.own_methods:
            if device != "cuda":  # compiling for a CPU takes minutes and gains nothing
                found = tuple(method for method in found if method.how != "hf-static")
            elif self.preset is DEFAULT:
                found = (found[0], STATIC, *found[1:])
            elif self.preset.name == "exactness":
                found = (*found, *EXACT_ON_CUDA)
        found = tuple(replace(m, dtype=self.half) if m.dtype == HALF else m for m in found)
        if self.ranks == 1:
            return found
        both: list[Method] = []
        for method in found:
            many = replace(method, ranks=self.ranks, label=f"{method.label}, {self.ranks} ranks")
            both += [method] if method.stock else [method, many]
        return tuple(both)

    def jobs(self, device: str) -> list[Job]:
        """Methods take turns on each prompt, so that a machine that slows down slows all of them."""
        methods, limits = self.methods_on(device), self.limits
        return [
            Job(data, number, prompt, method, limits[data], temperature, self.seed + number, repeat, self.warm)
            for repeat in range(self.size.repeats)
            for data, chosen in self.prompts.items()
            for temperature in self.temperatures
            for number, prompt in enumerate(chosen)
            for method in methods
        ]

    def work(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """How many answers the run takes, and how many tokens those may have: what `more` generates, too."""
        more = self.preset.work(self.prompts, self.limits) if self.preset.work is not None else (0, 0)
        tokens = sum(job.max_tokens * len(job.prompt.turns) for job in jobs)
        return len(jobs) + more[0], tokens + more[1]

    @property
    def limits(self) -> dict[str, int]:
        """New tokens of each answer, by set."""
        own = {name: one.max_tokens for name, one in prompts.PAPER_SETS.items()}
        return {data: self.size.max_tokens or own.get(data, 256) for data in self.prompts}

    def sections(self, run: BenchRun) -> list[Section]:
        made = self.preset.show(run)
        return [*made, ranks.show(run)] if self.ranks > 1 else made

    def record(self, run: BenchRun) -> dict[str, Any]:
        """The object of `--json`."""
        tables = [
            {"title": section.title, "rows": [dict(zip(section.head, row, strict=True)) for row in section.rows]}
            for section in self.sections(run)
        ]
        lines = [line.record() for line in run.lines]
        return {"preset": self.preset.name, "about": run.results.about, "lines": lines, "tables": tables}

    def models(self, lm: Any, load: Load, say: Callable[[str], None]) -> Models:
        """The loaded model, and those that a method may ask for besides."""

        def draft() -> Any:
            dtype = str(lm.dtype).removeprefix("torch.")
            return load_pretrained(self.draft_model, dtype=dtype, device=str(lm.device), log=say)[0]

        return Models(lm, load, draft if self.draft_model is not None else None, say)

    def run_of(self, jobs: list[Job], runner: Runner, say: Callable[[str], None]) -> BenchRun:
        """What the report is made of."""
        assert runner.results is not None
        return BenchRun(
            self.prompts, jobs, runner.results, runner.models, say, self.limits, self.step_cost, self.shapes
        )


def report(options: BenchOptions, run: BenchRun, out: Path) -> dict[str, Path]:
    """Markdown and HTML, named after the preset."""
    sections = [*options.sections(run), about_section(run)]
    title = f"lookahead bench: {options.preset.title}"
    name = options.preset.name
    files = {"results": run.results.path, "markdown": out / f"{name}.md", "html": out / f"{name}.html"}
    try:
        files["markdown"].write_text(markdown(title, sections), encoding="utf-8")
        files["html"].write_text(page.html(title, sections), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the report into {out}: {error.strerror}; the results are kept") from error
    return files


def about_section(run: BenchRun) -> Section:
    about = run.results.about or {}
    section = Section("Measured on", ("what", "value"))
    section.rows = [[name, str(value)] for name, value in about.items() if value is not None]
    done = sum(job.key in run.results for job in run.jobs)
    if run.jobs:
        repeats = max(job.repeat for job in run.jobs) + 1
        often = "once: on a machine that others use, add --repeats 3" if repeats == 1 else f"{repeats} times"
        unfinished = "" if done == len(run.jobs) else " Not finished."
        section.notes.append(f"{done} of {len(run.jobs)} answers.{unfinished} Each is timed {often}.")
    return section


def _set_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--sets names none: choose from {', '.join(prompts.SETS)}")
    return list(dict.fromkeys(names))


def known_shapes(option: str, text: str | None) -> tuple[str, ...]:
    """The shapes that an option names, when there are such shapes."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in MODEL_SHAPES:
            raise ValueError(f"{option} does not know {name!r}: choose from {', '.join(MODEL_SHAPES)}")
    return names
