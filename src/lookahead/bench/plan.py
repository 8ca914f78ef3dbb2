"""From the command's options to a run: which prompts, methods and sizes; then the report's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.bench import page, prompts, ranks
from lookahead.bench.context import Context
from lookahead.bench.jobs import Job
from lookahead.bench.methods import Method, named
from lookahead.bench.presets import DEFAULT, HALF, ON_CUDA, PRESETS, STATIC, Preset, Size, tokens_for
from lookahead.bench.prompts import Prompt
from lookahead.bench.sections import Section, markdown

if TYPE_CHECKING:
    from lookahead.bench.runner import Load, Models, Runner


@dataclass(frozen=True)
class Plan:
    """Everything that can be settled without a model."""

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
    ) -> Plan:
        preset = PRESETS[name] if name is not None else DEFAULT
        size = preset.quick if quick else preset.full
        size = Size(limit or size.limit, max_tokens or size.max_tokens, repeats or size.repeats)
        chosen = preset.quick_methods if quick and preset.quick_methods else preset.methods
        if methods:
            if not preset.methods:
                raise ValueError(f"preset {preset.name!r} has settings of its own and takes no --method")
            chosen = tuple(named(method) for method in methods)
        if ranks > 1 and preset.more is not None:
            raise ValueError(f"preset {preset.name!r} is measured on one rank; leave --ranks out")
        if ranks > 1 and any(method.dtype or method.backend for method in chosen):
            raise ValueError(f"preset {preset.name!r} loads several models, which ranks do not; leave --ranks out")
        _shapes("--inflate", inflate)
        if ranks > 1 and inflate is not None:
            raise ValueError("--inflate makes a model on one rank; leave --ranks out")
        if any(method.how == "hf-assisted" for method in chosen) and draft_model is None:
            raise ValueError("method 'hf-assisted' needs --draft-model, a smaller model with the same tokenizer")
        if draft_model is not None and not methods and preset.methods:
            chosen = (*chosen, named("hf-assisted"))
        if preset.name == "sampling":
            from lookahead.bench.rouge import scorer

            scorer()  # before hours of answers that could not be scored
        if step_cost is not None:
            from lookahead.bench.costs import read

            read(step_cost)
        names = split(sets) if sets is not None else list(preset.sets)
        for one in names:
            prompts.check(one)
        loaded = {one: prompts.load(one, data_dir, size.limit) for one in names}
        return cls(
            preset, loaded, chosen, bool(methods), size, tuple(temperatures or preset.temperatures), seed, warm,
            _shapes("--shapes", shapes), step_cost, draft_model, ranks, inflate, half,
        )  # fmt: skip

    def methods_on(self, device: str) -> tuple[Method, ...]:
        """The methods, less what this device cannot run, or plus what only it can; on several ranks each twice."""
        self.preset.check(device)
        cuda = device == "cuda"
        found = self.methods
        if not self.own_methods:
            if not cuda:  # compiling for a CPU takes minutes and gains nothing
                found = tuple(method for method in found if method.how != "hf-static")
            elif self.preset is DEFAULT:
                found = (found[0], STATIC, *found[1:])
            elif self.preset.name == "exactness":
                found = (*found, *ON_CUDA)
        found = tuple(replace(m, dtype=self.half) if m.dtype == HALF else m for m in found)
        if self.ranks == 1:
            return found
        both: list[Method] = []
        for method in found:
            both += [method] if method.stock else [method, replace(method, ranks=self.ranks, label=self._label(method))]
        return tuple(both)

    def jobs(self, device: str) -> list[Job]:
        methods = self.methods_on(device)
        return self.preset.jobs(self.prompts, methods, self.size, self.temperatures, self.seed, self.warm)

    def work(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """How many answers the run takes, and how many tokens those may have: what `more` generates, too."""
        more = self.preset.work(self.prompts, self.limits) if self.preset.work is not None else (0, 0)
        tokens = sum(job.max_tokens * len(job.prompt.turns) for job in jobs)
        return len(jobs) + more[0], tokens + more[1]

    @property
    def limits(self) -> dict[str, int]:
        """New tokens of each answer, by set."""
        return {data: tokens_for(data, self.size) for data in self.prompts}

    def _label(self, method: Method) -> str:
        return f"{method.label}, {self.ranks} ranks"

    def measure_more(self, run: Context) -> None:
        if self.preset.more is not None:
            self.preset.more(run)

    def sections(self, run: Context) -> list[Section]:
        made = self.preset.show(run)
        if self.ranks > 1:
            made.append(ranks.show(run))
        return made

    def record(self, run: Context) -> dict[str, Any]:
        """The object of `--json`."""
        tables = [
            {"title": section.title, "rows": [dict(zip(section.head, row, strict=True)) for row in section.rows]}
            for section in self.sections(run)
        ]
        about = run.results.about
        return {
            "preset": self.preset.name,
            "about": about,
            "lines": [line.record() for line in run.lines],
            "tables": tables,
        }


def models_of(plan: Plan, lm: Any, load: Load, say: Callable[[str], None]) -> Models:
    """The loaded model, and those that a method may ask for besides."""
    from lookahead.bench.runner import Models
    from lookahead.loading.load import load_pretrained

    def draft() -> Any:
        dtype = str(lm.dtype).removeprefix("torch.")
        return load_pretrained(plan.draft_model, dtype=dtype, device=str(lm.device), log=say)[0]

    return Models(lm, load, draft if plan.draft_model is not None else None, say)


def context_of(plan: Plan, jobs: list[Job], runner: Runner, say: Callable[[str], None]) -> Context:
    """What the report is made of."""
    assert runner.results is not None
    return Context(plan.prompts, jobs, runner.results, runner.models, say, plan.limits, plan.step_cost, plan.shapes)


def report(plan: Plan, run: Context, out: Path) -> dict[str, Path]:
    """Markdown and HTML, named after the preset."""
    sections = [*plan.sections(run), about_section(run)]
    title = f"lookahead bench: {plan.preset.title}"
    files = {
        "results": run.results.path,
        "markdown": out / f"{plan.preset.name}.md",
        "html": out / f"{plan.preset.name}.html",
    }
    try:
        files["markdown"].write_text(markdown(title, sections), encoding="utf-8")
        files["html"].write_text(page.html(title, sections), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the report into {out}: {error.strerror}; the results are kept") from error
    return files


def about_section(run: Context) -> Section:
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


def split(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--sets names none: choose from {', '.join(prompts.SETS)}")
    return list(dict.fromkeys(names))


def _shapes(option: str, text: str | None) -> tuple[str, ...]:
    known = ("1.5b", "7b", "13b", "34b")
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"{option} does not know {name!r}: choose from {', '.join(known)}")
    return names
