"""ROUGE-1, 2 and L of answers against the set's reference summaries, by the rouge-score library."""

from __future__ import annotations

import statistics
from typing import Any

from lookahead.bench.context import Context
from lookahead.bench.summary import Line

TYPES = ("rouge1", "rouge2", "rougeL")


def scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(
            f"the scores of preset 'sampling' need rouge-score, which cannot be imported ({error}): "
            "pip install 'lookahead-decoding[bench]'"
        ) from error
    return RougeScorer(list(TYPES), use_stemmer=True)


def scores(run: Context, line: Line) -> tuple[float, ...] | None:
    """Mean F1 in per cent of a method's answers on a set; None where nothing can be scored."""
    judge = scorer()
    found = []
    for job in run.jobs:
        row = run.results.rows.get(job.key)
        same = (job.data, job.method, job.temperature) == (line.data, line.method, line.temperature)
        if same and row is not None and "error" not in row and job.prompt.reference is not None and not job.repeat:
            score = judge.score(job.prompt.reference, row["texts"][-1])
            found.append([100 * score[name].fmeasure for name in TYPES])
    return tuple(statistics.mean(column) for column in zip(*found, strict=True)) if found else None
