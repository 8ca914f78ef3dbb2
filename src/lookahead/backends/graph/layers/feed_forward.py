"""The feed-forward of a block: down(activation(gate) * up)."""

from __future__ import annotations

import torch

from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.feed_forward import FeedForward


class FeedForwardLayer:
    """normed -> delta, or from and to other buffers in a parallel block. The norm that adds delta adds its bias."""

    def __init__(
        self, spec: FeedForward, ops: Ops, matrices: Matrices, source: str = "normed", target: str = "delta"
    ) -> None:
        self.spec, self._ops, self._source, self._target = spec, ops, source, target
        self.gate_up, self.down = matrices.lower(spec.gate_up), matrices.lower(spec.down)

    @property
    def bias(self) -> torch.Tensor | None:
        """What is to be added to the output."""
        return self.down.bias if self.spec.out_scale == 1.0 else None

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """In the order of their products."""
        return [self.gate_up, self.down]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]

    def buffers(self) -> dict[str, int]:
        both, hidden, inner = self.gate_up.out, self.gate_up.width, self.down.width
        return {self._source: hidden, "gate_up": both, "active": inner, self._target: self.down.out}

    def plan(self, step: StepContext) -> Run:
        rows, buffers = step.kind.rows, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        source, gate_up, active, target = buffers.values()
        multiply_in, multiply_out = self.gate_up.plan(rows), self.down.plan(rows)
        spec, bias, out_bias = self.spec, self.gate_up.bias, self.down.bias
        options = {"gated": spec.gated, "gate_scale": spec.gate_scale}

        def run() -> None:
            multiply_in(source, gate_up)
            self._ops.activate(gate_up, bias, active[:rows], spec.activation, spec.constants, **options)
            multiply_out(active, target)
            if spec.out_scale != 1.0:
                self._ops.scale(target, out_bias, target[:rows], spec.out_scale)

        return run
