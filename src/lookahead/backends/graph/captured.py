"""A captured step: a forward pass, and how targets come from its logits. Each is a CUDA graph of its own."""

from __future__ import annotations

from lookahead.backends.graph.forward import CapturedForward
from lookahead.backends.graph.kinds import StepKind
from lookahead.backends.graph.targets import CapturedTargets


class CapturedStep:
    """All steps of one kind. Steps of other kinds may share its `forward` or its `targets`."""

    def __init__(self, kind: StepKind, forward: CapturedForward, targets: CapturedTargets) -> None:
        self.kind, self.forward, self.targets = kind, forward, targets
        self.packet, self.queries = forward.packet, forward.queries
        self.top, self.logprobs = targets.top, targets.logprobs

    def run(self) -> None:
        """Run the step that the two packets describe."""
        self.forward.run()
        self.targets.run()

    def get_ready_ahead(self) -> None:
        """Capture the step ahead, of a step in which every row is padding: it must not write to anybody's K/V."""
        if self.forward.graph_ahead is None or self.targets.graph_ahead is None:
            self.forward.packet.put_nothing()
            self.targets.packet.put_nothing()
            self.run()
            self.run_ahead(0)

    def run_ahead(self, turn: int) -> None:
        """Run the one-token step that follows the last one run here, and send its results to host copy `turn`."""
        self.forward.run_ahead()
        self.targets.run_ahead(turn)
