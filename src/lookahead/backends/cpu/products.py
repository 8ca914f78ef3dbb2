"""Matrix products of a step, lowered by the number formats of a matrix's parts.

Parts whose weights and activations are in int8, with a scale per row, become products of integers (see `int8`). All
others are products in fp32: of a part's own weights, or of what quantised weights expand to. Where a format rounds
activations, the rows are rounded first, as the model's own layer does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from onnx import TensorProto

from lookahead.backends.cpu.int8 import INTEGERS, integer_product, quantised_bytes
from lookahead.backends.cpu.onnx_model import FLOAT, OnnxModel, array
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import Codes
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.spec import Decoder, expert_matrices_in, matrices_in


def linear(made: OnnxModel, name: str, x: str, matrix: Matrix, scale: float = 1.0) -> str:
    """Rows [R, in] -> [R, out], times `scale`. A plain matrix of one part is read in place; of several, copied."""
    pieces = [Matrix(tuple(parts), matrix.transposed) for _, parts in groupby(matrix.parts, _kind)]
    if len(pieces) > 1:
        each = [linear(made, f"{name}.{number}", x, piece, scale) for number, piece in enumerate(pieces)]
        return str(made.add("Concat", *each, axis=1))
    if is_integer(matrix):
        return _integer_linear(made, name, x, matrix, scale)
    activations = _activations(matrix.parts[0])
    return _float_linear(made, name, x if activations is None else _rounded(made, x, activations), matrix, scale)


def _kind(part: torch.nn.Module) -> tuple[bool, Codes | None]:
    """Neighbouring parts of one kind are one product."""
    return isinstance(part, QuantisedLinear) and part.format == INTEGERS, _activations(part)


def _activations(part: torch.nn.Module | torch.Tensor) -> Codes | None:
    return part.format.activations if isinstance(part, QuantisedLinear) else None


def computed_in(decoder: Decoder) -> torch.dtype:
    """What the activations of a model's products are rounded to; float32 where they are not rounded."""
    parts = [part for matrix in matrices_in(decoder) for part in matrix.parts]
    experts = [matrix.weights for matrix in expert_matrices_in(decoder)]
    rounded = {_activations(part) for part in (*parts, *experts)}
    kinds = {Codes.INT8: torch.int8, Codes.E4M3: torch.float8_e4m3fn}
    return next((dtype for codes, dtype in kinds.items() if codes in rounded), torch.float32)


def is_integer(matrix: Matrix) -> bool:
    """Whether its products are those of integers."""
    return all(format == INTEGERS for format in matrix.formats)


def _float_linear(made: OnnxModel, name: str, x: str, matrix: Matrix, scale: float) -> str:
    bias, weight = matrix.bias(), matrix.weight().float()
    biases = [] if bias is None else [made.weight(f"{name}.bias", array(bias.float()))]
    in_place = matrix.transposed and matrix.formats == (None,)
    own = made.weight(name, array(weight.T if in_place else weight))
    scales: dict[str, Any] = {} if scale == 1.0 else {"alpha": scale, "beta": scale}
    result: str = made.add("Gemm", x, own, *biases, transB=0 if in_place else 1, **scales)
    return result


def _rounded(made: OnnxModel, x: str, codes: Codes) -> str:
    """Rows [R, in], each rounded to codes with one scale, as `models.number_formats.rounded` does it."""
    return made.once(f"{codes.value} of {x}", lambda: _rounding(made, x, codes))


def _rounding(made: OnnxModel, x: str, codes: Codes) -> str:
    most = made.constant(127 if codes is Codes.INT8 else 448, np.float32)
    largest = made.add("ReduceMax", made.add("Abs", x), made.constant([1]), keepdims=1)
    steps = made.add("Div", made.add("Max", largest, made.constant(1e-30, np.float32)), most)
    rows = made.add("Div", x, steps)
    if codes is Codes.INT8:
        rows = made.add("Round", rows)
    else:
        rows = made.add("Cast", made.add("Cast", rows, to=TensorProto.FLOAT8E4M3FN), to=FLOAT)
    result: str = made.add("Mul", rows, steps)
    return result


def _integer_linear(made: OnnxModel, name: str, x: str, matrix: Matrix, scale: float) -> str:
    # 1. Quantise the rows.
    rows, steps = quantised_bytes(made, x)
    # 2. Multiply the integers, then both scales.
    parts = cast(Sequence[QuantisedLinear], matrix.parts)
    codes = _joined([part.codes for part in parts]).view(torch.int8).numpy()
    scales = array(_joined([part.scales for part in parts])[:, 0].float()) * np.float32(scale)
    product = integer_product(made, name, rows, np.ascontiguousarray(codes.T), scales)
    result: str = made.add("Mul", product, steps)
    bias = matrix.bias()
    if bias is not None:
        result = made.add("Add", result, made.weight(f"{name}.bias", array(bias.float() * scale)))
    return result


def merged(matrix: Matrix, rows: slice | list[int] = slice(None), bias_scale: float = 1.0) -> Matrix:
    """These outputs of a matrix, in this order, as one part, with the bias times `bias_scale`.

    In the format of the parts, if they share one whose rows can be taken one by one; else plain. A slice of a single
    plain part is in its memory.
    """
    bias = matrix.bias()
    if bias is not None:
        bias = bias[rows] if bias_scale == 1.0 else bias[rows] * bias_scale
    format = matrix.formats[0]
    if format is None or set(matrix.formats) != {format} or format.rows != 1 or format.ordered:
        return plain_matrix(matrix.weight()[rows], bias)
    parts = cast(Sequence[QuantisedLinear], matrix.parts)
    names = ["codes", "scales", *["zeros"] * format.zeros, *["offsets"] * format.offsets]
    tensors: dict[str, Any] = {name: _joined([getattr(part, name) for part in parts])[rows] for name in names}
    return Matrix((QuantisedLinear(format, **tensors, bias=bias, dtype=parts[0].dtype),))


def plain_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """A matrix of one part with this weight [out, in] and bias [out], which are not copied."""
    part = torch.nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    part.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        part.bias = torch.nn.Parameter(bias, requires_grad=False)
    return Matrix((part,))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
