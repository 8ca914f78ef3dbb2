"""Which captured step serves a step: its size, and how attention is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels.tiles import LARGE, SMALL, most_shared, queries_per_tile
from lookahead.backends.graph.sizes import INVARIANT_ROWS, MOST_NEEDED, ROW_SIZES, bucket, needed_bucket

SHORT = 256
"""Up to so many tokens a prompt runs in small tiles. On an H200 ten prompts of 100 tokens take 50 us of attention per
layer in small tiles and 75 in large ones, four of 250 tokens 57 and 68, two of 500 78 and 70."""


LARGE_TIME = 2.4
"""How many times as long as a small tile a large one takes. On an H200, 64 sequences of six rows take 96 us of
attention per layer in small tiles and 220 in large ones, of which there are as many."""


STAND_INS = (32, 128, 256, 512, ROW_SIZES[-1])
TRAIL_STAND_INS = (256, 512, ROW_SIZES[-1])
"""Sizes that stand in for the smaller ones. A prompt runs once, so that its pass may take twice as long."""


class Heads(Protocol):
    """What is asked of a model: its query heads, its K/V heads, and their width."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def dim(self) -> int: ...


class ForwardKind(NamedTuple):
    """Which captured forward pass serves a step: its rows, and for how many of them logits are computed, both padded.

    How attention is cut (see `kernels.tiles`): `small`: into small tiles, for sequences with few rows each. `alone`:
    there are many tiles, and each is done by one program. `one`: there are few, and no more than if one sequence had
    all rows. `invariant`: a row's result does not depend on the other rows, bit for bit.
    """

    rows: int
    needed: int
    small: bool
    alone: bool
    one: bool
    invariant: bool


class TargetsKind(NamedTuple):
    """Which captured end of a step serves it: how targets come from the logits of `needed` rows.

    `drawn`: targets are drawn, and not only the argmax taken; `raced`: with noise, as `torch.multinomial` draws.
    `adjusted`: from adjusted logits (see `sampling.adjusted`). `logprobs`: log-probabilities are returned.
    """

    needed: int
    drawn: bool = False
    raced: bool = False
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


def kind_of(
    items: Sequence[StepInput], lengths: Sequence[int], model: Heads, processors: int, invariant: bool
) -> StepKind:
    """The kind of a step of these inputs, whose sequences have so many tokens cached.

    `processors` are the device's multiprocessors. `invariant`: steps are to be so where they can.
    """
    trees, trails = [item.tree.size for item in items], [len(item.trail) for item in items]
    needed, drawn, plain = 0, False, True
    for item in items:
        needed += len(item.tree.needed)
        if item.uniforms:
            drawn = True
        if item.adjustment is not None or item.logprobs is not None or item.noise:
            plain = False
    forward = forward_kind(trees, trails, lengths, needed, model, processors, invariant)
    if plain:
        return StepKind(forward, TargetsKind(forward.needed, drawn))
    raced = any(item.noise for item in items)
    adjusted = any(item.adjustment is not None for item in items)
    logprobs = any(item.logprobs is not None for item in items)
    return StepKind(forward, TargetsKind(forward.needed, raced or drawn, raced, adjusted, logprobs))


def forward_kind(
    trees: Sequence[int],
    trails: Sequence[int],
    lengths: Sequence[int],
    needed: int,
    model: Heads,
    processors: int,
    invariant: bool,
) -> ForwardKind:
    """The kind of a forward pass over trees and prompt chunks (`trails`) of these sizes, with `needed` logits rows."""
    group, parts, largest = model.heads // model.kv_heads, list(trees), max(trees)
    small = largest <= few_rows(group)  # small tiles are faster then, which need not be worked out in every step
    if not small or any(trails):
        small = _small_tiles_are_faster(trees, trails, lengths, group)
        parts += trails
    rows = bucket(sum(parts))
    block = queries_per_tile(model.dim, small=small)
    tiles = sum([-(-count * group // block) for count in parts])
    alone = tiles > most_shared(model.heads, model.kv_heads, model.dim, processors, small=small)
    return ForwardKind(
        rows=rows,
        needed=needed_bucket(rows, needed),
        small=small,
        alone=alone,
        one=not alone and tiles <= -(-rows * group // block),
        invariant=invariant and largest <= INVARIANT_ROWS,
    )


def few_rows(group: int) -> int:
    """The most rows of a tree that always gets small tiles, where `group` query heads share a K/V head."""
    return 2 * SMALL // group


def _small_tiles_are_faster(trees: Sequence[int], trails: Sequence[int], lengths: Sequence[int], group: int) -> bool:
    """Whether attention takes less time in small tiles, for trees and trails of so many rows each.

    A tile reads the keys of its sequence once for all of its queries. In a batch, most trees are small, and one large
    tree or long prompt among them should not give all of them large tiles. Short prompts count for neither: they are
    faster in small tiles, but gain little.
    """
    small_work = large_work = 0
    for tree, trail, length in zip(trees, trails, lengths, strict=True):
        before = length + trail
        for rows, keys in ((tree, before + tree), (trail, before if before > SHORT else 0)):
            small_work += -(-rows * group // SMALL) * keys
            large_work += -(-rows * group // LARGE) * keys
    return small_work <= LARGE_TIME * large_work


def stand_in(kind: ForwardKind, trail: bool, most: int) -> ForwardKind:
    """The kind of a larger pass, of at most `most` rows, that can do what this one does, with the same bits if it is
    invariant. `trail`: some of the rows are a prompt's.

    Few kinds stand in for all others, so that few have to be captured before anything can run.
    """
    rows = min(next(size for size in (TRAIL_STAND_INS if trail else STAND_INS) if size >= kind.rows), most)
    kind = kind._replace(rows=rows, needed=needed_bucket(rows, min(rows, MOST_NEEDED)))
    return kind._replace(small=False, alone=True, one=False) if trail else kind
