"""t(K), the time of a step of K tokens: measured here and kept with the results, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        backend = in_shape(run.models.own, shape, "auto", run.say).backend
    run.say(f"measuring what a step costs: {'this model' if shape == OWN else shape + ' shape'}")
    cost = measure(backend, (*SIZES, *LARGE))
    facts = {"shape": shape, "sizes": list(cost.sizes), "seconds": list(cost.seconds)}
    run.results.add({"kind": "cost", "key": key(shape), **facts})
    return cost


def in_shape(lm: Any, shape: str, backend: str, say: Callable[[str], None]) -> Any:
    """A model loaded as `load` does, of the same function in this shape (see `inflate`)."""
    from lookahead import cost
    from lookahead.bench.inflate import SHAPES, inflate
    from lookahead.cache import cache_dir
    from lookahead.generate import LookaheadModel

    large = inflate(lm.model, SHAPES[shape], dtype=lm.dtype)
    made = LookaheadModel(large, lm.tokenizer, f"{lm.name} in {shape} shape", None, backend, say)
    made.default_config = cost.fitted(made.default_config, made.backend, cache_dir(), say)
    return made


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
