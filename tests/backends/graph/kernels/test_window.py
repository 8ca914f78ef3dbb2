"""Sliding windows and chunks in attention: which keys are read, and that a row's bits do not depend on how."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from attending import Step, parts_of, relative_error
from flat import Part
from marks import slow_interpreted

from lookahead.backends.graph.kernels import near, prefix
from lookahead.backends.graph.kernels.tiles import (
    NEAR_BLOCKS,
    Grid,
    HeadShape,
    Tiles,
    TileSize,
    Tiling,
    queries_per_tile,
    tiles_for,
)
from lookahead.backends.graph.sizes import PAGE

WINDOWS = [1, 7, 16, 31, 64, 100, 200]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="replaces functions of the kernel before it is run")

FEW = [(156, 0, 5), (20, 9, 2)]
"""Sequences of cached tokens, a prompt chunk's rows and a tree's rows. A window of 7 begins inside the block of 16
positions that the first tree continues, so that this block has cells that no row may read."""
BATCH = [(301, 0, 9), (20, 30, 4), (0, 0, 1), (190, 0, 1)]
LONG = [(1450, 0, 40), (700, 70, 0), (3, 0, 17), (1200, 1, 1)]
FAR_AWAY = [(64 * NEAR_BLOCKS + 117, 3, 5)]


def tilings(dim: int, near_keys: int) -> Iterator[Tiles]:
    """Small and large tiles, of which each split has its own program or one program does them all."""
    for block_m, unsplit in ((16, False), (32 if dim > 128 else 64, False), (16, True), (32, True)):
        programs = 4 if unsplit else 64  # fewer programs than tiles, or one for each
        block_n = 32 if dim > 128 else 64
        yield Tiles(
            block_m, block_n, 5, near_keys=near_keys, near_splits=3, unsplit=unsplit, programs=programs, processors=1
        )


def unrounded(step: Step, tiles: Tiles) -> torch.Tensor:
    """The step's results [R, H, D] in fp32, so that no bit is hidden. Rows that pad it are zeros."""
    return step.run(tiles, out=torch.zeros_like(step.q, dtype=torch.float32))


