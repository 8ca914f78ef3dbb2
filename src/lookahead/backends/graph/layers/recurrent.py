"""Mixers with a recurrent state: gated delta nets, Mamba-2, and short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lookahead.backends.graph.kernels.state_rows import StateRows, roots_as_replays
from lookahead.backends.graph.kernels.state_shapes import Channels, Columns, Gating
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.states import MatrixStates, RecurrentStates
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.norm import Norm
from lookahead.models.recurrent import GatedDelta, Mamba2, Recurrent, ShortConv


class RecurrentLayer:
    """normed -> delta, or from and to other buffers: the projection, the convolution, the recurrence and its gated
    norm, the output projection. The norm that adds delta adds the bias of `out`, unless `adds_bias` is false.

    Its states are those of layer number `index` of the model's state group number `group`. No token's result depends on
    the tokens beside it: see `kernels.scan`.
    """

    def __init__(
        self,
        spec: Recurrent,
        group: int,
        index: int,
        ops: Ops,
        matrices: Matrices,
        source: str = "normed",
        target: str = "delta",
        *,
        adds_bias: bool = True,
    ) -> None:
        self.spec, self.group, self.index, self._ops = spec, group, index, ops
        self._source, self.target = source, target
        self.projection, self.out = matrices.lower(spec.projection), matrices.lower(spec.out)
        self.output_bias = self.out.bias if adds_bias else None
        order, scales = columns_of(spec)
        columns = Columns(self.projection.bias, None if order is None else order.to(torch.int32), scales)
        found = spec.convolution
        weights = found.weight, found.bias, found.activation
        self._columns = columns
        self._gating: Gating | None = None
        if isinstance(spec, ShortConv):
            self.channels = Channels(*weights, columns, gated=True)
        elif isinstance(spec, GatedDelta):
            self.channels = Channels(*weights, columns)
            beta_at, time_at = sum(spec.columns[:4]), sum(spec.columns[:5])
            self._gating = Gating(spec.a_log, spec.dt_bias, columns, time_at, beta_at, spec.beta_scale)
        else:
            self.channels, time_at = Channels(*weights, columns, first=spec.columns[0]), sum(spec.columns[:4])
            self._gating = Gating(spec.a_log, spec.dt_bias, columns, time_at, limits=spec.prompt_time_steps)

    @staticmethod
    def check_recurrent(spec: Recurrent) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.convolution.taps < 2:
            raise UnsupportedModelError("a convolution of it has a single tap")
        norm = norm_of(spec)
        if norm is not None and (norm.centered or norm.bias is not None):
            raise UnsupportedModelError("the norm behind a recurrence is no RMSNorm")

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """In the order of their products."""
        return [self.projection, self.out]

    @property
    def tensors(self) -> list[torch.Tensor]:
        found = self.spec.convolution.weight, self.spec.convolution.bias, self._columns.scales, *self._own()
        return [*self.projection.tensors, *self.out.tensors, *(one for one in found if one is not None)]

    def _own(self) -> Sequence[torch.Tensor | None]:
        """The tensors of the recurrence and its norm."""
        norm = norm_of(self.spec)
        weight = None if norm is None else norm.weight
        gating = () if self._gating is None else (self._gating.a_log, self._gating.time_bias)
        return *gating, self.skip, weight

    @property
    def skip(self) -> torch.Tensor | None:
        """See `kernels.scan`."""
        return self.spec.skip if isinstance(self.spec, Mamba2) else None

    def buffers(self) -> dict[str, int]:
        inner = self.out.width
        widths = {
            self._source: self.projection.width,
            "projected": self.projection.out,
            "convolved": self.channels.count,
        }
        return {**widths, "scanned": inner, "gated": inner, self.target: self.out.out}

    def plan(self, step: StepContext) -> Run:
        assert step.states is not None
        size, buffers = step.kind.rows, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        normed, projected, convolved, target = (
            buffers[name] for name in (self._source, "projected", "convolved", self.target)
        )
        ops, rows, states = self._ops, step.states.rows, step.states.memory.groups[self.group]
        inputs, kept = states.inputs[self.index], states.kept_inputs[self.index]
        recurrence, mixed = states.recurrence, convolved[:size]
        kept_mixed = None if recurrence is None else recurrence.kept_mixed[self.index]
        multiply_in, multiply_out = self.projection.plan(size), self.out.plan(size)
        recur = None if recurrence is None else self._plan_recurrence(rows, recurrence, buffers)
        # A short convolution has its gates, and nothing behind them.
        source = convolved if recur is None else buffers["gated"]

        def run() -> None:
            multiply_in(normed, projected)
            ops.convolve(projected, self.channels, inputs, mixed, kept, kept_mixed, rows)
            ops.store_inputs(projected, self.channels, inputs, rows)
            if recur is not None:
                recur()
            multiply_out(source, target)

        return run

    def _plan_recurrence(self, rows: StateRows, states: MatrixStates, buffers: dict[str, torch.Tensor]) -> Run:
        """From the convolution's results to those of the gated norm."""
        assert self._gating is not None
        spec, size, shape, gating = self.spec, len(rows.kept), states.shape, self._gating
        projected = buffers["projected"]
        mixed, scanned, gated = (buffers[name][:size] for name in ("convolved", "scanned", "gated"))
        gates, kept_gates = states.gates[:size], states.kept_gates[self.index]
        skip = self.skip
        norm, norm_first, parts, gate_at = norm_of(spec), True, shape.heads, sum(spec.columns[:3])
        if isinstance(spec, Mamba2):
            norm_first, gate_at = spec.norm_first, 0
            parts = 1 if norm is None or norm.weight is None else len(norm.weight)
        matrices = states.matrices[self.index : self.index + 1]
        chunks = rows.chunk_walks, rows.chunk_count, rows.order, shape
        trees = rows.tree_walks, rows.tree_count, rows.order, shape
        ops, columns = self._ops, self._columns

        def run() -> None:
            ops.gate(projected, mixed, gating, shape, gates, kept_gates, rows)
            ops.scan(matrices, mixed[None], gates[None], skip, scanned, *chunks, stores=True)
            ops.scan(matrices, mixed[None], gates[None], skip, scanned, *trees, stores=False)
            ops.gated_norm(scanned, projected, gate_at, norm, parts, gated, norm_first=norm_first, columns=columns)

        return run


