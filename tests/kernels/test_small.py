"""The small models' products against their twins in fp64: at most twice the error of PyTorch's own, on odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookahead.kernels import reference, small

DTYPES = [
    torch.float32,
    torch.float16,
    # The interpreter multiplies bf16 matrices as if they were integers.
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]
SHAPES = [(1, 576, 40), (5, 100, 24), (33, 64, 50)]
"""Rows, width and columns: SmolLM2's width, and none of them a multiple of a tile."""


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """fp32 as such in PyTorch's products, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + shape[0])
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check(run: Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]) -> None:
    """`run(module, wide)`: the results of a kernel or its twin; `wide` takes inputs to the precision it is run in."""
    ours, plain = run(small, lambda x: x), run(reference, lambda x: x)
    exact = run(reference, lambda x: x.double() if x.is_floating_point() else x)
    for found, torchs, expected in zip(ours, plain, exact, strict=True):
        own, its = (float((x.double() - expected).norm() / expected.norm()) for x in (found, torchs))
        assert own <= 2 * its + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "columns"), SHAPES)
def test_add_product(device: torch.device, dtype: torch.dtype, rows: int, width: int, columns: int) -> None:
    x, weight = normal(device, dtype, rows + 3, width), normal(device, dtype, columns, width)
    stream = normal(device, dtype, rows, columns, seed=1)
    check(lambda module, wide: [module.add_product(wide(x), wide(weight), wide(stream).clone())])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "columns"), SHAPES)
def test_norm_gate(device: torch.device, dtype: torch.dtype, rows: int, width: int, columns: int) -> None:
    stream, gain = normal(device, dtype, rows, width), normal(device, dtype, width)
    weight = normal(device, dtype, 2 * columns, width) / width**0.5

    def run(module: Any, wide: Any) -> list[torch.Tensor]:
        out = wide(torch.full((rows, columns), float("nan"), device=device, dtype=dtype))
        return [module.norm_gate(wide(stream), wide(gain), wide(weight), out, 1e-5)]

    before = stream.clone()
    check(run)
    assert torch.equal(stream, before)


def written(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, extras: str) -> Any:
    """Inputs of `norm_rotate_write` for two rows of a batch, ten tokens each, as (name -> tensor, empty results)."""
    batch, count, capacity, width = 2, 10, 45, 96
    whole = {"dtype": torch.int32, "device": device}
    angle = torch.rand(64, dim // 2, generator=torch.Generator().manual_seed(0)).to(device) * 6
    total = (heads + 2 * kv_heads) * dim
    inputs = {
        "stream": normal(device, dtype, batch * count + 4, width),
        "gain": normal(device, dtype, width),
        "weight": normal(device, dtype, total, width) / width**0.5,
        "bias": normal(device, dtype, total) if extras == "bias" else None,
        "norms": normal(device, dtype, 2, dim) if extras == "norms" else None,
        "cosine": angle.cos(),
        "sine": angle.sin(),
        "rows": torch.tensor([2, 0], **whole),
        "lengths": torch.tensor([7, 30], **whole),
        "positions": (torch.arange(batch * count, **whole) * 7 % 60).view(batch, count),
    }

    def empty(wide: Any) -> list[torch.Tensor]:
        cache = (torch.zeros(3, kv_heads, capacity, dim, device=device, dtype=dtype) for _ in range(2))
        return [wide(x) for x in (torch.zeros(batch, count, heads, dim, device=device, dtype=dtype), *cache)]

    return inputs, empty


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 2, 80), (2, 1, 8)])
@pytest.mark.parametrize("extras", ["none", "bias", "norms"])
def test_norm_rotate_write(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, extras: str
) -> None:
    inputs, empty = written(device, dtype, heads, kv_heads, dim, extras)

    def run(module: Any, wide: Any) -> list[torch.Tensor]:
        q, keys, values = empty(wide)
        given = {name: x if x is None else wide(x) for name, x in inputs.items()}
        module.norm_rotate_write(**given, q=q, keys=keys, values=values, eps=1e-5)
        assert not keys[1].any()  # the row between belongs to someone else
        assert not values[1].any()
        assert not keys[0, :, 40:].any()
        return [q, keys, values]

    check(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [16, 128] if torch.cuda.is_available() else [18])
def test_a_row_has_the_same_bits_alone(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """The last row by itself and as the last of many, bit for bit: its place in a block and its neighbours differ.

    In the interpreter this says little: there are no matrix units.
    """
    width, inner = (576, 1536) if torch.cuda.is_available() else (100, 50)
    stream, gain = normal(device, dtype, rows, width), normal(device, dtype, width)
    gate_up, down = normal(device, dtype, 2 * inner, width) / 24, normal(device, dtype, width, inner) / 24

    def mlp(stream: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty(len(stream), inner, device=device, dtype=dtype)
        small.norm_gate(stream, gain, gate_up, out, 1e-5)
        return [out, small.add_product(out, down, stream.clone())]

    heads, dim = 3, 64
    qkv = normal(device, dtype, 5 * dim, width) / 24
    angle = torch.rand(200, dim // 2, generator=torch.Generator().manual_seed(0)).to(device) * 6

    def write(stream: torch.Tensor, first: int) -> list[torch.Tensor]:
        count = len(stream)
        places = torch.arange(first, first + count, dtype=torch.int32, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        q = torch.zeros(1, count, heads, dim, device=device, dtype=dtype)
        keys, values = (torch.zeros(1, 1, 200, dim, device=device, dtype=dtype) for _ in range(2))
        small.norm_rotate_write(
            stream, gain, qkv, None, None, angle.cos(), angle.sin(), zero, zero + first, places[None], q, keys, values,
            1e-5,
        )  # fmt: skip
        return [q[0, -1], keys[0, 0, rows - 1], values[0, 0, rows - 1]]

    among = [x[-1] for x in mlp(stream)] + write(stream, 0)
    alone = [x[-1] for x in mlp(stream[-1:])] + write(stream[-1:], rows - 1)
    assert all(bool(x.any()) for x in among)
    assert all(torch.equal(*pair) for pair in zip(among, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs CUDA, Hopper or later"
)
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("flags", [{"ahead": True}, {"early": True}, {"ahead": True, "early": True}])
def test_how_a_kernel_begins_changes_nothing(device: torch.device, rows: int, flags: dict[str, bool]) -> None:
    """Kernels that start before the one before has ended wait for what it writes, captured and not."""
    dtype = torch.bfloat16
    stream, gain = normal(device, dtype, rows, 576), normal(device, dtype, 576)
    layers = [
        (normal(device, dtype, 3072, 576, seed=i) / 24, normal(device, dtype, 576, 1536, seed=i) / 24)
        for i in range(20)
    ]
    out = torch.empty(rows, 1536, device=device, dtype=dtype)

    def run(x: torch.Tensor, tile: small.Tile) -> torch.Tensor:
        for gate_up, down in layers:
            small.norm_gate(x, gain, gate_up, out, 1e-5, tile)
            small.add_product(out, down, x, tile)
        return x

    expected = run(stream.clone(), small.Tile())
    assert torch.equal(run(stream.clone(), small.Tile(**flags)), expected)
    x, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, small.Tile(**flags))
    for _ in range(5):
        x.copy_(stream)
        graph.replay()
        assert torch.equal(x, expected)


def test_no_more_blocks_on_their_way_than_find_room() -> None:
    assert small.Tile(stages=4).stages_of(32, 2) == 4
    assert small.Tile(stages=4).stages_of(128, 4) == 1
