"""ROUGE-1, 2 and L of answers against the set's reference summaries, by the rouge-score library."""

from __future__ import annotations

import statistics
from typing import Any

from lookahead.bench.run.bench_run import BenchRun
from lookahead.bench.run.summary import Line

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


def scores(run: BenchRun, line: Line) -> tuple[float, ...] | None:
    """Mean F1 in per cent of a method's answers on a set; None where nothing can be scored."""
    judge, found = scorer(), []
    for job in run.jobs:
        same = (job.data, job.method, job.temperature, job.repeat) == (line.data, line.method, line.temperature, 0)
        if same and job.prompt.reference is not None and (record := run.record(job)) is not None:
            score = judge.score(job.prompt.reference, record["texts"][-1])
            found.append([100 * score[name].fmeasure for name in TYPES])
    return tuple(statistics.mean(column) for column in zip(*found, strict=True)) if found else None
