"""The tables that some presets have besides the common one, or instead of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lookahead.bench.report.sections import Section, by_data, errors, speedup, times
from lookahead.bench.run.intervals import Interval, draws, interval_text, middle
from lookahead.bench.run.methods import Method
from lookahead.bench.run.results import outputs, same
from lookahead.bench.run.runner import Job
from lookahead.bench.run.summary import BenchRun, Line
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit


def best(run: BenchRun) -> list[Section]:
    """Table 4, searched for rather than copied: the fastest (W, N) of each set."""
    section = Section("Table 4: the best of the grid", ("set", "W", "N", "S", "K", "speedup", "as good as it"))
    timed = [line for line in run.lines if line.method.config is not None and line.gain]
    for data, lines in by_data(timed).items():
        line = max(lines, key=lambda line: line.gain or 0.0)
        config, stats = line.method.config, line.stats
        assert config is not None
        compared = line.reference if line.own.speedup is None else line.own
        section.rows.append([
            data, str(config.window), str(config.ngram), f"{line.compression:.2f}{interval_text(line.s_interval)}",
            f"{stats.tokens_per_step:.0f}", speedup(compared), _as_good(line, lines),
        ])  # fmt: skip
    section.notes.append(
        "speedup: over our own autoregressive decoding, if it was run. as good as it: configs whose speedup lies "
        "within its 95% interval, which this sample does not separate from it. "
        "The paper's (W, N): 7B (15, 5), 13B (10, 5), 34B (7, 5) on an A100."
    )
    return [section]


def _as_good(best: Line, lines: Sequence[Line]) -> str:
    compared = best.reference if best.own.speedup is None else best.own
    if compared.interval is None:
        return "-"
    others = [line for line in lines if line is not best and (line.gain or 0.0) >= compared.interval[0]]
    return f"{len(others)} of {len(lines) - 1}"


LAW_DRAWS = 200
"""Samples of prompts to which the law is fitted for its intervals: a fit takes some 10 ms."""


def law(run: BenchRun) -> list[Section]:
    """Figure 4: S as measured, beside the paper's law with its numbers and with those that fit here."""
    made = []
    for data, found in by_data(run.lines).items():
        lines = [line for line in found if line.stats.steps and line.method.config is not None]
        points = [_point(line, line.compression) for line in lines]
        fitted = fit(points)
        paper = f"law, paper's alpha = {PAPER.alpha}, f = {PAPER.f}"
        section = Section(f"S over (W, N) on {data}", ("N", "W = G", "S measured", "95%", paper, "law, fitted"))
        outside = []
        for p, line in zip(points, lines, strict=True):
            laws = [law.predict(p.window, p.ngram, p.guesses) for law in (PAPER, fitted)]
            interval = line.s_interval
            if interval is not None and not interval[0] <= laws[1] <= interval[1]:
                outside.append(f"({p.ngram}, {p.window})")
            section.rows.append([
                str(p.ngram), str(p.window), f"{p.compression:.2f}", interval_text(interval).strip(" ()") or "-",
                *(f"{s:.2f}" for s in laws),
            ])  # fmt: skip
        section.notes = [
            "The law: S grows by a constant for every doubling of W, as long as N is large enough. The paper's alpha "
            "and f are those of LLaMA-2-7B-Chat on MT-Bench.",
            _about_fit(fitted, points, lines, outside)
            if points
            else "Nothing was measured yet: run the same command again.",
        ]
        made.append(section)
    return made


def _point(line: Line, compression: float) -> Point:
    config = line.method.config
    assert config is not None
    return Point(config.window, config.ngram, config.guesses, compression)


def _about_fit(fitted: ScalingLaw, points: Sequence[Point], lines: Sequence[Line], outside: Sequence[str]) -> str:
    """The fitted numbers with their intervals, how far the law is from what was measured, and where it breaks."""
    errors = [fitted.predict(p.window, p.ngram, p.guesses) - p.compression for p in points]
    (alpha, f), mean = _law_intervals(lines), math.sqrt(statistics.mean(error * error for error in errors))
    about = (
        f"Fitted to the S measured here: alpha = {fitted.alpha:.3f}{interval_text(alpha, 3)}, "
        f"f = {fitted.f:.3f}{interval_text(f, 3)}; it is off by {mean:.3f} (root of the mean square) and by "
        f"{max(map(abs, errors)):.3f} at most."
    )
    if alpha is None:
        return f"{about} With a single prompt there are no intervals."
    if not outside:
        return f"{about} The fitted law is within all intervals of S."
    return f"{about} The fitted law is outside of the interval of S at (N, W) = {', '.join(outside)}."


