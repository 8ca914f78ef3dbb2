"""The cost of a forward pass: t(rows), its time by its total number of rows.

On a GPU a pass of 100 rows takes about as long as a pass of one; on a CPU 8 rows may take twice as long. Three parts:

- `CostCurve` is the measured t at a few sizes. `loading.timing` measures it, `loading.fitting` stores it.
- A *table* is the curve for every number of rows: `table[k]` is the time of a pass of k + 1 rows.
- `PassCost` is the current cost of a pass: the table, corrected by the times of the engine's last passes. It also knows
  the time of a plain step that runs ahead of the host, which is shorter than a pass of as many rows.

`budget` decides from these times how many draft tokens a step takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.experts import ExpertCost, seconds_per_expert

Costs = Sequence[float] | npt.NDArray[np.float64]
"""A table: times of passes of 1, 2, 3, ... rows."""

NEWEST = 0.04
"""The weight of the newest pass among all."""
PRIOR, SPREAD = 0.2, 0.1
"""The prior of the fit: imaginary passes that take the table's times keep the slope near 1 without evidence. They
weigh PRIOR times as much as all real passes, and their times differ from the mean by SPREAD times the mean."""
LEAST_SLOPE, MOST_SLOPE = 0.5, 4.0
SURPRISE = 2.0
"""A longer time than this many times the expected one is clipped to it: usually a step was captured, or the machine was
busy."""


@dataclass(frozen=True)
class CostCurve:
    """The measured curve: a pass of `sizes[i]` rows takes `seconds[i]` seconds.

    `stable` is False if repeated measurements differed, because the machine was busy, or if there were none. `reads`:
    for a mixture of experts, how many experts each of the passes has read, of all of its layers' `experts`.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stable: bool = field(default=True, compare=False)
    reads: tuple[float, ...] = ()
    experts: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a cost curve needs one time per size, not {len(self.seconds)} for {len(self.sizes)}")
        if not all(0 < taken < float("inf") for taken in self.seconds):
            raise ValueError(f"a cost curve needs positive times, not {self.seconds}")
        if self.experts and len(self.reads) != len(self.sizes):
            raise ValueError(
                f"a cost curve needs the experts of each size, not {len(self.reads)} for {len(self.sizes)}"
            )

    def table(self, rows: int) -> tuple[float, ...]:
        """The times of passes of 1 to `rows` rows, interpolated linearly between the measured sizes.

        The times never fall. If a small pass was measured slower than a larger one, something disturbed it, and it gets
        the larger pass's time.
        """
        seconds = [min(self.seconds[i:]) for i in range(len(self.seconds))]
        times = []
        for size in range(1, rows + 1):
            i = next((i for i, s in enumerate(self.sizes) if s >= size), len(self.sizes) - 1)
            if i == 0:
                times.append(seconds[0] * max(1.0, size / self.sizes[0]))
                continue
            slope = (seconds[i] - seconds[i - 1]) / (self.sizes[i] - self.sizes[i - 1])
            times.append(seconds[i] + slope * (size - self.sizes[i]))
        return tuple(times)

    def expert_cost(self, rows: int) -> ExpertCost | None:
        """What the experts of passes of up to `rows` rows cost; None without experts."""
        if not self.experts:
            return None
        reads = np.maximum.accumulate(np.interp(np.arange(1, rows + 1), self.sizes, self.reads))
        each = seconds_per_expert(self.sizes, self.seconds, self.reads)
        return ExpertCost(self.experts, [float(one) for one in reads], each)

    @property
    def reach(self) -> int:
        """The largest pass to which the curve is extrapolated: 1.5 times the largest measured size, which is no more
        than the next size would be."""
        return self.sizes[-1] + self.sizes[-1] // 2 if self.sizes[-1] > 1 else 2

    def with_faster(self, other: CostCurve) -> CostCurve:
        """This curve with the faster of the two times for each size."""
        known = dict(zip(other.sizes, other.seconds, strict=True))
        best = [min(taken, known.get(size, taken)) for size, taken in zip(self.sizes, self.seconds, strict=True)]
        return replace(self, seconds=tuple(best))

    def across(self, ranks: int) -> CostCurve:
        """The curve of a step split over `ranks` ranks, which each run the root and their part of the other tokens."""
        return replace(self, sizes=tuple(1 + (size - 1) * ranks for size in self.sizes))


