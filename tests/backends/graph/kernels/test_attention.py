"""The attention kernel against its twin in fp64: at most twice the error of PyTorch's own operations, on odd shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from marks import slow_interpreted

from lookahead.algorithm.tree import packed_visibility
from lookahead.backends.graph.kernels import reference
from lookahead.backends.graph.kernels.attention import Workspace, attend
from lookahead.backends.graph.kernels.depths import new_order, order_by_depth
from lookahead.backends.graph.kernels.tiles import FAR, Tiles, invariant_tiles, tiles_for

DTYPES = [
    torch.float32,
    torch.float16,
    # The interpreter multiplies bf16 matrices as if they were integers.
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]

UNITS = pytest.mark.skipif(not torch.cuda.is_available(), reason="is about how the matrix units of a GPU add")


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
    """Random trees behind prefixes of these lengths. K/V that no node may see is huge, so that it would show."""
    rng = random.Random(repr((lengths, count, heads, kv_heads, dim)))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    batch = len(lengths)
    capacity = capacity or max(lengths) + count + 7
    lanes = rng.sample(range(batch + 2), batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    keys, values = normal(batch + 2, kv_heads, capacity, dim), normal(batch + 2, kv_heads, capacity, dim)
    positions, bits = [], []
    for lane, length in zip(lanes, lengths, strict=True):
        parents = [-1, *(rng.randrange(max(0, i - 9), i) for i in range(1, count))]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        positions.append([length + depth for depth in depths])
        bits.append(torch.from_numpy(packed_visibility(parents).view("<i4").copy()))
        keys[lane, :, length + count :] = 1e4
        values[lane, :, length + count :] = 1e4
    whole = {"dtype": torch.int32, "device": device}
    return {
        "q": normal(batch, count, heads, dim),
        "keys": keys,
        "values": values,
        "lanes": torch.tensor(lanes, **whole),
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
        slow_interpreted([1], 1, 4, 2, 64),
        ([300], 1, 3, 1, 128),
        slow_interpreted([127], 33, 2, 2, 64),
        slow_interpreted([128], 32, 6, 2, 64),  # a block and a word, just full
        slow_interpreted([129], 31, 4, 1, 96),
        ([260, 3, 0], 17, 4, 2, 80),  # ragged
        slow_interpreted([257], 70, 2, 1, 256),
        slow_interpreted([40], 121, 9, 3, 64),  # the embedded model's heads
    ],
)
def test_error_at_most_twice_pytorchs(
    device: torch.device, dtype: torch.dtype, lengths: list[int], count: int, heads: int, kv_heads: int, dim: int
) -> None:
    inputs = step(device, dtype, lengths, count, heads, kv_heads, dim)
    ours, plain = errors(inputs)
    assert ours <= 2 * plain + 1e-7
    if dtype != torch.float32:
        ours, plain = errors(inputs, tiles=invariant_tiles(count, heads, kv_heads, dim, processors=11))
        assert ours <= 2 * plain + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, slow_interpreted(2), 3, slow_interpreted(7)])
@pytest.mark.parametrize("block_m", [16, 64])
def test_any_cut_gives_the_same(device: torch.device, splits: int, block_m: int) -> None:
    inputs = step(device, torch.float32, [517, 5], 21, 4, 2, 64)
    ours, plain = errors(inputs, tiles=Tiles(block_m, 64, splits))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("length", [64 * FAR - 3, 64 * FAR + 70, 64 * FAR + 1000])
@pytest.mark.parametrize("near_splits", [1, 3])
def test_more_splits_far_away(device: torch.device, length: int, near_splits: int) -> None:
    """Every block is read once, before the block from which all splits take part and after it."""
    inputs = step(device, torch.float32, [length, 40], 3, 2, 1, 64)
    ours, plain = errors(inputs, tiles=Tiles(16, 64, 5, near_splits=near_splits))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("window", [slow_interpreted(1), slow_interpreted(7), 50, slow_interpreted(400)])
def test_a_sliding_window(device: torch.device, window: int) -> None:
    """A window of one sees the token itself and nothing else; blocks may be wholly out of sight."""
    for dtype, reach in ((torch.float32, 0), (torch.float16, 16)):
        inputs = step(device, dtype, [301, 20], 40, 4, 2, 64)
        ours, plain = errors(inputs, window, tiles=Tiles(64, 64, 3, reach=reach))
        assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("count", [slow_interpreted(512)])
def test_the_largest_step(device: torch.device, count: int) -> None:
    ours, plain = errors(step(device, torch.float32, [100], count, 2, 1, 64))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(1, 64, 64), (121, 64, 64), (121, 9, 3), (512, 32, 8)])
def test_tiles_fill_the_device(count: int, heads: int, kv_heads: int) -> None:
    tiles = tiles_for(1, count, heads, kv_heads, 64)
    programs = kv_heads * -(-count * heads // kv_heads // tiles.block_m) * tiles.splits
    assert programs >= 132 // 2 or tiles.splits == 64
    assert tiles.block_m >= 16


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "length", "window", "spread"),
    [
        slow_interpreted(2, 2, 64, 60, 0, 1),
        (4, 2, 64, 131, 40, 1),
        slow_interpreted(3, 1, 64, 203, 0, 1),
        slow_interpreted(2, 1, 64, 700, 40, 1),
        slow_interpreted(2, 2, 64, 64 * FAR + 117, 0, 1),
        slow_interpreted(2, 1, 256, 60, 0, 5),
        pytest.param(2, 2, 64, 90, 0, 5, marks=UNITS),
        pytest.param(2, 2, 64, 203, 0, 10, marks=UNITS),
        pytest.param(1, 1, 64, 90, 0, 25, marks=UNITS),
        pytest.param(2, 1, 128, 90, 0, 5, marks=UNITS),
    ],
)
def test_a_row_is_the_same_alone_and_in_a_tree(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    length: int,
    window: int,
    spread: float,
) -> None:
    """Bit for bit: a text's last tokens one step each, against the same tokens scattered over one tree.

    A large `spread` is as in a trained model: few keys have nearly all of the weight, the others next to none.
    """
    ahead, count, scale = 16, 70, dim**-0.5
    if device.type == "cuda":  # the interpreter would take minutes
        heads, kv_heads = 16 * heads, 16 * kv_heads
    rng = random.Random(length)
    inputs = step(device, dtype, [length], count, heads, kv_heads, dim)
    inputs["q"] *= spread
    lane = int(inputs["lanes"][0])

    def run(**changed: Any) -> torch.Tensor:
        given = {**inputs, **changed}
        tiles = invariant_tiles(given["q"].shape[1], heads, kv_heads, dim)
        tiles = replace(tiles, splits=5, near_splits=3)
        out = torch.full_like(given["q"], float("nan"), dtype=torch.float32)  # unrounded: no bit is hidden
        return attend(**given, out=out, work=Workspace(device), scale=scale, window=window, tiles=tiles)

    # The tree: node 0 and `ahead` more form the text, the other nodes hang somewhere.
    text = [0, *sorted(rng.sample(range(1, count), ahead))]
    parents = [-1, *(rng.randrange(i) for i in range(1, count))]
    depths = [0] * count
    for before, node in pairwise(text):
        parents[node] = before
    for node in range(1, count):
        depths[node] = depths[parents[node]] + 1
    whole = {"dtype": torch.int32, "device": device}
    bits = torch.from_numpy(packed_visibility(parents).view("<i4").copy())[None].to(device)
    positions = torch.tensor([[length + depth for depth in depths]], **whole)
    tree = run(bits=bits, positions=positions)
    # One by one: the text's tokens next to each other behind the prefix.
    lined = {}
    for name in ("keys", "values"):
        lined[name] = inputs[name].clone()
        lined[name][lane, :, length : length + ahead + 1] = inputs[name][lane][:, [length + node for node in text]]
    for depth in (0, 1, 2, 7, 15, 16):
        node = text[depth]
        alone = run(
            **lined,
            q=inputs["q"][:, node : node + 1].contiguous(),
            lengths=torch.tensor([length + depth], **whole),
            positions=torch.tensor([[length + depth]], **whole),
            bits=torch.ones(1, 1, 1, **whole),
        )
        assert torch.equal(alone[0, 0], tree[0, node]), depth


def test_nodes_stand_in_groups_of_one_depth(device: torch.device) -> None:
    """Two blocks of queries, of eight tokens each. The first sees no later node, the second few earlier ones."""
    parents = [-1, 0, 0, 1, 0, 3, 2, 0, 0, 0, 8, 8, 8, 10, 0]
    depths = [0, 1, 1, 2, 1, 3, 2, 1, 1, 1, 2, 2, 2, 3, 1]
    count, tiles = len(parents), Tiles(16, 64, 1, reach=16)
    whole = {"dtype": torch.int32, "device": device}
    bits = torch.from_numpy(packed_visibility(parents).view("<i4").copy())[None].to(device)
    positions = torch.tensor([[70 + depth for depth in depths]], **whole)
    order = new_order(1, count, tiles, 2, device).fill_(99)
    order_by_depth(positions, torch.tensor([70], **whole), bits, order, tiles, 2)
    expected = [[[0], [1, 2, 4, 7], [3, 6], [5]], [[0], [8, 9, 14], [10, 11, 12], [13]]]
    for block, (used, *places) in enumerate(order[0].tolist()):
        assert used == 64
        assert places[:64] == [node for level in expected[block] for node in level + [-1] * (16 - len(level))]
        # A token's sights are the places of its own path.
        words = places[16 * count :]
        for local, token in enumerate(range(8 * block, min(8 * block + 8, count))):
            sight = words[local * (count // 4 + 1)].to_bytes(4, "little", signed=True)
            seen = {places[16 * group + byte - 1] for group, byte in enumerate(sight) if byte}
            path = [token]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            assert seen == set(path)
