"""The kinds of captured steps: size, tiling of attention, and how targets are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
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
    needed, sampler, plain = 0, Sampler.GREEDY, True
    for sequence in inputs:
        needed += sequence.tree.needed_count
        if sequence.uniforms:
            sampler = Sampler.INVERSE_CDF
        if sequence.adjustment is not None or sequence.logprobs is not None or sequence.noise:
            plain = False
    forward = forward_kind(trees, chunks, lengths, needed, device)
    if plain:
        return StepKind(forward, TargetsKind(forward.needed, sampler))
    if any(sequence.noise for sequence in inputs):
        sampler = Sampler.MULTINOMIAL
    adjusted = any(sequence.adjustment is not None for sequence in inputs)
    logprobs = any(sequence.logprobs is not None for sequence in inputs)
    return StepKind(forward, TargetsKind(forward.needed, sampler, adjusted=adjusted, logprobs=logprobs))


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
    tilings = []
    for shape in device.shapes:
        group, size, row_counts = shape.group, TileSize.SMALL, trees
        if largest > few_rows(group) or any_chunk:  # otherwise small tiles are faster
            size = _faster_size(trees, chunks, lengths, group)
            row_counts = [*trees, *chunks]
        block = queries_per_tile(shape.dim, size)
        if largest * group <= block and not any_chunk:  # one for each tree
            tiles = len(trees)
        else:
            tiles = sum([-(-count * group // block) for count in row_counts])
        grid = Grid.SINGLE if tiles <= -(-rows * group // block) else Grid.SPLIT
        if tiles > most_split(shape, device.processors, size):
            grid = Grid.UNSPLIT
        tilings.append(Tiling(size, grid))
    return ForwardKind(
        rows, needed_bucket(rows, needed), tuple(tilings), device.invariant and largest <= INVARIANT_NODES
    )


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
