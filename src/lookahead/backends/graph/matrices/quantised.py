"""Matrices whose weights are quantised: codes and scales, read by one kernel at any number of rows.

As with dense matrices, modules that read the same input are fused, and their own tensors become parts of the fused
ones. The codes are put into the order in which the kernel reads them, one matrix after the other, so that meanwhile
one matrix is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from lookahead.backends.graph.matrices.dense import Multiply
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.quantised import QuantisedLinear, interleaved
from lookahead.models.spec import Matrix

EIGHT_ROWS, TWO_PIECES = 8, 128
"""Codes are interleaved if a matrix has a multiple of this many rows, of this many bytes; the kernel for others is
slower."""


class QuantisedMatrix:
    """W [out, in] in codes with scales, and its bias [out] or None."""

    def __init__(self, matrix: Matrix, ops: Ops) -> None:
        fuse_quantised(matrix)
        parts = parts_of(matrix)
        self.out, self.width = matrix.shape
        self.bias, self._matrix, self._products = matrix.bias(), matrix, ops.quantised
        tensors: dict[str, Any] = {name: _whole([getattr(part, name) for part in parts]) for name in TENSORS}
        self._tensors = {**tensors, "order": parts[0].order}
        if self._products is not None:
            from lookahead.backends.graph.kernels.quantised import QuantisedWeights

            self._weights = QuantisedWeights(
                parts[0].format, self.out, self.width, **self._tensors, interleaved=parts[0].is_interleaved
            )
            self._products.reserve(self._weights)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        return [tensor for tensor in (*self._tensors.values(), self.bias) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return sum(tensor.nbytes for tensor in self._tensors.values() if tensor is not None)

    def new_out(self, rows: int) -> torch.Tensor:
        """Memory [rows, out] that products may be written to."""
        return torch.empty(rows, self.out, dtype=parts_of(self._matrix)[0].dtype, device=self.device)

    def plan(self, rows: int) -> Multiply:
        """The product for a step of this many rows, without the bias: the kernel that reads the product adds it."""
        run = self._expand if self._products is None else self._products.plan(self._weights, rows)
        return lambda x, out: run(x[:rows], out[:rows])

    def _expand(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The product without a kernel."""
        out.copy_(F.linear(x, self._matrix.weight().to(x.dtype)))


def parts_of(matrix: Matrix) -> list[QuantisedLinear]:
    return [part for part in matrix.parts if isinstance(part, QuantisedLinear)]


def can_fuse(matrix: Matrix) -> bool:
    """Whether all parts are quantised in one format, so that they can be one matrix."""
    parts = parts_of(matrix)
    first = parts[0] if parts else None
    if first is None or len(parts) < len(matrix.parts):
        return False
    formats = {replace(part.format, rows=1) for part in parts}
    orders = [part.order for part in parts if part.order is not None]
    dtypes = {part.scales.dtype for part in parts}
    return len(formats) == len(dtypes) == 1 and all(torch.equal(order, orders[0]) for order in orders)


TENSORS = ("codes", "scales", "zeros", "offsets")


@torch.no_grad()
def fuse_quantised(matrix: Matrix, device: torch.device | None = None) -> None:
    """Make the tensors of a matrix's parts parts of one each, on `device`, with interleaved codes if possible."""
    parts = parts_of(matrix)
    if activations := next((part.format.activations for part in parts if part.format.activations), None):
        raise UnsupportedModelError(f"its activations are rounded to {activations.value}")
    if _are_fused(parts):
        return
    for part in parts:
        part.to(device or part.codes.device)
    if any(part.format != parts[0].format or part.out_features % part.format.rows for part in parts[:-1]):
        for part in parts:
            spread_scales(part)
    able = all(part.out_features % EIGHT_ROWS == 0 and part.codes.shape[1] % TWO_PIECES == 0 for part in parts)
    for name in TENSORS:
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            continue
        if name == "codes" and able:
            tensors = [interleaved(tensor) for tensor in tensors]
        fused = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
        for part, view in zip(parts, fused.split([len(tensor) for tensor in tensors]), strict=True):
            setattr(part, name, view)
    order = None if parts[0].order is None else parts[0].order.to(torch.int32)
    for part in parts:
        part.order, part.is_interleaved = order, able


def _are_fused(parts: Sequence[QuantisedLinear]) -> bool:
    """Whether that has been done: the parts' codes lie one after the other."""
    if len(parts) == 1 or parts[0].is_interleaved:
        return parts[0].is_interleaved
    codes = [part.codes for part in parts]
    return all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + before.nbytes == after.data_ptr()
        for before, after in pairwise(codes)
    )


def spread_scales(part: QuantisedLinear) -> None:
    """Give each row of a part scales of its own, where several rows share them."""
    rows = part.format.rows
    for name in TENSORS[1:]:
        tensor = getattr(part, name)
        if tensor is not None and rows > 1:
            setattr(part, name, tensor.repeat_interleave(rows, 0)[: part.out_features])
    part.format = replace(part.format, rows=1)


def _whole(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The tensor of which these are the parts, in their order."""
    first = parts[0]
    if first is None or len(parts) == 1:
        return first
    rows = sum(len(part) for part in parts if part is not None)
    return torch.as_strided(first, (rows, first.shape[1]), first.stride(), first.storage_offset())
