"""Which captured step serves a step: its size, and how attention is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lookahead.backends.base import StepInput
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, bucket, needed_bucket, sizes_to
from lookahead.backends.graph.weights import Weights

SMALL_TILE, LARGE_TILE = 16, 64
"""Queries per tile of attention; see `kernels.tiles`."""


SHORT = 256
"""Up to so many tokens a prompt runs in small tiles. On an H200 four prompts of 100 tokens take 34 us of attention per
layer in small tiles and 50 in large ones; 512 tokens after 512 take 94 and 77."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """Which captured step serves a step: its rows, and for how many of them logits are computed, both padded.

    `drawn`: targets are drawn, and not only the argmax taken; `raced`: with noise, as `torch.multinomial` draws.
    `small`, `alone` and `one` say how attention is cut (see `kernels.tiles`): small tiles for sequences with few rows
    each, each done by one program if there are many, or all at a time if there are few. `invariant`: a row's result
    does not depend on the other rows, bit for bit.
    """

    rows: int
    needed: int
    drawn: bool
    raced: bool
    small: bool
    alone: bool
    one: bool
    invariant: bool


def kind_of(
    items: Sequence[StepInput], lengths: Sequence[int], weights: Weights, processors: int, invariant: bool
) -> StepKind:
    """The kind of a step of these inputs, whose sequences have so many tokens cached.

    `processors` are the device's multiprocessors. `invariant`: steps are to be so where they can.
    """
    rows = needed = largest = small_tiles = large_tiles = 0
    small, drawn, raced, group = True, False, False, weights.heads // weights.kv_heads
    few = 2 * SMALL_TILE // group
    for item, length in zip(items, lengths, strict=True):
        trail, nodes = len(item.trail), len(item.tree.tokens)
        rows, needed = rows + trail + nodes, needed + len(item.tree.needed)
        largest = nodes if nodes > largest else largest
        drawn, raced = drawn or bool(item.uniforms), raced or bool(item.noise)
        # Small tiles serve best who has few queries, or little to read.
        small = small and nodes <= few and (trail <= few or length + trail <= SHORT)
        for count in (trail, nodes) if trail else (nodes,):
            small_tiles += -(-count * group // SMALL_TILE)
            large_tiles += -(-count * group // LARGE_TILE)
    rows = bucket(rows)
    tiles, block = (small_tiles, SMALL_TILE) if small else (large_tiles, LARGE_TILE)
    alone = tiles * weights.kv_heads >= processors
    return StepKind(
        rows=rows,
        needed=needed_bucket(rows, needed),
        drawn=drawn or raced,
        raced=raced,
        small=small,
        alone=alone,
        one=not alone and tiles <= -(-rows * group // block),
        invariant=invariant and largest <= INVARIANT_ROWS,
    )


def every_shape(tokens: int, budget: int, most: int, group: int) -> Iterator[tuple[int, int, int]]:
    """Steps of one sequence that together have every kind: the lengths of trail and tree, and the needed nodes.

    A trail has at most `tokens` tokens, a tree at most `budget`, and both together at most `most`.
    """
    few = 2 * SMALL_TILE // group
    trees = {0, 1, few, few + 1, FEW_NEEDED, FEW_NEEDED + 1, INVARIANT_ROWS, INVARIANT_ROWS + 1, budget}
    before = 0
    for size in sizes_to(min(tokens + budget, most)):
        for tree in sorted({min(tree, budget, size) for tree in trees | {size}}, reverse=True):
            for rows in (before + 1, min(size, most)):
                trail = rows - tree
                for needed in (tree, min(1, tree)):
                    if 0 <= trail <= tokens:
                        yield trail, tree, needed
        before = size
