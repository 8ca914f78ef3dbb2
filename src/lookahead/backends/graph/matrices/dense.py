"""Matrices in fp32, fp16 or bf16, as the model stores them.

Modules that read the same input are fused into one matrix, for few and large products. The modules' own parameters
become views of that matrix, so nothing is stored twice, the model still works on its own, and in-place changes of its
weights are seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lookahead.backends.graph.matrices.products import Products
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Matrix

Multiply = Callable[[torch.Tensor, torch.Tensor], None]
"""A function of (x [rows, in], out [rows, out]) that computes out = x W^T, for at least the planned rows."""


class DenseMatrix:
    """W [out, in] and its bias [out] or None. `like` are all the model's matrices of this shape, this one included."""

    def __init__(self, matrix: Matrix, products: Products, like: list[torch.Tensor]) -> None:
        self.weight, self.bias = fuse_weights(matrix)
        self._products, self._like = products, like
        like.append(self.weight)

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that captured steps read."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def plan(self, rows: int) -> Multiply:
        """The product for a step of this many rows, without the bias: the kernel that reads the product adds it."""
        product, weight = self._products.plan(self.weight, rows, self._like), self.weight
        return lambda x, out: product(x, weight, out)


class DenseMatrices:
    """Lowers the matrices of one model."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._like: dict[tuple[int, int], list[torch.Tensor]] = {}

    def lower(self, matrix: Matrix) -> DenseMatrix:
        return DenseMatrix(matrix, self._products, self._like.setdefault(matrix.shape, []))


def check_dense(matrix: Matrix) -> None:
    """Raise UnsupportedModelError for a matrix that cannot be fused."""
    if matrix.has_bias and any(part.bias is None for part in matrix.parts):
        raise UnsupportedModelError("of projections that read the same input, some have a bias and some have none")


@torch.inference_mode(False)
@torch.no_grad()
def fuse_weights(matrix: Matrix, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The parts' weights as one matrix [out, in], and their biases as one vector [out], or None.

    Each part's own weight and bias become views of them. Several parts on another `device` are fused there.
    """
    weight = _fuse(matrix.parts, "weight", device)
    return weight, _fuse(matrix.parts, "bias", device) if matrix.has_bias else None


def _fuse(modules: Sequence[torch.nn.Module], name: str, device: torch.device | None) -> torch.Tensor:
    """The modules' parameters [n_i, ...] of this name as one tensor [sum of n_i, ...], of which they become views."""
    parts: list[torch.Tensor] = [getattr(module, name).detach() for module in modules]
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    one_piece = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    one_piece = one_piece and all(part.is_contiguous() for part in parts) and device in (None, parts[0].device)
    if len(parts) == 1 or (one_piece and [part.data_ptr() for part in parts[1:]] == ends[:-1]):  # fused already
        return torch.as_strided(parts[0], (sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    fused = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], device=device)
    for module, part, view in zip(modules, parts, fused.split([len(part) for part in parts]), strict=True):
        view.copy_(part)
        parameter = getattr(module, name)
        if parameter.is_inference() or part.device != view.device:
            grad = parameter.requires_grad and not parameter.is_inference()
            setattr(module, name, torch.nn.Parameter(view, requires_grad=grad))
        else:
            parameter.data = view  # it stays the parameter that an optimizer may know
    return fused
