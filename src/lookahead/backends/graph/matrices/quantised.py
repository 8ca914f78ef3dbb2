"""Matrices whose weights are quantised: codes and scales, read by one kernel at any number of rows.

As with dense matrices, modules that read the same input are fused, and their own tensors become parts of the fused
ones. The codes are put into the order in which the kernel reads them, one matrix after the other, so that meanwhile
one matrix is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from lookahead.backends.graph.matrices.dense import Multiply, fuse_biases
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import NAMES, Codes, Format, rounded
from lookahead.models.packing import INTERLEAVED_BYTES, INTERLEAVED_ROWS, in_words
from lookahead.models.quantised import QuantisedLinear

MOST_PADDING = 0.125
"""Codes are interleaved if this needs no more columns beyond a matrix's own, as a share of them; the kernel for others
is slower. gpt-oss's rows of 2,880 columns get 7% more."""
FP8_ROWS = Format(Codes.E4M3, 0, activations=Codes.E4M3)
"""The format whose rows of x are rounded."""
SMALL_GROUPS = (8, 16, 32)
"""Columns per scale that the kernel for interleaved codes takes, besides multiples of 64."""


class QuantisedMatrix:
    """W [out, in] in codes with scales, and its bias [out] or None. `dtype` is that of the products."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, ops: Ops) -> None:
        self._tensors = fuse_quantised(matrix)
        self._parts, self._dtype = parts_of(matrix), dtype
        self._products = ops.quantised if self._parts[0].format.activations is None else ops.fp8
        self.out, self.width = matrix.shape
        self.bias = fuse_biases(matrix)
        if self._products is not None:
            from lookahead.backends.graph.kernels.quantised_tiles import QuantisedWeights

            self._weights = QuantisedWeights.of(self._parts[0], self.out, self._tensors)
            self._products.reserve(self._weights)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        return [*self._tensors.values()] if self.bias is None else [*self._tensors.values(), self.bias]

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def new_out(self, rows: int) -> torch.Tensor:
        """Memory [rows, out] that products may be written to."""
        return torch.empty(rows, self.out, dtype=self._dtype, device=self.device)

    def plan(self, rows: int) -> Multiply:
        """The product for a step of this many rows, without the bias: the kernel that reads the product adds it."""
        run = self._expand if self._products is None else self._products.plan(self._weights, rows)
        return lambda x, out: run(x[:rows], out[:rows])

    def _expand(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The product without a kernel."""
        activations = self._parts[0].format.activations
        if activations is not None:
            x = rounded(x, activations)
        out.copy_(x @ torch.cat([part.dequantised(x.dtype) for part in self._parts]).T)


def parts_of(matrix: Matrix) -> list[QuantisedLinear]:
    return [part for part in matrix.parts if isinstance(part, QuantisedLinear)]


def check_quantised(matrix: Matrix) -> None:
    """Raise UnsupportedModelError for a format that the kernels do not have."""
    for part in parts_of(matrix):
        format = part.format
        if replace(format, rows=1) != FP8_ROWS:
            check_format(format)


def check_format(format: Format) -> None:
    """The same for the matrices of experts, whose rows are not rounded."""
    if format.activations is not None:
        raise UnsupportedModelError(
            f"it rounds activations to {NAMES[format.activations]}; load it with weights alone quantised, for "
            "instance dtype='fp8', or use backend='eager'"
        )


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


@torch.inference_mode(False)
@torch.no_grad()
def fuse_quantised(matrix: Matrix) -> dict[str, torch.Tensor]:
    """The tensors of a matrix's parts as one each, by name, with interleaved codes if possible.

    The parts' own become views of them. What is fused already is not copied.
    """
    parts = parts_of(matrix)
    if any(part.format != parts[0].format or part.out_features % part.format.rows for part in parts[:-1]):
        for part in parts:
            spread_scales(part)
    able = all(map(can_interleave, parts))
    for part in parts:
        part.set_interleaved(able)
    own = {name: [tensor for part in parts if (tensor := getattr(part, name)) is not None] for name in TENSORS}
    found = {name: _joined(tensors) for name, tensors in own.items() if tensors}
    if able and _has_words(parts[0].format, found["scales"].dtype):
        found["scales"], found["zeros"] = in_words(found["scales"], found["zeros"])
    else:
        found = {name: tensor.contiguous() for name, tensor in found.items()}
    for name, tensor in found.items():
        for part, view in zip(parts, tensor.split(list(map(len, own[name]))), strict=True):
            setattr(part, name, view)
    if parts[0].order is not None:
        found["order"] = parts[0].order.to(torch.int32)
        for part in parts:
            part.order = found["order"]
    return found


def can_interleave(part: QuantisedLinear) -> bool:
    """Whether the kernel for interleaved codes takes a part."""
    if part.format.activations is not None:  # FP8 instructions take codes in the order of the columns
        return False
    group, size = part.format.group, part.in_features * part.format.codes.bits // 8
    padding = -size % INTERLEAVED_BYTES
    fits = padding == 0 or (padding <= MOST_PADDING * size and part.order is None)
    return fits and part.out_features % INTERLEAVED_ROWS == 0 and (group % 64 == 0 or group in SMALL_GROUPS)


def _has_words(format: Format, scales: torch.dtype) -> bool:
    """Whether the kernel reads scales and zero points of interleaved codes as words: where 64 columns share them."""
    plain = format.rows == 1 and not format.offsets and scales.itemsize == 2
    return plain and format.zeros and (format.group == 64 or (format.group > 0 and format.group % 128 == 0))


def spread_scales(part: QuantisedLinear) -> None:
    """Give each row of a part scales of its own, where several rows share them."""
    rows = part.format.rows
    for name in TENSORS[1:]:
        tensor = getattr(part, name)
        if tensor is not None and rows > 1:
            setattr(part, name, tensor.repeat_interleave(rows, 0)[: part.out_features])
    part.format = replace(part.format, rows=1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' rows in one tensor: the one that they are parts of already, or a new one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(part.stride() == first.stride() and part.dtype == first.dtype for part in parts) and all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + len(before) * before.stride(0) * before.itemsize == after.data_ptr()
        for before, after in pairwise(parts)
    ):
        rows = sum(map(len, parts))
        return first.as_strided((rows, first.shape[1]), first.stride())
    return torch.cat(list(parts))
