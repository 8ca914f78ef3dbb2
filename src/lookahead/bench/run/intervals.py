"""95% intervals of what is summed over prompts, by the bootstrap: how much S or a speedup depends on the sample.

Prompts are drawn again, with replacement, as many as there are; their sums give one more value of the ratio. The
interval is where the middle 95% of these values lie. Answers of one prompt stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DRAWS, SEED = 2000, 0
LEVEL = 95.0

Interval = tuple[float, float]


def ratio_interval(parts: Sequence[tuple[float, float]]) -> Interval | None:
    """The interval of sum(a) / sum(b) over the (a, b) of the prompts; None for fewer than two prompts."""
    if len(parts) < 2:
        return None
    above, below = np.array(parts, dtype=np.float64)[draws(len(parts), DRAWS)].sum(1).T
    return middle(above / np.maximum(below, np.finfo(np.float64).tiny))


def draws(prompts: int, count: int) -> npt.NDArray[np.int64]:
    """The prompts of each draw, by their index. [count, prompts], the same in every call."""
    return np.random.default_rng(SEED).integers(prompts, size=(count, prompts))


def middle(values: Sequence[float] | npt.NDArray[np.float64]) -> Interval:
    """Where the middle 95% of these values lie."""
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(np.asarray(values, dtype=np.float64), [tail, 100 - tail])
    return float(low), float(high)


def interval_text(interval: Interval | None, digits: int = 2) -> str:
    """As it stands behind a value in a table; empty without one, and for a value that no prompt changes."""
    if interval is None or interval[0] == interval[1]:
        return ""
    return f" ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})"
