"""t(K), the time of a step of K tokens: measured here and kept with the records, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

from lookahead.algorithm.cost import CostCurve
from lookahead.bench.run.results import key_of
from lookahead.bench.run.summary import BenchRun
from lookahead.loading.timing import WIDE_SIZES, measure

KEY = key_of({"kind": "cost", "shape": "own"})


def known(run: BenchRun) -> CostCurve | None:
    """The curve of the model, if it was measured; a file's stands for it."""
    if run.step_cost is not None:
        return read(run.step_cost)
    record = run.results.records.get(KEY)
    return None if record is None else CostCurve(tuple(record["sizes"]), tuple(record["seconds"]))


def measured(run: BenchRun) -> CostCurve:
    """The same, measured now if need be."""
    if (found := known(run)) is not None:
        return found
    run.say("measuring what a step costs")
    cost = measure(run.models.own.backend, WIDE_SIZES)
    run.results.add({"kind": "cost", "key": KEY, "sizes": list(cost.sizes), "seconds": list(cost.seconds)})
    return cost


def read(path: Path) -> CostCurve:
    """A JSON object with `sizes` and `seconds`, such as a record of kind `cost`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return CostCurve(tuple(map(int, found["sizes"])), tuple(map(float, found["seconds"])))
    except OSError as error:
        raise ValueError(f"--step-cost {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--step-cost {path}: no JSON object with `sizes` and `seconds` ({error})") from error
