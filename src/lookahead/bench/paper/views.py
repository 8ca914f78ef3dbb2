"""The presets' reports: what was measured, beside what the paper says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lookahead.bench.report.sections import COLUMNS, Bars, Curves, Section, by_set, cells, comparison, errors, times
from lookahead.bench.run.summary import BenchRun, Line

EVEN = 0.02  # a ratio this close to 1 is called even


def verdict(lines: Sequence[Line]) -> list[str]:
    """One sentence per set: is the default faster than transformers' greedy here, and are the tokens the same."""
    said = []
    for line in lines:
        speedup = line.reference.speedup
        fitted = line.method.how == "lookahead" and line.method.config is None
        if fitted and speedup is not None and not line.temperature:
            word = "even" if abs(speedup - 1) <= EVEN else "faster" if speedup > 1 else "slower"
            said.append(
                f"{line.data}: {line.method.label} is {speedup:.2f}x as fast as the reference ({word}), "
                f"{line.reference.identity} outputs identical, S = {line.compression:.2f}."
            )
    return said


def default(run: BenchRun) -> list[Section]:
    section = comparison(run.lines)
    section.notes = [*verdict(run.lines), *section.notes]
    return [section]


PAPER_END_TO_END = {"humaneval": "up to 2.3x"} | dict.fromkeys(("mt-bench", "mbpp", "gsm8k"), "1.5x to 2.3x, all sets")
"""What the text says of figure 5: its bars have no numbers. 7B to 70B on an A100, over transformers' greedy."""


def end_to_end(run: BenchRun) -> list[Section]:
    section = comparison(run.lines, "Speed over transformers' greedy search")
    head = ("set", "method", "over transformers' greedy", "over AR", "paper (7B to 70B, A100)")
    beside = Section("Beside the paper", head)
    for line in run.lines:
        if not line.method.stock:
            said = PAPER_END_TO_END.get(line.data, "-")
            both = times(line.reference.speedup), times(line.own.speedup)
            beside.rows.append([line.data, line.method.label, *both, said])
    beside.notes.append("The paper's figure gives no numbers with its bars; these are those of its text (section 5.1).")
    section.notes = [*verdict(run.lines), *section.notes]
    return [section, beside]


def flash(run: BenchRun) -> list[Section]:
    section = comparison(run.lines, "With and without the kernel")
    gains = Section("What the kernel gains", ("set", "method", "kernel over no kernel", "paper"))
    at = {(line.data, line.method.label): line for line in run.lines}
    for (data, label), line in at.items():
        bare = at.get((data, label.replace(", kernel", ", no kernel")))
        if label.endswith(", kernel") and bare and bare.reference.speedup and line.reference.speedup:
            ratio = line.reference.speedup / bare.reference.speedup
            gains.rows.append([data, label.removesuffix(", kernel"), times(ratio), "1.20x for lookahead"])
    gains.notes.append(
        "The paper, 7B on MT-Bench: lookahead with FlashAttention 1.9x, autoregressive with FlashAttention 1.07x, both "
        "over transformers' greedy search. Without the kernel here: the eager backend, SDPA with a dense mask. The "
        "kernel's backend also fuses layers and captures the step as one graph, so the gain is that of all three."
    )
    return [section, gains]


TABLE_2 = {
    ("cnn-dm", 1.0): ((36.55, 13.20, 22.68), (36.53, 13.27, 22.71), 1.46, 1.64),
    ("cnn-dm", 0.0): ((37.79, 14.59, 23.96), (37.79, 14.59, 23.96), 1.57, 1.72),
    ("xsum", 1.0): ((19.15, 4.53, 12.84), (19.20, 4.53, 12.87), 1.50, 1.67),
    ("xsum", 0.0): ((19.38, 4.78, 13.05), (19.39, 4.79, 13.06), 1.60, 1.77),
}
"""ROUGE-1, 2, L of autoregressive and of lookahead, its speedup and its S: LLaMA-2-7B-Chat."""


ROUGE = ("rouge1", "rouge2", "rougeL")


def scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(
            f"the scores of preset 'sampling' need rouge-score, which cannot be imported ({error}): "
            "pip install 'lookahead-decoding[bench]'"
        ) from error
    return RougeScorer(list(ROUGE), use_stemmer=True)


def scores(run: BenchRun, line: Line) -> tuple[float, ...] | None:
    """ROUGE of a method's answers on a set: mean F1 in per cent. None where nothing can be scored."""
    judge, found = scorer(), []
    for job in run.jobs:
        same = (job.data, job.method, job.temperature, job.repeat) == (line.data, line.method, line.temperature, 0)
        if same and job.prompt.reference is not None and (record := run.record(job)) is not None:
            score = judge.score(job.prompt.reference, record["texts"][-1])
            found.append([100 * score[name].fmeasure for name in ROUGE])
    return tuple(statistics.mean(column) for column in zip(*found, strict=True)) if found else None


