"""Linear layers in int8: weights and activations quantised per row, their products exact integers.

A weight's row (an output channel) and an activation's row (a token) have a scale each: their largest magnitude becomes
127. Sums of integers do not depend on their order, so a row's result does not depend on the other rows of its step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from lookahead.backends.cpu.onnx_model import MICROSOFT, Array, OnnxModel
from lookahead.models.number_formats import Codes, Format

INTEGERS = Format(Codes.INT8, 0, activations=Codes.INT8)
"""The format of the layers that are computed so."""
LEVELS = 127
"""The largest magnitude of a quantised number."""
MIDDLE = 128
"""The unsigned byte that represents zero."""


def quantised_bytes(made: OnnxModel, x: str) -> tuple[str, str]:
    """Rows [R, in] as bytes, and their scales [R, 1]: x is about (bytes - MIDDLE) * scales.

    All that is quantised in one model must have the same number of rows. A row of zeros has the scale 0. Its
    bytes may be any, because the scale multiplies what becomes of them. Matrices that multiply the same x share both.
    """
    steps = made.once(f"steps of {x}", lambda: _steps(made, x))
    middles = made.once("middles", lambda: _middles(made, steps))
    rows = made.once(f"bytes of {x}", lambda: made.add("QuantizeLinear", x, steps, middles, axis=0))
    return rows, made.once(f"scales of {x}", lambda: made.add("Unsqueeze", steps, made.constant([1])))


def _steps(made: OnnxModel, x: str) -> str:
    """The scale of each row [R]."""
    largest = made.add("ReduceMax", made.add("Abs", x), made.constant([1]), keepdims=0)
    steps: str = made.add("Mul", largest, made.constant(1 / LEVELS, np.float32))
    return steps


def _middles(made: OnnxModel, steps: str) -> str:
    """The byte that represents zero, once per row."""
    middle = helper.make_tensor("middle", onnx.TensorProto.UINT8, [1], [MIDDLE])
    middles: str = made.add("ConstantOfShape", made.add("Shape", steps), value=middle)
    return middles


def integer_product(made: OnnxModel, name: str, rows: str, quantised: np.ndarray[Any, Any], scales: Array) -> str:
    """Rows [R, in] of bytes around MIDDLE, times int8 weights [in, out], times the scales [out]: [R, out]."""
    zero: Any = np.int8(0)
    if not signed_products_are_exact():
        quantised, zero = (quantised.astype(np.int16) + MIDDLE).astype(np.uint8), np.uint8(MIDDLE)
    result: str = made.add(
        "MatMulIntegerToFloat",
        rows,
        made.weight(f"{name}.int8", quantised),
        made.constant(1, np.float32),
        made.weight(f"{name}.scales", scales),
        made.constant(MIDDLE, np.uint8),
        made.constant(zero, zero.dtype),
        domain=MICROSOFT,
    )
    return result


@cache
def signed_products_are_exact() -> bool:
    """Whether products of unsigned and signed bytes are exact here.

    On x86 without VNNI instructions they are not: two products are added in 16 bits, which overflow. Products of two
    unsigned bytes are exact everywhere, but slower where VNNI is available.
    """
    left, right = np.full((2, 64), 255, np.uint8), np.full((64, 32), LEVELS, np.int8)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["left", "right"], ["product"])],
        "product",
        [value("left", onnx.TensorProto.UINT8, left.shape)],
        [value("product", onnx.TensorProto.INT32, (2, 32))],
        [onnx.numpy_helper.from_array(right, "right")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    product: np.ndarray[Any, Any] = session.run(None, {"left": left})[0]
    return bool((product == left.astype(np.int32) @ right.astype(np.int32)).all())
