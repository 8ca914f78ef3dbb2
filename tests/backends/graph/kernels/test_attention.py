"""The attention kernel against its twin in fp64: at most twice the error of PyTorch's own operations, on odd shapes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attending import Step, check_invariance, parts_of
from flat import Part, rows_of, tables_of
from marks import slow_interpreted

from lookahead.backends.graph.kernels.paths import list_paths, list_size, most_blocks_of, most_nodes_of, most_paths_of
from lookahead.backends.graph.kernels.tiles import NEAR_BLOCKS, Grid, HeadShape, Tiles, TileSize, Tiling, tiles_for
from lookahead.backends.graph.kernels.workspace import Workspace
from lookahead.backends.graph.records import Tile
from lookahead.backends.graph.sizes import PAGE

DTYPES = [
    torch.float32,
    torch.float16,
    # The interpreter multiplies bf16 matrices as if they were integers.
    pytest.param(torch.bfloat16, marks=[] if torch.cuda.is_available() else pytest.mark.skip("needs CUDA")),
]

UNITS = pytest.mark.skipif(not torch.cuda.is_available(), reason="is about how the matrix units of a GPU add")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shapes", "heads", "kv_heads", "dim"),
    [
        ([(0, 0, 1)], 4, 4, 64),  # the very first token
        ([(40, 0, 5)], 2, 1, 16),  # heads narrower than four products of Triton's
        ([(40, 0, 5)], 2, 1, 32),
        slow_interpreted([(1, 0, 1)], 4, 2, 64),
        slow_interpreted([(300, 0, 1)], 3, 1, 128),
        slow_interpreted([(127, 0, 33)], 2, 2, 64),
        slow_interpreted([(128, 0, 32)], 6, 2, 64),  # a block and a word, just full
        slow_interpreted([(129, 0, 31)], 4, 1, 96),
        ([(70, 0, 17), (3, 2, 5), (0, 0, 1), (30, 20, 0)], 2, 1, 80),  # ragged, with chunks
        slow_interpreted([(260, 0, 17), (3, 2, 5), (0, 0, 1), (90, 20, 0)], 4, 2, 80),
        slow_interpreted([(0, 70, 0), (64, 1, 1)], 2, 1, 64),  # a prompt, and a token that was computed elsewhere
        slow_interpreted([(100, 90, 3)], 2, 1, 64),
        *(slow_interpreted([(257, 0, 70)], 2, 1, dim) for dim in (112, 192, 256, 512)),
        *(slow_interpreted([(90, 20, 3), (700, 0, 1)], 8, 1, dim) for dim in (96, 256, 512)),
        slow_interpreted([(40, 0, 121)], 9, 3, 64),  # the embedded model's heads
    ],
)
@pytest.mark.thinned(1, most=2)
def test_error_at_most_twice_pytorchs(
    device: torch.device, dtype: torch.dtype, shapes: list[tuple[int, int, int]], heads: int, kv_heads: int, dim: int
) -> None:
    step = Step(device, dtype, parts_of(*shapes), heads, kv_heads, dim, padding=3)
    grid, shape = Grid.SINGLE if len(shapes) == 1 else Grid.SPLIT, HeadShape(heads, kv_heads, dim)
    for tiling in (Tiling(TileSize.SMALL, Grid.UNSPLIT), Tiling(TileSize.SMALL, grid), Tiling(TileSize.LARGE, grid)):
        for invariant in {False, dtype != torch.float32}:
            tiles = tiles_for(len(step.q), shape, tiling, invariant=invariant, processors=11)
            # On one multiprocessor every other program comes to the prefix last.
            ours, plain = step.errors(replace(tiles, processors=1, programs=24))
            assert ours <= 2 * plain + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, slow_interpreted(2), 3, slow_interpreted(7)])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("unsplit", "programs"), [slow_interpreted(True, 1), (True, 2), (False, 32)])
def test_any_cut_gives_the_same(device: torch.device, splits: int, block_m: int, unsplit: bool, programs: int) -> None:
    """Also if a program does several tiles, one after the other."""
    step = Step(device, torch.float32, parts_of((517, 0, 21), (5, 3, 9), (0, 40, 0)), 4, 2, 64)
    ours, plain = step.errors(Tiles(block_m, 64, splits, unsplit=unsplit, programs=programs))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(
    "length", [slow_interpreted(64 * NEAR_BLOCKS - 3), 64 * NEAR_BLOCKS + 70, slow_interpreted(64 * NEAR_BLOCKS + 1000)]
)
@pytest.mark.parametrize("near_splits", [slow_interpreted(1), 3])
@pytest.mark.parametrize("unsplit", [False, True])
@pytest.mark.thinned(1, most=1)
def test_more_splits_far_away(device: torch.device, length: int, near_splits: int, unsplit: bool) -> None:
    """Every block is read once, before the block from which all splits take part and after it."""
    step = Step(device, torch.float32, parts_of((length, 0, 3), (40, 0, 3)), 2, 1, 64)
    ours, plain = step.errors(Tiles(16, 64, 5, near_splits=near_splits, programs=1 if unsplit else 2, unsplit=unsplit))
    assert ours <= 2 * plain + 1e-7


def test_more_splits_than_near_blocks(device: torch.device) -> None:
    """One program does them all, and reads every block once."""
    step = Step(device, torch.float32, parts_of((64 * (2 * NEAR_BLOCKS + 10), 0, 2)), 1, 1, 64)
    ours, plain = step.errors(Tiles(16, 64, NEAR_BLOCKS + 8, programs=1, unsplit=True))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(("dtype", "invariant"), [(torch.float32, False), (torch.float16, True)])
@pytest.mark.parametrize("dim", [64, slow_interpreted(80)])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(TileSize.SMALL, Grid.SPLIT),
        slow_interpreted(Tiling(TileSize.SMALL, Grid.UNSPLIT)),
        slow_interpreted(Tiling(TileSize.LARGE, Grid.SPLIT)),
    ],
    ids=str,
)
@pytest.mark.thinned(1, most=1)
def test_what_others_left_behind_does_not_spread(
    device: torch.device, dtype: torch.dtype, invariant: bool, dim: int, tiling: Tiling
) -> None:
    """Not even NaN, at every place that is no sequence's: behind a prefix, behind a tree, and on page 0."""
    step = Step(device, dtype, parts_of((70, 0, 5), (130, 3, 1), (0, 0, 1), (20, 30, 0)), 2, 1, dim)
    tiles = tiles_for(len(step.q), HeadShape(2, 1, dim), tiling, invariant=invariant, processors=11)
    before = step.run(tiles)
    assert int((step.keys == 1e4).sum()) > 0
    for cache in (step.keys, step.values):
        cache[cache == 1e4] = float("nan")
    assert torch.equal(step.run(tiles), before)


