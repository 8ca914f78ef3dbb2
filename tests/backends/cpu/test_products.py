"""Products in int8: what the integers give, row by row, and matrices of several parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from described import matrix
from onnx import TensorProto, helper

from lookahead.backends.cpu.int8 import Int8Products, quantise
from lookahead.backends.cpu.onnx_model import OnnxModel
from lookahead.backends.cpu.session import start
from lookahead.models.spec import Matrix


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(x: Any, linear: Matrix) -> Any:
    """Rows [R, in] times a matrix, in int8."""
    made = OnnxModel()
    made.add_named("Identity", [Int8Products().linear(made, "layer", "x", linear)], ["y"])
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, ["R", x.shape[1]])], [value("y", TensorProto.FLOAT, None)]
    return start(made.file(inputs, outputs), made.arrays, 1).run(None, {"x": x})[0]


def by_hand(x: Any, linear: Matrix) -> Any:
    quantised, scales = quantise(linear.weight().numpy())
    steps = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 127)
    integers = np.rint(x / steps).astype(np.int64) @ quantised.astype(np.int64)
    return integers * scales * steps + (linear.bias().numpy() if linear.has_bias else 0)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_products_are_those_of_the_integers(rows: int) -> None:
    """A scale for each row: rows differ much in size, and the large ones must not spoil the small ones."""
    x = random(rows, 96) * np.logspace(-3, 3, rows, dtype=np.float32)[:, None]
    linear = matrix(random(40, 96, seed=1), random(40, seed=2))
    assert np.allclose(product(x, linear), by_hand(x, linear), rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x, linear = random(33, 576), matrix(random(64, 576, seed=1))
    together = product(x, linear)
    for rows in (1, 2, 3, 5, 16):
        assert np.array_equal(product(x[:rows], linear), together[:rows])
    assert np.array_equal(product(x[20:21] * 1, linear), together[20:21])


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38])
def test_a_row_of_zeros_gives_the_bias(tiny: float) -> None:
    x, linear = random(3, 96), matrix(random(40, 96, seed=1), random(40, seed=2))
    x[1] = tiny
    found = product(x, linear)
    assert np.array_equal(found[1], linear.bias())
    assert np.allclose(found[::2], by_hand(x[::2], linear), rtol=1e-5, atol=1e-6)


def test_the_parts_of_a_matrix_give_what_they_give_alone() -> None:
    x = random(4, 96)
    alone = [matrix(random(24, 96, seed=1)), matrix(random(8, 96, seed=2), random(8, seed=3))]
    expected = np.concatenate([product(x, one) for one in alone], axis=1)
    assert np.array_equal(product(x, Matrix((*alone[0].parts, *alone[1].parts))), expected)
