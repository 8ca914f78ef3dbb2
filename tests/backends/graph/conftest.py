"""What the graph backend's device runs."""

from __future__ import annotations

import pytest

from lookahead.backends.graph.steps import CapturedStep


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of what the device runs from now on, in order."""
    told: list[str] = []
    step, step_ahead = CapturedStep.run, CapturedStep.run_ahead

    def note_step(captured: CapturedStep) -> None:
        told.append("step" if captured.packet.forward.needed else "prompt")
        step(captured)

    def note_ahead(captured: CapturedStep, turn: int) -> None:
        told.append("ahead")
        step_ahead(captured, turn)

    monkeypatch.setattr(CapturedStep, "run", note_step)
    monkeypatch.setattr(CapturedStep, "run_ahead", note_ahead)
    return told
