"""RMSNorm of the residual stream, after adding the previous layer's output."""

from __future__ import annotations

import torch

from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.ops import Ops
from lookahead.models.spec import Norm


class NormLayer:
    """residual += delta; normed = RMSNorm(residual)."""

    def __init__(self, norm: Norm | None, ops: Ops) -> None:
        assert norm is not None
        assert norm.weight is not None
        self.weight, self.eps, self._ops = norm.weight, norm.eps, ops

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.weight]

    def plan(self, step: StepContext, *, first: bool = False) -> Run:
        """`first`: there is no previous layer, and no delta to add."""
        rows, hidden = step.kind.rows, len(self.weight)
        residual, normed, delta = (step.buffers.rows(name, hidden)[:rows] for name in ("residual", "normed", "delta"))
        added = None if first else delta

        def run() -> None:
            self._ops.add_norm(residual, added, self.weight, normed, self.eps)

        return run
