"""All captured steps of a graph backend, and which of them serves a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from lookahead.backends.base import StepInput
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.captured import CapturedStep
from lookahead.backends.graph.forward import CapturedForward
from lookahead.backends.graph.kinds import Device, ForwardKind, StepKind, TargetsKind, kind_of, stand_in
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.state import DeviceState
from lookahead.backends.graph.targets import CapturedTargets

C = TypeVar("C")

PATIENCE = 128
"""How often another step stands in for one that is not captured. A capture takes as long as 50 to 100 steps gain by it,
and far longer on a machine where a kernel has yet to be compiled or searched for."""


class CapturedSteps:
    """The steps by their kinds: forward passes, ends of steps, and pairs of these. Each is captured when it is first
    asked for.

    With `patient`, an invariant pass is made only when it has been asked for a number of times. Until then a larger one
    stands in for it, of at most `most_rows` rows. `invariant`: steps are to be so where they can.
    """

    def __init__(self, state: DeviceState, *, invariant: bool, patient: bool) -> None:
        self.state, self.patient = state, patient
        self.device = Device(state.model.shapes, state.ops.processors, invariant)
        self.forwards: dict[ForwardKind, CapturedForward] = {}
        self.targets: dict[TargetsKind, CapturedTargets] = {}
        self.pairs: dict[StepKind, CapturedStep] = {}
        self._missed: Counter[ForwardKind] = Counter()  # how often a kind was asked for that was not there

    def kind(self, items: Sequence[StepInput], lengths: Sequence[int]) -> StepKind:
        """The kind of a step of these inputs, whose sequences have `lengths` tokens cached."""
        return kind_of(items, lengths, self.device)

    def choose(self, items: Sequence[StepInput], lengths: Sequence[int]) -> CapturedStep:
        """The captured step for these inputs."""
        kind = self.kind(items, lengths)
        step = self.pairs.get(kind)
        if step is not None:
            return step
        forward = kind.forward
        if self.patient and forward.invariant and forward not in self.forwards:
            self._missed[forward] += 1
            if self._missed[forward] <= PATIENCE and not any(item.continues_alone for item in items):
                forward = stand_in(forward, any(item.chunk for item in items), self.state.most_rows)
                kind = StepKind(forward, kind.targets._replace(needed=forward.needed))
        return self.get(kind)

    def get(self, kind: StepKind) -> CapturedStep:
        """The captured step of this kind."""
        if kind not in self.pairs:
            self.pairs[kind] = CapturedStep(kind, self.forward(kind.forward), self.end(kind.targets))
        return self.pairs[kind]

    def forward(self, kind: ForwardKind) -> CapturedForward:
        """The captured forward pass of this kind."""
        if kind not in self.forwards:
            what = f"a step of {kind.rows} tokens"
            self.forwards[kind] = self._made(lambda: CapturedForward(self.state, kind), what)
        return self.forwards[kind]

    def end(self, kind: TargetsKind) -> CapturedTargets:
        """The captured end of steps of this kind."""
        if kind not in self.targets:
            what = f"choosing the targets of {kind.needed} tokens"
            self.targets[kind] = self._made(lambda: CapturedTargets(self.state, kind), what)
        return self.targets[kind]

    def _made(self, make: Callable[[], C], what: str) -> C:
        """What `make` compiles and captures. Where the memory is full it runs uncaptured, and where it is too full for
        that DeviceMemoryError is raised."""
        state = self.state
        try:
            return with_room(make, self.drop_unused, what, state.device)
        except DeviceMemoryError as error:
            if state.full or not state.capture:
                raise
            state.stop_capturing(error)
        return with_room(make, self.drop_unused, what, state.device)

    def drop_unused(self) -> None:
        """Drop the parts of steps that were captured in advance and have not been used since: they are in no pair."""
        forwards, targets = {kind.forward for kind in self.pairs}, {kind.targets for kind in self.pairs}
        self.forwards = {kind: forward for kind, forward in self.forwards.items() if kind in forwards}
        self.targets = {kind: end for kind, end in self.targets.items() if kind in targets}

    def clear(self) -> None:
        """Drop all steps: what they read is replaced."""
        for steps in (self.forwards, self.targets, self.pairs):
            steps.clear()
        self.state.full = False

    def forget_adjusted(self) -> None:
        """Drop the ends of steps whose logits are adjusted: the tables that they read are replaced."""
        self.targets = {kind: end for kind, end in self.targets.items() if not kind.adjusted}
        self.pairs = {kind: step for kind, step in self.pairs.items() if not kind.targets.adjusted}
