"""Which captured step serves a step: its size, how attention is cut, and how targets are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels.tiles import Cut, Grid, HeadShape, TileSize, most_split, queries_per_tile
from lookahead.backends.graph.sizes import INVARIANT_ROWS, MOST_NEEDED, ROW_SIZES, bucket, needed_bucket

SHORT = 256
"""A prompt of up to this many tokens runs in small tiles. On an H200 ten prompts of 100 tokens take 50 us of attention
per layer in small tiles and 75 in large ones, four of 250 tokens 57 and 68, two of 500 78 and 70."""


LARGE_TIME = 2.4
"""How many times as long as a small tile a large one takes. On an H200, 64 sequences of six rows take 96 us of
attention per layer in small tiles and 220 in large ones, of which there are as many."""


STAND_INS = (32, 128, 256, 512, ROW_SIZES[-1])
CHUNK_STAND_INS = (256, 512, ROW_SIZES[-1])
"""Sizes that stand in for the smaller ones. A prompt runs once, so that its pass may take twice as long."""


class ForwardKind(NamedTuple):
    """Which captured forward pass serves a step: its rows, and for how many of them logits are computed, both padded.

    `cuts`: how attention is cut, for each head shape of the model's layers. `invariant`: a row's result does not depend
    on the other rows, bit for bit.
    """

    rows: int
    needed: int
    cuts: tuple[Cut, ...]
    invariant: bool


class Targets(IntEnum):
    """How a step chooses the targets of its needed rows: the argmax; a draw by inverse CDF with a uniform per row; or a
    draw with noise, as `torch.multinomial` draws. A step that draws may also hold rows that take the argmax."""

    GREEDY = 0
    DRAWN = 1
    MULTINOMIAL = 2


class TargetsKind(NamedTuple):
    """Which captured end of a step serves it: how targets come from the logits of `needed` rows.

    `adjusted`: from adjusted logits (see `sampling.adjusted`). `logprobs`: log-probabilities are returned.
    """

    needed: int
    targets: Targets = Targets.GREEDY
    adjusted: bool = False
    logprobs: bool = False


class StepKind(NamedTuple):
    """Which captured step serves a step: a forward pass, and how targets come from its logits."""

    forward: ForwardKind
    targets: TargetsKind

    @property
    def rows(self) -> int:
        return self.forward.rows

    @property
    def needed(self) -> int:
        return self.forward.needed


class Device(NamedTuple):
    """What the kind of a step depends on besides its inputs: the head shapes of the model's layers, each once; the
    GPU's multiprocessors; and whether steps are to be invariant where they can."""

    shapes: tuple[HeadShape, ...]
    processors: int
    invariant: bool


def kind_of(items: Sequence[StepInput], lengths: Sequence[int], device: Device) -> StepKind:
    """The kind of a step of these inputs, whose sequences have `lengths` tokens cached."""
    trees, chunks = [item.tree.size for item in items], [len(item.chunk) for item in items]
    needed, targets, plain = 0, Targets.GREEDY, True
    for item in items:
        needed += len(item.tree.needed)
        if item.uniforms:
            targets = Targets.DRAWN
        if item.adjustment is not None or item.logprobs is not None or item.noise:
            plain = False
    forward = forward_kind(trees, chunks, lengths, needed, device)
    if plain:
        return StepKind(forward, TargetsKind(forward.needed, targets))
    if any(item.noise for item in items):
        targets = Targets.MULTINOMIAL
    adjusted = any(item.adjustment is not None for item in items)
    logprobs = any(item.logprobs is not None for item in items)
    return StepKind(forward, TargetsKind(forward.needed, targets, adjusted, logprobs))


def forward_kind(
    trees: Sequence[int], chunks: Sequence[int], lengths: Sequence[int], needed: int, device: Device
) -> ForwardKind:
    """The kind of a forward pass over trees and prompt chunks of these sizes, with `needed` logits rows."""
    largest, any_chunk = max(trees), any(chunks)
    rows = bucket(sum(trees) + sum(chunks))
    cuts = []
    for shape in device.shapes:
        group, size, parts = shape.group, TileSize.SMALL, list(trees)
        if largest > few_rows(group) or any_chunk:  # otherwise small tiles are faster
            size = _faster_size(trees, chunks, lengths, group)
            parts += chunks
        block = queries_per_tile(shape.dim, size)
        tiles = sum([-(-count * group // block) for count in parts])
        grid = Grid.SINGLE if tiles <= -(-rows * group // block) else Grid.SPLIT
        if tiles > most_split(shape, device.processors, size):
            grid = Grid.WHOLE
        cuts.append(Cut(size, grid))
    return ForwardKind(rows, needed_bucket(rows, needed), tuple(cuts), device.invariant and largest <= INVARIANT_ROWS)


def few_rows(group: int) -> int:
    """The most rows of a tree that always gets small tiles, where `group` query heads share a K/V head."""
    return 2 * TileSize.SMALL // group


def _faster_size(trees: Sequence[int], chunks: Sequence[int], lengths: Sequence[int], group: int) -> TileSize:
    """The tiles in which attention takes less time, for trees and prompt chunks with these numbers of rows.

    A tile reads the keys of its sequence once for all of its queries. In a batch, most trees are small, and one large
    tree or long prompt among them should not give all of them large tiles. Short prompts count for neither: they are
    faster in small tiles, but gain little.
    """
    small_work = large_work = 0
    for tree, chunk, length in zip(trees, chunks, lengths, strict=True):
        before = length + chunk
        for rows, keys in ((tree, before + tree), (chunk, before if before > SHORT else 0)):
            small_work += -(-rows * group // TileSize.SMALL) * keys
            large_work += -(-rows * group // TileSize.LARGE) * keys
    return TileSize.SMALL if small_work <= LARGE_TIME * large_work else TileSize.LARGE


def stand_in(kind: ForwardKind, chunk: bool, most: int) -> ForwardKind:
    """The kind of a larger pass, of at most `most` rows, that can do what this one does, with the same bits if it is
    invariant. `chunk`: some of the rows are a prompt's.

    Few kinds stand in for all others, so that few have to be captured before anything can run.
    """
    rows = min(next(size for size in (CHUNK_STAND_INS if chunk else STAND_INS) if size >= kind.rows), most)
    kind = kind._replace(rows=rows, needed=needed_bucket(rows, min(rows, MOST_NEEDED)))
    return kind._replace(cuts=(Cut(TileSize.LARGE, Grid.WHOLE),) * len(kind.cuts)) if chunk else kind
