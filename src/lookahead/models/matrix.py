"""The matrices of a described model: one of the whole layer, or one for each expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.number_formats import Format
from lookahead.models.quantised import QuantisedLinear


@dataclass(frozen=True, eq=False)
class Matrix:
    """y = x W^T + b, for x [rows, in] and y [rows, out].

    `parts` are the model's own linear modules that read the same x; their outputs are concatenated in y. So
    q, k and v are one Matrix, whether the model has one module for them or three. `transposed`: the modules store their
    weights as [in, out], as GPT-2's Conv1D does. A part may be quantised; then it stores [out, in] in any case.
    `formats` are the parts' number formats.
    """

    parts: tuple[torch.nn.Module, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            kind = type(part)
            plain = kind.__name__ == "Conv1D" if self.transposed else _is_linear(kind)
            if not plain and kind is not QuantisedLinear:
                raise UnsupportedModelError(f"a {kind.__name__} is no plain matrix")  # with an adapter, for instance

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        shapes = [_shape(part, self.transposed) for part in self.parts]
        return sum(out for out, _ in shapes), shapes[0][1]

    @property
    def formats(self) -> tuple[Format | None, ...]:
        """The format of each part's weights; None where they are plain numbers."""
        return tuple(part.format if isinstance(part, QuantisedLinear) else None for part in self.parts)

    @property
    def has_bias(self) -> bool:
        """Whether some part has a bias."""
        return any(part.bias is not None for part in self.parts)

    def weight(self) -> torch.Tensor:
        """W [out, in]: of a single plain part its own tensor, maybe transposed; else a copy."""
        turned = [self.transposed and format is None for format in self.formats]
        weights = [_weight(part).T if turn else _weight(part) for part, turn in zip(self.parts, turned, strict=True)]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bias(self) -> torch.Tensor | None:
        """b [out], with zeros where a part has none; None if no part has one."""
        given = [part.bias.detach() if isinstance(part.bias, torch.Tensor) else None for part in self.parts]
        like = next((bias for bias in given if bias is not None), None)
        if like is None:
            return None
        sizes = [_shape(part, self.transposed)[0] for part in self.parts]
        found = [like.new_zeros(size) if bias is None else bias for size, bias in zip(sizes, given, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)


def _is_linear(kind: type[torch.nn.Module]) -> bool:
    """torch's own, or Falcon's, which differs from it in how it rounds a bias."""
    return kind is torch.nn.Linear or kind.__name__ == "FalconLinear"


def _shape(part: torch.nn.Module, transposed: bool) -> tuple[int, int]:
    """(out, in) of a part."""
    if isinstance(part, QuantisedLinear):
        return part.out_features, part.in_features
    first, second = _weight(part).shape
    return (second, first) if transposed else (first, second)


def _weight(part: torch.nn.Module) -> torch.Tensor:
    weight = part.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def check_shape(name: str, matrix: Matrix | ExpertMatrix, expected: tuple[int | None, int | None]) -> None:
    """Raise ValueError for a matrix of another shape: a reader has mixed something up."""
    if any(size is not None and size != found for size, found in zip(expected, matrix.shape, strict=True)):
        raise ValueError(f"{name} is a matrix {matrix.shape}, where (out, in) must be {expected}")


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
    """y = x W[e]^T + b[e], for x [rows, in] of the rows that expert e is given.

    `weights` [experts, out, in] is the model's own tensor, or with `transposed` [experts, in, out]. Quantised, it is
    one layer of experts x out rows, never transposed. `bias` [experts, out].
    """

    weights: torch.Tensor | QuantisedLinear
    experts: int
    bias: torch.Tensor | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.weights, QuantisedLinear):
            rows = self.weights.out_features
            if self.transposed or rows % self.experts or self.weights.bias is not None:
                raise ValueError(f"{rows} quantised rows of {self.experts} experts")
        elif self.weights.ndim != 3 or len(self.weights) != self.experts:
            raise ValueError(f"weights of {list(self.weights.shape)} for {self.experts} experts")
        if self.bias is not None and tuple(self.bias.shape) != (self.experts, self.shape[0]):
            raise ValueError(f"a bias of {list(self.bias.shape)} for {self.experts} experts of {self.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of an expert."""
        if isinstance(self.weights, QuantisedLinear):
            return self.weights.out_features // self.experts, self.weights.in_features
        first, second = self.weights.shape[1:]
        return (second, first) if self.transposed else (first, second)

    @property
    def format(self) -> Format | None:
        """The format of the weights; None for plain numbers."""
        return self.weights.format if isinstance(self.weights, QuantisedLinear) else None

    def weight(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """W [out, in] of an expert."""
        if isinstance(self.weights, QuantisedLinear):
            out = self.shape[0]
            return self.weights.dequantised_rows(expert * out, (expert + 1) * out, dtype)
        own = self.weights[expert].detach().to(dtype)
        return own.T if self.transposed else own
