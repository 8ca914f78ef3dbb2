"""The first and last layer of a pass: token embedding, and logits of the needed rows."""

from __future__ import annotations

import torch

from lookahead.backends.graph.layers.norm import Addition, NormLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.lowering import Matrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.spec import Decoder


class EmbeddingLayer:
    """tokens -> residual. With learned positions, those of the rows must have been located."""

    def __init__(self, spec: Decoder, ops: Ops) -> None:
        self.table, self._positions, self._ops = spec.embedding, spec.position_embedding, ops
        aliases = torch.tensor(spec.aliases, dtype=torch.int32, device=self.table.device) if spec.aliases else None
        self._options = {"aliases": aliases, "scale": spec.embedding_scale, "position_table": self._positions}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.table] if self._positions is None else [self.table, self._positions]

    def buffers(self) -> dict[str, int]:
        return {"residual": self.table.shape[1]}

    def plan(self, step: StepContext) -> Run:
        residual = step.buffers.rows("residual", self.table.shape[1])[: step.kind.rows]
        tokens, positions = step.views["tokens"], step.rows[0].rotary  # a row's is the same in every group
        return lambda: self._ops.embed(self.table, tokens, residual, positions=positions, **self._options)


LOGITS_ALIGNMENT = 64
"""Rows of logits begin at multiples of this many numbers, and columns beyond a multiple of it have a kernel of their
own (see `DenseMatrix`). On an H200 the product of one row with a head of 49,159 x 4,096 took 505 us without either,
where reading the matrix takes 100 us."""


class HeadLayer:
    """residual and the last outputs -> logits of the needed rows only: head(norm(residual + outputs))."""

    def __init__(self, spec: Decoder, added: Addition, ops: Ops, matrices: Matrices) -> None:
        self.norm, self.head = (
            NormLayer(added, (spec.norm,), spec.hidden, ops),
            matrices.lower(spec.head, LOGITS_ALIGNMENT),
        )
        self._scale, self._softcap, self._ops = spec.logit_scale, spec.logit_softcap, ops

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.norm.tensors, *self.head.tensors]

    def buffers(self) -> dict[str, int]:
        return self.norm.buffers()

    def new_logits(self, rows: int) -> torch.Tensor:
        """Memory for logits [rows, V]."""
        return self.head.new_out(rows).zero_()

    def plan(self, step: StepContext, logits: torch.Tensor) -> Run:
        """`logits` [at least the needed rows, V], made by `new_logits`."""
        needed, norm = step.kind.needed, self.norm.plan(step, needed_only=True)
        normed, multiply = step.buffers.rows("normed", self.head.width), self.head.plan(needed)
        bias, scale, softcap, wanted = self.head.bias, self._scale, self._softcap, logits[:needed]
        finishes = bias is not None or scale != 1.0 or softcap is not None

        def run() -> None:
            norm()
            multiply(normed, logits)
            if finishes:
                self._ops.finish_logits(wanted, bias, scale, softcap)

        return run
