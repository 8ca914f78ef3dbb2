"""How long a pass takes here and now, for the choice of guesses.

The table of times was measured in a quiet moment, with few sequences and short texts. A pass of many sequences takes
longer, the more so the more rows it has, and the host needs its time, too. `PassTimes` fits a straight line through the
last passes: the time that they took by the time that the table says.

    seconds = constant + slope * table[rows - 1]

So the table's stairs stay where they are: rows that only fill up a captured step are free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.counts import Costs

NEWEST = 0.04
"""The weight of the newest pass among all."""
PRIOR, SPREAD = 0.2, 0.1
"""The fit counts some imagined passes that take what the table says, so that the slope leaves 1 only for a reason: they
weigh PRIOR times as much as all real passes, and their times differ from the mean by SPREAD times the mean."""
LEAST_SLOPE, MOST_SLOPE = 0.5, 4.0
SURPRISE = 2.0
"""A pass that takes more than this many times what is expected counts as if it took that long: most often a step was
captured, or the machine was busy."""


class PassTimes:
    """The times of passes, by their rows: a measured `table`, and what the last passes of the engine add to it."""

    def __init__(self, table: Costs) -> None:
        self.table = np.asarray(table, dtype=np.float64)
        self.constant, self.slope = 0.0, 1.0
        # Means over the last passes: the table's times, the passes' times, and the products of these.
        self._x = self._y = self._xx = self._xy = self._weight = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long, with the host's work around it."""
        if rows > len(self.table):
            return
        x = float(self.table[rows - 1])
        y = min(seconds, SURPRISE * (self.constant + self.slope * x))
        self._weight += NEWEST * (1 - self._weight)
        part = NEWEST / self._weight  # the first passes count alike
        self._x += part * (x - self._x)
        self._y += part * (y - self._y)
        self._xx += part * (x * x - self._xx)
        self._xy += part * (x * y - self._xy)
        prior = PRIOR * (SPREAD * self._x) ** 2
        slope = (self._xy - self._x * self._y + prior) / (self._xx - self._x**2 + prior)
        self.slope = min(max(slope, LEAST_SLOPE), MOST_SLOPE)
        self.constant = self._y - self.slope * self._x

    def after(self, rows: int) -> npt.NDArray[np.float64]:
        """The times of passes of `rows` + 1 and more rows: so many are taken already. There is always at least one."""
        return self.constant + self.slope * self.table[min(rows, len(self.table) - 1) :]