@pytest.mark.parametrize("count", [slow_interpreted(512)])
def test_the_largest_tree(device: torch.device, count: int) -> None:
    step = Step(device, torch.float32, parts_of((100, 0, count)), 2, 1, 64)
    tiling = Tiling(TileSize.LARGE, Grid.SINGLE)
    ours, plain = step.errors(tiles_for(count, HeadShape(2, 1, 64), tiling, invariant=False))
    assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize(("count", "heads", "kv_heads"), [(1, 64, 64), (121, 64, 64), (121, 9, 3), (512, 32, 8)])
def test_tiles_fill_the_device(count: int, heads: int, kv_heads: int) -> None:
    tiling = Tiling(TileSize.SMALL if count == 1 else TileSize.LARGE, Grid.SINGLE)
    tiles = tiles_for(count, HeadShape(heads, kv_heads, 64), tiling, invariant=False)
    programs = kv_heads * -(-count * heads // kv_heads // tiles.block_m) * tiles.splits
    assert programs >= 132 // 2 or tiles.splits == 64
    assert tiles.block_m >= 16


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "length", "window", "spread"),
    [
        slow_interpreted(2, 2, 64, 60, 0, 1),
        slow_interpreted(2, 1, 64, 131, 40, 1),
        slow_interpreted(4, 2, 64, 131, 40, 1),
        slow_interpreted(3, 1, 64, 203, 0, 1),
        slow_interpreted(2, 1, 64, 700, 40, 1),
        *(slow_interpreted(group, 1, 64, 90, 0, 1) for group in (7, 16)),
        *(slow_interpreted(2, 1, 64, 203, window, 1) for window in (1, 7, 16, 31, 64, 100)),
        slow_interpreted(2, 1, 64, 1400, 200, 1),
        slow_interpreted(2, 1, 256, 300, 31, 1),
        slow_interpreted(2, 2, 64, 64 * NEAR_BLOCKS + 117, 0, 1),
        *(slow_interpreted(2, 1, dim, 60, 0, 5) for dim in (112, 192, 256, 512)),
        pytest.param(2, 1, 256, 700, 128, 5, marks=UNITS),
        pytest.param(2, 1, 512, 700, 128, 5, marks=UNITS),
        pytest.param(2, 2, 64, 90, 0, 5, marks=UNITS),
        pytest.param(2, 2, 64, 203, 0, 10, marks=UNITS),
        pytest.param(1, 1, 64, 90, 0, 25, marks=UNITS),
        pytest.param(2, 1, 128, 90, 0, 5, marks=UNITS),
    ],
)
def test_a_row_is_the_same_alone_in_a_tree_and_in_a_prompt(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    length: int,
    window: int,
    spread: float,
) -> None:
    """A large `spread` is as in a trained model: few keys have nearly all of the weight, the others next to none."""
    if device.type == "cuda":  # the interpreter would take minutes
        heads, kv_heads = 16 * heads, 16 * kv_heads
    check_invariance(device, dtype, HeadShape(heads, kv_heads, dim), length, {"window": window}, spread=spread)


