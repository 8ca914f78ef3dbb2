"""The stacked matrices of a layer's experts, in plain numbers or quantised, multiplied by the pairs of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lookahead.backends.graph.kernels.finish import Finish
from lookahead.backends.graph.matrices.quantised import check_format, fuse_quantised
from lookahead.backends.graph.ops import Ops
from lookahead.models.feed_forward import Router
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.quantised import QuantisedLinear

MultiplyPairs = Callable[[torch.Tensor, torch.Tensor], None]
"""A function of (x [rows, in], out [pairs, out]) for the pairs that the step's router has listed."""


class StackedExperts:
    """W [experts, out, in] and b [experts, out] or None, of whose experts a row has `top_k`.

    Creating it lays the model's own tensor out as [experts, out, in], or its codes as the kernels read them.
    """

    def __init__(self, matrix: ExpertMatrix, top_k: int, ops: Ops) -> None:
        self.experts, (self.out, self.width) = matrix.experts, matrix.shape
        self.bias = None if matrix.bias is None else matrix.bias.detach()
        self._weights: Any = None
        if isinstance(matrix.weights, QuantisedLinear):
            named = fuse_quantised(Matrix((matrix.weights,)))
            self._own = list(named.values())
            if ops.experts is not None:
                self._weights = ops.experts.quantised(matrix.weights, self.out, named)
        else:
            self._own = [self.weights_of(matrix)]
            self._weights = self._own[0]
        self._products, self._top_k = ops.experts, top_k
        if self._products is not None:
            self._products.reserve(self._weights, top_k)

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def weights_of(matrix: ExpertMatrix) -> torch.Tensor:
        """W [experts, out, in], contiguous; the model's own tensor becomes a view of it."""
        own = matrix.weights
        assert isinstance(own, torch.Tensor)
        weights = (own.transpose(1, 2) if matrix.transposed else own).detach()
        if not weights.is_contiguous():
            weights = weights.contiguous()
            own.data = weights.transpose(1, 2) if matrix.transposed else weights
        return weights

    @staticmethod
    def check(matrix: ExpertMatrix) -> None:
        """Raise UnsupportedModelError for what the kernels do not support."""
        if matrix.format is not None:
            check_format(matrix.format)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        return self._own if self.bias is None else [*self._own, self.bias]

    def plan(self, rows: int, per: int) -> MultiplyPairs:
        """The products for a step of this many rows; a pair reads row pair // `per` of x. Only with kernels."""
        run, weights, bias = self._products.plan(self._weights, rows, self._top_k), self._weights, self.bias
        return lambda x, out: run(x, weights, out, bias, per)

    def takes_few(self, rows: int, router: Router, finish: Finish) -> bool:
        """See `ExpertProducts.takes_few`."""
        return bool(self._products.takes_few(rows, router, self._weights, finish))

    def plan_few(self, rows: int, finish: Finish) -> MultiplyPairs:
        """The products for a step of few rows, with their finish, which writes `out`."""
        run, weights, bias = self._products.plan_few(self._weights, rows, self._top_k, finish), self._weights, self.bias
        return lambda x, out: run(x, weights, out, bias)
