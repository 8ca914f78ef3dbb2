"""Products by number formats: what the integers of int8 give, row by row, what others give, and several parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from described import matrix
from onnx import TensorProto, helper
from quantising import int8_by_hand, quantised, random_layer

from lookahead.backends.cpu.onnx_model import OnnxModel
from lookahead.backends.cpu.products import is_integer, merged
from lookahead.backends.cpu.products import linear as lower_linear
from lookahead.backends.cpu.session import start
from lookahead.loading.formats import CPU_INT8
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import Codes, Format


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(x: Any, linear: Matrix) -> Any:
    """Rows [R, in] times a matrix, in int8 unless it is quantised already."""
    return product_of(x, linear if any(linear.formats) else quantised(linear))


def product_of(x: Any, linear: Matrix) -> Any:
    """Rows [R, in] times a matrix."""
    made = OnnxModel()
    made.add_named("Identity", [lower_linear(made, "layer", "x", linear)], ["y"])
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, ["R", x.shape[1]])], [value("y", TensorProto.FLOAT, None)]
    return start(made.file(inputs, outputs), made.arrays, 1).run(None, {"x": x})[0]


def by_hand(x: Any, linear: Matrix) -> Any:
    codes, scales = int8_by_hand(linear.weight().numpy())
    steps = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 127)
    integers = np.rint(x / steps).astype(np.int64) @ codes.T.astype(np.int64)
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


# Other formats


FORMATS = [
    Format(Codes.E4M3, 0),
    Format(Codes.E4M3, 16, rows=8),
    Format(Codes.INT8, 0),
    Format(Codes.INT8, 32, activations=Codes.INT8),
    Format(Codes.INT4, 32, zeros=True, ordered=True),
    Format(Codes.INT4, 32, offsets=True, activations=Codes.INT8),
    Format(Codes.E2M1, 32),
    Format(Codes.E4M3, 0, activations=Codes.E4M3),
]


def by_layers(x: Any, linear: Matrix) -> Any:
    with torch.no_grad():
        return torch.cat([part(torch.from_numpy(x)) for part in linear.parts], dim=1).numpy()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_other_formats_are_expanded_and_round_their_activations(format: Format) -> None:
    x = random(5, 96) * np.logspace(-2, 2, 5, dtype=np.float32)[:, None]
    x[2] = 0
    linear = Matrix((random_layer(format, 40, 96).with_bias(torch.randn(40)), random_layer(format, 24, 96, seed=1)))
    assert np.allclose(product(x, linear), by_layers(x, linear), rtol=1e-4, atol=1e-4)


def test_a_matrix_may_have_parts_of_several_formats() -> None:
    """Plain, in integers, expanded, and with rounded activations: each is what it is alone."""
    x, formats = random(5, 96), (CPU_INT8, FORMATS[0], FORMATS[-1], CPU_INT8)
    parts = [random_layer(format, 24, 96) for format in formats]
    linear = Matrix((torch.nn.Linear(96, 8), *parts))
    assert np.allclose(product(x, linear), by_layers(x, linear), rtol=1e-4, atol=1e-4)
    alone = [product_of(x, Matrix((part,))) for part in linear.parts]
    assert np.allclose(product(x, linear), np.concatenate(alone, axis=1), rtol=1e-6, atol=1e-6)
    assert [is_integer(Matrix((part,))) for part in linear.parts] == [False, True, False, False, True]


@pytest.mark.parametrize("format", [None, CPU_INT8, *FORMATS], ids=str)
def test_merged_parts_are_rows_in_another_order(format: Format | None) -> None:
    x, rows = random(5, 96), [3, 30, 1, 0, 16]
    parts = [matrix(random(out, 96, seed=out), random(out)).parts[0] for out in (24, 8)]
    if format is not None:
        parts = [random_layer(format, out, 96, seed=out).with_bias(torch.randn(out)) for out in (24, 8)]
    linear = Matrix(tuple(parts))
    made = merged(linear, rows)
    assert torch.equal(made.weight(), linear.weight()[rows])
    assert torch.equal(made.bias(), linear.bias()[rows])
    keeps = format is not None and format.rows == 1 and not format.ordered
    assert made.formats == ((format,) if keeps else (None,))
    if format is None or keeps:
        assert np.allclose(product_of(x, made), product_of(x, linear)[:, rows], rtol=1e-5, atol=1e-5)
    assert torch.equal(merged(linear, slice(7), bias_scale=2.0).bias(), 2 * linear.bias()[:7])
