"""ROUGE of summaries, as in the paper's table 2, by the package rouge-score (`pip install '.[bench]'`)."""

from __future__ import annotations

import statistics
from typing import Any

from lookahead.bench.report.sections import Section
from lookahead.bench.run.intervals import interval_text, ratio_interval
from lookahead.bench.run.summary import BenchRun

KINDS = ("rouge1", "rouge2", "rougeL")
ABOUT = (
    "F1 in per cent, with stemming, and its 95% interval. With the same seeds lookahead draws the tokens that "
    "autoregressive sampling draws, so its scores are equal. The paper (LLaMA-2-7B-Chat, greedy / temperature 1): "
    "CNN/DailyMail R-1 37.79 / 36.55, XSum 19.38 / 19.15, and within 0.1 of that with lookahead."
)


def rouge(run: BenchRun) -> list[Section]:
    """Table 2's scores of every method, on prompts that have a reference."""
    section = Section("ROUGE", ("set", "temp.", "method", "R-1", "R-2", "R-L"), notes=[ABOUT])
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        section.notes = ["ROUGE needs the package rouge-score: pip install '.[bench]', and run the same command again."]
        return [section]
    scorer, found = RougeScorer(list(KINDS), use_stemmer=True), dict[tuple[str, str, str], list[Any]]()
    for job in run.jobs:
        record = run.record(job)
        if record is not None and job.prompt.reference is not None and not job.repeat:
            scores = scorer.score(job.prompt.reference, record["texts"][-1])
            row = (job.data, f"{job.temperature:g}", job.method.label)
            found.setdefault(row, []).append([100 * scores[kind].fmeasure for kind in KINDS])
    for row, scores in found.items():
        section.rows.append([*row, *(_cell([one[kind] for one in scores]) for kind in range(len(KINDS)))])
    return [section]


def _cell(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}{interval_text(ratio_interval([(value, 1.0) for value in values]))}"
