"""t(K), the time of a step of K tokens: measured here and kept with the results, or read from a file."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.bench.context import Context
from lookahead.bench.results import key_of

if TYPE_CHECKING:
    from lookahead.loading.step_cost import StepCost

LARGE = (192, 256, 384, 512)
"""Sizes beyond those that a default config needs: the steps that several ranks share."""
OWN = "own"


def key(shape: str) -> str:
    return key_of({"kind": "cost", "shape": shape})


def known(run: Context, shape: str = OWN) -> StepCost | None:
    """The curve of the model itself, or inflated to a shape, if it was measured; a file's stands for the model's."""
    if shape == OWN and run.step_cost is not None:
        return read(run.step_cost)
    from lookahead.loading.step_cost import StepCost

    row = run.results.rows.get(key(shape))
    return None if row is None else StepCost(tuple(row["sizes"]), tuple(row["seconds"]))


def measured(run: Context, shape: str = OWN) -> StepCost:
    """The same, measured now if need be."""
    if (found := known(run, shape)) is not None:
        return found
    from lookahead.loading.step_cost import SIZES, measure

    run.say(f"measuring what a step costs: {'this model' if shape == OWN else shape + ' shape'}")
    lm = run.models.own
    cost = measure(lm.backend if shape == OWN else _backend(lm, shape, run.say), (*SIZES, *LARGE))
    gc.collect()  # a backend's captured steps refer to it: without this a 34B would stay beside what comes next
    facts = {"shape": shape, "sizes": list(cost.sizes), "seconds": list(cost.seconds)}
    run.results.add({"kind": "cost", "key": key(shape), **facts})
    return cost


def in_shape(lm: Any, shape: str, backend: str, say: Callable[[str], None]) -> Any:
    """A model loaded as `load` does, of the same function in this shape (see `inflate`)."""
    from lookahead.bench.inflate import SHAPES, inflate

    large = inflate(lm.model, SHAPES[shape], dtype=lm.dtype)
    return _loaded(large, lm.tokenizer, f"{lm.name} in {shape} shape", backend, say)


def behind(lm: Any, backend: str, say: Callable[[str], None] | None = None) -> Any:
    """A model loaded as `load` does, of the weights that `lm` has, behind another backend."""
    return _loaded(lm.model, lm.tokenizer, lm.name, backend, say)


def _loaded(model: Any, tokenizer: Any, name: str, backend: str, say: Callable[[str], None] | None) -> Any:
    from lookahead.generate import LookaheadModel
    from lookahead.loading.default import default_config

    made = LookaheadModel(model, tokenizer, name, None, backend, say)
    made.default_config = default_config(name, made.backend, say)
    return made


def _backend(lm: Any, shape: str, say: Callable[[str], None]) -> Any:
    """The best backend for the model in this shape: no more than its steps can be timed with."""
    from lookahead.backends.choose import make_backend
    from lookahead.bench.inflate import SHAPES, inflate

    return make_backend(inflate(lm.model, SHAPES[shape], dtype=lm.dtype), "auto", say)


def read(path: Path) -> StepCost:
    """A JSON object with `sizes` and `seconds`, such as a line of results of kind `cost`."""
    from lookahead.loading.step_cost import StepCost

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StepCost(tuple(map(int, found["sizes"])), tuple(map(float, found["seconds"])))
    except OSError as error:
        raise ValueError(f"--step-cost {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--step-cost {path}: no JSON object with `sizes` and `seconds` of equal length ({error})"
        ) from error
