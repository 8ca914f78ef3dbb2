"""t(K), the time of a step of K tokens: measured here and kept with the results, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.bench.context import Context
from lookahead.bench.results import key_of

if TYPE_CHECKING:
    from lookahead.cost import StepCost

LARGE = (192, 256, 384, 512)
"""Sizes beyond those that a default config needs: the steps that several ranks share."""
OWN = "own"


def key(shape: str) -> str:
    return key_of({"kind": "cost", "shape": shape})


def known(run: Context, shape: str = OWN) -> StepCost | None:
    """The curve of the model itself, or inflated to a shape, if it was measured; a file's stands for the model's."""
    if shape == OWN and run.step_cost is not None:
        return read(run.step_cost)
    from lookahead.cost import StepCost

    row = run.results.rows.get(key(shape))
    return None if row is None else StepCost(tuple(row["sizes"]), tuple(row["seconds"]))


def measured(run: Context, shape: str = OWN) -> StepCost:
    """The same, measured now if need be."""
    if (found := known(run, shape)) is not None:
        return found
    from lookahead.cost import SIZES, measure

    backend = run.models.own.backend
    if shape != OWN:
        backend = inflated(run, shape)
    run.say(f"measuring what a step costs: {'this model' if shape == OWN else shape + ' shape'}")
    cost = measure(backend, (*SIZES, *LARGE))
    facts = {"shape": shape, "sizes": list(cost.sizes), "seconds": list(cost.seconds)}
    run.results.add({"kind": "cost", "key": key(shape), **facts})
    return cost


def inflated(run: Context, shape: str) -> object:
    """A backend of the model's function in this shape: what a step costs depends on nothing else."""
    from lookahead.backends.choose import make_backend
    from lookahead.bench.inflate import SHAPES, inflate

    lm = run.models.own
    backend: object = make_backend(inflate(lm.model, SHAPES[shape], dtype=lm.dtype), "auto", run.say)
    return backend


def read(path: Path) -> StepCost:
    """A JSON object with `sizes` and `seconds`, such as a line of results of kind `cost`."""
    from lookahead.cost import StepCost

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StepCost(tuple(map(int, found["sizes"])), tuple(map(float, found["seconds"])))
    except OSError as error:
        raise ValueError(f"--step-cost {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--step-cost {path}: no JSON object with `sizes` and `seconds` of equal length ({error})"
        ) from error
