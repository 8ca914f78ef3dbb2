"""`benchmarks/device_gaps.py`: the part of a step in which the device waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_gaps import DeviceGaps, device_gaps

from lookahead.backends.graph.steps import CapturedStep


class Event:
    """A CUDA event that was recorded at the given time."""

    def __init__(self, time: float) -> None:
        self.time = time

    def elapsed_time(self, other: Event) -> float:
        return other.time - self.time


def test_the_median_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gaps = DeviceGaps()
    assert gaps.percent() is None
    times = [(0.0, 9.0), (10.0, 18.0), (20.0, 25.0), (30.0, 31.0)]  # 1 of 10, 2 of 10, 5 of 10
    gaps._events = [(Event(begin), Event(end)) for begin, end in times]
    assert gaps.percent() == 20.0


def test_steps_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU they are watched within the block, else not at all."""
    own: Any = CapturedStep.run
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        with device_gaps():
            assert (CapturedStep.run is own) is not here
        assert CapturedStep.run is own
