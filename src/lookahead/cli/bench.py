"""`lookahead bench`: prompt sets x methods, measured and compared; the paper's tables by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lookahead.cli.common import INTERRUPTED, Host, choice
from lookahead.cli.ranks import Ranks
from lookahead.cli.settings import Settings
from lookahead.cli.workloads import run_workloads, workload_options

if TYPE_CHECKING:
    from lookahead.bench.paper.options import BenchOptions
    from lookahead.bench.paper.series import Part
    from lookahead.bench.run.results import Results
    from lookahead.bench.run.summary import BenchRun

GPU_PRESETS = {
    "gpu-step": "A step by K on a CUDA GPU",
    "gpu-speed": "Tokens per second and S on a CUDA GPU",
    "gpu-batch": "1 to 64 sequences at once on a CUDA GPU",
    "gpu-report": "The report of the other GPU presets' results in --out",
}
"""Presets of `python -m lookahead.bench.gpu`, which has two more options."""
GPU_TAKES = ("preset", "model", "dtype", "device", "data_dir", "out", "limit", "max_tokens")
"""The options of these presets."""
WORKLOADS_TAKE = (
    *GPU_TAKES, "sets", "method", "quick", "repeats", "seed", "as_json", "backend"
)  # fmt: skip
"""The options of the preset `workloads`."""
WORKLOADS = {"workloads": "Edit, extract, quote, summarise, act, sample, chat: what each gains"}
EVERY = 15.0  # seconds between progress lines if stderr is not a terminal


def bench(
    ctx: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="Tables or figures of the paper; `list` names them.", metavar="A,B,...|all|list"),
    ] = None,
    sets: Annotated[
        str | None,
        typer.Option(
            "--sets",
            help="Prompt sets, such as builtin,mt-bench; of the preset workloads: edit,agent.",
            metavar="A,B,...",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="lookahead, hf-greedy, paper:W,N,G, config:... Repeatable.", metavar="NAME"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder with the sets' files; else the hub.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of results and reports; an earlier run is resumed.")
    ] = Path("lookahead-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, short answers: minutes on a CPU.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts of each set, evenly spread.", min=1)] = None,
    baseline_limit: Annotated[
        int | None, typer.Option("--baseline-limit", help="The same for transformers' own methods.", min=1)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="New tokens of each answer.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Times each is run; medians count.", min=1)] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 is greedy. Repeatable.", min=0.0)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The first prompt's; the next ones count up.", min=0)] = 0,
    warm: Annotated[
        bool, typer.Option("--warm", help="Keep what a method learns from one prompt for the next, as a server does.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", help="Stop after this time; the same command goes on.", min=0.0),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option("--merge", help="Take over the results in this folder. Repeatable.", metavar="DIR"),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Report what OUT and --merge have; load no model, measure nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of each report.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="As for generate.", rich_help_panel="Model")] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="The small model of hf-assisted.", rich_help_panel="Model")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="As for generate.", rich_help_panel="Model")] = "auto",
    device: Annotated[str, typer.Option("--device", help="As for generate.", rich_help_panel="Model")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help="As for generate.", rich_help_panel="Model")] = "auto",
    step_cost: Annotated[Path | None, typer.Option("--step-cost", hidden=True)] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Run our methods on this many ranks.", rich_help_panel="Ranks")
    ] = None,
    rank_timeout: Annotated[
        float,
        typer.Option("--rank-timeout", help="Seconds without an answer that end the run.", rich_help_panel="Ranks"),
    ] = 60.0,
) -> None:
    """Measure lookahead on this machine, and check its output, against transformers' own decoding.

    Answers are saved to OUT as they finish: the same command resumes an interrupted run.
    """
    begin = monotonic()
    from lookahead.bench.paper.options import BenchOptions
    from lookahead.bench.paper.presets import PRESETS

    host = ctx.ensure_object(Host)
    if preset == "list":
        titles = {**{name: one.title for name, one in PRESETS.items()}, **WORKLOADS, **GPU_PRESETS}
        host.write("".join(f"{name:<15}{title}\n" for name, title in titles.items()))
        return
    if preset is not None and preset.startswith("gpu-"):
        _refuse_others(ctx, GPU_TAKES, "presets of a GPU")
        given = {"model": model, "dtype": dtype, "device": device, "data_dir": data_dir, "out": out}
        host.write(_gpu(host, preset, {**given, "limit": limit, "max_tokens": max_tokens}) + "\n")
        return
    if preset == "workloads":
        _refuse_others(ctx, WORKLOADS_TAKE, "the preset workloads")
        settings = Settings(model=model, dtype=dtype, device=device, backend=backend)
        settings.validate()
        options = workload_options(sets, method, data_dir, quick, limit, max_tokens, repeats, seed)
        run_workloads(host, settings, options, out, as_json)
        return
    if step_cost is not None:
        host.say("warning: --step-cost is deprecated and ignored: preset configs reports measured speeds alone")
    settings = Settings(model=model, dtype=dtype, device=device, backend=backend)
    settings.validate()
    several = Ranks(ranks, rank_timeout, False)
    runs = [
        BenchOptions(
            name, sets=sets, methods=method, data_dir=data_dir, quick=quick, limit=limit,
            baseline_limit=baseline_limit, max_tokens=max_tokens, repeats=repeats, temperatures=temperature,
            seed=seed, warm=warm, draft_model=draft_model, ranks=several.size,
            half="float16" if dtype == "float16" else "bfloat16",
        )
        for name in _named(preset, device)
    ]  # fmt: skip
    asked = Asked(out, as_json, tuple(merge or ()), None if minutes is None else begin + 60 * minutes)
    if report:
        _report(host, runs, asked)
        return
    if several.together and not several.started:
        raise typer.Exit(several.launch(host, None))
    with several.watched(host):
        _bench(host, settings, several, runs, asked)


def _refuse_others(ctx: typer.Context, taken: Sequence[str], what: str) -> None:
    """Raise ValueError if an option was given that is not in `taken`."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in taken:
            raise ValueError(f"{parameter.opts[0]} is not for {what}; leave it out")


