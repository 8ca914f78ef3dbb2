"""The attention kernel against its twin in fp64: at most twice the error of PyTorch's own operations, on odd shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lookahead.kernels import reference
from lookahead.kernels.attention import Tiles, Workspace, attend, tiles_for
from lookahead.tree import packed_visibility

DTYPES = [
    torch.float32,
    torch.float16,
    # The interpreter multiplies bf16 matrices as if they were integers.
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]


def step(
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    count: int,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int | None = None,
) -> dict[str, Any]:
    """A step of random trees behind prefixes of these lengths. What no one may see is huge, so that it would show."""
    rng = random.Random(repr((lengths, count, heads, kv_heads, dim)))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    batch = len(lengths)
    capacity = capacity or max(lengths) + count + 7
    rows = rng.sample(range(batch + 2), batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    keys, values = normal(batch + 2, kv_heads, capacity, dim), normal(batch + 2, kv_heads, capacity, dim)
    positions, bits = [], []
    for row, length in zip(rows, lengths, strict=True):
        parents = [-1, *(rng.randrange(max(0, i - 9), i) for i in range(1, count))]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        positions.append([length + depth for depth in depths])
        bits.append(torch.from_numpy(packed_visibility(parents).view("<i4").copy()))
        keys[row, :, length + count :] = 1e4
        values[row, :, length + count :] = 1e4
    whole = {"dtype": torch.int32, "device": device}
    return {
        "q": normal(batch, count, heads, dim),
        "keys": keys,
        "values": values,
        "rows": torch.tensor(rows, **whole),
        "lengths": torch.tensor(lengths, **whole),
        "positions": torch.tensor(positions, **whole),
        "bits": torch.stack(bits).to(device),
    }


def errors(inputs: dict[str, Any], window: int = 0, **options: Any) -> tuple[float, float]:
    """Relative errors against fp64: of the kernel, and of PyTorch's operations in the same dtype."""
    scale = inputs["q"].shape[-1] ** -0.5
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = reference.attend(**wide, scale=scale, window=window)
    plain = reference.attend(**inputs, scale=scale, window=window)
    out = torch.full_like(inputs["q"], float("nan"))
    attend(**inputs, out=out, work=Workspace(out.device), scale=scale, window=window, **options)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    return error(out), error(plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "count", "heads", "kv_heads", "dim"),
    [
        ([0], 1, 4, 4, 64),  # the very first token
        ([1], 1, 4, 2, 64),
        ([300], 1, 3, 1, 128),
        ([127], 33, 2, 2, 64),
        ([128], 32, 6, 2, 64),  # a block and a word, just full
        ([129], 31, 4, 1, 96),
        ([260, 3, 0], 17, 4, 2, 80),  # ragged
        ([513], 70, 2, 1, 256),
        ([40], 121, 9, 3, 64),  # the embedded model's heads
    ],
)
def test_error_at_most_twice_pytorchs(
    device: torch.device, dtype: torch.dtype, lengths: list[int], count: int, heads: int, kv_heads: int, dim: int
) -> None:
    ours, plain = errors(step(device, dtype, lengths, count, heads, kv_heads, dim))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("block_m", [16, 64])
def test_any_cut_gives_the_same(device: torch.device, splits: int, block_m: int) -> None:
    inputs = step(device, torch.float32, [517, 5], 21, 4, 2, 64)
    ours, plain = errors(inputs, tiles=Tiles(block_m, 64, splits))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("window", [1, 7, 50, 400])
def test_a_sliding_window(device: torch.device, window: int) -> None:
    """A window of one sees the token itself and nothing else; blocks may be wholly out of sight."""
    ours, plain = errors(step(device, torch.float32, [301, 20], 40, 4, 2, 64), window, tiles=Tiles(64, 64, 3))
    assert ours <= 2 * plain + 1e-7


def test_512_tokens(device: torch.device) -> None:
    ours, plain = errors(step(device, torch.float32, [100], 512, 2, 1, 64))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(1, 64, 64), (121, 64, 64), (121, 9, 3), (512, 32, 8)])
def test_tiles_fill_the_device(count: int, heads: int, kv_heads: int) -> None:
    tiles = tiles_for(1, count, heads, kv_heads, 64)
    programs = kv_heads * -(-count * heads // kv_heads // tiles.block_m) * tiles.splits
    assert programs >= 132 // 2 or tiles.splits == 64
    assert tiles.block_m >= 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_result_hardly_depends_on_the_grouping(device: torch.device, dtype: torch.dtype) -> None:
    """Tokens that stand in the tree and tokens that stand in the prefix give the same row, but for fp32 rounding."""
    inputs = step(device, dtype, [700], 1, 8, 8, 64)
    outs = []
    for splits in (1, 2, 6):
        out = torch.empty_like(inputs["q"])
        tiles = Tiles(64, 64, splits)
        attend(**inputs, out=out, work=Workspace(device), scale=0.125, tiles=tiles)
        outs.append(out)
    differing = [(out != outs[0]).float().mean().item() for out in outs[1:]]
    assert max(differing) < 0.02
