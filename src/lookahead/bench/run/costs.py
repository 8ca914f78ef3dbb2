"""t(K), the time of a step of K tokens: measured here and kept with the records, or read from a file."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from lookahead.backends.choose import make_backend
from lookahead.bench.run.inflate import MODEL_SHAPES, inflate
from lookahead.bench.run.results import key_of
from lookahead.bench.run.summary import BenchRun
from lookahead.loading.step_cost import StepCost
from lookahead.loading.timing import WIDE_SIZES, measure

OWN = "own"
"""Stands for the model itself, where else a shape is named."""


def _key(shape: str) -> str:
    return key_of({"kind": "cost", "shape": shape})


def known(run: BenchRun, shape: str = OWN) -> StepCost | None:
    """The curve of the model itself, or in a shape, if it was measured; a file's stands for the model's."""
    if shape == OWN and run.step_cost is not None:
        return read(run.step_cost)
    record = run.results.records.get(_key(shape))
    return None if record is None else StepCost(tuple(record["sizes"]), tuple(record["seconds"]))


def measured(run: BenchRun, shape: str = OWN) -> StepCost:
    """The same, measured now if need be."""
    if (found := known(run, shape)) is not None:
        return found
    run.say(f"measuring what a step costs: {'this model' if shape == OWN else shape + ' shape'}")
    lm = run.models.own
    if shape == OWN:
        cost = measure(lm.backend, WIDE_SIZES)
    else:
        large = inflate(lm.model, MODEL_SHAPES[shape], dtype=lm.dtype)
        cost = measure(make_backend(large, "auto", run.say), WIDE_SIZES)
        del large
    gc.collect()  # a backend's captured steps refer to it: without this a 34B would stay beside what comes next
    facts = {"shape": shape, "sizes": list(cost.sizes), "seconds": list(cost.seconds)}
    run.results.add({"kind": "cost", "key": _key(shape), **facts})
    return cost


def read(path: Path) -> StepCost:
    """A JSON object with `sizes` and `seconds`, such as a record of kind `cost`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StepCost(tuple(map(int, found["sizes"])), tuple(map(float, found["seconds"])))
    except OSError as error:
        raise ValueError(f"--step-cost {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--step-cost {path}: no JSON object with `sizes` and `seconds` ({error})") from error
