"""What products with quantised matrices cost, and whether they are right: `python benchmarks/quantised_products.py`, on
a GPU.

The four products of a block of a 7B Llama in each format, at several numbers of rows, each with the weights of several
layers in turn, so that they come from memory. `block`: microseconds of the four one after the other, then of each
alone. `read`: the bytes of their weights per second, as a share of what a copy reads and writes. `check`: ok, or WRONG
where some result is further from that of the dequantised weights than rounding explains, or its bits differ from those
at another number of rows. `--stages` and `--chunks` launch products of at most 32 rows in other ways than
`quantised_tiles.tile_of` does. Kernels are compiled ahead by `--workers` processes. Without a GPU, for tests:
`TRITON_INTERPRET=1 python benchmarks/quantised_products.py --tiny`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
from kernel_instructions import FORMATS, SHAPES, Driver, compiled, weights_of
from triton.runtime.driver import driver

from lookahead.backends.graph.kernels.quantised import QuantisedProducts, multiply
from lookahead.backends.graph.kernels.quantised_tiles import QuantisedWeights, Tile, fitted, splits_of, tile_of
from lookahead.backends.graph.matrices.quantised import fuse_quantised
from lookahead.bench.gpu.timing import copy_bandwidth, median_ms, wall_ms
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import Codes
from lookahead.models.quantised import QuantisedLinear

TINY = ((128, 512), (64, 512), (192, 512), (64, 1472))
FEW = 32
"""The most rows whose launches the options change."""
DEFAULT = ("int4", "int4-zeros", "fp8", "mxfp4")


class Launch(NamedTuple):
    """Changes of `tile_of`'s launches of few rows; None for none."""

    stages: int | None = None
    chunks: int | None = None

    def tile(self, weights: QuantisedWeights, rows: int, shared: int) -> Tile:
        tile = tile_of(weights, rows, splits_of(weights))
        if rows <= FEW:
            tile = replace(tile, stages=self.stages or tile.stages, chunks=self.chunks or tile.chunks)
        return fitted(tile, weights, shared)


