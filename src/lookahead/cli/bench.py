"""`lookahead bench`: prompt sets x methods, measured and compared; the paper's tables by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lookahead.cli.common import INTERRUPTED, Host, choice
from lookahead.cli.ranks import Ranks
from lookahead.cli.settings import Settings

if TYPE_CHECKING:
    from lookahead.bench.context import Context
    from lookahead.bench.jobs import Job
    from lookahead.bench.plan import Plan
    from lookahead.bench.runner import Runner

EVERY = 15.0  # seconds between lines of progress where there is no terminal to draw a bar on


def bench(
    ctx: typer.Context,
    preset: Annotated[
        str | None, typer.Option("--preset", help="A table or figure of the paper; `list` names them.")
    ] = None,
    sets: Annotated[
        str | None, typer.Option("--sets", help="Prompt sets, such as builtin,mt-bench.", metavar="A,B,...")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="lookahead, hf-greedy, paper:W,N,G, config:... Repeatable.", metavar="NAME"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder with the sets' files; else the hub.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of results and reports; an earlier run there goes on.")
    ] = Path("lookahead-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, short answers: minutes on a CPU.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts of each set, evenly spaced.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="New tokens of each answer.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Times each is run; medians count.", min=1)] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 is greedy. Repeatable.", min=0.0)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The first prompt's; the next ones count up.", min=0)] = 0,
    warm: Annotated[
        bool, typer.Option("--warm", help="Keep what a method learns from one prompt for the next, as a server does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="As for generate.", rich_help_panel="Model")] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="The small model of hf-assisted.", rich_help_panel="Model")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="As for generate.", rich_help_panel="Model")] = "auto",
    device: Annotated[str, typer.Option("--device", help="As for generate.", rich_help_panel="Model")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help="As for generate.", rich_help_panel="Model")] = "auto",
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", help="Also cost shape-inflated models, such as 7b,13b.", rich_help_panel="Model"),
    ] = None,
    inflate: Annotated[
        str | None,
        typer.Option(
            "--inflate", help="Run the model's function in a larger shape, such as 7b.", rich_help_panel="Model"
        ),
    ] = None,
    step_cost: Annotated[
        Path | None,
        typer.Option(
            "--step-cost", help="JSON with sizes and seconds of steps, measured elsewhere.", rich_help_panel="Ranks"
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Run our methods on this many ranks.", rich_help_panel="Ranks")
    ] = None,
    rank_timeout: Annotated[
        float,
        typer.Option("--rank-timeout", help="Seconds without an answer that end the run.", rich_help_panel="Ranks"),
    ] = 60.0,
) -> None:
    """Measure lookahead on this machine, and check its output, against transformers' own decoding.

    Answers are kept in OUT as they come: the same command goes on where an earlier one stopped.
    """
    from lookahead.bench.plan import Plan
    from lookahead.bench.presets import PRESETS

    host = ctx.ensure_object(Host)
    if preset == "list":
        host.write("".join(f"{name:<12}{one.title}\n" for name, one in PRESETS.items()))
        return
    if preset is not None:
        choice("--preset", preset, (*PRESETS, "list"))
    settings = Settings(model=model, dtype=dtype, device=device, backend=backend)
    settings.check()
    several = Ranks(ranks, rank_timeout, False)
    plan = Plan.of(
        preset, sets=sets, methods=method, data_dir=data_dir, quick=quick, limit=limit, max_tokens=max_tokens,
        repeats=repeats, temperatures=temperature, seed=seed, warm=warm, shapes=shapes, step_cost=step_cost,
        draft_model=draft_model, ranks=several.size, inflate=inflate,
        half="float16" if dtype == "float16" else "bfloat16",
    )  # fmt: skip
    if several.together and not several.started:
        raise typer.Exit(several.launch(host, None))
    with several.watched(host):
        _bench(host, settings, several, plan, out, as_json)


def _bench(host: Host, settings: Settings, several: Ranks, plan: Plan, out: Path, as_json: bool) -> None:
    from lookahead.bench.about import about, versions
    from lookahead.bench.costs import in_shape
    from lookahead.bench.plan import context_of, report, runner_of
    from lookahead.bench.results import Results

    results = None if several.follows else Results(out / "results.jsonl")
    if results is not None:
        results.check(versions())  # before a model is loaded for nothing
    if results is not None and results.dropped:
        host.say(f"note: the last line of {results.path} was cut off and is measured again")

    def shaped(small: Any, backend: str) -> Any:
        return small if plan.inflate is None else in_shape(small, plan.inflate, backend, host.say)

    def load(dtype: str | None, backend: str | None) -> Any:
        backend = backend or settings.backend
        options = {"dtype": dtype or settings.dtype, "device": settings.device, "log": host.say}
        return shaped(host.load(settings.model, backend=backend, **options), backend)

    lm: Any = shaped(several.load(host, settings), settings.backend)
    if results is not None:
        results.begin(about(lm))
    runner, jobs = runner_of(plan, lm, results, load, host.say), plan.jobs(lm.device.type)
    todo = runner.agreed(jobs)
    if results is None:  # a rank that follows
        for _ in runner.run(todo):
            pass
        return
    context = context_of(plan, jobs, runner, host.say)
    stopped = False
    try:
        _run(host, runner, context, todo)
        plan.measure_more(context)
    except KeyboardInterrupt:
        stopped = True
    files = report(plan, context, out)
    if as_json:
        host.write(json.dumps({**plan.record(context), "files": {k: str(v) for k, v in files.items()}}) + "\n")
    else:
        host.write(files["markdown"].read_text(encoding="utf-8"))
    host.say(f"results in {results.path}, report in {files['html']}")
    if stopped:
        left = len(runner.missing(context.jobs))
        host.say(f"interrupted, {left} of {len(context.jobs)} answers to go: the same command goes on from here")
        raise typer.Exit(INTERRUPTED)


def _run(host: Host, runner: Runner, context: Context, todo: Sequence[Job]) -> None:
    """The jobs, with a bar and the time left; lines instead where stderr is no terminal."""
    done = len(context.jobs) - len(todo)
    if done:
        host.say(f"{done} of {len(context.jobs)} answers are there already")
    left, ran = TimeRemainingColumn(), TimeElapsedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), ran, TextColumn("left"), left)
    begin = said = monotonic()
    with Progress(*columns, console=host.err, transient=True, disable=not host.err.is_terminal) as bar:
        task = bar.add_task("answers", total=len(todo))
        for number, (job, row) in enumerate(runner.run(todo), 1):
            bar.update(task, advance=1, description=f"{job.data}: {job.method.label}")
            if "error" in row:
                host.say(f"note: {job.method.label} on {job.data} {job.prompt.id}: {row['error']}")
            if not host.err.is_terminal and monotonic() - said > EVERY:
                said = monotonic()
                rest = (said - begin) / number * (len(todo) - number)
                host.say(f"{number} of {len(todo)} answers, about {rest:.0f} s left")
