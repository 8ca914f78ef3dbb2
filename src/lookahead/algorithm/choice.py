"""How the sequences of one step share its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree


def choose_trees(
    sequences: Sequence[DecodingSequence], limit: int | None = None, cost: Sequence[float] | None = None
) -> list[TokenTree]:
    """One tree per sequence, for one step of all of them.

    `limit` is the most tokens of all trees together. `cost[k]` is the time of a pass of k + 1 tokens.
    """
    together = 1 << (len(sequences) - 1).bit_length()
    return [sequence.propose(together) for sequence in sequences]
