"""Quantised linear layers: their layout, what it expands to, and rounding to it."""

import pytest
import torch
from quantising import random_layer
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import E2M1, Codes, Format, nearest_e2m1, rounded, values_of
from lookahead.models.packing import BLOCK, packed
from lookahead.models.quantised import MOST_EXPANDED, QuantisedLinear, activations_name, formats_of, weights_name
from lookahead.models.rounding import quantise


def by_hand(layer: QuantisedLinear) -> torch.Tensor:
    """W [out, in] of a layer, number by number."""
    format, out, width = layer.format, layer.out_features, layer.in_features
    weight = torch.zeros(out, width)
    for n in range(out):
        for k in range(width):
            row, group = n // format.rows, k // (format.group or width)
            if format.codes.bits == 8:
                kind = torch.int8 if format.codes is Codes.INT8 else torch.float8_e4m3fn
                value = float(layer.codes[n, k].view(kind))
            else:
                start = k // BLOCK * BLOCK
                half = min(BLOCK, width - start) // 2
                high, byte = divmod(k - start, half)
                nibble = int(layer.codes[n, start // 2 + byte]) >> 4 * high & 15
                zero = 8 if layer.zeros is None else int(layer.zeros[row, group])
                value = nibble - zero if format.codes is Codes.INT4 else (-1) ** (nibble >> 3) * E2M1[nibble & 7]
            scale = layer.scales[row, group]
            number = value * (2.0 ** (int(scale) - 127) if scale.dtype is torch.uint8 else float(scale))
            number += 0 if layer.offsets is None else float(layer.offsets[row, group])
            weight[n, k if layer.order is None else int(layer.order[k])] = number
    return weight


FORMATS = [
    Format(Codes.E4M3, 64),
    Format(Codes.E4M3, 16, rows=8),
    Format(Codes.INT8, 0),
    Format(Codes.INT4, 32),
    Format(Codes.INT4, 32, zeros=True),
    Format(Codes.INT4, 32, zeros=True, ordered=True),
    Format(Codes.INT4, 32, offsets=True),
    Format(Codes.E2M1, 32),
]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(24, 64), (13, 72), (9, 550)], ids=str)
@pytest.mark.thinned(1, most=4)
def test_weights_are_those_computed_number_by_number(format: Format, shape: tuple[int, int]) -> None:
    layer = random_layer(format, *shape)
    torch.testing.assert_close(layer.dequantised(), by_hand(layer), rtol=1e-6, atol=0)
    assert layer.dequantised().shape == shape == Matrix((layer,)).shape
    x = torch.randn(3, shape[1])
    assert torch.equal(layer(x), F.linear(x, layer.dequantised()))