def _law_intervals(lines: Sequence[Line]) -> tuple[Interval | None, Interval | None]:
    """The 95% intervals of alpha and f: the law is fitted again to samples of the prompts that all lines answered."""
    shared = [prompt for prompt in lines[0].counts if all(prompt in line.counts for line in lines)]
    if len(shared) < 2:
        return None, None
    counts = np.array([[line.counts[prompt] for prompt in shared] for line in lines], dtype=np.float64)
    sums = counts[:, draws(len(shared), LAW_DRAWS)].sum(2)  # [lines, draws, tokens and steps]
    laws = [
        fit([_point(line, tokens / steps) for line, (tokens, steps) in zip(lines, drawn, strict=True)])
        for drawn in sums.swapaxes(0, 1).tolist()
    ]
    return middle([law.alpha for law in laws]), middle([law.f for law in laws])


def prompt_by_prompt(run: BenchRun) -> list[Section]:
    head = ("set", "prompt", "tokens", "autoregressive s", "lookahead s", "ratio", "S", "K", "identical")
    section = Section("Prompt by prompt", head)
    answers = {(job.data, job.prompt.id, job.method.how): run.record(job) for job in run.jobs if not job.repeat}
    ratios: dict[str, list[float]] = {}
    for (data, prompt, how), ours in answers.items():
        plain = answers.get((data, prompt, "autoregressive"))
        if how != "lookahead" or ours is None or plain is None:
            continue
        ratios.setdefault(data, []).append(plain["seconds"] / ours["seconds"])
        section.rows.append([
            data, prompt, str(plain["generated_tokens"]), f"{plain['seconds']:.2f}", f"{ours['seconds']:.2f}",
            times(ratios[data][-1]), f"{ours['compression']:.2f}", f"{ours['step_tokens'] / ours['steps']:.1f}",
            "yes" if same(ours, plain) else "no",
        ])  # fmt: skip
    section.notes += [f"{data}: the median of the ratios is {statistics.median(r):.2f}x." for data, r in ratios.items()]
    return [section]


PAPER_EXACTNESS = (
    "The paper (LLaMA-2-7B-Chat, 160 turns of MT-Bench): in fp32 all outputs are the same. In fp16 transformers' "
    "greedy search differs from its own fp32 in 35 of 160 outputs, in 42 with FlashAttention, and lookahead in 35-44."
)
Outputs = tuple[Any, Any]


def is_exact(job: Job) -> bool:
    return (job.method.how, job.method.dtype) == ("hf-greedy", "float32")


def is_stock_half(job: Job) -> bool:
    return (job.method.how, job.method.attention) == ("hf-greedy", "sdpa") and not is_exact(job)


def is_own(job: Job) -> bool:
    return job.method.how == "autoregressive"


def paired(
    run: BenchRun, is_reference: Callable[[Job], bool], alike: Callable[[Method], Any] = lambda method: None
) -> dict[Method, list[Outputs]]:
    """Every turn's output beside the reference's, by method; the reference's method is `alike`."""

    def place(job: Job) -> Any:
        return job.data, job.prompt.id, alike(job.method)

    references = {place(job): run.record(job) for job in run.jobs if is_reference(job)}
    found: dict[Method, list[Outputs]] = {}
    for job in run.jobs:
        record, reference = run.record(job), references.get(place(job))
        if record is not None and reference is not None:
            found.setdefault(job.method, []).extend(outputs(record, reference))
    return found


def exactness(run: BenchRun) -> list[Section]:
    """Appendix E: in fp32 every output is that of transformers' greedy search; in half precision some differ, as they
    do between transformers' own ways."""
    head = ("path", "from transformers' fp32", "from transformers' half", "from our autoregressive")
    section = Section("Outputs that differ", head, notes=errors(run.lines))
    exact, half = paired(run, is_exact), paired(run, is_stock_half)
    own = paired(run, is_own, lambda method: (method.dtype, method.backend))
    for method in dict.fromkeys(job.method for job in run.jobs):
        cells = [exact.get(method, []), [] if method.dtype == "float32" else half.get(method, [])]
        cells.append([] if method.stock or method.how == "autoregressive" else own.get(method, []))
        section.rows.append([method.label, *map(_differing, cells)])
    section.notes += [
        "How many outputs differ, of those that both have. Outputs are turns of conversations; a turn after one that "
        "differs was asked something else in part, and counts as it is. Our autoregressive decoding: in the same dtype "
        "and on the same backend.",
        PAPER_EXACTNESS,
    ]
    return [section]


def identity(run: BenchRun) -> list[Section]:
    """The same in the run's own precision."""
    head = ("path", "from transformers' greedy search", "from our autoregressive")
    section = Section("Outputs that differ", head, notes=errors(run.lines))
    stock, own = paired(run, lambda job: job.method.how == "hf-greedy"), paired(run, is_own)
    for method in dict.fromkeys(job.method for job in run.jobs if not job.method.stock):
        section.rows.append([method.label, _differing(stock.get(method, [])), _differing(own.get(method, []))])
    section.notes += ["How many outputs, which are turns of conversations, differ, of those that both have.",
                      PAPER_EXACTNESS]  # fmt: skip
    return [section]


def _differing(outputs: list[Outputs]) -> str:
    return f"{sum(ours != theirs for ours, theirs in outputs)} of {len(outputs)}" if outputs else "-"
