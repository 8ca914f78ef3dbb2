"""Products of rows that are rounded to FP8: the rounding, every shape and launch, and the same bits for a row among any
others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import slow_but
from quantising import cancelling_layer, random_layer
from rounding import DTYPES

from lookahead.backends.graph.kernels import fp8
from lookahead.backends.graph.kernels.fp8 import (
    EmulatedFp8Products,
    Fp8Products,
    Fp8Tile,
    RoundedRows,
    fitted,
    fp8_products,
    launch_of,
    multiply,
    round_rows,
)
from lookahead.backends.graph.kernels.quantised import QuantisedProducts
from lookahead.backends.graph.kernels.quantised_tiles import HOPPER_SHARED, QuantisedWeights, splits_of
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.number_formats import Codes, Format, rounded
from lookahead.models.quantised import QuantisedLinear

FORMAT = Format(Codes.E4M3, 0, activations=Codes.E4M3)
TILES = (
    Fp8Tile(64, 16, 4, 6, parallel=True),
    Fp8Tile(64, 64, 4, 4, parallel=False),
    Fp8Tile(128, 64, 8, 4, parallel=True),
    Fp8Tile(64, 128, 4, 4, parallel=False),
)
SHAPES = [(104, 512), (1, 40), (13, 130), (70, 1001), (200, 640), (9, 894)]
"""(out, in): whole blocks of 128 columns or not, and rows that are no multiple of 16 bytes."""
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""What all codes stand for."""


def weights_of(layer: QuantisedLinear, device: torch.device) -> QuantisedWeights:
    codes, scales = layer.codes.to(device), layer.scales.to(device)
    return QuantisedWeights.of(layer, layer.out_features, {"codes": codes, "scales": scales})


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded by the kernel, in memory that was full of other codes."""
    memory = RoundedRows.new(x.device, len(x))
    memory.reserve(x.shape[1])
    codes, scales = memory.views(*x.shape)
    codes.fill_(77)
    scales.fill_(float("nan"))
    round_rows(x, codes, scales)
    return codes, scales


def product(x: torch.Tensor, weights: QuantisedWeights, tile: Fp8Tile, splits: int = 2, gap: int = 0) -> torch.Tensor:
    """x W^T, written to rows that are `gap` numbers apart. Nothing else may be written, nor left in the counters."""
    tiles = -(-weights.out // tile.block_n) * -(-len(x) // tile.block_m)
    memory = SplitMemory.new(x.device, tiles * splits * tile.block_n * tile.block_m, tiles + 1)
    memory.partials.fill_(float("nan"))
    out = torch.full((len(x) + 1, weights.out + gap), float("nan"), dtype=x.dtype, device=x.device)
    multiply(*rows_of(x), weights, out[: len(x), : weights.out], tile, splits, memory)
    assert not memory.arrived.any()
    assert out[len(x) :].isnan().all()
    assert out[:, weights.out :].isnan().all()
    return out[: len(x), : weights.out]


def check_product(found: torch.Tensor, x: torch.Tensor, layer: QuantisedLinear) -> None:
    """Within the roundings of sums and of the result, of products whose rows are rounded as the layer's own are.

    Hopper's matrix units keep 14 bits of their sums.
    """
    wide, weight = rounded(x.cpu().float(), Codes.E4M3).double(), layer.dequantised().double().T
    exact, terms = wide @ weight, wide.abs() @ weight.abs()
    error = (found.cpu().double() - exact).abs()
    eps = torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0.0
    sums = 2.0**-12 if x.is_cuda else 2e-6
    assert bool((error <= eps * exact.abs() + sums * terms + 1e-30).all()), float((error / terms).max())


# Rounding


def check_rounding(x: torch.Tensor) -> None:
    """The kernel's numbers are those of `rounded` on a CPU, bit for bit: on CUDA torch divides by a constant with its
    reciprocal. Codes after the last column are zero."""
    codes, scales = (made.cpu() for made in rows_of(x))
    numbers = codes.view(torch.float8_e4m3fn).float()
    assert codes.shape[1] % 128 == 0
    assert not numbers[:, x.shape[1] :].any()
    assert torch.equal((numbers[:, : x.shape[1]] * scales[:, None]).to(x.dtype), rounded(x.cpu(), Codes.E4M3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 130, 576, 1500, 11008])
def test_rows_are_rounded_as_the_layer_rounds_them(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Also rows of zeros, of tiny and of huge numbers, and rows that lie apart."""
    sizes = torch.tensor([1.0, 1e-3, 0.0, 6e4 if dtype is torch.float16 else 1e30, 1e-7])
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).clamp(-1, 1) * sizes[:, None]
    buffer = torch.full((5, width + 7), float("nan"), dtype=dtype, device=device)
    buffer[:, 3 : width + 3] = x
    check_rounding(buffer[:, 3 : width + 3])


