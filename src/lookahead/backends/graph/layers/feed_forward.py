"""The feed-forward of a block: down(activation(gate) * up)."""

from __future__ import annotations

import torch

from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.dense import DenseMatrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Activation, FeedForward


class FeedForwardLayer:
    """normed -> delta."""

    def __init__(self, spec: FeedForward, ops: Ops, matrices: DenseMatrices) -> None:
        self.gate_up, self.down, self._ops = matrices.lower(spec.gate_up), matrices.lower(spec.down), ops

    @staticmethod
    def check_feed_forward(spec: FeedForward) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.activation is not Activation.SILU:
            raise UnsupportedModelError(f"its activation is {spec.activation.value!r}")
        if spec.gate_up.has_bias or spec.down.has_bias:
            raise UnsupportedModelError("its feed-forward has biases")

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]

    def buffers(self) -> dict[str, int]:
        (both, hidden), inner = self.gate_up.weight.shape, self.down.weight.shape[1]
        return {"normed": hidden, "gate_up": both, "active": inner, "delta": self.down.out}

    def plan(self, step: StepContext) -> Run:
        rows, buffers = step.kind.rows, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        normed, gate_up, active, delta = buffers["normed"], buffers["gate_up"], buffers["active"], buffers["delta"]
        multiply_in, multiply_out = self.gate_up.plan(rows), self.down.plan(rows)

        def run() -> None:
            multiply_in(normed, gate_up)
            self._ops.gate(gate_up, active[:rows])
            multiply_out(active, delta)

        return run
