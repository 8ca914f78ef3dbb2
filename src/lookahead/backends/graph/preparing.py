"""The kinds of steps that are captured in advance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from lookahead.backends.graph.kernels.tiles import Grid, HeadShape, TileSize, Tiling, most_split, queries_per_tile
from lookahead.backends.graph.kinds import (
    FALLBACK_ROWS,
    SHORT_PROMPT,
    DeviceTraits,
    ForwardKind,
    Sampler,
    TargetsKind,
    fallback_kind,
    few_rows,
    forward_kind,
)
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_NODES, needed_bucket, sizes_to


def every_forward_kind(
    device: DeviceTraits, sequences: int, tokens: int, budget: int, most: int
) -> Iterator[ForwardKind]:
    """The kinds of all passes of up to `sequences` sequences, with prompts of up to `tokens` tokens and trees of up to
    `budget` nodes each. A pass has at most `most` rows. The largest passes come first: they need the most memory.

    They may include kinds that only an unusual distribution of the rows needs.
    """
    nodes, sizes = sequences * budget, [0, *sizes_to(min(sequences * (tokens + budget), most))]
    for before, rows in reversed(list(pairwise(sizes))):
        tilings = [_tilings(shape, device.processors, before + 1, rows, sequences) for shape in device.shapes]
        needed = {needed_bucket(rows, count) for count in (1, min(nodes, FEW_NEEDED + 1))}
        exact = {device.invariant, device.invariant and budget <= INVARIANT_NODES}
        for one_per_shape, count, invariant in product(product(*tilings), needed, exact):
            yield ForwardKind(rows, count, one_per_shape, invariant)


def _tilings(shape: HeadShape, processors: int, fewest_rows: int, rows: int, sequences: int) -> list[Tiling]:
    """The possible tilings of attention over heads of this shape in passes of `fewest_rows` to `rows` rows.

    They depend on the number of tiles, which is lowest if one sequence has all rows, and highest if every sequence has
    few.
    """
    tilings, group, parts = [], shape.group, 2 * sequences
    for size in TileSize:
        if size is TileSize.LARGE and rows <= few_rows(group):
            continue  # no chunk or tree is that large
        if size is TileSize.SMALL and sequences == 1 and fewest_rows > SHORT_PROMPT + few_rows(group):
            continue  # the prompt is long, or the tree large
        block = queries_per_tile(shape.dim, size)
        split = most_split(shape, processors, size)
        fewest, usual = -(-fewest_rows * group // block), -(-rows * group // block)
        most_tiles = min(rows * -(-group // block), (rows * group + min(parts, rows) * (block - 1)) // block)
        grids = {
            Grid.SINGLE: fewest <= min(usual, split),
            Grid.SPLIT: max(fewest, usual + 1) <= min(most_tiles, split),
            Grid.UNSPLIT: most_tiles > split,
        }
        tilings += [Tiling(size, grid) for grid, possible in grids.items() if possible]
    return tilings


def forward_kinds_ahead(device: DeviceTraits, sequences: int) -> list[ForwardKind]:
    """The kinds of passes with one token per sequence, which may run ahead."""
    numbers = range(1, sequences + 1)
    return list(dict.fromkeys(forward_kind([1] * n, [0] * n, [0] * n, n, device) for n in numbers))


def every_targets_kind(needed: int) -> Iterator[TargetsKind]:
    """All kinds of targets graphs for `needed` rows: greedy or sampled, with and without adjusted logits, with and
    without log-probabilities."""
    for sampler, adjusted, logprobs in product((Sampler.GREEDY, Sampler.INVERSE_CDF), (False, True), (False, True)):
        yield TargetsKind(needed, sampler, adjusted=adjusted, logprobs=logprobs)


def usual_fallbacks(device: DeviceTraits, most: int) -> Iterator[ForwardKind]:
    """The fallback kinds that most requests of a single sequence need."""
    few = min(few_rows(shape.group) for shape in device.shapes)
    for chunk, nodes in ((0, min(few, FALLBACK_ROWS[0])), (0, 32), (0, 128), (128, 128), (384, 128)):
        if chunk + nodes <= most:
            kind = forward_kind([nodes], [chunk], [0], nodes, device)
            yield fallback_kind(kind, has_chunk=chunk > 0, most=most)
