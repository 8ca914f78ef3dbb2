"""Kinds of steps: what is captured in advance is all that one sequence can ask for."""

from __future__ import annotations

import random

import pytest
from chains import chain

from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.graph.kernels.tiles import Grid, HeadShape, TileSize, tiles_for
from lookahead.backends.graph.kinds import (
    DeviceTraits,
    ForwardKind,
    _forward_kind,
    fallback_kind,
    forward_kind,
    step_kind,
)
from lookahead.backends.graph.preparing import every_forward_kind, forward_kinds_ahead
from lookahead.config import SamplingParams

PROCESSORS = 132
"""Those of an H200."""
MOST_ROWS = 1024


def device(*shapes: HeadShape, invariant: bool = True) -> DeviceTraits:
    return DeviceTraits(shapes, PROCESSORS, invariant)


def kind(on: DeviceTraits, chunk: int, nodes: int, needed: int) -> ForwardKind:
    tree = chain([0] * nodes, needed) if nodes else NO_TREE
    item = StepInput(0, [0] * chunk, tree, SamplingParams(), ())
    return step_kind([item], [0], on).forward


@pytest.mark.parametrize(("tokens", "budget"), [(60, 16), (230, 64)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 256), (9, 3, 64), (32, 8, 128), (32, 32, 128)])
@pytest.mark.thinned(1, most=1)
def test_every_kind_of_one_sequence_is_prepared(heads: int, kv_heads: int, dim: int, tokens: int, budget: int) -> None:
    on = device(HeadShape(heads, kv_heads, dim))
    prepared = set(every_forward_kind(on, 1, tokens, budget, MOST_ROWS))
    wanted = set()
    for chunk in range(tokens + 1):
        for nodes in range(0 if chunk else 1, budget + 1):
            for needed in {nodes, min(1, nodes)}:
                found = kind(on, chunk, nodes, needed)
                assert found in prepared, (chunk, nodes, needed)
                wanted.add(found)
    assert len(prepared) <= 2 * len(wanted)  # each takes time to capture


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(64, 64, 64), (9, 3, 64), (32, 8, 128), (32, 4, 128), (4, 2, 256)]
)
@pytest.mark.parametrize("sequences", [1, 3, 64, 256])
@pytest.mark.thinned(1)
def test_every_kind_of_many_sequences_is_prepared(heads: int, kv_heads: int, dim: int, sequences: int) -> None:
    """Whatever the trees and prompts that come together in a pass. A step has at most 512 needed rows."""
    rng, on = random.Random(sequences), device(HeadShape(heads, kv_heads, dim))
    prepared = set(every_forward_kind(on, sequences, 1 << 15, 128, MOST_ROWS))
    assert len(prepared) <= 120, "captures before a server is ready"
    ahead = forward_kinds_ahead(on, sequences)
    assert set(ahead) <= prepared
    for _ in range(400):
        count, rows = rng.randint(1, sequences), rng.choice([1, 2, 3, 6, 12, 20, 40, 70, 120, 200, 400, 700, MOST_ROWS])
        trees, chunks, left, nodes = list[int](), list[int](), rows, 512
        for _ in range(count):
            if not left or not nodes:
                break
            trees.append(min(rng.choice([1, 1, 2, 4, 9, 30, 60, 128]), left, nodes))
            left, nodes = left - trees[-1], nodes - trees[-1]
            chunks.append(min(rng.choice([0, 0, 0, 5, 30, 100, 300, left]), left))
            left -= chunks[-1]
            if chunks[-1] and rng.random() < 0.2:  # a piece of a prompt that does not come to its root
                left, nodes, trees[-1] = left + trees[-1], nodes + trees[-1], 0
        lengths = [rng.choice([0, 50, 300, 5000]) for _ in trees]
        needed = rng.choice([sum(trees), len(trees)])
        found = forward_kind(trees, chunks, lengths, needed, on)
        assert found in prepared, (trees, chunks, lengths)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 32, 128), (32, 8, 128), (64, 8, 64)])
def test_a_single_tree_has_one_kind_at_any_length(heads: int, kv_heads: int, dim: int) -> None:
    on = device(HeadShape(heads, kv_heads, dim))
    for nodes in range(1, 300):
        cached = forward_kind([nodes], [0], [0], nodes, on)
        assert all(_forward_kind([nodes], [0], [length], nodes, on) == cached for length in (0, 1, 77, 30_011))


@pytest.mark.parametrize(
    ("trees", "chunks", "length", "small"),
    [
        ([4] * 63 + [60], [], 250, True),  # one large tree among many small ones
        ([60] * 8, [], 250, False),
        ([4] * 64, [400], 250, True),  # a prompt beside many that decode
        ([4] * 8, [480], 6000, False),  # a piece of a long one, which reads far more than they do
        ([1] * 8, [100] * 8, 0, True),
    ],
)
def test_a_batch_has_the_tiles_that_serve_most_of_its_rows(
    trees: list[int], chunks: list[int], length: int, small: bool
) -> None:
    on = device(HeadShape(32, 32, 128))
    chunks = [0] * (len(trees) - len(chunks)) + chunks
    items = [
        StepInput(0, [0] * chunk, chain([0] * nodes, nodes), SamplingParams(), ())
        for nodes, chunk in zip(trees, chunks, strict=True)
    ]
    (tiling,) = step_kind(items, [length] * len(items), on).forward.tilings
    assert (tiling.size is TileSize.SMALL) == small


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(64, 64, 64), (9, 3, 64), (32, 8, 128), (4, 2, 256), (1, 1, 32)]
)
@pytest.mark.thinned(1, most=2)
def test_there_is_a_program_for_every_tile(heads: int, kv_heads: int, dim: int) -> None:
    """Where a tile's splits have programs of their own, no program takes a second tile. A few sequences have such
    programs, and many do not."""
    shape = HeadShape(heads, kv_heads, dim)
    rng, found = random.Random(0), set()
    for _ in range(400):
        count = rng.choice([1, 2, 3, 5, 9, 40, 64])
        trees = [rng.randrange(1, rng.choice([2, 9, 1 + 512 // count])) for _ in range(count)]
        chunks = [rng.choice([0, 0, rng.randrange(1 + (1024 - sum(trees)) // count)]) for _ in range(count)]
        items = [
            StepInput(0, [0] * chunk, chain([0] * nodes, nodes), SamplingParams(), ())
            for nodes, chunk in zip(trees, chunks, strict=True)
        ]
        lengths = [rng.randrange(3000)] * count
        own = step_kind(items, lengths, device(shape, invariant=rng.random() < 0.8)).forward
        for kind in (own, fallback_kind(own, has_chunk=any(chunks), most=MOST_ROWS)):
            (tiling,) = kind.tilings
            tiled = tiles_for(kind.rows, shape, tiling, invariant=kind.invariant, processors=PROCESSORS)
            tiles = sum(-(-rows * shape.group // tiled.block_m) for rows in (*trees, *chunks))
            assert tiling.grid is Grid.UNSPLIT or tiles <= tiled.programs
            found.add((count > 1, tiling.grid))
    assert found >= {(False, Grid.SINGLE), (True, Grid.SPLIT), (True, Grid.UNSPLIT)}