def random_layer(name: str, shape: tuple[int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Matrix:
    """Random codes, scales, zero points and offsets, with products of about x's size."""
    (format, scales), (out, width) = FORMATS[name], shape
    generator, groups = torch.Generator(device).manual_seed(seed), (-(-out // format.rows), format.groups(width))

    def whole(low: int, high: int, size: Sequence[int]) -> torch.Tensor:
        return torch.randint(low, high, tuple(size), generator=generator, dtype=torch.uint8, device=device)

    def numbers(scale: float) -> torch.Tensor:
        return (scale * (0.5 + torch.rand(groups, generator=generator, device=device))).to(scales)

    codes = whole(0, 256, (out, width * format.codes.bits // 8))
    if format.codes is Codes.E4M3:
        codes[(codes & 127) == 127] = 0  # NaN
    usual = {Codes.E4M3: 240.0, Codes.INT8: 74.0, Codes.INT4: 4.6, Codes.E2M1: 2.5}[format.codes] * width**0.5
    layer = QuantisedLinear(
        format,
        codes,
        whole(118, 125, groups) if scales is torch.uint8 else numbers(1 / usual),
        zeros=whole(0, 16, groups) if format.zeros else None,
        offsets=numbers(1 / usual) if format.offsets else None,
        dtype=dtype,
    )
    return Matrix((layer,))


class Layers:
    """One of a block's matrices in several layers, and its products."""

    def __init__(self, name: str, shape: tuple[int, int], count: int, device: torch.device, dtype: torch.dtype) -> None:
        parts = [random_layer(name, shape, seed, device, dtype) for seed in range(count)]
        self.layers = [part for matrix in parts for part in matrix.parts if isinstance(part, QuantisedLinear)]
        self.weights = [
            QuantisedWeights.of(layer, shape[0], fuse_quantised(matrix))
            for layer, matrix in zip(self.layers, parts, strict=True)
        ]
        first = self.weights[0]
        found = (first.codes, first.scales, first.zeros, first.offsets)
        self.nbytes = sum(tensor.nbytes for tensor in found if tensor is not None)
        self.shape, self.products = shape, QuantisedProducts(device)
        self.products.reserve(first)

    def plan(self, x: torch.Tensor, launch: Launch) -> tuple[Callable[[int], None], torch.Tensor]:
        """A function of a layer's number, and what it writes."""
        out, first = x.new_empty(len(x), self.shape[0]), self.weights[0]
        tile, splits, memory = launch.tile(first, len(x), self.products.shared), splits_of(first), self.products.memory
        if tile.parallel:
            tiles = triton.cdiv(first.out, tile.block_n) * triton.cdiv(len(x), tile.block_m)
            memory.reserve(tiles, splits, tile.block_n, tile.block_m)

        def run(number: int) -> None:
            multiply(x, self.weights[number % len(self.weights)], out, tile, splits, memory)

        return run, out


def is_right(found: torch.Tensor, x: torch.Tensor, layer: QuantisedLinear, *, after: bool) -> bool:
    """Whether a product is as near to that in fp64 as its roundings allow. Scales `after` sums round no weight."""
    weight = layer.dequantised(torch.float32 if after else x.dtype).double().T
    exact, terms = x.double() @ weight, x.double().abs() @ weight.abs()
    error = (found.double() - exact).abs()
    return bool((error <= torch.finfo(x.dtype).eps * exact.abs() + 2e-6 * terms + 1e-30).all())


def microseconds(run: Callable[[], object], device: torch.device) -> float:
    """Of a call: captured on a GPU, so that launching is no part of it."""
    if device.type == "cpu":
        return 1e3 * wall_ms(run, 1)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1e3 * median_ms(graph.replay, repeats=10)


def run_layers(runs: Sequence[Callable[[int], None]], layers: int) -> None:
    for number in range(layers):
        for run in runs:
            run(number)


def compile_ahead(job: tuple[str, tuple[int, int], int, Launch, int]) -> None:
    """Compile one kernel into Triton's cache, in a process that uses no GPU."""
    name, shape, rows, launch, shared = job
    driver.set_active(Driver())
    weights = weights_of(name, shape)
    compiled(weights, rows, launch.tile(weights, rows, shared))


def jobs_of(
    formats: Sequence[str], rows: Sequence[int], launches: Sequence[Launch], shared: int
) -> list[tuple[str, tuple[int, int], int, Launch, int]]:
    """What has to be compiled, each kernel once: shapes have the same if Triton sees the same of their strides."""
    found = {}
    for name, shape in product(formats, SHAPES):
        weights = weights_of(name, shape)
        seen = name, splits_of(weights), weights.scales.stride(0) % 16 == 0
        for count, launch in product(rows, launches):
            own = launch if count <= FEW else Launch()
            found[seen, count, own] = name, shape, count, own, shared
    return list(found.values())


def measured(
    matrices: Sequence[Layers], rows: Sequence[int], launch: Launch, layers: int, copy: float, dtype: torch.dtype,
    device: torch.device, known: dict[int, tuple[torch.Tensor, bool]],
) -> list[list[str]]:  # fmt: skip
    """A line of the table for each number of rows. `known`: each matrix's results at the most rows, and whether they
    are right."""
    lines, most = [], max(rows)
    for count in sorted(rows, reverse=True):
        planned, right = [], True
        for number, own in enumerate(matrices):
            generator = torch.Generator(device).manual_seed(100 + number)
            x = torch.randn(most, own.shape[1], generator=generator, device=device).to(dtype)[:count]
            run, out = own.plan(x, launch)
            run(0)
            if number not in known:
                known[number] = out.clone(), is_right(out, x, own.layers[0], after=own.weights[0].scales_after)
            expected, is_expected_right = known[number]
            right &= is_expected_right and torch.equal(out, expected[:count])
            planned.append(run)

        whole = microseconds(partial(run_layers, planned, layers), device) / layers
        alone = [microseconds(partial(run_layers, [run], layers), device) / layers for run in planned]
        share = sum(own.nbytes for own in matrices) / (whole * 1e-6) / copy
        tile = launch.tile(matrices[0].weights[0], count, matrices[0].products.shared)
        how = f"{tile.block_n}x{tile.block_m} s{tile.stages} c{tile.chunks}"
        times = " ".join(f"{one:.1f}" for one in alone)
        lines.append([str(count), how, f"{whole:.1f}", times, f"{share:.0%}", "ok" if right else "WRONG"])
    return lines[::-1]


def dense(rows: Sequence[int], layers: int, copy: float, device: torch.device) -> list[list[str]]:
    """The same of `torch.mm` in bf16."""
    lines = []
    weights = [[torch.randn(*shape, device=device).bfloat16() for shape in SHAPES] for _ in range(layers)]
    for count in rows:
        given = [torch.randn(count, width, device=device).bfloat16() for _, width in SHAPES]

        def block(given: Sequence[torch.Tensor] = given) -> None:
            for own in weights:
                for x, weight in zip(given, own, strict=True):
                    torch.mm(x, weight.T)

        whole = microseconds(block, device) / layers
        share = sum(weight.nbytes for weight in weights[0]) / (whole * 1e-6) / copy
        lines.append([str(count), "torch.mm", f"{whole:.1f}", "", f"{share:.0%}", ""])
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(DEFAULT))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 128])
    parser.add_argument("--stages", nargs="+", type=int, default=[None])
    parser.add_argument("--chunks", nargs="+", type=int, choices=(1, 2), default=[None])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="small matrices in fp16, by Triton's interpreter")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, shapes = (torch.float16, TINY) if given.tiny else (torch.bfloat16, SHAPES)
    launches = [Launch(*own) for own in product(given.stages, given.chunks)]
    shared, copy = QuantisedProducts(device).shared, copy_bandwidth(device)
    print(f"Triton {triton.__version__}, a copy reads and writes {copy / 1e12:.2f} TB/s", flush=True)
    if device.type == "cuda" and given.workers:
        with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_ahead, jobs_of(given.formats, given.rows, launches, shared)))
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    print("\n| format | rows | launch | block, us | each | read | check |\n|---|---|---|---|---|---|---|")
    for line in [] if given.tiny else dense(given.rows, given.layers, copy, device):
        print("| " + " | ".join(["bf16", *line]) + " |", flush=True)
    for name in given.formats:
        matrices = [Layers(name, shape, given.layers, device, dtype) for shape in shapes]
        known: dict[int, tuple[torch.Tensor, bool]] = {}
        for number, launch in enumerate(launches):
            rows = [count for count in given.rows if number == 0 or count <= FEW]
            if rows:
                for line in measured(matrices, rows, launch, given.layers, copy, dtype, device, known):
                    print("| " + " | ".join([name, *line]) + " |", flush=True)
        del matrices
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