def columns_of(spec: Recurrent) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The order and the factors of the columns of a layer's projection; None for those that it does not have."""
    order = spec.order if isinstance(spec, GatedDelta) else None
    return order, spec.column_scales if isinstance(spec, Mamba2) else None


def norm_of(spec: Recurrent) -> Norm | None:
    """The norm behind a layer's recurrence."""
    return None if isinstance(spec, ShortConv) else spec.norm


def plan_states(step: StepContext, layers: Sequence[RecurrentLayer], ops: Ops) -> tuple[Run, Run]:
    """The work of all recurrent layers once per pass, before its layers: replay what the previous step accepted into
    the stored states, and list the walks of this step."""
    assert step.states is not None
    rows, memory = step.states.rows, step.states.memory
    accepted = rows.replays, rows.replay_count, rows.replayed
    return partial(replay, memory, layers, ops, *accepted), partial(ops.list_walks, rows)


def plan_states_ahead(step: StepContext, layers: Sequence[RecurrentLayer], ops: Ops) -> Run:
    """The work of all recurrent layers at the beginning of a step ahead: replay the nodes of the step before it, which
    were the roots of its sequences, from where it kept them."""
    assert step.states is not None
    rows, memory = step.states.rows, step.states.memory
    accepted = roots_as_replays(rows)

    def run() -> None:
        accepted()
        replay(memory, layers, ops, rows.replays, rows.replay_count, rows.replayed)

    return run


def replay(
    memory: RecurrentStates,
    layers: Sequence[RecurrentLayer],
    ops: Ops,
    replays: torch.Tensor,
    count: torch.Tensor,
    replayed: torch.Tensor,
) -> None:
    """Update the states of all layers by kept rows: see `StateRows.replays`."""
    for number, states in enumerate(memory.groups):
        ops.replay_inputs(states.inputs, states.kept_inputs, replays, count, replayed)
        if (of := states.recurrence) is None:
            continue
        # No output is written, and no skip is read. They are of the types for which the step's kernel is compiled.
        skip = next(layer.skip for layer in layers if layer.group == number)
        ops.scan(
            of.matrices, of.kept_mixed, of.kept_gates, skip, of.kept_mixed, replays, count, replayed, of.shape,
            stores=True,
        )  # fmt: skip
