"""The kinds of captured steps: size, tiling of attention, and how targets are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels.tiles import Grid, HeadShape, TileSize, Tiling, most_split, queries_per_tile
from lookahead.backends.graph.sizes import INVARIANT_NODES, MOST_NEEDED, ROW_SIZES, bucket, needed_bucket

SHORT_PROMPT = 256
"""Prompts of up to this many tokens run in small tiles. On an H200 ten prompts of 100 tokens take 50 us of attention
per layer in small tiles and 75 in large ones, four of 250 tokens 57 and 68, two of 500 78 and 70."""


LARGE_TILE_TIME = 2.4
"""Time of a large tile relative to a small one. On an H200, 64 sequences of six rows take 96 us of attention per layer
in small tiles and 220 in the same number of large ones."""


FALLBACK_ROWS = (32, 128, 256, 512, ROW_SIZES[-1])
CHUNK_FALLBACK_ROWS = (256, 512, ROW_SIZES[-1])
"""Rows of the fallback kinds, without and with prompt chunks. A prompt runs only once, so its pass may take twice as
long."""


_UNIFORMS, _NOISE = attrgetter("uniforms"), attrgetter("noise")


class ForwardKind(NamedTuple):
    """The key of a captured forward pass: its rows, and the rows whose logits are needed, both padded.

    `tilings`: the tiling of attention for each head shape of the model. `invariant`: a row's result does not depend on
    the other rows, bit for bit.
    """

    rows: int
    needed: int
    tilings: tuple[Tiling, ...]
    invariant: bool


class Sampler(IntEnum):
    """How the targets of a step are sampled: argmax; inverse CDF with one uniform per row; or exponential noise, as in
    `torch.multinomial`. A step that samples may contain greedy rows, too."""

    GREEDY = 0
    INVERSE_CDF = 1
    MULTINOMIAL = 2


class TargetsKind(NamedTuple):
    """The key of a captured targets graph, which samples targets from the logits of `needed` rows.

    `adjusted`: penalties, biases or masks are applied first (see `sampling.adjusted`). `logprobs`: log-probabilities
    are returned.
    """

    needed: int
    sampler: Sampler = Sampler.GREEDY
    adjusted: bool = False
    logprobs: bool = False


class StepKind(NamedTuple):
    """The key of a captured step: its forward pass and its targets graph."""

    forward: ForwardKind
    targets: TargetsKind

    @property
    def rows(self) -> int:
        return self.forward.rows

    @property
    def needed(self) -> int:
        return self.forward.needed


class DeviceTraits(NamedTuple):
    """What the kind of a step depends on besides its inputs: the distinct head shapes of the model's layers, the number
    of multiprocessors, and whether steps should be invariant where possible."""

    shapes: tuple[HeadShape, ...]
    processors: int
    invariant: bool


def step_kind(inputs: Sequence[StepInput], lengths: Sequence[int], device: DeviceTraits) -> StepKind:
    """The kind of a step of these inputs, whose sequences have `lengths` cached tokens."""
    trees, chunks = [sequence.tree.size for sequence in inputs], [len(sequence.chunk) for sequence in inputs]
    needed = sum([sequence.tree.needed_count for sequence in inputs])
    forward = forward_kind(trees, chunks, lengths, needed, device)
    sampler = Sampler.INVERSE_CDF if any(map(_UNIFORMS, inputs)) else Sampler.GREEDY
    if any(map(_NOISE, inputs)):
        sampler = Sampler.MULTINOMIAL
    adjusted = [sequence.adjustment for sequence in inputs].count(None) < len(inputs)
    logprobs = [sequence.logprobs for sequence in inputs].count(None) < len(inputs)
    return StepKind(forward, TargetsKind(forward.needed, sampler, adjusted, logprobs))


def forward_kind(
    trees: Sequence[int], chunks: Sequence[int], lengths: Sequence[int], needed: int, device: DeviceTraits
) -> ForwardKind:
    """The kind of a forward pass over trees and prompt chunks of these sizes, with `needed` rows of logits."""
    if len(trees) == 1 and not chunks[0]:  # a single tree has the same kind at any length
        return _kind_of_tree(trees[0], needed, device)
    return _forward_kind(trees, chunks, lengths, needed, device)


@lru_cache(maxsize=4096)
def _kind_of_tree(tree: int, needed: int, device: DeviceTraits) -> ForwardKind:
    return _forward_kind((tree,), (0,), (0,), needed, device)


def _forward_kind(
    trees: Sequence[int], chunks: Sequence[int], lengths: Sequence[int], needed: int, device: DeviceTraits
) -> ForwardKind:
    largest, any_chunk = max(trees), any(chunks)
    rows = bucket(sum(trees) + sum(chunks))
    tiles: list[tuple[TileSize, int]] = []
    for group, few, (size, block), large in _tile_limits(device):
        row_counts = trees
        if largest > few or any_chunk:  # otherwise small tiles are faster
            row_counts = [*trees, *chunks]
            if _faster_size(trees, chunks, lengths, group) is TileSize.LARGE:
                size, block = large
        if largest * group <= block and not any_chunk:  # one for each tree
            tiles.append((size, len(trees)))
        else:
            tiles.append((size, sum([-(-count * group // block) for count in row_counts])))
    return _kind_of_tiles(rows, needed, largest <= INVARIANT_NODES, tuple(tiles), device)


@lru_cache(maxsize=16)
def _tile_limits(device: DeviceTraits) -> list[tuple[int, int, tuple[TileSize, int], tuple[TileSize, int]]]:
    """For each head shape: the query heads of a K/V head, `few_rows`, and small and large tiles with their queries."""
    return [
        (
            shape.group,
            few_rows(shape.group),
            (TileSize.SMALL, queries_per_tile(shape.dim, TileSize.SMALL)),
            (TileSize.LARGE, queries_per_tile(shape.dim, TileSize.LARGE)),
        )
        for shape in device.shapes
    ]


@lru_cache(maxsize=4096)
def _kind_of_tiles(
    rows: int, needed: int, exact: bool, tiles: tuple[tuple[TileSize, int], ...], device: DeviceTraits
) -> ForwardKind:
    """The kind of a pass with these tiles for each head shape. `exact`: its trees can be invariant."""
    tilings = []
    for shape, (size, count) in zip(device.shapes, tiles, strict=True):
        one_tree = -(-rows * shape.group // queries_per_tile(shape.dim, size))
        grid = Grid.SINGLE if count <= one_tree else Grid.SPLIT
        if count > most_split(shape, device.processors, size):
            grid = Grid.UNSPLIT
        tilings.append(Tiling(size, grid))
    return ForwardKind(rows, needed_bucket(rows, needed), tuple(tilings), device.invariant and exact)


def few_rows(group: int) -> int:
    """Trees of up to this many rows always get small tiles, where `group` query heads share a K/V head."""
    return 2 * TileSize.SMALL // group


def _faster_size(trees: Sequence[int], chunks: Sequence[int], lengths: Sequence[int], group: int) -> TileSize:
    """The faster tile size for trees and prompt chunks with these numbers of rows.

    A tile reads the keys of its sequence once for all of its queries. Most trees of a batch are small, and one large
    tree or long prompt should not force large tiles on all of them. Short prompts are ignored: they are faster in small
    tiles, but gain little.
    """
    small, large = int(TileSize.SMALL), int(TileSize.LARGE)  # the members of an enum take longer
    small_work = large_work = 0
    for tree, chunk, length in zip(trees, chunks, lengths, strict=True):
        before = length + chunk
        keys = before + tree
        small_work += -(-tree * group // small) * keys
        large_work += -(-tree * group // large) * keys
        if chunk and before > SHORT_PROMPT:
            small_work += -(-chunk * group // small) * before
            large_work += -(-chunk * group // large) * before
    return TileSize.SMALL if small_work <= LARGE_TILE_TIME * large_work else TileSize.LARGE


def fallback_kind(kind: ForwardKind, *, has_chunk: bool, most: int) -> ForwardKind:
    """The kind of a larger pass, of at most `most` rows, that can replace this one, with the same bits if it is
    invariant. `has_chunk`: the pass includes prompt tokens.

    A few fallback kinds cover all others, so that few captures are needed before anything can run.
    """
    sizes = CHUNK_FALLBACK_ROWS if has_chunk else FALLBACK_ROWS
    rows = min(next(size for size in sizes if size >= kind.rows), most)
    kind = kind._replace(rows=rows, needed=needed_bucket(rows, min(rows, MOST_NEEDED)))
    return kind._replace(tilings=(Tiling(TileSize.LARGE, Grid.UNSPLIT),) * len(kind.tilings)) if has_chunk else kind
