"""Which kinds of steps are captured before anybody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from lookahead.backends.graph.kernels.tiles import most_shared, queries_per_tile
from lookahead.backends.graph.kinds import (
    SHORT,
    STAND_INS,
    ForwardKind,
    Heads,
    TargetsKind,
    few_rows,
    forward_kind,
    stand_in,
)
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, needed_bucket, sizes_to


def every_forward(
    model: Heads, processors: int, invariant: bool, sequences: int, tokens: int, budget: int, most: int
) -> Iterator[ForwardKind]:
    """The kinds of all passes of up to `sequences` sequences, with prompts of up to `tokens` tokens and trees of up to
    `budget` nodes each. A pass has at most `most` rows. The largest passes come first: they need most memory.

    A kind depends on how many tiles of attention its rows make. Those are fewest if one sequence has all rows, and most
    if every sequence has few. A kind that only a strange division of the rows would need may be among them.
    """
    group, parts = model.heads // model.kv_heads, 2 * sequences
    nodes, sizes = sequences * budget, [0, *sizes_to(min(sequences * (tokens + budget), most))]
    for before, rows in reversed(list(pairwise(sizes))):
        for small in (True, False):
            if not small and rows <= few_rows(group):
                continue  # no part is that large
            if small and sequences == 1 and before >= SHORT + few_rows(group):
                continue  # the prompt is long, or the tree large
            block = queries_per_tile(model.dim, small=small)
            shared = most_shared(model.heads, model.kv_heads, model.dim, processors, small=small)
            fewest, usual = -(-(before + 1) * group // block), -(-rows * group // block)
            most_tiles = min(rows * -(-group // block), (rows * group + min(parts, rows) * (block - 1)) // block)
            grids = {
                (False, True): fewest <= min(usual, shared),
                (False, False): max(fewest, usual + 1) <= min(most_tiles, shared),
                (True, False): most_tiles > shared,
            }
            needed = {needed_bucket(rows, count) for count in (1, min(nodes, FEW_NEEDED + 1))}
            exact = {invariant, invariant and budget <= INVARIANT_ROWS}
            for (alone, one), count, bits in product([grid for grid, there in grids.items() if there], needed, exact):
                yield ForwardKind(rows, count, small, alone, one, bits)


def forwards_ahead(model: Heads, processors: int, invariant: bool, sequences: int) -> list[ForwardKind]:
    """The kinds of passes with one token of each sequence, which may run ahead."""
    numbers = range(1, sequences + 1)
    found = [forward_kind([1] * n, [0] * n, [0] * n, n, model, processors, invariant) for n in numbers]
    return list(dict.fromkeys(found))


def every_end(needed: int) -> Iterator[TargetsKind]:
    """All ways to choose the targets of `needed` rows: greedy or drawn, from adjusted logits or not, with
    log-probabilities or not."""
    for drawn, adjusted, logprobs in product((False, True), repeat=3):
        yield TargetsKind(needed, drawn, False, adjusted, logprobs)


def first_forwards(model: Heads, processors: int, most: int) -> Iterator[ForwardKind]:
    """The stand-ins that most calls of one sequence need."""
    few = few_rows(model.heads // model.kv_heads)
    for trail, nodes in ((0, min(few, STAND_INS[0])), (0, 32), (0, 128), (128, 128), (384, 128)):
        if trail + nodes <= most:
            kind = forward_kind([nodes], [trail], [0], nodes, model, processors, True)
            yield stand_in(kind, trail > 0, most)
