"""Norms of the residual stream, after adding what the last layers computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lookahead.backends.graph.kernels.delta import Delta
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.ops import Ops
from lookahead.models.norm import Norm

NORMED = ("normed", "normed_2")
"""The buffers of the norms' outputs: two for halves of a parallel block that have norms of their own."""


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """A layer's output in a buffer, before the layer's last bias and before the norm that follows it in the block."""

    buffer: str
    bias: torch.Tensor | None
    norm: Norm | None


@dataclass(frozen=True, eq=False)
class Addition:
    """The outputs that a norm adds to the residual stream: see `kernels.norms.add_norm`. None before the first."""

    outputs: tuple[LayerOutput, ...] = ()
    scale: float = 1.0
    output_scale: torch.Tensor | None = None


class ScaleLayer:
    """target = (source + bias) * factor: of what one of two mixers reads, or adds to the stream."""

    def __init__(
        self, source: str, bias: torch.Tensor | None, target: str, factor: float, width: int, ops: Ops
    ) -> None:
        self._source, self._bias, self._target, self._factor, self._width = source, bias, target, factor, width
        self._ops = ops

    @property
    def matrices(self) -> list[Any]:
        return []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [] if self._bias is None else [self._bias]

    def buffers(self) -> dict[str, int]:
        return dict.fromkeys([self._source, self._target], self._width)

    def plan(self, step: StepContext) -> Run:
        source, target = (step.buffers.rows(name, self._width) for name in (self._source, self._target))
        return partial(self._ops.scale, source, self._bias, target[: step.kind.rows], self._factor)


class NormLayer:
    """residual += outputs of the last layers; normed = norm(residual), for one or two norms."""

    def __init__(self, added: Addition, norms: tuple[Norm | None, ...], width: int, ops: Ops) -> None:
        self._added, self._norms, self._width, self._ops = added, norms, width, ops

    @property
    def tensors(self) -> list[torch.Tensor]:
        norms = [*self._norms, *(output.norm for output in self._added.outputs)]
        found = [self._added.output_scale, *(tensor for norm in norms if norm for tensor in (norm.weight, norm.bias))]
        return [tensor for tensor in found if tensor is not None]

    def buffers(self) -> dict[str, int]:
        added = [output.buffer for output in self._added.outputs]
        return dict.fromkeys(["residual", *added, *NORMED[: len(self._norms)]], self._width)

    def plan(self, step: StepContext, *, needed_only: bool = False) -> Run:
        """`needed_only`: only the rows whose logits are needed are normed, and the residual stream is unchanged."""
        kind, buffers = step.kind, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        rows, size = (step.views["needed"], kind.needed) if needed_only else (None, kind.rows)
        residual, outs = buffers["residual"], [buffers[name][:size] for name in NORMED[: len(self._norms)]]
        deltas = [Delta(buffers[output.buffer], output.bias, output.norm) for output in self._added.outputs]
        scale, output_scale = self._added.scale, self._added.output_scale

        def run() -> None:
            self._ops.add_norm(residual, deltas, self._norms, outs, rows, scale=scale, output_scale=output_scale)

        return run