def test_a_wide_row_is_rounded_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever piece has its largest number."""
    monkeypatch.setattr(fp8, "ROW_BLOCK", 256)
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    for row, column in enumerate((3, 300, 999, 600)):
        x[row, column] = 30 * (-1) ** row
    check_rounding(x.to(device))


def test_every_code_tie_and_neighbour(device: torch.device) -> None:
    """The largest number of a row is 448: then its scale is 1. Numbers half way between two codes get the even one."""
    codes = NUMBERS[:127]
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e3))])
    x = torch.cat([codes, middles, near, torch.tensor([2.0**-10, 2.0**-30, 1e-38])])
    x = torch.cat([x, -x])[None].to(device)
    check_rounding(x)
    found = rows_of(x)[0][0, : x.shape[1]].cpu()
    assert found[:127].tolist() == list(range(127))
    ties = found[127 : 127 + 126]
    assert not (ties & 1).any()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(odd: float, device: torch.device) -> None:
    x = torch.ones(3, 40, device=device)
    x[1, 7] = odd
    numbers, scales = rows_of(x)
    found = numbers.view(torch.float8_e4m3fn).float()[:, :40] * scales[:, None]
    assert found[1, 7].isnan()
    assert torch.equal(found[::2], x[::2])


# Products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_n}x{tile.block_m} {tile.warps}")
@pytest.mark.thinned(1, most=4)
def test_products(shape: tuple[int, int], tile: Fp8Tile, dtype: torch.dtype, device: torch.device) -> None:
    layer = random_layer(FORMAT, *shape, scales=torch.float32)
    x = torch.randn(21, shape[1], generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 2, 21)[:, None]
    x[4] = 0
    x = x.to(device, dtype)
    found = product(x, weights_of(layer, device), tile, gap=5)
    check_product(found, x, layer)
    assert not found[4].any()


def test_every_code_is_multiplied(device: torch.device) -> None:
    """Of both operands, but NaN: 16 rows of one number, and the numbers of all codes."""
    codes = torch.arange(254, dtype=torch.uint8) % 127 + (torch.arange(254) >= 127) * 128
    layer = QuantisedLinear(FORMAT, codes.to(torch.uint8)[:, None].repeat(1, 2), torch.ones(254, 1))
    layer.codes[:, 1] = 0
    x = torch.stack([NUMBERS[:127], torch.full((127,), 448.0)], 1).to(device)
    expected = NUMBERS[:127, None] * layer.dequantised()[:, 0]
    assert torch.equal(product(x, weights_of(layer, device), TILES[0], splits=1).cpu(), expected)


def test_a_scale_for_several_rows_of_the_matrix(device: torch.device) -> None:
    layer = random_layer(replace(FORMAT, rows=16), 40, 256, scales=torch.float32)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(device)
    check_product(product(x, weights_of(layer, device), TILES[0]), x, layer)


# A row's bits


def test_a_row_has_the_same_bits_in_every_launch(device: torch.device) -> None:
    """Alone, among others, at any offset, in any tile, in splits that run beside or after one another. All sums cancel,
    so that another order of summation changes the bits, as another number of splits does here."""
    layer, x = cancelling_layer(FORMAT, 40, 1024, 24)
    x = x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = weights_of(layer, device)
    expected = product(x, weights, TILES[1])
    assert expected.any()
    assert not torch.equal(expected, product(x, weights, TILES[1], splits=4))
    for tile, first, count in zip(TILES, (0, 7, 20, 23), (24, 17, 2, 1), strict=True):
        assert torch.equal(product(x[first : first + count], weights, tile), expected[first : first + count])


@pytest.mark.parametrize("out", [24, 512, 4096, 40000])
def test_one_reserve_is_enough_for_every_number_of_rows(out: int) -> None:
    """And the memory is not replaced by a narrower matrix, or one of another format: captured steps would lose it."""
    layer = random_layer(FORMAT, 8, 8192, scales=torch.float32)
    others = QuantisedProducts(torch.device("cpu"))
    weights, products = (
        replace(weights_of(layer, torch.device("cpu")), out=out),
        Fp8Products(torch.device("cpu"), others),
    )
    products.reserve(weights)
    splits, memory = splits_of(weights), products.memory
    assert memory is others.memory
    assert (splits > 1) is (out < 10000)
    addresses = [one.data_ptr() for one in (memory.partials, memory.arrived, products.rows.codes, products.rows.scales)]
    for rows in range(1, ROW_SIZES[-1] + 1):
        tile = launch_of(weights, rows, splits)
        assert not (tile.parallel and splits == 1)
        codes, scales = products.rows.views(rows, weights.width)
        assert (codes.shape, scales.shape) == ((rows, weights.width), (rows,))
        tiles = -(-out // tile.block_n) * -(-rows // tile.block_m)
        if tile.parallel:
            assert len(memory.partials) >= tiles * splits * tile.block_n * tile.block_m
            assert len(memory.arrived) >= tiles
    products.reserve(replace(weights, width=100))
    again = [one.data_ptr() for one in (memory.partials, memory.arrived, products.rows.codes, products.rows.scales)]
    assert again == addresses


def test_launches_fit_the_shared_memory_of_a_device() -> None:
    """Every tile has 64 rows of the matrix for each four warps, at least 16 rows of x, and so the same instructions."""
    for out in (12288, 4096, 22016):
        weights = replace(weights_of(random_layer(FORMAT, 8, 4096), torch.device("cpu")), out=out)
        for rows in ROW_SIZES:
            usual = launch_of(weights, rows, splits_of(weights))
            assert fitted(usual, HOPPER_SHARED) == usual
            for shared in (99 << 10, 64 << 10, 32 << 10):
                small = fitted(usual, shared)
                assert small.shared <= shared
                assert small.stages > 1
                assert small.block_m >= 16
                assert small.block_n == 16 * small.warps


def test_a_gpu_without_fp8_multiplies_what_the_codes_stand_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = QuantisedProducts(device)
    assert isinstance(fp8_products(torch.device("cpu"), others), Fp8Products)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    emulated = fp8_products(torch.device("cuda"), others)
    assert isinstance(emulated, EmulatedFp8Products)
    layer = random_layer(FORMAT, 24, 140, scales=torch.float32)
    x = torch.randn(3, 140, generator=torch.Generator().manual_seed(0)).to(device)
    weights, out = weights_of(layer, device), torch.full((3, 24), float("nan"), device=device)
    emulated.reserve(weights)
    emulated.plan(weights, 3)(x, out)
    check_product(out, x, layer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "shape", slow_but([(4096, 4096), (12288, 4096), (520, 8192), (100, 1100)], (4096, 4096), (100, 1100)), ids=str
)
def test_a_row_has_the_same_bits_in_every_step(shape: tuple[int, int], device: torch.device) -> None:
    """In steps of all captured sizes, launched as the backend launches them."""
    layer, x = cancelling_layer(FORMAT, *shape, ROW_SIZES[-1])
    x, weights, products = x.to(device), weights_of(layer, device), fp8_products(device, QuantisedProducts(device))
    products.reserve(weights)
    expected = x.new_empty(len(x), shape[0])
    products.plan(weights, len(x))(x, expected)
    assert expected.any()
    for rows in ROW_SIZES:
        run = products.plan(weights, rows)
        for first in range(0, len(x) - rows + 1, max(rows, 100)):
            out = torch.full((rows, shape[0]), float("nan"), dtype=x.dtype, device=device)
            run(x[first : first + rows], out)
            assert torch.equal(out, expected[first : first + rows]), (rows, first)