def test_a_row_is_the_same_in_a_small_tree(device: torch.device) -> None:
    check_invariance(device, torch.float16, HeadShape(2, 1, 64), 131, {"window": 40}, ahead=12, nodes=24)


@pytest.mark.parametrize("length", [65, 76, 79, 80])
def test_every_token_is_led_along_its_own_path(device: torch.device, length: int) -> None:
    """In each block of 16 positions, from the root's on, the cells of a token's path are its text's, its ancestors' and
    its own. Tokens that share a path list it once. A chunk's tile has no paths."""
    rng = random.Random(length)
    parents = [-1, *range(20), *(rng.randrange(max(0, i - 9), i) for i in range(21, 40))]
    tiles, group = Tiles(16, 64, 1, near_keys=64), 2
    parts = [Part(length, 5, parents), Part(9)]
    tables = tables_of(parts, device)[0]
    rows = rows_of(parts, tables, (group, 16))
    nodes = most_nodes_of(len(rows.positions))
    most, blocks = most_paths_of(nodes), most_blocks_of(nodes)
    lists = torch.full((len(rows.tiles), list_size(nodes, tiles, group)), 99, dtype=torch.int32, device=device)
    list_paths(rows, lists, tiles, group)
    real = rows.tiles[: int(rows.counts[0])].tolist()
    trees = [index for index, tile in enumerate(real) if tile[Tile.IS_TREE] and tile[Tile.ROWS] > 1]
    assert [index for index in range(len(real)) if lists[index, 0] > 0] == trees
    end, table = length + 5, tables[0].tolist()
    for tile, used, *numbers in ((index, *lists[index].tolist()) for index in trees):
        cells, bases = numbers[:used], numbers[16 * most : 16 * most + used // 64]
        tokens = range(8 * trees.index(tile), min(8 * trees.index(tile) + 8, len(parents)))
        listed = set()
        for local, token in enumerate(tokens):
            path = [token]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            indices = [*range(end), *(end + node for node in reversed(path))]  # by position
            for number in range(len(indices[:-1]) // 16 - end // 16 + 1):
                at = 16 * (end // 16 + number)
                its_path = numbers[16 * most + most // 4 + local * blocks + number]
                assert bases[its_path // 4] == at
                seen = indices[at : at + 16]
                expected = [table[index // PAGE] * PAGE + index % PAGE for index in seen]
                assert cells[16 * its_path :][: len(seen)] == expected
                listed.add(its_path)
        lengths = [16 - cells[16 * path : 16 * path + 16].count(-1) for path in range(used // 16)]
        assert {path for path, found in enumerate(lengths) if found} == listed


def test_the_workspace_has_room_for_all_head_shapes(device: torch.device) -> None:
    """Wide heads need more memory per query, narrow ones may have more queries. Neither takes the other's."""
    needs = [(64, 40, Tiles(16, 64, 2), 1, 1, 512), (64, 4, Tiles(16, 64, 7, near_keys=64), 4, 2, 16)]
    for order in (needs, needs[::-1]):
        work = Workspace(device)
        for need in order:
            work.reserve(*need)
        assert work.part.numel() >= 64 * 2 * 512
        assert work.top.numel() >= 64 * 4 * 8 * 2
        assert work.arrived.numel() >= 40
        assert work.paths.numel() >= 4 * list_size(64, needs[1][2], 2)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 2, 512), (32, 8, 128)])
def test_the_workspace_holds_no_more_queries_than_split_tiles(heads: int, kv_heads: int, dim: int) -> None:
    """A step of many rows has many tiles, whose splits share a program and store nothing."""
    work, shape = Workspace(torch.device("meta")), HeadShape(heads, kv_heads, dim)
    for size in TileSize:
        work.reserve(1024, 99, tiles_for(1024, shape, Tiling(size, Grid.SINGLE), invariant=True), *shape)
    assert 4 * work.part.numel() < 300e6
