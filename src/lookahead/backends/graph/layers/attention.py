"""Paged attention: the projections and kernels of a layer, and the per-step work of an attention group."""

from __future__ import annotations

from dataclasses import replace

import torch

from lookahead.backends.graph.groups import AttentionGroup
from lookahead.backends.graph.kernels.projections import Projections
from lookahead.backends.graph.kernels.tiles import WIDEST_HEAD, HeadShape
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Attention


class AttentionLayer:
    """normed -> delta, or from and to other buffers: writes the step's keys and values to their pages, then attends to
    prefix and tree. The norm that adds delta adds the bias of `out`, unless `adds_bias` is false.

    The layer reads the keys and values of layer number `index` of the model's attention group number `group`: its own,
    or with `spec.kv_layer` those of an earlier layer.
    """

    def __init__(
        self,
        spec: Attention,
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
        self.shape = HeadShape(spec.heads, spec.kv_heads, spec.head_dim)
        self.qkv, self.out = matrices.lower(spec.qkv), matrices.lower(spec.out)
        self.gate = None if spec.output_gate is None else matrices.lower(spec.output_gate)
        self.output_bias = self.out.bias if adds_bias else None
        heads, self._gate_heads = (
            None if order is None else torch.tensor(order, dtype=torch.int32, device=self.qkv.device)
            for order in (spec.head_order, spec.gate_heads)
        )
        self._projections = replace(_projections(spec), bias=self.qkv.bias, order=heads)

    @staticmethod
    def check_attention(spec: Attention) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.head_dim % 2 or spec.head_dim > WIDEST_HEAD:
            raise UnsupportedModelError(
                f"its heads are {spec.head_dim} columns wide, where the kernels take even numbers up to {WIDEST_HEAD}"
            )
        projections = _projections(spec)
        if projections.norms_last and projections.needs_norm_heads:
            raise UnsupportedModelError("after the rotation, queries or keys have norms that are not RMSNorms of heads")
        if spec.window is not None and spec.chunk is not None:
            raise UnsupportedModelError("a layer of it has both a sliding window and attention chunks")

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """In the order of their products."""
        return [self.qkv, self.out] if self.gate is None else [self.qkv, self.gate, self.out]

    @property
    def tensors(self) -> list[torch.Tensor]:
        matrices = [tensor for matrix in self.matrices for tensor in matrix.tensors]
        norms = (norm for norm in self._projections.norms if norm is not None)
        own = (tensor for norm in norms for tensor in (norm.weight, norm.bias) if tensor is not None)
        return [*matrices, *own, *([] if self.spec.sinks is None else [self.spec.sinks])]

    def buffers(self) -> dict[str, int]:
        wide = self.shape.heads * self.shape.dim
        hidden = self.qkv.width
        widths = {self._source: hidden, "qkv": self.qkv.out, "q": wide, "mixed": wide, self.target: self.out.out}
        if self._projections.needs_norm_heads:
            widths["heads"] = self._projections.total * self.shape.dim
        if self.gate is not None:
            widths["output_gate"] = self.gate.out
        return widths

    def plan(self, step: StepContext) -> Run:
        ops, spec = self._ops, self.spec
        size, buffers = step.kind.rows, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        normed, qkv, mixed, delta = (buffers[name] for name in (self._source, "qkv", "mixed", self.target))
        q, attended = (buffers[name][:size].view(size, *self.shape[::2]) for name in ("q", "mixed"))
        rows, tiles, work = step.rows[self.group], step.tiles[self.group], step.work[self.group]
        keys, values = step.kv.caches[self.group][self.index]
        own = (keys, values) if spec.kv_layer is None else (None, None)
        cosine, sine = (None, None) if spec.rope is None else step.kv.rotary(spec.rope)
        scale = None if spec.query_scale is None else step.kv.query_scale(spec.query_scale)
        projections = replace(self._projections, cosine=cosine, sine=sine, query_scale=scale)
        heads = buffers["heads"][:size] if projections.needs_norm_heads else None
        rotated = projections if heads is None else projections.after_norm_heads()
        scoring = {
            "scale": spec.scale,
            "window": spec.window or 0,
            "chunk": spec.chunk or 0,
            "softcap": spec.softcap or 0.0,
            "sinks": spec.sinks,
        }
        multiply_in, multiply_out = self.qkv.plan(size), self.out.plan(size)
        multiply_gate = None if self.gate is None else self.gate.plan(size)
        gate, gate_bias = buffers.get("output_gate", qkv), None if self.gate is None else self.gate.bias
        gate_heads, own_bias, dim = self._gate_heads, self.qkv.bias, self.shape.dim

        def run() -> None:
            multiply_in(normed, qkv)
            if heads is not None:
                ops.norm_heads(qkv, projections, heads)
            ops.rotate_write(qkv if heads is None else heads, rotated, rows, q, *own)
            ops.attend(q, keys, values, rows, attended, work, tiles, **scoring)
            if multiply_gate is not None:
                multiply_gate(normed, gate)
                ops.apply_gate(mixed[:size], gate, gate_bias)
            if gate_heads is not None:
                ops.apply_head_gates(mixed[:size], qkv, own_bias, gate_heads, dim)
            multiply_out(mixed, delta)

        return run


def _projections(spec: Attention) -> Projections:
    """What is known of a layer's projections without its tensors on the device."""
    has_kv = spec.kv_layer is None
    return Projections(
        spec.heads,
        spec.kv_heads if has_kv else 0,
        spec.head_dim,
        clip=spec.clip,
        q_norm=spec.q_norm,
        k_norm=spec.k_norm if has_kv else None,
        v_norm=spec.v_norm if has_kv else None,
        whole_norms=spec.whole_norms,
        norms_last=spec.norms_after_rope and spec.rope is not None,
        interleaved=spec.rope is not None and spec.rope.interleaved,
    )


def plan_group(group: AttentionGroup, number: int, step: StepContext, ops: Ops) -> tuple[Run, Run]:
    """The work of a group once per pass, before its layers: commit the previous step, and locate this step's rows.

    The commit moves the K/V of accepted nodes next to their prefix, in all layers with one launch. Locating computes
    the rows' positions, cells and ancestors. In an invariant step attention reads a tree along its paths, which are
    listed here once for all layers.
    """
    rows, tiles, work, views = step.rows[number], step.tiles[number], step.work[number], step.views

    def commit() -> None:
        ops.move_accepted(step.kv.caches[number], rows.counts, views["commits"], views["moves"][number])

    def locate() -> None:
        ops.locate_rows(rows)
        ops.list_paths(rows, work, tiles, group.shape.group)

    return commit, locate