def invisible(step: Step) -> torch.Tensor:
    """The cells [pages, PAGE] that no row sees, of its own text or of others."""
    window, chunk = step.options.get("window", 0), step.options.get("chunk", 0)
    seen = torch.zeros(len(step.keys), PAGE, dtype=torch.bool, device=step.device)
    for line, part in enumerate(step.parts):
        oldest = part.length // chunk * chunk if chunk else max(0, part.length - window + 1)
        at = torch.arange(oldest, part.end, device=step.device)
        seen[step.tables[line, at // PAGE].long(), at % PAGE] = True
    return ~seen


LIMITS = [*({"window": tokens} for tokens in WINDOWS), *({"chunk": tokens} for tokens in (16, 23, 64, 150))]
QUICK = [{"window": 7}, {"window": 100}]
CASES = [
    ({"window": 7}, 64, FEW),
    slow_interpreted({"chunk": 23}, 64, FEW),
    *(slow_interpreted(limit, dim, shapes) for limit in LIMITS for dim in (64, 256) for shapes in (BATCH, LONG)),
    *(slow_interpreted({"window": window}, 80, BATCH) for window in (7, 100)),
    *(slow_interpreted({"window": window}, 64, FAR_AWAY) for window in (1, 100, 64 * NEAR_BLOCKS)),
    *(slow_interpreted({"chunk": chunk}, 64, FAR_AWAY) for chunk in (100, 64 * NEAR_BLOCKS)),
]


@pytest.mark.parametrize(("limit", "dim", "shapes"), [*CASES, ({"chunk": 23}, 16, FEW)])
@pytest.mark.parametrize(("dtype", "near_keys"), [(torch.float32, 0), (torch.float16, 64)])
@pytest.mark.thinned(1, most=1)
def test_no_key_before_the_window_counts(
    device: torch.device,
    dtype: torch.dtype,
    near_keys: int,
    limit: dict[str, int],
    dim: int,
    shapes: list[tuple[int, int, int]],
) -> None:
    """The results are right, and stay the same bit for bit with NaN in every cell that no row sees. An invariant
    step's are the same in every cut."""
    step = Step(device, dtype, parts_of(*shapes), 2, 1, dim, padding=2)
    step.options = limit
    exact, rounded = (step.plain(kind) for kind in (torch.float64, dtype))
    before = [unrounded(step, tiles) for tiles in tilings(dim, near_keys)]
    for found in before:
        assert relative_error(found, exact) <= 2 * relative_error(rounded, exact) + 1e-7
    hidden = invisible(step)
    assert hidden[step.tables[0, 0]].any()
    for cache in (step.keys, step.values):
        cache.transpose(1, 2)[hidden] = float("nan")
    for tiles, expected in zip(tilings(dim, near_keys), before, strict=True):
        found = unrounded(step, tiles)
        assert found.isfinite().all()
        assert torch.equal(found, expected)
        assert not near_keys or torch.equal(found, before[0])


@INTERPRETED
@pytest.mark.parametrize(("limit", "dim", "shapes"), [({"window": 31}, 64, FEW), *CASES[1:]])
@pytest.mark.parametrize(("dtype", "near_keys"), [slow_interpreted(torch.float32, 0), (torch.float16, 64)])
@pytest.mark.slow
def test_a_walk_over_the_whole_context_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    dtype: torch.dtype,
    near_keys: int,
    limit: dict[str, int],
    dim: int,
    shapes: list[tuple[int, int, int]],
) -> None:
    """Blocks before the window add exact zeros: with all of them, under the mask alone, no bit changes."""
    step = Step(device, dtype, parts_of(*shapes), 2, 1, dim)
    step.options = limit
    found = [unrounded(step, tiles) for tiles in tilings(dim, near_keys)]
    for module in (prefix, near):
        monkeypatch.setattr(module, "lowest_key", lambda oldest, BOUNDED: prefix.tl.min(oldest, 0) * 0)
    for tiles, ours in zip(tilings(dim, near_keys), found, strict=True):
        assert torch.equal(unrounded(step, tiles), ours)


@pytest.mark.parametrize("shapes", [FEW, *map(slow_interpreted, (BATCH, LONG, FAR_AWAY))])
@pytest.mark.slow
def test_a_window_longer_than_the_text_changes_nothing(
    device: torch.device, shapes: list[tuple[int, int, int]]
) -> None:
    """Bit for bit, in an invariant step: although one program does a window's splits by another loop, and masks where
    it need not. Nor does a chunk that no row leaves."""
    step = Step(device, torch.float16, parts_of(*shapes), 2, 1, 64)
    for tiles in list(tilings(64, 16))[1:3]:
        expected = unrounded(step, tiles)
        for limit in ("window", "chunk"):
            step.options = {limit: 5000}
            assert torch.equal(unrounded(step, tiles), expected)
        step.options = {}


@pytest.mark.parametrize(
    "limit",
    [limit if limit in QUICK else slow_interpreted(limit) for limit in (*LIMITS, {"chunk": 155})],
    ids=str,
)
@pytest.mark.parametrize(("dim", "length"), [(64, 150), slow_interpreted(64, 1490), slow_interpreted(256, 1490)])
@pytest.mark.thinned(1, most=1)
def test_a_row_is_the_same_alone_and_in_a_prompt(
    device: torch.device, limit: dict[str, int], dim: int, length: int
) -> None:
    """Bit for bit, in an invariant step: a prompt chunk's rows, whose windows begin at different keys, and each of them
    as a step of its own, which reads less."""
    chunk = Step(device, torch.float16, [Part(length, 20, ())], 2, 1, dim)
    chunk.options = limit
    for tiles in list(tilings(dim, 16))[1:3]:
        together = unrounded(chunk, tiles)
        for row in (0, 7, 19):
            alone = Step(device, torch.float16, [Part(length + row, 0, (-1,))], 2, 1, dim)
            alone.tables, alone.keys, alone.values = chunk.tables, chunk.keys, chunk.values
            alone.q, alone.options = chunk.q[row : row + 1], limit
            for own in list(tilings(dim, 16))[::2]:
                assert torch.equal(unrounded(alone, own)[0], together[row]), (row, own)


@INTERPRETED
@pytest.mark.parametrize(
    ("length", "limit", "blocks"),
    [
        (1450, {"window": 100}, 2),
        (1450, {"window": 200}, 4),
        (1450, {"window": 1}, 1),
        (1408, {"window": 65}, 1),
        (1408, {"window": 1}, 0),
        (1450, {"chunk": 100}, 2),
        (1450, {"chunk": 725}, 1),
        (1408, {"chunk": 704}, 0),
    ],
)
@pytest.mark.thinned(1, most=3)
def test_only_the_blocks_of_the_window_are_read(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, length: int, limit: dict[str, int], blocks: int
) -> None:
    """Of 23 blocks of 64 keys; a program that does all splits reads them in halves."""
    calls = []
    load_keys = prefix.load_keys

    def counted(*args: Any) -> Any:
        calls.append(args)
        return load_keys(*args)

    monkeypatch.setattr(prefix, "load_keys", counted)
    step = Step(device, torch.float32, [Part(length)], 2, 1, 64)
    step.options = limit
    for unsplit, parts in ((False, 1), (True, 2)):
        calls.clear()
        step.run(Tiles(16, 64, 5, near_splits=3, unsplit=unsplit, part_n=32))
        assert len(calls) == blocks * parts


def test_a_short_window_has_few_splits() -> None:
    """And the same in all invariant steps. A long window is divided like a long context."""
    shape = HeadShape(16, 2, 64)
    for window, splits, near_splits in ((1, 1, 1), (128, 3, 3), (1024, 4, 4), (2048, 8, 4), (4096, 15, 4), (0, 15, 4)):
        for size, grid, rows in product(TileSize, Grid, (1, 128)):
            tiles = tiles_for(rows, shape, Tiling(size, grid), invariant=True).for_layer(64, torch.bfloat16, window)
            assert (tiles.splits, tiles.near_splits) == (splits, near_splits)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256, 512])
def test_all_invariant_steps_divide_keys_alike(dim: int) -> None:
    for heads, kv_heads in ((4, 1), (9, 3), (16, 8), (64, 64)):
        shape, found = HeadShape(heads, kv_heads, dim), set()
        for size, grid, rows in product(TileSize, Grid, (1, 16, 128, 1024)):
            tiles = tiles_for(rows, shape, Tiling(size, grid), invariant=True)
            found.add((tiles.block_n, tiles.splits, tiles.near_splits))
            assert tiles.block_m == queries_per_tile(dim, size)
            assert tiles.block_n % tiles.part_n == 0
            assert tiles.part_n % 16 == 0
        assert len(found) == 1
        assert PAGE % tiles.block_n == 0


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 576 columns"):
        tiles_for(1, HeadShape(16, 1, 576), Tiling(TileSize.SMALL, Grid.SINGLE), invariant=True)
