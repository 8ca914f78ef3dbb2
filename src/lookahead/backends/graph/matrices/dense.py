"""Matrices in fp32, fp16 or bf16, as the model stores them.

Modules that read the same input are fused into one matrix, for few and large products. The modules' own parameters
become views of that matrix, so nothing is stored twice, the model still works on its own, and in-place changes of its
weights are seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from lookahead.backends.graph.matrices.products import Products
from lookahead.models.matrix import Matrix

Multiply = Callable[[torch.Tensor, torch.Tensor], None]
"""A function of (x [rows, in], out [rows, out]) that computes out = x W^T, for at least the planned rows."""

Multiplication = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A function of (x [rows, in], W [out, in], out [rows, out]) that does the same for any matrix."""


class DenseMatrix:
    """W [out, in] and its bias [out] or None. `like` are all the model's matrices of this shape, this one included.

    `alignment`: rows of its products begin at multiples of this, in memory of `new_out`. If `out` is no multiple of it,
    the last columns have a kernel of their own, so that the others have sizes that fast kernels are made for.
    """

    def __init__(
        self,
        matrix: Matrix,
        products: Products,
        last_columns: Multiplication,
        like: list[torch.Tensor],
        alignment: int = 1,
    ) -> None:
        self.weight, self.bias = fuse_weights(matrix)
        self._last_columns = last_columns
        self._aligned = self.out // alignment * alignment
        if self._aligned < self.out:
            products = products.with_stride(self._aligned + alignment)
        self._products, self._like = products, like
        like.append(self.weight)

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return self.weight.nbytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def new_out(self, rows: int) -> torch.Tensor:
        """Memory [rows, out] that products may be written to."""
        return self._products.new_out(self.weight, rows)

    def plan(self, rows: int) -> Multiply:
        """The product for a step of this many rows, without the bias: the kernel that reads the product adds it."""
        product, weight = self._products.plan, self.weight
        if self._aligned == self.out:
            run = product(weight, rows, self._like)
            return lambda x, out: run(x, weight, out)
        aligned, last_columns = self._aligned, self._last_columns
        first, last = weight[:aligned], weight[aligned:]
        run_first = product(first, rows) if aligned else None

        def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
            if run_first is not None:
                run_first(x, first, out[:, :aligned])
            last_columns(x[:rows], last, out[:rows, aligned:])

        return multiply


@torch.inference_mode(False)
@torch.no_grad()
def fuse_weights(matrix: Matrix, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The parts' weights as one matrix [out, in], and their biases as one vector [out], or None.

    Each part's own weight and bias become views of them; a part without a bias stays without one, and has zeros in the
    vector. What has to be copied for that is copied to `device`, if it is given.
    """
    sizes = [Matrix((part,), matrix.transposed).shape[0] for part in matrix.parts]
    weight = _fuse(matrix.parts, "weight", sizes, device, transposed=matrix.transposed)
    return weight, _fuse(matrix.parts, "bias", sizes, device) if matrix.has_bias else None


@torch.inference_mode(False)
@torch.no_grad()
def fuse_biases(matrix: Matrix) -> torch.Tensor | None:
    """The biases alone, as `fuse_weights` fuses them."""
    sizes = [Matrix((part,), matrix.transposed).shape[0] for part in matrix.parts]
    return _fuse(matrix.parts, "bias", sizes, None) if matrix.has_bias else None


def _fuse(
    modules: Sequence[torch.nn.Module],
    name: str,
    sizes: Sequence[int],
    device: torch.device | None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """The modules' parameters [n_i, ...] of this name as one tensor [sum of n_i, ...], of which they become views.

    `sizes` are the n_i. A module without such a parameter has zeros there. `transposed`: the parameters are [..., n_i].
    """
    parts: dict[int, torch.Tensor] = {}
    for number, module in enumerate(modules):
        parameter = getattr(module, name)
        if parameter is not None:
            parts[number] = parameter.detach().T if transposed else parameter.detach()
    if len(sizes) == 1 and not transposed:
        return parts[0]
    fused = _fused_already(parts, sizes, device)
    if fused is not None:
        return fused
    like = next(iter(parts.values()))
    fused = like.new_zeros(sum(sizes), *like.shape[1:], device=device)
    for number, view in enumerate(fused.split(list(sizes))):
        if number not in parts:
            continue
        view.copy_(parts[number])
        own = view.T if transposed else view
        parameter = getattr(modules[number], name)
        if parameter.is_inference() or parameter.device != view.device:
            grad = parameter.requires_grad and not parameter.is_inference()
            setattr(modules[number], name, torch.nn.Parameter(own, requires_grad=grad))
        else:
            parameter.data = own  # it stays the parameter that an optimizer may know
    return fused


def _fused_already(
    parts: dict[int, torch.Tensor], sizes: Sequence[int], device: torch.device | None
) -> torch.Tensor | None:
    """The contiguous tensor on `device` that these parts, by their index, are views of; None if there is none."""
    like, starts = next(iter(parts.values())), [0, *accumulate(sizes)]
    width, storage = like[0].numel(), like.untyped_storage()
    offsets = {part.storage_offset() - starts[number] * width for number, part in parts.items()}
    if len(offsets) > 1 or any(part.untyped_storage().data_ptr() != storage.data_ptr() for part in parts.values()):
        return None
    if not all(part.is_contiguous() for part in parts.values()) or device not in (None, like.device):
        return None
    missing = [number for number in range(len(sizes)) if number not in parts]
    if missing and (offsets != {0} or storage.nbytes() != starts[-1] * width * like.element_size()):
        return None  # what lies between the parts may belong to others
    fused = torch.as_strided(like, (starts[-1], *like.shape[1:]), (width, 1)[-like.dim() :], offsets.pop())
    return None if any(fused[starts[number] : starts[number + 1]].any() for number in missing) else fused
