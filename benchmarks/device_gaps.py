"""How long the device waits for the host between two steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from lookahead.backends.graph.steps import CapturedStep


class DeviceGaps:
    """When captured steps began and ended on the device, without those that run ahead of the host, which never wait."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []

    def run(self, run: Any, step: CapturedStep) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(step)
        end.record()
        self._events.append((begin, end))

    def percent(self) -> float | None:
        """The median share of the time from one step's beginning to the next one's in which the device waits. None
        without two steps."""
        if len(self._events) < 2:
            return None
        torch.cuda.synchronize()
        shares = [
            before[1].elapsed_time(after[0]) / before[0].elapsed_time(after[0])
            for before, after in pairwise(self._events)
        ]
        return round(100 * statistics.median(shares), 1)


@contextmanager
def device_gaps() -> Iterator[DeviceGaps]:
    """Watches the steps of the block, if there is a GPU."""
    found, own = DeviceGaps(), CapturedStep.run

    def run(step: CapturedStep) -> None:
        found.run(own, step)

    if torch.cuda.is_available():
        CapturedStep.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CapturedStep.run = own  # type: ignore[method-assign]
