"""What a pass of a mixture of experts costs: its rows choose the experts that it reads.

A row reads the share f of all experts T. Rows that chose independently of each other would read

    reads(r) = T (1 - (1 - f)^r)

experts together. Rows of one text share experts, by how much the text decides, so that r rows read as many as r^spread
independent ones. Passes tell how many they have read, and `ExpertCost` learns the spread for each size from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
import numpy.typing as npt

PRIOR_SPREAD, PRIOR_PASSES = 0.8, 4.0
"""The spread before any pass, and how many passes it counts as. Four tokens in a row of a text read about 2.5 times the
experts of one: 0.7."""
NEWEST = 0.05
"""The weight of the newest pass of a size among all, once there are many."""
MOST_READ = 0.97
"""A pass that reads more of all experts tells nothing of the spread: its logarithm is too uncertain."""
ROWS_ARE_FREE = 64
"""Up to this many rows a pass takes longer because of the experts that it reads, and hardly because of its rows."""


class ExpertCost:
    """The experts that passes read, and the time that these take.

    `total` are all experts; `reads[i]` of them were read by the measured pass of i + 1 rows. An expert that is read
    takes `seconds`.
    """

    def __init__(self, total: int, reads: Sequence[float], seconds: float) -> None:
        self.total, self.reads, self.seconds = total, np.asarray(reads, dtype=np.float64), seconds
        self._one = -log(1 - min(reads[0] / total, MOST_READ))  # of a row: rows add up in this logarithm
        self._rows = np.log2(np.arange(1, len(reads) + 1, dtype=np.float64))
        self._spread: dict[int, tuple[float, float]] = {}  # by the size's power of two: mean, passes

    def record(self, rows: int, reads: float) -> None:
        """Record a pass that has read this many experts."""
        if rows < 2 or not 0 < reads < MOST_READ * self.total:
            return
        spread = log(max(-log(1 - reads / self.total) / self._one, 1.0)) / log(rows)
        size = rows.bit_length() - 1
        mean, passes = self._spread.get(size, (PRIOR_SPREAD, PRIOR_PASSES))
        mean += max(1 / (passes + 1), NEWEST) * (spread - mean)
        self._spread[size] = mean, passes + 1

    def expected(self) -> npt.NDArray[np.float64]:
        """The experts that passes of 1, 2, 3, ... rows will read; as many sizes as were measured."""
        sizes = sorted(self._spread)
        spread: Sequence[float] = [self._spread[size][0] for size in sizes] or [PRIOR_SPREAD]
        spreads = np.interp(self._rows, sizes or [0], spread)
        independent = np.exp2(self._rows * spreads)
        return np.maximum.accumulate(self.total * (1 - np.exp(-self._one * independent)))

    def change(self, rows: int, reads: float) -> float:
        """How many seconds longer a pass takes than the measured one of as many rows, because it has read this many."""
        return self.seconds * (reads - float(self.reads[rows - 1]))


def seconds_per_expert(sizes: Sequence[int], seconds: Sequence[float], reads: Sequence[float]) -> float:
    """The time that an expert takes: the slope of a line through the measured passes of few rows."""
    few = [i for i, size in enumerate(sizes) if size <= ROWS_ARE_FREE]
    x, y = np.array([reads[i] for i in few]), np.array([seconds[i] for i in few])
    spread = float(((x - x.mean()) ** 2).sum())
    return max(0.0, float(((x - x.mean()) * (y - y.mean())).sum()) / spread) if spread else 0.0
