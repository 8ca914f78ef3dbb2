"""Which kinds of steps are captured before anybody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from lookahead.backends.graph.kernels.tiles import Cut, Grid, HeadShape, TileSize, most_split, queries_per_tile
from lookahead.backends.graph.kinds import (
    SHORT,
    STAND_INS,
    Device,
    ForwardKind,
    Targets,
    TargetsKind,
    few_rows,
    forward_kind,
    stand_in,
)
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, needed_bucket, sizes_to


def every_forward(device: Device, sequences: int, tokens: int, budget: int, most: int) -> Iterator[ForwardKind]:
    """The kinds of all passes of up to `sequences` sequences, with prompts of up to `tokens` tokens and trees of up to
    `budget` nodes each. A pass has at most `most` rows. The largest passes come first: they need most memory.

    A kind that only a strange division of the rows would need may be among them.
    """
    nodes, sizes = sequences * budget, [0, *sizes_to(min(sequences * (tokens + budget), most))]
    for before, rows in reversed(list(pairwise(sizes))):
        cuts = [_cuts(shape, device.processors, before + 1, rows, sequences) for shape in device.shapes]
        needed = {needed_bucket(rows, count) for count in (1, min(nodes, FEW_NEEDED + 1))}
        exact = {device.invariant, device.invariant and budget <= INVARIANT_ROWS}
        for one_of_each, count, invariant in product(product(*cuts), needed, exact):
            yield ForwardKind(rows, count, one_of_each, invariant)


def _cuts(shape: HeadShape, processors: int, fewest_rows: int, rows: int, sequences: int) -> list[Cut]:
    """How attention over heads of this shape may be cut in passes of `fewest_rows` to `rows` rows.

    That depends on how many tiles the rows make. Those are fewest if one sequence has all rows, and most if every
    sequence has few.
    """
    cuts, group, parts = [], shape.group, 2 * sequences
    for size in TileSize:
        if size is TileSize.LARGE and rows <= few_rows(group):
            continue  # no part is that large
        if size is TileSize.SMALL and sequences == 1 and fewest_rows > SHORT + few_rows(group):
            continue  # the prompt is long, or the tree large
        block = queries_per_tile(shape.dim, size)
        split = most_split(shape, processors, size)
        fewest, usual = -(-fewest_rows * group // block), -(-rows * group // block)
        most_tiles = min(rows * -(-group // block), (rows * group + min(parts, rows) * (block - 1)) // block)
        grids = {
            Grid.SINGLE: fewest <= min(usual, split),
            Grid.SPLIT: max(fewest, usual + 1) <= min(most_tiles, split),
            Grid.WHOLE: most_tiles > split,
        }
        cuts += [Cut(size, grid) for grid, possible in grids.items() if possible]
    return cuts


def forwards_ahead(device: Device, sequences: int) -> list[ForwardKind]:
    """The kinds of passes with one token of each sequence, which may run ahead."""
    numbers = range(1, sequences + 1)
    return list(dict.fromkeys(forward_kind([1] * n, [0] * n, [0] * n, n, device) for n in numbers))


def every_end(needed: int) -> Iterator[TargetsKind]:
    """All ways to choose the targets of `needed` rows: greedy or drawn, from adjusted logits or not, with
    log-probabilities or not."""
    for targets, adjusted, logprobs in product((Targets.GREEDY, Targets.DRAWN), (False, True), (False, True)):
        yield TargetsKind(needed, targets, adjusted, logprobs)


def first_forwards(device: Device, most: int) -> Iterator[ForwardKind]:
    """The stand-ins that most calls of one sequence need."""
    few = min(few_rows(shape.group) for shape in device.shapes)
    for chunk, nodes in ((0, min(few, STAND_INS[0])), (0, 32), (0, 128), (128, 128), (384, 128)):
        if chunk + nodes <= most:
            kind = forward_kind([nodes], [chunk], [0], nodes, device)
            yield stand_in(kind, chunk > 0, most)
