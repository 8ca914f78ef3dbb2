"""The first and last layer of a pass: token embedding, and logits of the needed rows."""

from __future__ import annotations

import torch

from lookahead.backends.graph.layers.norm import NormLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.dense import DenseMatrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Decoder


class EmbeddingLayer:
    """tokens -> residual."""

    def __init__(self, table: torch.Tensor, ops: Ops) -> None:
        self.table, self._ops = table, ops

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.table]

    def buffers(self) -> dict[str, int]:
        return {"residual": self.table.shape[1]}

    def plan(self, step: StepContext) -> Run:
        residual = step.buffers.rows("residual", self.table.shape[1])[: step.kind.rows]
        return lambda: self._ops.embed(self.table, step.views["tokens"], residual)


class HeadLayer:
    """residual and the last delta -> logits of the needed rows only: head(norm(residual + delta))."""

    def __init__(self, spec: Decoder, ops: Ops, matrices: DenseMatrices) -> None:
        self.norm, self.head, self._ops = NormLayer(spec.norm, ops), matrices.lower(spec.head), ops

    @staticmethod
    def check_head(spec: Decoder) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.head.has_bias:
            raise UnsupportedModelError("its head has a bias")

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.norm.tensors, *self.head.tensors]

    def buffers(self) -> dict[str, int]:
        hidden = self.head.weight.shape[1]
        return {"residual": hidden, "normed": hidden, "delta": hidden}

    def plan(self, step: StepContext, logits: torch.Tensor) -> Run:
        """`logits` [at least the needed rows, V]."""
        size, needed, norm, hidden = step.kind.rows, step.kind.needed, self.norm, self.head.weight.shape[1]
        residual, delta = (step.buffers.rows(name, hidden)[:size] for name in ("residual", "delta"))
        normed, multiply = step.buffers.rows("normed", hidden), self.head.plan(needed)

        def run() -> None:
            self._ops.add_norm(residual, delta, norm.weight, normed[:needed], norm.eps, step.views["needed"])
            multiply(normed, logits)

        return run
