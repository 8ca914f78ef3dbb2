"""Captured steps: a forward pass and the sampling of its targets, each a CUDA graph of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lookahead.backends.failures import DeviceMemoryError, named_kernels, out_of_memory
from lookahead.backends.graph.forward import CapturedForward
from lookahead.backends.graph.kinds import ForwardKind, StepKind, TargetsKind
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.state import DeviceState
from lookahead.backends.graph.targets import CapturedTargets
from lookahead.backends.graph.targets_packet import StepPacket


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

    def capture_ahead(self) -> None:
        """Capture the step ahead on a step that is all padding, so that no sequence's K/V is written."""
        if self.forward.graph_ahead is None or self.targets.graph_ahead is None:
            self.packet.forward.write_padding()
            self.packet.targets.write_padding()
            self.run()
            self.run_ahead(0)

    def run_ahead(self, turn: int) -> None:
        """Run the one-token step after the last one of this kind, and send its results to host copy `turn`."""
        self.forward.run_ahead()
        self.targets.run_ahead(turn)


class CapturedSteps:
    """Captured forward passes, targets graphs, and pairs of the two, by kind. Each is captured when first needed.

    `planned` are those whose kernels are compiled, and which are not captured yet.
    """

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self.forwards: dict[ForwardKind, CapturedForward] = {}
        self.targets: dict[TargetsKind, CapturedTargets] = {}
        self.pairs: dict[StepKind, CapturedStep] = {}
        self.planned: dict[ForwardKind | TargetsKind, CapturedForward | CapturedTargets] = {}

    def compile_kernels(self, kinds: Iterable[ForwardKind | TargetsKind]) -> None:
        """Plan forward passes and targets graphs of these kinds, and compile their kernels, many at once. Capturing
        them then finds all of that. Where memory runs out, or nothing is captured, that is left to the capture."""
        state = self.state
        if not state.capture or state.full:
            return
        known = self.forwards.keys() | self.targets.keys() | self.planned.keys()
        try:
            new = {kind: self._plan(kind) for kind in dict.fromkeys(kinds) if kind not in known}
            if new:
                with named_kernels(), state.times.timing("compile"):
                    state.ops.compile_launched(lambda: [planned.launch_kernels() for planned in new.values()])
            self.planned |= new
        except RuntimeError as error:
            if not out_of_memory(error):
                raise

    def _plan(self, kind: ForwardKind | TargetsKind) -> CapturedForward | CapturedTargets:
        if isinstance(kind, ForwardKind):
            return CapturedForward(self.state, kind)
        return CapturedTargets(self.state, kind)

    def get(self, kind: StepKind) -> CapturedStep:
        """The captured step of this kind."""
        step = self.pairs.get(kind)
        if step is None:
            forward, targets = self.forward_for(kind.forward), self.targets_for(kind.targets)
            self.forwards[kind.forward] = forward  # again: room for `targets` may have been made by dropping it
            step = self.pairs[kind] = CapturedStep(kind, forward, targets)
        return step

    def forward_for(self, kind: ForwardKind) -> CapturedForward:
        """The captured forward pass of this kind."""
        if kind not in self.forwards:
            what = f"a step of {kind.rows} tokens"
            self.forwards[kind] = self._capture(kind, what)
        return self.forwards[kind]

    def targets_for(self, kind: TargetsKind) -> CapturedTargets:
        """The captured targets graph of this kind."""
        if kind not in self.targets:
            what = f"sampling the targets of {kind.needed} rows"
            self.targets[kind] = self._capture(kind, what)
        return self.targets[kind]

    def _capture(self, kind: ForwardKind | TargetsKind, what: str) -> Any:
        """Plan, compile and capture the work of this kind. If memory runs out, the work stays uncaptured; if even that
        does not fit, DeviceMemoryError is raised."""
        state = self.state

        def make() -> CapturedForward | CapturedTargets:
            planned = self.planned.pop(kind, None) or self._plan(kind)
            planned.compile_and_capture()
            return planned

        try:
            return with_room(make, self.drop_unused, what, state.device)
        except DeviceMemoryError as error:
            if state.full or not state.capture:
                raise
            state.stop_capturing(error)
        return with_room(make, self.drop_unused, what, state.device)

    def drop_unused(self) -> None:
        """Drop graphs that were planned or captured in advance and never used: they are in no pair."""
        self.planned.clear()
        forwards, targets = {kind.forward for kind in self.pairs}, {kind.targets for kind in self.pairs}
        self.forwards = {kind: forward for kind, forward in self.forwards.items() if kind in forwards}
        self.targets = {kind: graph for kind, graph in self.targets.items() if kind in targets}

    def clear(self) -> None:
        """Drop all captured steps, because the memory they read is replaced."""
        for steps in (self.forwards, self.targets, self.pairs, self.planned):
            steps.clear()
        self.state.full = False

    def drop_adjusted(self) -> None:
        """Drop the targets graphs that adjust logits, because the tables they read are replaced."""
        self.planned = {kind: graph for kind, graph in self.planned.items() if not getattr(kind, "adjusted", False)}
        self.targets = {kind: graph for kind, graph in self.targets.items() if not kind.adjusted}
        self.pairs = {kind: step for kind, step in self.pairs.items() if not kind.targets.adjusted}
