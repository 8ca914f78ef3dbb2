"""Products with quantised matrices: every format, shape and launch, and the same bits for a row among any others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from marks import slow_but
from quantising import cancelling_layer, random_layer
from rounding import DTYPES

from lookahead.backends.graph.kernels.quantised import QuantisedProducts, multiply
from lookahead.backends.graph.kernels.quantised_tiles import (
    HOPPER_SHARED,
    LARGEST_WORD,
    QuantisedWeights,
    Tile,
    fitted,
    shared_bytes,
    splits_of,
    tile_of,
)
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.backends.graph.matrices.quantised import can_interleave, fuse_quantised
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import MXFP4, Codes, Format
from lookahead.models.quantised import QuantisedLinear

E8M0 = torch.uint8

TILES = (
    Tile(64, 16, 4, 3, 2, parallel=True),
    Tile(64, 16, 4, 2, 1, parallel=False),
    Tile(128, 32, 4, 2, 1, parallel=True),
    Tile(128, 32, 8, 2, 2, parallel=False),
)


class Case(NamedTuple):
    format: Format
    scales: torch.dtype = torch.float32
    offsets: torch.dtype = torch.float32
    most: int = 255
    """The largest of scales that are powers of two, as a code. MXFP4 with `LARGEST_WORD` reads four of them at once."""

    def layer(self, out: int, width: int) -> QuantisedLinear:
        made = random_layer(self.format, out, width, scales=self.scales, offsets=self.offsets)
        if self.scales is E8M0:
            made.scales.clamp_(max=self.most)
        return made


CASES = {
    "fp8 rows": Case(Format(Codes.E4M3, 0)),
    "fp8 blocks": Case(Format(Codes.E4M3, 128, rows=128), torch.bfloat16),
    "fp8 e8m0 blocks": Case(Format(Codes.E4M3, 128, rows=128), E8M0),
    "fp8 matrix": Case(Format(Codes.E4M3, 0, rows=200)),
    "mxfp8": Case(Format(Codes.E4M3, 32), E8M0),
    "int8 rows": Case(Format(Codes.INT8, 0), torch.float16),
    "int8 32": Case(Format(Codes.INT8, 32), torch.float16),
    "int8 16": Case(Format(Codes.INT8, 16), torch.bfloat16),
    "int8 64 ordered": Case(Format(Codes.INT8, 64, ordered=True), torch.float16),
    "int4 rows": Case(Format(Codes.INT4, 0)),
    "int4 8": Case(Format(Codes.INT4, 8)),
    "int4 32": Case(Format(Codes.INT4, 32), torch.bfloat16),
    "int4 48": Case(Format(Codes.INT4, 48), torch.bfloat16),
    "int4 64": Case(Format(Codes.INT4, 64), torch.float16),
    "int4 128": Case(Format(Codes.INT4, 128), torch.float16),
    "int4 192": Case(Format(Codes.INT4, 192), torch.float16),
    "int4 32 zeros": Case(Format(Codes.INT4, 32, zeros=True), torch.float16),
    "int4 8 zeros": Case(Format(Codes.INT4, 8, zeros=True), torch.float16),
    "int4 64 zeros": Case(Format(Codes.INT4, 64, zeros=True), torch.bfloat16),
    "int4 128 zeros": Case(Format(Codes.INT4, 128, zeros=True), torch.float16),
    "int4 128 zeros bf16": Case(Format(Codes.INT4, 128, zeros=True), torch.bfloat16),
    "int4 128 zeros fp32": Case(Format(Codes.INT4, 128, zeros=True), torch.float32),
    "int4 rows zeros": Case(Format(Codes.INT4, 0, zeros=True), torch.bfloat16),
    "int4 128 zeros ordered": Case(Format(Codes.INT4, 128, zeros=True, ordered=True), torch.float16),
    "gguf": Case(Format(Codes.INT4, 32, offsets=True), torch.float16, torch.float32),
    "gguf 16 halves": Case(Format(Codes.INT4, 16, offsets=True), torch.float16, torch.float16),
    "int4 offsets rows": Case(Format(Codes.INT4, 0, offsets=True)),
    "int4 e8m0 zeros offsets": Case(Format(Codes.INT4, 64, zeros=True, offsets=True), E8M0),
    "mxfp4": Case(MXFP4, E8M0),
    "mxfp4 words": Case(MXFP4, E8M0, most=LARGEST_WORD),
    "fp4 128 ordered": Case(Format(Codes.E2M1, 128, ordered=True)),
}
SHAPES = [(104, 512), (8, 256), (70, 512), (1, 40), (13, 130), (200, 640), (9, 894), (16, 1472)]
"""(out, in). The first two are interleaved in every format whose groups allow it, the sixth only in 8 bits; the last is
padded for that."""


def weights_of(layer: QuantisedLinear, device: torch.device, *, plain: bool = False) -> QuantisedWeights:
    """What the kernel reads of a layer, interleaved if it can be, unless `plain`."""
    own = copy.deepcopy(layer).to(device)
    if can_interleave(layer) and not plain:
        return QuantisedWeights.of(own, own.out_features, fuse_quantised(Matrix((own,))))
    given = {name: getattr(own, name) for name in ("codes", "scales", "zeros", "offsets")}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if own.order is not None:
        tensors["order"] = own.order.int()
    return QuantisedWeights.of(own, own.out_features, tensors)


def product(x: torch.Tensor, weights: QuantisedWeights, tile: Tile, splits: int = 2, gap: int = 0) -> torch.Tensor:
    """x W^T, written to rows that are `gap` numbers apart. Nothing else may be written, nor left in the counters."""
    tiles = -(-weights.out // tile.block_n) * -(-len(x) // tile.block_m)
    memory_of_splits = SplitMemory.new(x.device, tiles * splits * tile.block_n * tile.block_m, tiles + 1)
    memory_of_splits.partials.fill_(float("nan"))
    memory = torch.full((len(x) + 1, weights.out + gap), float("nan"), dtype=x.dtype, device=x.device)
    multiply(x, weights, memory[: len(x), : weights.out], tile, splits, memory_of_splits)
    assert not memory_of_splits.arrived.any()
    assert memory[len(x) :].isnan().all()
    assert memory[:, weights.out :].isnan().all()
    return memory[: len(x), : weights.out]


def check_product(found: torch.Tensor, x: torch.Tensor, layer: QuantisedLinear, *, after: bool) -> None:
    """Within the roundings of fp32 sums and of the result; weights are rounded unless scales come `after`."""
    half = x.dtype if x.dtype.itemsize == 2 else torch.float32
    weight = layer.dequantised(torch.float32 if after else half).double().T
    wide = x.cpu().double()
    exact, terms = wide @ weight, wide.abs() @ weight.abs()
    error = (found.cpu().double() - exact).abs()
    eps = torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0.0
    assert bool((error <= eps * exact.abs() + 2e-6 * terms + 1e-30).all()), float((error / terms).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_n}x{tile.block_m} {tile.warps}")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(1, most=16)
def test_products(name: str, shape: tuple[int, int], tile: Tile, dtype: torch.dtype, device: torch.device) -> None:
    layer = CASES[name].layer(*shape)
    x = torch.randn(21, shape[1], generator=torch.Generator().manual_seed(2)).to(device, dtype)
    weights = weights_of(layer, device)
    check_product(product(x, weights, tile, gap=5), x, layer, after=weights.scales_after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CASES)
def test_products_in_bfloat16(name: str, device: torch.device) -> None:
    """By the conversions in PTX, launched as the backend launches them, of rows with scales and zero points of their
    own. The same bits in every step, which other tests show, may be wrong bits."""
    layer = CASES[name].layer(200, 2880)
    x = torch.randn(300, 2880, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    weights, products = weights_of(layer, device), QuantisedProducts(device)
    assert layer.format != MXFP4 or (weights.words is None) == (name == "mxfp4")
    products.reserve(weights)
    for rows in (3, 300):
        out = torch.full((rows, 200), float("nan"), dtype=x.dtype, device=device)
        products.plan(weights, rows)(x[:rows], out)
        check_product(out, x[:rows], layer, after=weights.scales_after)


@pytest.mark.parametrize("codes", [Codes.E2M1, Codes.E4M3])
@pytest.mark.parametrize("exponent", [0, 1, 254])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.thinned(1, most=4)
def test_the_smallest_and_largest_powers_of_two(codes: Codes, exponent: int, plain: bool, device: torch.device) -> None:
    """2^-127 is a number without an exponent of its own, in fp32 as in bf16. x makes the products normal numbers."""
    layer = random_layer(Format(codes, 32), 8, 256, scales=E8M0)
    layer.scales.fill_(exponent)
    if codes is Codes.E2M1:
        layer.codes &= 0x99  # 0.5, 0 and their negatives
    else:
        layer.codes = torch.full_like(layer.codes, 0x30)  # 0.5
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)) * 2.0 ** max(-100, min(120, 127 - exponent))
    x = x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    check_product(product(x, weights_of(layer, device, plain=plain), TILES[0]), x, layer, after=False)


@pytest.mark.parametrize("name", ["fp8 rows", "int4 128 zeros", "gguf", "mxfp4"])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.thinned(1, most=3)
def test_what_lies_behind_the_rows_is_not_read(name: str, plain: bool, device: torch.device) -> None:
    """x is a part of a larger buffer, with rows of another stride; NaN lies around it."""
    case = CASES[name]
    layer = random_layer(case.format, 24, 256, scales=case.scales, offsets=case.offsets)
    buffer = torch.full((8, 300), float("nan"), device=device)
    buffer[2:5, 16:272] = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(device)
    x, weights = buffer[2:5, 16:272], weights_of(layer, device, plain=plain)
    found = product(x, weights, TILES[2])
    check_product(found, x, layer, after=weights.scales_after)
    assert torch.equal(found, product(x.clone(), weights, TILES[2]))


# A row's bits


CANCELLING = {
    "fp8 rows": Format(Codes.E4M3, 0),
    "fp8 blocks": Format(Codes.E4M3, 128, rows=128),
    "int8 32": Format(Codes.INT8, 32),
    "int4 rows": Format(Codes.INT4, 0),
    "int4 64": Format(Codes.INT4, 64),
    "int4 64 zeros": Format(Codes.INT4, 64, zeros=True),
    "int4 128 zeros ordered": Format(Codes.INT4, 128, zeros=True, ordered=True),
    "gguf": Format(Codes.INT4, 32, offsets=True),
    "mxfp4": Format(Codes.E2M1, 32),
}


@pytest.mark.parametrize("name", slow_but(CANCELLING, "int4 128 zeros ordered", "gguf"))
@pytest.mark.parametrize("plain", slow_but([True, False], False))
@pytest.mark.thinned(1, most=1)
def test_a_row_has_the_same_bits_in_every_launch(name: str, plain: bool, device: torch.device) -> None:
    """Alone, among others, at any offset, in any tile, in splits that run beside or after one another. All sums cancel,
    so that another order of summation changes the bits, as another number of splits does here."""
    layer, x = cancelling_layer(CANCELLING[name], 40, 1024, 24)
    x = x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float16)
    weights = weights_of(layer, device, plain=plain)
    expected = product(x, weights, TILES[1], splits=2)
    exact = x.cpu().double() @ layer.dequantised().double().T
    assert float(exact.abs().max()) < 1e-2
    assert not torch.equal(expected, product(x, weights, TILES[1], splits=4))
    tiles = (*TILES[::-1], Tile(64, 64, 4, 2, 1, parallel=False))
    for tile, first, count in zip(tiles, (0, 7, 20, 23, 3), (24, 17, 2, 1, 20), strict=True):
        assert torch.equal(product(x[first : first + count], weights, tile, splits=2), expected[first : first + count])


@pytest.mark.parametrize("out", [24, 512, 4096, 40000])
@pytest.mark.parametrize("format", [Format(Codes.E4M3, 0), Format(Codes.E4M3, 128), Format(Codes.INT4, 128)], ids=str)
def test_one_reserve_is_enough_for_every_number_of_rows(format: Format, out: int) -> None:
    """And splits do not depend on the number of rows, which would change texts."""
    layer = random_layer(format, 8, 8192)
    weights = replace(weights_of(layer, torch.device("cpu")), out=out)
    products = QuantisedProducts(torch.device("cpu"))
    products.reserve(weights)
    splits = splits_of(weights)
    assert (splits > 1) is (out < 10000)
    for rows in range(1, ROW_SIZES[-1] + 1):
        tile = tile_of(weights, rows, splits_of(weights))
        assert splits == 1 or tile.parallel or rows > 32
        assert not (tile.parallel and splits == 1)
        tiles = -(-out // tile.block_n) * -(-rows // tile.block_m)
        if tile.parallel:
            assert len(products.memory.partials) >= tiles * splits * tile.block_n * tile.block_m
            assert len(products.memory.arrived) >= tiles


@pytest.mark.parametrize("format", [Format(Codes.E4M3, 0), Format(Codes.E4M3, 128), Format(Codes.E2M1, 32)], ids=str)
def test_launches_fit_the_shared_memory_of_a_device(format: Format) -> None:
    weights = replace(weights_of(random_layer(format, 64, 1024), torch.device("cpu")), number_bytes=2)
    wide = replace(weights, number_bytes=4)
    for rows in ROW_SIZES:
        usual = tile_of(weights, rows, splits_of(weights))
        assert fitted(usual, weights, HOPPER_SHARED) == usual
        assert shared_bytes(fitted(usual, wide, HOPPER_SHARED), wide) <= HOPPER_SHARED
        small = fitted(usual, weights, 99 << 10)
        columns = 64 * small.chunks * 8 // format.codes.bits
        assert small.stages * (small.block_n * 64 * small.chunks + small.block_m * columns * 2) <= 99 << 10
        assert small.stages > 1
        assert small.block_m >= 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "shape", slow_but([(4096, 4096), (1024, 2048), (520, 8192), (100, 1100)], (1024, 2048)), ids=str
)
@pytest.mark.parametrize("name", CANCELLING)
def test_a_row_has_the_same_bits_in_every_step(name: str, shape: tuple[int, int], device: torch.device) -> None:
    """In steps of all captured sizes, launched as the backend launches them."""
    layer, x = cancelling_layer(CANCELLING[name], *shape, ROW_SIZES[-1])
    x, weights, products = x.to(device), weights_of(layer, device), QuantisedProducts(device)
    products.reserve(weights)
    expected = x.new_empty(len(x), shape[0])
    products.plan(weights, len(x))(x, expected)
    assert not torch.equal(expected, torch.zeros_like(expected))
    for rows in ROW_SIZES:
        run = products.plan(weights, rows)
        for first in range(0, len(x) - rows + 1, max(rows, 100)):
            out = torch.full((rows, shape[0]), float("nan"), dtype=x.dtype, device=device)
            run(x[first : first + rows], out)
            assert torch.equal(out, expected[first : first + rows]), (rows, first)