@pytest.mark.parametrize("format", [*FORMATS, Format(Codes.INT8, 0, activations=Codes.INT8)], ids=str)
@pytest.mark.parametrize("most", [1, 200, 1 << 10])
def test_a_large_matrix_is_expanded_some_rows_at_a_time(
    format: Format, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = random_layer(format, 37, 64).with_bias(torch.randn(37)), torch.randn(2, 3, 64)
    whole = layer(x)
    monkeypatch.setitem(MOST_EXPANDED, "cpu", most)
    expand = layer.dequantised_rows
    sizes: list[int] = []
    monkeypatch.setattr(
        layer, "dequantised_rows", lambda first, last, dtype: sizes.append(last - first) or expand(first, last, dtype)
    )
    torch.testing.assert_close(layer(x), whole, rtol=1e-4, atol=1e-3)
    assert sum(sizes) == 37
    assert max(sizes) == max(most // (64 * format.rows), 1) * format.rows


def test_another_bias() -> None:
    layer, bias = random_layer(Format(Codes.INT4, 32, zeros=True), 24, 64), torch.randn(24)
    other = layer.with_bias(bias)
    assert other.codes is layer.codes
    assert layer.bias is None
    x = torch.randn(3, 64)
    assert torch.equal(other(x), F.linear(x, layer.dequantised(), bias))


def test_names_of_what_a_model_has() -> None:
    layers = [random_layer(Format(Codes.E4M3, 0), 4, 8), torch.nn.Linear(8, 4)]
    model = torch.nn.Sequential(*layers, *layers)
    assert formats_of(model) == (Format(Codes.E4M3, 0),)
    assert (weights_name(model, torch.bfloat16), activations_name(model)) == ("fp8", None)
    assert weights_name(layers[1], torch.bfloat16) == "bfloat16"
    model.append(random_layer(Format(Codes.INT4, 4, activations=Codes.INT8), 4, 8))
    assert (weights_name(model, torch.bfloat16), activations_name(model)) == ("fp8+int4", "int8")


def test_the_name_of_fp8_whose_rows_are_rounded() -> None:
    """Also beside experts in fp8, as `dtype='fp8_dynamic'` makes them."""
    rounds = random_layer(Format(Codes.E4M3, 0, activations=Codes.E4M3), 4, 8)
    for model in (torch.nn.Sequential(rounds), torch.nn.Sequential(random_layer(Format(Codes.E4M3, 0), 4, 8), rounds)):
        assert (weights_name(model, torch.bfloat16), activations_name(model)) == ("fp8_dynamic", "fp8")


def test_packing_and_unpacking_are_inverse() -> None:
    for width in (64, 256, 512, 550):
        nibbles = torch.randint(0, 16, (3, width))
        assert torch.equal(values_of(packed(nibbles), Codes.INT4), nibbles.float() - 8)


@pytest.mark.parametrize(
    ("format", "bound"),
    [(Format(Codes.E4M3, 0), 2**-4), (Format(Codes.INT8, 0), 1 / 254), (Format(Codes.INT4, 32), 1 / 13.9)],
    ids=str,
)
def test_rounding_to_a_format_is_to_the_nearest_value(format: Format, bound: float) -> None:
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))
    layer = quantise(weight, format, torch.arange(20.0))
    error = (layer.dequantised() - weight).abs().unflatten(1, (-1, format.group or 96))
    most = weight.abs().unflatten(1, (-1, format.group or 96)).amax(2, keepdim=True)
    assert (error <= bound * most).all()
    again = quantise(layer.dequantised(), format)
    assert torch.equal(again.codes, layer.codes)
    assert layer.bias is not None
    assert torch.equal(layer.bias, torch.arange(20.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 72, 33 * 2])
@pytest.mark.thinned(1, most=3)
def test_rounding_with_zero_points(width: int, dtype: torch.dtype) -> None:
    """Every number is within half a step of its group's, as far as the scale is; 0 stays 0, wherever a group lies."""
    weight = torch.randn(20, width, generator=torch.Generator().manual_seed(1))
    weight[0], weight[1], weight[2] = 0, weight[1].abs() + 3, -weight[2].abs() - 3
    weight[3], weight[4], weight[5] = 2.5, -2.5, weight[5] * 1e-3
    weight[6:, ::5] = 0
    weight = weight.to(dtype)
    layer = quantise(weight, Format(Codes.INT4, 32, zeros=True))
    assert layer.zeros is not None
    assert (layer.scales.dtype, layer.zeros.dtype, int(layer.zeros.max())) == (dtype, torch.uint8, 15)
    found = layer.dequantised()
    torch.testing.assert_close(found, by_hand(layer), rtol=1e-6, atol=0)
    assert not found[weight == 0].any()
    wide = F.pad(weight.float(), (0, -width % 32)).unflatten(1, (-1, 32))
    steps = (wide.amax(2).clamp(min=0) - wide.amin(2).clamp(max=0)) / 15
    error = F.pad((found - weight.float()).abs(), (0, -width % 32)).unflatten(1, (-1, 32))
    lost = 15 * torch.finfo(dtype).eps  # in 15 rounded steps; both ends may be half a step away
    assert (error <= (0.5 + lost) * steps[:, :, None] * 1.001).all()
    symmetric = quantise(weight, Format(Codes.INT4, 32)).dequantised()
    for rows in (slice(1, 3), slice(5, 20)):
        assert (found - weight.float())[rows].norm() < (symmetric - weight.float())[rows].norm()


def test_rounding_to_zero_points_again_changes_nothing() -> None:
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(3))
    layer = quantise(weight, Format(Codes.INT4, 32, zeros=True))
    again = quantise(layer.dequantised(), layer.format)
    torch.testing.assert_close(again.dequantised(), layer.dequantised(), rtol=1e-6, atol=1e-7)


