"""The results of a forward pass for a sequence: the targets of its tree's needed nodes, and other requested outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NO_ROWS = np.empty((0, 1), dtype=np.int32)


class StepResults:
    """The results of a step for all its inputs, in one array. It is created while the device runs, and filled later.

    `rows` [R, 1 + 2 n] are the target, the n top tokens and their levels of every needed row, input after input. The C
    drafter verifies all of them at once, and finds them at `address`.
    """

    __slots__ = ("address", "rows")

    def __init__(self, rows: npt.NDArray[np.int32]) -> None:
        self.rows, self.address = rows, int(rows.ctypes.data)


class StepOutput:
    """The results of a forward pass for the tree's needed nodes, in their order. Those not requested are None.

    `targets` are the tokens that the model chooses after them. `top` [len(needed), 2 n] are their n top tokens, best
    first, followed by the n probability levels of these (see `sampling.top_tokens`). `logits` [len(needed), V] are on
    the backend's device (for `engine.processors`). `likely` [len(needed), n] are the likeliest tokens of the unmodified
    logits, and `logprobs` [len(needed), 1 + n] the log-probabilities of the target and of these.

    An output `of_results` reads its targets and top tokens from the step's `results` on first access, which may be
    while the device runs the next step.
    """

    __slots__ = ("_count", "_end", "_start", "_targets", "_top", "likely", "logits", "logprobs", "results")

    def __init__(
        self,
        targets: list[int],
        top: npt.NDArray[np.int32] | None = None,
        logits: Any = None,
        likely: npt.NDArray[np.int32] | None = None,
        logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._targets: list[int] | None = targets
        self._top = top
        self.logits, self.likely, self.logprobs = logits, likely, logprobs
        self.results: StepResults | None = None
        self._start = self._end = self._count = 0

    @classmethod
    def of_results(cls, results: StepResults, start: int, end: int, count: int) -> StepOutput:
        """The output of the input whose needed rows are `start` to `end`, with `count` top tokens of each."""
        output = cls([])
        output._targets = None  # not read yet
        output.results, output._start, output._end, output._count = results, start, end, count
        return output

    @property
    def targets(self) -> list[int]:
        if self._targets is None:
            self._targets = self._rows()[:, 0].tolist()
        return self._targets

    @property
    def top(self) -> npt.NDArray[np.int32] | None:
        if self._top is None and self._count:
            self._top = best_tokens(self._rows(), self._count)
        return self._top

    def _rows(self) -> npt.NDArray[np.int32]:
        return NO_ROWS if self.results is None else self.results.rows[self._start : self._end]

    def __repr__(self) -> str:
        return f"StepOutput(targets={self.targets}, top={self.top})"


NO_OUTPUT = StepOutput([])
"""In place of an output that the device has not computed yet."""


def best_tokens(rows: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    """Results [R, 1 + 2 n] -> [R, 2 count]: the `count` best tokens and these tokens' levels; all n if n is less."""
    most = (rows.shape[1] - 1) // 2
    if count >= most:
        return rows[:, 1:]
    return np.concatenate([rows[:, 1 : 1 + count], rows[:, 1 + most : 1 + most + count]], axis=1)