def sampling(run: BenchRun) -> list[Section]:
    head = ("set", "temp.", "method", "R-1", "R-2", "R-L", "speedup", "S", "same", "paper: R-1, 2, L, speedup, S")
    section = Section("Table 2", head)
    for line in run.lines:
        found = scores(run, line)
        shown = [f"{value:.2f}" for value in found] if found else ["-"] * 3
        known = TABLE_2.get((line.data, line.temperature))
        said = "-"
        if known and line.method.how == "autoregressive":
            said = f"{' '.join(f'{v:.2f}' for v in known[0])}, 1.00x, 1.00"
        elif known:
            said = f"{' '.join(f'{v:.2f}' for v in known[1])}, {known[2]:.2f}x, {known[3]:.2f}"
        section.rows.append([
            line.data, f"{line.temperature:g}", line.method.label, *shown, times(line.reference.speedup),
            f"{line.compression:.2f}", line.reference.identity, said,
        ])  # fmt: skip
    section.notes += errors(run.lines)
    section.notes.append(
        "R: ROUGE by rouge-score, F1 in per cent, with stemming. With the same seeds lookahead draws the tokens that "
        "autoregressive sampling draws, so equal scores are exact, not a matter of luck; `same` counts the outputs."
    )
    for heat in sorted({line.temperature for line in run.lines}):
        lines = [line for line in run.lines if line.temperature == heat]
        section.plots += by_set(lines, "S", lambda line: line.compression or None, title=f"S at temperature {heat:g}")
    return [section]


TABLE_3 = {
    "hf-greedy": (1.00, 1.00),
    "hf-prompt-lookup": (1.44, 1.55),
    "(10,1,3) + prompt": (1.36, 1.45),
    "(5,1,10) + prompt": (1.36, 1.51),
    "(5,1,30)": (1.04, 1.12),
    "(5,1,30) + prompt": (1.46, 1.59),
    "(5,30,1)": (1.61, 1.79),
    "(5,15,15)": (1.78, 1.96),
    "(5,15,15) + prompt": (1.88, 2.05),
}
"""Speedup and S of LLaMA-2-7B-Chat on MT-Bench, A100 with FlashAttention."""


def ablation(run: BenchRun) -> list[Section]:
    made = []
    for data in dict.fromkeys(line.data for line in run.lines):
        lines = [line for line in run.lines if line.data == data]
        kept = [line for line in lines if line.method.label in TABLE_3]
        table = Section(f"Table 3 on {data}", ("(N,W,G)", *COLUMNS[2:], "paper: speedup, S"))
        for line in kept:
            speedup, compression = TABLE_3[line.method.label]
            table.rows.append([line.method.label, *cells(line), f"{speedup:.2f}x, {compression:.2f}"])
        table.notes += errors(lines)
        here: list[float | None] = [line.compression or None for line in kept]
        said: list[float | None] = [TABLE_3[line.method.label][1] for line in kept]
        table.plots.append(Bars("S", [line.method.label for line in kept], {"here": here, "paper": said}))
        made.append(table)
        ours = [line for line in lines if line not in kept]
        if ours:
            sources = Section(f"Sources on {data}", ("sources", *COLUMNS[2:]))
            sources.rows = [[line.method.label, *cells(line)] for line in ours]
            sources.notes.append("Each source alone and combined, at the default budget; a window only with `jacobi`.")
            values: list[float | None] = [line.compression or None for line in ours]
            sources.plots.append(Bars("S by sources", [line.method.label for line in ours], {"S": values}, mark=1.0))
            made.append(sources)
    return made


def overhead(run: BenchRun) -> list[Section]:
    section = comparison(run.lines, "S and speedup against W, with N = 5 and G = W")
    section.plots = []
    for data in dict.fromkeys(line.data for line in run.lines):
        lines = [line for line in run.lines if line.data == data and line.method.config is not None]
        widths = [(line, float(line.method.config.window)) for line in lines if line.method.config]
        series = {
            "S": [(width, line.compression) for line, width in widths if line.prompts],
            "speedup": [(width, line.gain) for line, width in widths if line.gain],
        }
        section.plots.append(Curves(f"{data}: S and speedup against W", "W", "times", dict(series)))
    section.notes.append(
        "The paper (figure 8, MT-Bench): S does not depend on the device; the speedup does: over 1.5x on an A100 and "
        "about 1.3x on an RTX 3090. Its curves have no numbers in the text. The plot's speedup is over our own "
        "autoregressive decoding."
    )
    return [section]


def prompt_by_prompt(run: BenchRun) -> list[Section]:
    """The common table, and lookahead beside autoregressive decoding on every prompt."""
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
            "yes" if ours["tokens"] == plain["tokens"] else "no",
        ])  # fmt: skip
    section.notes += [f"{data}: the median of the ratios is {statistics.median(r):.2f}x." for data, r in ratios.items()]
    return [*default(run), section]
