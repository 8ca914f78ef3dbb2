"""A mixture of experts: the router, its experts' products for the rows that chose them, and their sum."""

from __future__ import annotations

from functools import partial

import torch

from lookahead.backends.graph.kernels.finish import Finish
from lookahead.backends.graph.layers.feed_forward import FeedForwardLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.dense import fuse_weights
from lookahead.backends.graph.matrices.experts import StackedExperts
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.ops import Ops
from lookahead.models import reference
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE

SHARED = "shared"
"""The buffer of the shared expert's output."""


class MoELayer:
    """normed -> delta, or from and to other buffers in a parallel block; see `models.feed_forward.MoE`."""

    def __init__(self, spec: MoE, ops: Ops, matrices: Matrices, source: str = "normed", target: str = "delta") -> None:
        self.spec, self._ops, self._source, self._target = spec, ops, source, target
        top_k = spec.router.top_k
        self._router, self._router_bias = fuse_weights(spec.router.logits)
        self._gate = None if spec.shared_gate is None else fuse_weights(spec.shared_gate)[0]
        self.gate_up, self.down = StackedExperts(spec.gate_up, top_k, ops), StackedExperts(spec.down, top_k, ops)
        self.shared = None if spec.shared is None else FeedForwardLayer(spec.shared, ops, matrices, source, SHARED)
        if ops.experts is not None:
            ops.experts.reserve_router(self._router, top_k)

    @staticmethod
    def check_experts(spec: MoE) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if spec.latent_in is not None:
            raise UnsupportedModelError("its experts read a projection of their input")
        for experts in (spec.gate_up, spec.down):
            StackedExperts.check(experts)

    @property
    def bias(self) -> None:
        """What is to be added to the output: nothing, the experts have their own."""

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """Of all rows, not of experts."""
        return [] if self.shared is None else self.shared.matrices

    @property
    def tensors(self) -> list[torch.Tensor]:
        router = self.spec.router
        found = [self._router, self._router_bias, self._gate, router.choice_bias, router.expert_scale]
        shared = [] if self.shared is None else self.shared.tensors
        return [*(one for one in found if one is not None), *self.gate_up.tensors, *self.down.tensors, *shared]

    def buffers(self) -> dict[str, int]:
        top_k, down = self.spec.router.top_k, self.down
        own = {
            self._source: self.gate_up.width,
            "expert_gate_up": top_k * self.gate_up.out,
            "expert_active": top_k * down.width,
            "expert_parts": top_k * down.out,
            self._target: down.out,
        }
        return own if self.shared is None else {**self.shared.buffers(), **own}

    def plan(self, step: StepContext) -> Run:
        rows, spec, ops = step.kind.rows, self.spec, self._ops
        widths = self.buffers()
        source, target = (step.buffers.rows(name, widths[name])[:rows] for name in (self._source, self._target))
        if ops.experts is None:
            return partial(_run_reference, spec, source, target)
        inner = Finish(spec.activation, spec.constants, gated=spec.gated, alternate=spec.alternate)
        plan = self._plan_few if self.gate_up.takes_few(rows, spec.router, inner) else self._plan_many
        run_shared = None if self.shared is None else self.shared.plan(step)
        shared = None if self.shared is None else step.buffers.rows(SHARED, self.down.out)[:rows]
        bias = None if self.shared is None else self.shared.down.bias
        outer = Finish(shared=shared, shared_bias=bias, gated=self._gate is not None)
        run_experts = plan(step, source, target, inner, outer)

        def run() -> None:
            if run_shared is not None:
                run_shared()
            run_experts()

        return run

    def _pairs(self, step: StepContext, name: str, size: int) -> torch.Tensor:
        """A buffer as [pairs of a row and an expert, size]."""
        rows, top_k = step.kind.rows, self.spec.router.top_k
        return step.buffers.rows(name, top_k * size)[:rows].view(rows * top_k, size)

    def _plan_few(
        self, step: StepContext, source: torch.Tensor, target: torch.Tensor, inner: Finish, outer: Finish
    ) -> Run:
        """Three launches: what follows a product is done by its last programs."""
        rows, router, sequence_of = step.kind.rows, self.spec.router, step.rows[0].sequence_of
        active = self._pairs(step, "expert_active", self.down.width)
        choose = self._ops.experts.plan_few_router(router, self._router, self._router_bias, self._gate, rows)
        multiply_in, multiply_out = self.gate_up.plan_few(rows, inner), self.down.plan_few(rows, outer)

        def run() -> None:
            choose(source, sequence_of)
            multiply_in(source, active)
            multiply_out(active, target)

        return run

    def _plan_many(
        self, step: StepContext, source: torch.Tensor, target: torch.Tensor, inner: Finish, outer: Finish
    ) -> Run:
        """Six launches."""
        rows, spec, ops, sequence_of = step.kind.rows, self.spec, self._ops, step.rows[0].sequence_of
        sizes = {"expert_gate_up": self.gate_up.out, "expert_active": self.down.width, "expert_parts": self.down.out}
        gate_up, active, parts = (self._pairs(step, name, size) for name, size in sizes.items())
        choose = ops.experts.plan_router(spec.router, self._router, self._router_bias, self._gate, rows)
        multiply_in, multiply_out = self.gate_up.plan(rows, spec.router.top_k), self.down.plan(rows, 1)

        def run() -> None:
            choose(source, sequence_of)
            multiply_in(source, gate_up)
            ops.activate(
                gate_up, None, active, inner.activation, inner.constants, gated=inner.gated, alternate=inner.alternate
            )
            multiply_out(active, parts)
            ops.experts.combine(parts, sequence_of, target, outer.shared, outer.shared_bias, gated=outer.gated)

        return run


def _run_reference(spec: MoE, source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(reference.mixture(spec, source))
