"""`lookahead tune`: the fastest config for a model on this machine, or plain decoding if that is faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from lookahead.cache import cache_dir
from lookahead.cli.common import Host
from lookahead.cli.settings import DTYPES, check_device
from lookahead.config import BACKENDS, LookaheadConfig, SamplingParams, StopRules

TOKENS, QUICK_TOKENS = 64, 32
PROMPTS, QUICK_PROMPTS = 3, 2


def tune(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", help="Embedded model, short name, hub id, folder or .gguf.", metavar="NAME")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.", metavar="NAME")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", metavar="NAME")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help=f"One of {', '.join(BACKENDS)}.", metavar="NAME")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help='Your prompts: one per line, or JSONL with "prompt".')
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help=f"Tokens of each answer ({TOKENS}, or {QUICK_TOKENS} if quick).")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 is greedy; sampling accepts fewer draft tokens.")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs; rougher.")] = False,
    prior: Annotated[bool, typer.Option("--prior", help="Measure only the cost of a step; assume acceptance.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Make the best one the default for this model.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Find the config that makes a model fastest on this machine, plain decoding included.

    Measures what a step costs and, on your prompts, how many tokens are accepted; predicts every candidate's speed.
    """
    host = ctx.ensure_object(Host)
    check_device(dtype, device, backend)
    tokens = (QUICK_TOKENS if quick else TOKENS) if max_tokens is None else max_tokens
    StopRules(tokens)
    if tokens < 2:
        raise ValueError(f"--max-tokens {tokens}: an answer of one token is always one step; use at least 2")
    SamplingParams(temperature)
    chosen = choose_prompts(prompts, QUICK_PROMPTS if quick else PROMPTS)
    if plot is not None:
        host.say("warning: --plot is deprecated and ignored: the bars are printed, and --json has every figure")

    from lookahead.tune import tuner

    # An explicit config skips the measurement and the profile at loading.
    loaded: Any = host.load(model, dtype=dtype, device=device, backend=backend, log=host.say, config=LookaheadConfig())
    result = tuner.tune(
        loaded,
        chosen,
        acceptance=not prior,
        second_looks=1 if quick else tuner.SECOND_LOOKS,
        say=host.say,
        max_tokens=tokens,
        temperature=temperature,
        raw=raw,
    )
    if as_json:
        host.write(json.dumps(result.record()) + "\n")
    else:
        host.out.print(table(result))
        host.write(bars(result.predictions))
        host.write(law(result))
        host.write(result.verdict() + "\n")
    if save:
        path = tuner.save(loaded, result, cache_dir())
        host.say(f"saved: {path}; `lookahead` and lookahead.load() use it for this model here; delete it to go back")
    elif result.pays and not as_json:
        host.say("--save keeps it for this model on this machine")


def choose_prompts(path: Path | None, ours: int) -> list[str]:
    """All prompts in the user's file, or the first built-in ones."""
    from lookahead.bench.run import prompts

    return [one.turns[0] for one in prompts.load("builtin", limit=ours)] if path is None else prompts.read_own(path)


def table(result: Any) -> Table:
    """Every candidate, fastest first; * marks the best."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    made.add_column("  candidate", no_wrap=True)
    made.add_column("S from", no_wrap=True)
    for name in ("tokens\n/step", "S", "ms\n/step", "tok/s", "speedup"):
        made.add_column(name, justify="right", no_wrap=True)
    for one in result.predictions:
        best = one is result.best
        made.add_row(
            f"{'*' if best else ' '} {one.candidate.name}",
            one.basis,
            f"{one.step_tokens:.1f}",
            f"{one.compression:.2f}",
            f"{1e3 * one.step_seconds:.1f}",
            f"{one.tokens_per_second:.1f}",
            f"{one.speedup:.2f}x",
            style="bold" if best else None,
        )
    return made


def law(result: Any) -> str:
    """One line: the scaling law and the points it was fitted to."""
    found, points = result.laws.paper, result.laws.points
    text = f"scaling law of the paper's method: alpha {found.alpha:.3f}, f {found.f:.2f}"
    if not points:
        return f"{text} (the paper's own; none was run)\n"
    fits = ", ".join(
        f"W={p.window} N={p.ngram}: S {p.compression:.2f}, by the law {found.predict(p.window, p.ngram, p.guesses):.2f}"
        for p in points
    )
    return f"{text}; {fits}\n"


def bars(predictions: Any, width: int = 40) -> str:
    """One bar per candidate, proportional to its speedup; `|` marks the speed of plain decoding."""
    most = max(1.0, *(p.speedup for p in predictions))
    names = max(len(p.candidate.name) for p in predictions)
    one = round(width / most)
    lines = []
    for p in predictions:
        length = max(1, round(width * p.speedup / most))
        bar = "".join("|" if i + 1 == one else "#" if i < length else " " for i in range(max(length, one)))
        lines.append(f"{p.candidate.name:<{names}}  {bar:<{width}}  {p.speedup:.2f}x")
    return "\n".join(lines) + "\n"