def test_tiny_weights_in_float16_become_zero() -> None:
    """Their scale is 0 there."""
    weight = torch.full((2, 64), 6e-8, dtype=torch.float16)
    weight[1] *= -1
    layer = quantise(weight, Format(Codes.INT4, 32, zeros=True))
    assert not layer.dequantised().any()


def test_numbers_become_the_nearest_of_fp4() -> None:
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    numbers = torch.cat([torch.linspace(-9, 9, 4001), values])
    chosen = values[nearest_e2m1(numbers).long()]
    assert torch.equal((numbers - chosen).abs(), (numbers[:, None] - values).abs().amin(1))
    # Of two that are equally near it is the one whose code is even.
    halfway = (values[1:8] + values[:7]) / 2
    assert nearest_e2m1(halfway).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nearest_e2m1(-halfway).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_rounding_to_mxfp4() -> None:
    """A power of two per group of 32: OCP's, the largest for which the group's largest magnitude is at least 4."""
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))
    weight[0, :32], weight[1, 5], weight[2, 7] = 0, 8.0, 7.999
    layer = quantise(weight, Format(Codes.E2M1, 32))
    groups = weight.unflatten(1, (-1, 32))
    scales, most = torch.exp2(layer.scales.float() - 127), groups.abs().amax(2)
    ratio = (most / scales)[most > 0]
    assert layer.scales.dtype is torch.uint8
    assert ((ratio >= 4) & (ratio < 8)).all()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    nearest = (groups / scales[:, :, None])[..., None].sub(values).abs().argmin(-1)
    expected = values[nearest] * scales[:, :, None]
    assert torch.equal(layer.dequantised().unflatten(1, (-1, 32)), expected)
    assert float(layer.dequantised()[1, 5]) == 8.0
    assert float(layer.dequantised()[2, 7]) == 6.0
    assert not layer.dequantised()[0, :32].any()
    again = quantise(layer.dequantised(), layer.format)
    assert torch.equal(again.dequantised(), layer.dequantised())


@pytest.mark.parametrize("width", [72, 550])
def test_the_last_group_of_mxfp4_may_be_shorter(width: int) -> None:
    weight = torch.randn(5, width, generator=torch.Generator().manual_seed(2))
    layer = quantise(weight, Format(Codes.E2M1, 32))
    assert layer.dequantised().shape == weight.shape
    torch.testing.assert_close(layer.dequantised(), by_hand(layer))
    assert (layer.dequantised() - weight).norm() < 0.15 * weight.norm()


def test_a_matrix_of_quantised_and_plain_parts_has_the_weights_and_biases_of_both() -> None:
    plain, layer = torch.nn.Linear(64, 8), random_layer(Format(Codes.INT4, 32), 24, 64)
    matrix = Matrix((plain, layer))
    assert matrix.shape == (32, 64)
    assert matrix.formats == (None, layer.format)
    assert torch.equal(matrix.weight(), torch.cat([plain.weight, layer.dequantised()]))
    assert torch.equal(matrix.bias(), torch.cat([plain.bias, torch.zeros(24)]))


def test_a_quantised_part_of_a_transposed_matrix_is_not_transposed() -> None:
    plain, layer = Conv1D(8, 64), random_layer(Format(Codes.INT4, 32), 24, 64)
    matrix = Matrix((plain, layer), transposed=True)
    assert matrix.shape == (32, 64)
    assert torch.equal(matrix.weight(), torch.cat([plain.weight.T, layer.dequantised()]))


def test_rounded_activations_have_a_scale_per_row() -> None:
    x = torch.randn(4, 64) * torch.tensor([1e-3, 1, 10, 0])[:, None]
    for codes, bound in ((Codes.INT8, 1 / 254), (Codes.E4M3, 2**-4)):
        error = (rounded(x, codes) - x).abs()
        assert (error <= bound * x.abs().amax(1, keepdim=True) * 1.001).all()
        assert torch.equal(rounded(x[1:2], codes), rounded(x, codes)[1:2])


def test_tensors_that_do_not_fit_the_format_are_refused() -> None:
    codes, scales = torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2)
    with pytest.raises(ValueError, match=r"scales of \[8, 2\].*needs \[8, 1\]"):
        QuantisedLinear(Format(Codes.INT8, 0), codes, scales)
    with pytest.raises(ValueError, match="zeros are missing"):
        QuantisedLinear(Format(Codes.INT4, 64, zeros=True), codes, scales)
