"""How many guesses of each sequence a step takes: the top of one merged list, as long as that pays (see `choice`).

Its twin in C, `cut` in `native/choice.c`, takes a fifth of the time for 16 sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Costs = Sequence[float] | npt.NDArray[np.float64]


def best_counts(
    scores: Sequence[array[float]],
    weights: Sequence[float],
    bonuses: Sequence[float],
    kept: Sequence[bool],
    rows: int,
    most: int,
    cost: Costs | None,
) -> tuple[list[int], float | None]:
    """How many of each sequence's guesses a step takes, and what the best one that it refuses scores.

    A guess of sequence i is worth its score times `weights[i]`, plus `bonuses[i]`. All guesses of a `kept` sequence
    are taken, before those of any other. `rows` are in the step anyway, and at most `most` guesses are taken.
    Other guesses are taken only as far as the `cost` table reaches.
    """
    joined = array("d")
    for one in scores:
        joined += one
    owners = np.repeat(np.arange(len(scores)), [len(one) for one in scores])
    weighted = np.frombuffer(joined) * np.array(weights)[owners]
    value = weighted + np.array(bonuses)[owners]
    rank = value + 2.0 * np.array(kept)[owners] if any(kept) else value
    order = np.argsort(-rank, kind="stable")
    count = max(0, min(most, len(order)))
    least = min(count, sum(len(one) for one, all_of_it in zip(scores, kept, strict=True) if all_of_it))
    if cost is not None:
        count = max(least, min(count, len(cost) - rows))
    if cost is not None and count > least:
        tokens = np.empty(count + 1)
        tokens[0] = len(scores)
        tokens[1:] = value[order[:count]]
        gains = np.cumsum(tokens)[least:] / np.asarray(cost)[rows - 1 + least : rows + count]
        count = least + int(np.argmax(gains))
    refused = None if count == len(order) else float(weighted[order[count]])
    return np.bincount(owners[order[:count]], minlength=len(scores)).tolist(), refused