def table_for_sizes(table: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """The table of a backend that captures passes of these sizes only: a pass takes the time of the next larger size,
    so rows up to that size are free."""
    ends = [next((size for size in sizes if size >= rows), rows) for rows in range(1, len(table) + 1)]
    return tuple(table[min(end, len(table)) - 1] for end in ends)


NEWEST_PLAIN = 0.1
"""The weight of the newest plain step among all that ran ahead."""


class PassCost:
    """The current cost of a pass: a measured `table`, and a linear fit to the engine's last passes.

        seconds = constant + slope * table[rows - 1]

    The table was measured on an idle machine, with few sequences and short texts, or only quickly. A pass of many
    sequences takes longer, the more so the more rows it has, and host time is added. The fit keeps the table's steps:
    rows that only fill up a captured step are free.

    With `experts`, a mixture's, the table is that of the text: corrected by how many experts its passes read.
    """

    def __init__(self, table: Costs, experts: ExpertCost | None = None) -> None:
        self._measured, self._experts = np.asarray(table, dtype=np.float64), experts
        self.table = self._measured
        self._correct_table()
        self.constant, self.slope = 0.0, 1.0
        # Means over the last passes: the table's times, the passes' times, and the products of these.
        self._x = self._y = self._xx = self._xy = self._weight = 0.0
        self._ahead: float | None = None  # seconds of plain steps that ran ahead, relative to those of a pass

    def _correct_table(self) -> None:
        if self._experts is not None:
            more = self._experts.seconds * (self._experts.expected() - self._experts.reads)
            corrected = self._measured + more[: len(self._measured)]
            self.table = np.maximum.accumulate(np.maximum(corrected, 0.5 * self._measured[0]))

    def record_pass(self, rows: int, seconds: float, reads: float = 0.0) -> None:
        """Record the time of a pass, host work included, and the experts that it has read. Passes beyond the table are
        ignored."""
        if rows > len(self.table):
            return
        x = float(self.table[rows - 1])
        if self._experts is not None:
            self._experts.record(rows, reads)
            x = max(float(self._measured[rows - 1]) + self._experts.change(rows, reads), 0.5 * float(self._measured[0]))
            self._correct_table()
        y = min(seconds, SURPRISE * self.seconds(rows))
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
        if self.constant < (LEAST_SLOPE - self.slope) * self.table[0]:  # then one row would take next to nothing
            self.constant, self.slope = 0.0, self._y / self._x

    def record_plain_step(self, rows: int, seconds: float) -> None:
        """Record a plain step that ran ahead: the time since the end of the step before it."""
        ratio = min(1.0, seconds / self.seconds(rows))
        self._ahead = ratio if self._ahead is None else self._ahead + NEWEST_PLAIN * (ratio - self._ahead)

    def plain_seconds(self, rows: int) -> float:
        """The time of a plain step of this many sequences that runs ahead of the host: a pass without the host's part.
        Before the first one, that is what the fit adds to the table."""
        if self._ahead is not None:
            return self._ahead * self.seconds(rows)
        return self.seconds(rows) - max(0.0, self.constant)

    def seconds(self, rows: int) -> float:
        """The time of a pass of this many rows. Beyond the table it is that of the table's last entry."""
        return self.constant + self.slope * float(self.table[min(rows, len(self.table)) - 1])

    def times_after(self, rows: int, plain: int = 0) -> npt.NDArray[np.float64]:
        """The times of passes of `rows` + 1 and more rows, for a pass that already has `rows`. There is always at least
        one. `plain`: a step of this many rows is plain and would run ahead."""
        times = self.constant + self.slope * self.table[min(rows, len(self.table) - 1) :]
        if 0 < plain <= len(times):
            times[plain - 1] = self.plain_seconds(plain)
        return times

    def times_up_to(self, rows: int, plain: int = 0) -> array[float] | None:
        """The times of passes of 1 to `rows` rows, or None if the table is shorter. `plain` as in `times_after`."""
        if rows > len(self.table):
            return None
        return array("d", self.times_after(0, plain)[:rows].tobytes())