def _gpu(host: Host, preset: str, given: dict[str, Any]) -> str:
    """Run presets of `lookahead.bench.gpu`; returns their summary table. Options not given keep its defaults."""
    from lookahead.bench.gpu.command import parser, run

    words = [choice("--preset", name.strip(), tuple(GPU_PRESETS)).removeprefix("gpu-") for name in preset.split(",")]
    for name, value in given.items():
        words += [] if value in (None, "auto") else [f"--{name.replace('_', '-')}", str(value)]
    return run(parser().parse_args(words), host.load)


def _named(preset: str | None, device: str) -> list[str | None]:
    """The presets to run; `all` means those that the device supports. None is the default run."""
    from lookahead.bench.paper.presets import PRESETS

    if preset is None:
        return [None]
    names = [name.strip() for name in preset.split(",")]
    if of_gpu := [name for name in names if name in GPU_PRESETS]:
        raise ValueError(
            f"--preset {of_gpu[0]} cannot be combined with {names[0]}: run the presets of a GPU by themselves"
        )
    for name in names:
        if name in WORKLOADS:
            raise ValueError("--preset workloads must be used alone: its --sets names workloads")
        choice("--preset", name, (*PRESETS, *WORKLOADS, *GPU_PRESETS, "all", "list"))
    if "list" in names:
        raise ValueError("--preset list must be used alone: name presets, or all of them with `all`")
    chosen = dict.fromkeys(one for name in names for one in (PRESETS if name == "all" else [name]))
    for name in [name for name in chosen if PRESETS[name].cuda]:  # checked before a model is loaded
        from lookahead.loading.load import pick_device

        kind = pick_device(device).type
        if name in names:
            PRESETS[name].check(kind)
        elif kind != "cuda":
            del chosen[name]
    return list(chosen)


@dataclass(frozen=True)
class Asked:
    """Where results come from and go to, and when to stop, a time of `monotonic`."""

    out: Path
    as_json: bool
    merge: tuple[Path, ...] = ()
    until: float | None = None


