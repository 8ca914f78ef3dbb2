"""Lowers the matrices of one model, each as its number format asks for."""

from __future__ import annotations

import torch

from lookahead.backends.graph.matrices.dense import DenseMatrix, Multiply, fuse_biases
from lookahead.backends.graph.matrices.products import Products
from lookahead.backends.graph.matrices.quantised import QuantisedMatrix, can_fuse
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.sizes import INVARIANT_ROWS
from lookahead.models.matrix import Matrix


class SeparateMatrix:
    """Parts that share an input, and are not of one format: each has a product of its own."""

    def __init__(self, parts: list[DenseMatrix | QuantisedMatrix], bias: torch.Tensor | None) -> None:
        self._parts, self.bias = parts, bias
        self.out, self.width, self.device = sum(part.out for part in parts), parts[0].width, parts[0].device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        own = [tensor for part in self._parts for tensor in part.tensors]
        return own if self.bias is None else [*own, self.bias]

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return sum(part.nbytes for part in self._parts)

    def new_out(self, rows: int) -> torch.Tensor:
        """Memory [rows, out] that products may be written to."""
        return self._parts[0].new_out(1).new_empty(rows, self.out)

    def plan(self, rows: int) -> Multiply:
        """The products for a step of this many rows, without the bias."""
        planned, end = list[tuple[Multiply, slice, torch.Tensor | None]](), 0
        for part in self._parts:
            padded = -(-rows // INVARIANT_ROWS) * INVARIANT_ROWS  # its kernels may pad a product to this
            own = part.new_out(padded) if isinstance(part, DenseMatrix) else None
            planned.append((part.plan(rows), slice(end, end + part.out), own))
            end += part.out

        def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
            for run, columns, own in planned:
                if own is None:
                    run(x, out[:, columns])
                else:  # its kernels write whole rows
                    run(x, own)
                    out[:rows, columns].copy_(own[:rows])

        return multiply


LoweredMatrix = DenseMatrix | QuantisedMatrix | SeparateMatrix


class Matrices:
    """Lowers matrices. A dense one knows all others of its shape, on which its kernels are timed."""

    def __init__(self, products: Products, ops: Ops) -> None:
        self._products, self._ops = products, ops
        self._like: dict[tuple[int, int], list[torch.Tensor]] = {}

    def lower(self, matrix: Matrix, alignment: int = 1) -> LoweredMatrix:
        """A matrix of one format, or one of several. `alignment`: see `DenseMatrix`."""
        if not any(matrix.formats):
            like = self._like.setdefault(matrix.shape, [])
            return DenseMatrix(matrix, self._products, self._ops.last_columns, like, alignment)
        if can_fuse(matrix):
            return QuantisedMatrix(matrix, self._products.dtype, self._ops)
        bias = fuse_biases(matrix)  # first: the parts' own become views of it
        parts = [self.lower(Matrix((part,), matrix.transposed)) for part in matrix.parts]
        return SeparateMatrix([part for part in parts if not isinstance(part, SeparateMatrix)], bias)
