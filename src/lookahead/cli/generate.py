"""`lookahead generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from lookahead.cli.answer import answer, interrupted, legend, summary
from lookahead.cli.common import FAILED, INTERRUPTED, Completion, Host, Model
from lookahead.cli.compare import BASELINE, Comparison, baseline_request, stock_answer, warm_up
from lookahead.cli.ranks import Ranks
from lookahead.cli.settings import Settings, takes_settings

EXACT = ("float32", "float64", "int8", "float8_e4m3fn")  # dtypes in which a method must produce the baseline's tokens


@takes_settings
def generate(
    ctx: typer.Context,
    settings: Settings,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The prompt; - reads stdin, as does a pipe without -p."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help=f"Also run {BASELINE} decoding, check the tokens, print both speeds."),
    ] = False,
    compare_stock: Annotated[
        bool,
        typer.Option("--compare-stock", help="As --compare, and beside transformers' own generate. Greedy only."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Start this many ranks that share every step's tokens.", rich_help_panel="Ranks"),
    ] = None,
    rank_timeout: Annotated[
        float,
        typer.Option("--rank-timeout", help="Seconds without an answer that end the run.", rich_help_panel="Ranks"),
    ] = 60.0,
    check_ranks: Annotated[
        bool,
        typer.Option("--check-ranks", help="Compare the ranks' state at every step.", rich_help_panel="Ranks"),
    ] = False,
) -> None:
    """Generate text from a prompt: text to stdout, a summary to stderr.

    On a terminal the colours show how many tokens each step accepted.
    """
    host = ctx.ensure_object(Host)
    compare = compare or compare_stock
    if compare_stock and settings.temperature:
        raise ValueError(f"--compare-stock is greedy, not --temperature {settings.temperature}; use --compare")
    if compare and settings.method == BASELINE:
        raise ValueError(f"--compare runs {BASELINE} beside another method; choose another --method")
    several = Ranks(ranks, rank_timeout, check_ranks)
    if compare_stock and several.together:
        raise ValueError("--compare-stock runs in one process; leave out --ranks, or use --compare")
    if several.together and not several.started:
        settings.validate()
        text = read_prompt(host, prompt)
        raise typer.Exit(several.launch(host, None if prompt not in (None, "-") else text))
    with several.watched(host):
        _generate(host, settings, several, prompt, raw, as_json, compare, compare_stock)


def _generate(
    host: Host,
    settings: Settings,
    several: Ranks,
    prompt: str | None,
    raw: bool,
    as_json: bool,
    compare: bool,
    compare_stock: bool,
) -> None:
    """Generate in this process. A rank other than 0 takes rank 0's prompt and prints nothing."""
    text = read_prompt(host, prompt) if not several.follows else None
    model: Any = several.load(host, settings)
    request = {**settings.request(model), "raw": raw}
    if several.follows:
        _follow_rank_zero(host, model, request, compare)
        return

    if compare and not warm_up(host, model, text, request):
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        legend(host)
    completion = answer(host, model.stream(text, **request), show=not as_json)
    comparison = None
    stopped = interrupted(completion)
    if compare and not stopped:
        baseline = answer(host, model.stream(text, **baseline_request(request)), show=False)
        stopped = interrupted(baseline)
        stock = stock_answer(model, text, request) if compare_stock and not stopped else None
        comparison = None if stopped else Comparison(completion, baseline, stock)

    if as_json:
        result = record(model, completion)
        host.write(json.dumps(result | {"compare": comparison.record()} if comparison else result) + "\n")
    if comparison is None:
        host.say(summary(completion.stats, completion.finish_reason))
    else:
        report(host, model, comparison)
    if several.together:
        host.say(model.backend.counters.summary())
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _follow_rank_zero(host: Host, model: Any, request: dict[str, Any], compare: bool) -> None:
    """Make the same calls as rank 0, in the same order."""
    requests = [request, baseline_request(request)] if compare else [request]
    if compare:
        warm_up(host, model, None, request)
    for one in requests:
        answer(host, model.stream(None, **one), show=False)


def read_prompt(host: Host, prompt: str | None) -> str:
    """The prompt as given, or the text of stdin without its last newline."""
    if prompt is None and host.person:
        raise ValueError("no prompt: give one with -p TEXT, or pipe it to stdin")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.read() if sys.stdin is not None else ""
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt on stdin is not {error.encoding} text: {error.reason}") from error
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise ValueError("the prompt is empty: give one with -p TEXT, or pipe it to stdin")
    return prompt


def record(model: Model, completion: Completion) -> dict[str, Any]:
    """The object that `--json` prints."""
    stats, config = completion.stats, completion.config
    return {
        "text": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "steps": stats.steps,
        "compression": stats.compression,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens_per_second,
        "method": completion.method,
        "model": model.name,
        "finish_reason": completion.finish_reason,
        "config": {
            "window": config.window,
            "ngram": config.ngram,
            "guesses": config.guesses,
            "budget": config.budget,
            "sources": list(config.sources),
        },
        "accepted_by_depth": list(stats.accepted_by_depth),
        "accepted_by_source": dict(stats.accepted_by_source),
        "seed": completion.seed,
    }


def report(host: Host, model: Model, comparison: Comparison) -> None:
    """Print the comparison to stderr. A difference is an error in float32, and rounding in half precision."""
    dtype = model.rounding or str(model.dtype).removeprefix("torch.")
    host.err.print(comparison.table())
    if (other := comparison.stock_difference()) is not None:
        host.say(other)
    if comparison.identical:
        count = comparison.equal_tokens
        host.say(f"same tokens: all {count} of them; {comparison.speed()}", style="")
    elif dtype in EXACT and model.rounding is None:
        host.fail(f"{comparison.difference()}; in {dtype} only a near tie explains that: please report the prompt")
        raise typer.Exit(FAILED)
    else:
        host.say(comparison.speed(), style="")
        host.say(
            f"note: {comparison.difference()}. {dtype} rounds a step of several tokens differently from a "
            "step of one, so two nearly equal logits can swap ranks; --dtype float32 rules that out"
        )