def _results(host: Host, asked: Asked) -> Results:
    """What OUT has, with what is merged into it."""
    from lookahead.bench.run.results import Results

    results = Results(asked.out / "results.jsonl")
    if results.dropped:
        host.say(f"note: the last line of {results.path} was cut off and is measured again")
    differ = results.merge([folder / "results.jsonl" for folder in asked.merge])
    if differ:
        host.say(f"warning: {len(differ)} answers were measured twice, and are not the same text; the first ones count")
    return results


def _report(host: Host, runs: Sequence[BenchOptions], asked: Asked) -> None:
    """Reports of what was measured before, on whatever machine that was."""
    from lookahead.bench.run.summary import BenchRun

    results = _results(host, asked)
    if results.about is None:
        raise ValueError(f"{results.path} has no results to report: measure first, or give --merge")
    for options in runs:
        device = results.about["device"].partition(":")[0]
        _show(host, options, BenchRun(options.jobs(device), results), asked)


def _bench(host: Host, settings: Settings, several: Ranks, runs: Sequence[BenchOptions], asked: Asked) -> None:
    """Run the presets one after another, on one loaded model and into one results file. The time that is left is shared
    among those that are not done."""
    from lookahead.bench.paper.series import Series
    from lookahead.bench.run.about import about, versions

    results = None if several.follows else _results(host, asked)
    if results is not None:
        results.check(versions())  # before a model is loaded

    def load(dtype: str | None = None, backend: str | None = None) -> Any:
        return replace(settings, dtype=dtype or settings.dtype, backend=backend or settings.backend).load(host)

    lm: Any = several.load(host, settings) if several.together else load()
    if results is not None:
        results.begin(about(lm))
    series = Series(runs, runs[0].models(lm, load, host.say), results, asked.until)
    for line in series.plan if results is not None else ():
        host.say(line)
    for part in series.parts():
        if results is None:  # a follower rank
            for _ in part.answers():
                pass
        elif not _measured(host, part, asked):
            left = series.to_go()
            host.say(f"interrupted{', ' if left else ''}{left}: the same command resumes from here")
            raise typer.Exit(INTERRUPTED)
    if results is not None and (left := series.to_go()):
        host.say(f"out of time, {left}: the same command resumes from here")


def _measured(host: Host, part: Part, asked: Asked) -> bool:
    """Run one preset and report, even if interrupted by Ctrl-C. Returns False then."""
    whole = True
    try:
        _run(host, part)
    except KeyboardInterrupt:
        whole = False
    _show(host, part.options, part.run, asked)
    return whole


def _show(host: Host, options: BenchOptions, run: BenchRun, asked: Asked) -> None:
    from lookahead.bench.paper.options import report

    files = report(options, run, asked.out)
    if asked.as_json:
        host.write(json.dumps({**options.record(run), "files": {k: str(v) for k, v in files.items()}}) + "\n")
    else:
        host.write(files["markdown"].read_text(encoding="utf-8"))
    host.say(f"results in {run.results.path}, report in {files['markdown']}")


def _run(host: Host, part: Part) -> None:
    """Run the jobs with a progress bar, or progress lines if stderr is not a terminal."""
    if part.existing:
        host.say(part.existing)
    left_column = TextColumn("{task.fields[left]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left_column)
    every, said = 1.0 if host.err.is_terminal else EVERY, monotonic()
    with Progress(*columns, console=host.err, transient=True, disable=not host.err.is_terminal) as bar:
        task = bar.add_task("answers", total=len(part.todo), left="")
        for number, (job, record) in enumerate(part.answers(), 1):
            bar.update(task, advance=1, description=f"{job.data}: {job.method.label}")
            if "error" in record:
                host.say(f"note: {job.method.label} on {job.data} {job.prompt.id}: {record['error']}")
            if monotonic() - said > every:
                said, progress = monotonic(), part.progress(number)
                bar.update(task, left=progress.partition(", ")[2])
                if not host.err.is_terminal:
                    host.say(progress)
