"""Captured steps: a forward pass, and how targets come from its logits. Each is a CUDA graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.forward import CapturedForward
from lookahead.backends.graph.kinds import ForwardKind, StepKind, TargetsKind
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.state import DeviceState
from lookahead.backends.graph.targets import CapturedTargets
from lookahead.backends.graph.targets_packet import StepPacket

C = TypeVar("C")


class CapturedStep:
    """All steps of one kind. Steps of other kinds may share its `forward` or its `targets`."""

    def __init__(self, kind: StepKind, forward: CapturedForward, targets: CapturedTargets) -> None:
        self.kind, self.forward, self.targets = kind, forward, targets
        self.packet = StepPacket(forward.packet, targets.packet, forward.queries)
        self.top, self.logprobs = targets.top, targets.logprobs

    def run(self) -> None:
        """Run the step that the packet describes."""
        self.forward.run()
        self.targets.run()

    def get_ready_ahead(self) -> None:
        """Capture the step ahead, of a step in which every row is padding: it must not write to any sequence's K/V."""
        if self.forward.graph_ahead is None or self.targets.graph_ahead is None:
            self.packet.forward.put_nothing()
            self.packet.targets.put_nothing()
            self.run()
            self.run_ahead(0)

    def run_ahead(self, turn: int) -> None:
        """Run the one-token step that follows the last one run here, and send its results to host copy `turn`."""
        self.forward.run_ahead()
        self.targets.run_ahead(turn)


class CapturedSteps:
    """The steps by their kinds: forward passes, ends of steps, and pairs of these. Each is captured when it is first
    needed."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self.forwards: dict[ForwardKind, CapturedForward] = {}
        self.targets: dict[TargetsKind, CapturedTargets] = {}
        self.pairs: dict[StepKind, CapturedStep] = {}

    def get(self, kind: StepKind) -> CapturedStep:
        """The captured step of this kind."""
        step = self.pairs.get(kind)
        if step is None:
            step = self.pairs[kind] = CapturedStep(kind, self.forward(kind.forward), self.end(kind.targets))
        return step

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

    def drop_adjusted(self) -> None:
        """Drop the ends of steps whose logits are adjusted: the tables that they read are replaced."""
        self.targets = {kind: end for kind, end in self.targets.items() if not kind.adjusted}
        self.pairs = {kind: step for kind, step in self.pairs.items() if not kind.targets.adjusted}
