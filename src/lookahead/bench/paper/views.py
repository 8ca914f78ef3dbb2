"""The presets' reports: what was measured, beside what the paper says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lookahead.bench.report.plots import Bars, Curves, Points
from lookahead.bench.report.sections import COLUMNS, Section, by_data, by_set, cells, comparison, errors, times
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


def default(run: BenchRun, title: str = "Methods") -> list[Section]:
    section = comparison(run.lines, title)
    section.notes = [*verdict(run.lines), *section.notes]
    return [section]


PAPER_END_TO_END = {"humaneval": "up to 2.3x"} | dict.fromkeys(("mt-bench", "mbpp", "gsm8k"), "1.5x to 2.3x, all sets")
"""What the text says of figure 5: its bars have no numbers. 7B to 70B on an A100, over transformers' greedy."""


def end_to_end(run: BenchRun) -> list[Section]:
    head = ("set", "method", "over transformers' greedy", "over AR", "paper (7B to 70B, A100)")
    rows: list[Sequence[str]] = [
        [one.data, one.method.label, *map(times, (one.reference.speedup, one.own.speedup)), said]
        for one in run.lines
        if not one.method.stock and (said := PAPER_END_TO_END.get(one.data, "-"))
    ]
    note = "The paper's figure gives no numbers with its bars; these are those of its text (section 5.1)."
    beside = Section("Beside the paper", head, rows, [note])
    return [*default(run, "Speed over transformers' greedy search"), beside]


def flash(run: BenchRun) -> list[Section]:
    gains = Section("What the kernel gains", ("set", "method", "kernel over no kernel", "paper"))
    speedups = {(line.data, line.method.label): line.reference.speedup for line in run.lines}
    for (data, label), speedup in speedups.items():
        bare = speedups.get((data, label.replace(", kernel", ", no kernel")))
        if label.endswith(", kernel") and bare and speedup:
            gains.rows.append([data, label.removesuffix(", kernel"), times(speedup / bare), "1.20x for lookahead"])
    gains.notes.append(
        "The paper, 7B on MT-Bench: lookahead with FlashAttention 1.9x, autoregressive with FlashAttention 1.07x, both "
        "over transformers' greedy search. Without the kernel here: the eager backend, SDPA with a dense mask. The "
        "kernel's backend also fuses layers and captures the step as one graph, so the gain is that of all three."
    )
    return [comparison(run.lines, "With and without the kernel"), gains]


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
        found, known = scores(run, line), TABLE_2.get((line.data, line.temperature))
        said = "-"
        if known is not None:
            plain, ours, speedup, compression = known
            if line.method.how == "autoregressive":
                ours, speedup, compression = plain, 1.0, 1.0
            said = f"{' '.join(f'{value:.2f}' for value in ours)}, {speedup:.2f}x, {compression:.2f}"
        section.rows.append([
            line.data, f"{line.temperature:g}", line.method.label,
            *([f"{value:.2f}" for value in found] if found else ["-"] * 3),
            times(line.reference.speedup), f"{line.compression:.2f}", line.reference.identity, said,
        ])  # fmt: skip
    section.notes = [
        *errors(run.lines),
        "R: ROUGE by rouge-score, F1 in per cent, with stemming. With the same seeds lookahead draws the tokens that "
        "autoregressive sampling draws, so equal scores are exact, not a matter of luck; `same` counts the outputs.",
    ]
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
    for data, lines in by_data(run.lines).items():
        kept = [line for line in lines if line.method.label in TABLE_3]
        ours = [line for line in lines if line not in kept]
        said = [TABLE_3[line.method.label] for line in kept]
        table = Section(f"Table 3 on {data}", ("(N,W,G)", *COLUMNS[2:], "paper: speedup, S"), notes=errors(lines))
        pairs = zip(kept, said, strict=True)
        table.rows = [[line.method.label, *cells(line), f"{speedup:.2f}x, {s:.2f}"] for line, (speedup, s) in pairs]
        paper: list[float | None] = [s for _, s in said]
        table.plots = [Bars("S", _labels(kept), {"here": _compressions(kept), "paper": paper})]
        made.append(table)
        if ours:
            sources = Section(f"Sources on {data}", ("sources", *COLUMNS[2:]))
            sources.rows = [[line.method.label, *cells(line)] for line in ours]
            sources.notes = ["Each source alone and combined, at the default budget; a window only with `jacobi`."]
            sources.plots = [Bars("S by sources", _labels(ours), {"S": _compressions(ours)}, mark=1.0)]
            made.append(sources)
    return made


def _labels(lines: Sequence[Line]) -> list[str]:
    return [line.method.label for line in lines]


def _compressions(lines: Sequence[Line]) -> list[float | None]:
    return [line.compression or None for line in lines]


def overhead(run: BenchRun) -> list[Section]:
    section = comparison(run.lines, "S and speedup against W, with N = 5 and G = W")
    section.plots = []
    for data, lines in by_data(run.lines).items():
        widths = [(line, float(line.method.config.window)) for line in lines if line.method.config]
        series: dict[str, Points] = {
            "S": [(width, line.compression) for line, width in widths if line.prompts],
            "speedup": [(width, line.gain) for line, width in widths if line.gain],
        }
        section.plots.append(Curves(f"{data}: S and speedup against W", "W", "times", series))
    section.notes.append(
        "The paper (figure 8, MT-Bench): S does not depend on the device; the speedup does: over 1.5x on an A100 and "
        "about 1.3x on an RTX 3090. Its curves have no numbers in the text. The plot's speedup is over our own "
        "autoregressive decoding."
    )
    return [section]


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
            "yes" if ours["tokens"] == plain["tokens"] else "no",
        ])  # fmt: skip
    section.notes += [f"{data}: the median of the ratios is {statistics.median(r):.2f}x." for data, r in ratios.items()]
    return [*default(run), section]
