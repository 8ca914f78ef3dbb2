"""All captured steps of a graph backend, and which of them serves a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lookahead.backends.base import StepInput
from lookahead.backends.graph.captured import CapturedStep, DeviceState
from lookahead.backends.graph.kinds import StepKind, kind_of, stand_in

PATIENCE = 128
"""How often another step stands in for one that is not captured. A capture takes as long as 50 to 100 steps gain by it,
and far longer on a machine where a kernel has yet to be compiled or searched for."""


class CapturedSteps(dict[StepKind, CapturedStep]):
    """The steps by their kinds. A step is made when it is first asked for, and captured when it first runs.

    With `patient`, an invariant step is made only when it has been asked for a number of times. Until then a larger one
    stands in for it, of at most `most_rows` rows. `invariant`: steps are to be so where they can.
    """

    def __init__(self, state: DeviceState, most_rows: int, *, invariant: bool, patient: bool) -> None:
        super().__init__()
        self.state, self.most_rows, self.invariant, self.patient = state, most_rows, invariant, patient
        self._missed: Counter[StepKind] = Counter()  # how often a kind was asked for that was not there

    def kind(self, items: Sequence[StepInput], lengths: Sequence[int]) -> StepKind:
        """The kind of a step of these inputs, whose sequences have so many tokens cached."""
        return kind_of(items, lengths, self.state.weights, self.state.ops.processors, self.invariant)

    def choose(self, items: Sequence[StepInput], lengths: Sequence[int]) -> CapturedStep:
        """The captured step for these inputs."""
        kind = self.kind(items, lengths)
        step = self.get(kind)
        if step is not None:
            return step
        if self.patient and kind.invariant:
            self._missed[kind] += 1
            if self._missed[kind] <= PATIENCE and not any(item.continues_alone for item in items):
                kind = stand_in(kind, any(item.trail for item in items), self.most_rows)
        if kind not in self:
            self[kind] = CapturedStep(self.state, kind)
        return self[kind]

    def forget_adjusted(self) -> None:
        """Drop the steps whose logits are adjusted: the tables that they read are replaced."""
        for kind in [kind for kind in self if kind.adjusted]:
            del self[kind]
