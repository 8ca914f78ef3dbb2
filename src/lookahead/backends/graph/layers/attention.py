"""Paged attention: the projections and kernels of a layer, and the per-step work of an attention group."""

from __future__ import annotations

import torch

from lookahead.backends.graph.groups import AttentionGroup
from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.dense import DenseMatrices
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Attention


class AttentionLayer:
    """normed -> delta: writes the step's keys and values to their pages, then attends to prefix and tree.

    The layer is number `index` of the model's attention group number `group`.
    """

    def __init__(self, spec: Attention, group: int, index: int, ops: Ops, matrices: DenseMatrices) -> None:
        self.spec, self.group, self.index, self._ops = spec, group, index, ops
        self.shape = HeadShape(spec.heads, spec.kv_heads, spec.head_dim)
        self.qkv, self.out = matrices.lower(spec.qkv), matrices.lower(spec.out)
        self._gains = [None if norm is None else norm.weight for norm in (spec.q_norm, spec.k_norm)]
        self._eps = 0.0 if spec.q_norm is None else spec.q_norm.eps

    @staticmethod
    def check_attention(spec: Attention) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.out.has_bias:
            raise UnsupportedModelError("its output projections have biases")
        if spec.rope is not None and spec.rope.dim != spec.head_dim:
            raise UnsupportedModelError(f"{spec.rope.dim} of the {spec.head_dim} columns of its heads are rotated")
        if (spec.q_norm and spec.q_norm.eps) != (spec.k_norm and spec.k_norm.eps):
            raise UnsupportedModelError("its queries and its keys have different norms")

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.qkv.tensors, *self.out.tensors, *(gain for gain in self._gains if gain is not None)]

    def buffers(self) -> dict[str, int]:
        wide = self.shape.heads * self.shape.dim
        hidden = self.qkv.weight.shape[1]
        return {"normed": hidden, "qkv": self.qkv.out, "q": wide, "mixed": wide, "delta": self.out.out}

    def plan(self, step: StepContext) -> Run:
        ops, spec, bias, (q_norm, k_norm), eps = self._ops, self.spec, self.qkv.bias, self._gains, self._eps
        size, buffers = step.kind.rows, {name: step.buffers.rows(name, width) for name, width in self.buffers().items()}
        normed, qkv, mixed, delta = buffers["normed"], buffers["qkv"], buffers["mixed"], buffers["delta"]
        q, attended = (buffers[name][:size].view(size, *self.shape[::2]) for name in ("q", "mixed"))
        rows, tiles, work = step.rows[self.group], step.tiles[self.group], step.work[self.group]
        keys, values = step.kv.caches[self.group][self.index]
        cosine, sine = step.kv.rotary(spec.rope, spec.head_dim)
        multiply_in, multiply_out = self.qkv.plan(size), self.out.plan(size)

        def run() -> None:
            multiply_in(normed, qkv)
            ops.rotate_write(qkv, bias, q_norm, k_norm, cosine, sine, rows, q, keys, values, eps)
            ops.attend(q, keys, values, rows, attended, work, tiles, scale=spec.scale, window=spec.window or 0)
            multiply_out(mixed, delta)

        return run


def plan_group(group: AttentionGroup, number: int, step: StepContext, ops: Ops) -> tuple[Run, Run]:
    """The work of a group once per pass, before its layers: commit the previous step, and locate this step's rows.

    The commit moves the K/V of accepted nodes next to their prefix, in all layers with one launch. Locating computes
    the rows' positions, cells and ancestors. In an invariant step attention sums the nodes of a tree by depth, so they
    are sorted here once for all layers.
    """
    rows, tiles, work, views = step.rows[number], step.tiles[number], step.work[number], step.views

    def commit() -> None:
        ops.move_accepted(step.kv.caches[number], rows.counts, views["commits"], views["moves"][number])

    def locate() -> None:
        ops.locate_rows(rows)
        ops.order_by_depth(rows, work, tiles, group.shape.group)

    return commit, locate
