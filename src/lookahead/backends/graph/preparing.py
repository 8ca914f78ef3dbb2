"""Steps that are run only to be captured: for whoever starts a server, and for the first call of others.

They run on a slot of their own, with tokens that mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.kernels.tiles import SMALL, queries_per_tile
from lookahead.backends.graph.kinds import STAND_INS
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, MOST_NEEDED, sizes_to
from lookahead.config import SamplingParams


def every_input(slot: int, tokens: int, budget: int, most: int, group: int, dim: int) -> Iterator[StepInput]:
    """Inputs that together need every step of one sequence with up to `tokens` tokens and this budget.

    A pass has at most `most` rows, and `group` query heads of width `dim` share a K/V head.
    """
    for trail, nodes, needed in every_shape(min(tokens, most), min(budget, MOST_NEEDED, most), most, group, dim):
        alone = (trail, nodes, needed) == (0, 1, 1)  # so that the step ahead is captured, too
        tree = chain([0] * nodes, needed)
        yield StepInput(slot, [0] * trail, tree, SamplingParams(), (), continues_alone=alone)


def first_inputs(slot: int, most: int, group: int, noise: bool) -> Iterator[StepInput]:
    """Inputs that need the stand-ins which most calls need; with `noise` those that draw from it."""
    for trail, nodes in first_shapes(group):
        if trail + nodes <= most:
            lines = [-1] * nodes if noise else ()
            yield StepInput(slot, [0] * trail, chain([0] * nodes, nodes), SamplingParams(), (), noise=lines)


def first_shapes(group: int) -> list[tuple[int, int]]:
    """Trails and trees of one sequence that together have the stand-ins which most calls need.

    `group` query heads share a K/V head. Trees of up to `few` nodes have small tiles.
    """
    few = 2 * SMALL // group
    return [(0, min(few, STAND_INS[0])), (0, 32), (0, 128), (128, 128), (384, 128)]


def every_shape(tokens: int, budget: int, most: int, group: int, dim: int) -> Iterator[tuple[int, int, int]]:
    """Steps of one sequence that together have every kind: the lengths of trail and tree, and the needed nodes.

    A trail has at most `tokens` tokens, a tree at most `budget`, and both together at most `most`. Kinds differ by
    their sizes, and by how many tiles there are. A trail or a tree has most tiles for its rows where its last row
    begins one.
    """
    few, blocks = 2 * SMALL // group, (SMALL, queries_per_tile(dim, small=False))
    begin = [{row * block // group + 1 for row in range(most * group // block)} for block in blocks]
    trees = {0, few, FEW_NEEDED, FEW_NEEDED + 1, INVARIANT_ROWS, INVARIANT_ROWS + 1, budget, *begin[0], *begin[1]}
    before = 0
    for size in sizes_to(min(tokens + budget, most)):
        for tree in sorted({tree for tree in trees | {size} if tree <= min(budget, size)}, reverse=True):
            least, longest = max(0, before + 1 - tree), min(size - tree, tokens)
            trails = {least, longest, *[max((row for row in one if row <= longest), default=0) for one in begin]}
            for trail in sorted(trails):
                for needed in {tree, min(1, tree)}:
                    if least <= trail <= longest:
                        yield trail, tree, needed
        before = size


def chain(tokens: Sequence[int], needed: int = 0) -> TokenTree:
    """A tree that is a single chain of these tokens. The logits of the first `needed` are needed."""
    size = len(tokens)
    return TokenTree(list(tokens), list(range(-1, size - 1)), list(range(size)), list(range(needed)))
