"""How the sequences of one step share its tokens: the best guesses of all of them, as many as pay.

A step of n sequences gives at least n tokens. A guess adds its score, the chance that it is accepted, and one row,
which costs time. The best step is the set of guesses that maximises

    (n + sum of scores) / t(rows)

Every sequence offers its guesses best first, and a child never scores above its parent. So for every number of guesses
the best set is the top of one merged list, and the best number is where the ratio is best. A list that is cut anywhere
keeps the parents of what it keeps. If all sequences score alike, each gets an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.counts import Costs
from lookahead.algorithm.draft import Offer, Share
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree, WindowLayout

SLACK = 0.5
"""Guesses that score less than this part of the best one that the last step refused are not searched for."""


def power_of_two(count: int) -> int:
    """The next power of two. Budgets are shared among so many sequences, so that one that comes or goes seldom changes
    the others' share."""
    return 1 << (count - 1).bit_length()


def choose_trees(
    sequences: Sequence[DecodingSequence], limit: int | None = None, cost: Costs | None = None
) -> list[TokenTree]:
    """One tree per sequence, for one step of all of them.

    `limit` is the most tokens of all trees together; the roots are always in. `cost[k]` is the time of a pass of k + 1
    tokens, whosever they are. It may be a staircase, and guesses end where the table does. Without it the largest
    budget is filled.

    A sequence alone takes what its own config says. So does a sequence that does not share its budget, and, without a
    `cost`, one whose config has a step cost: that is measured on a backend which pads every tree of a batch to the
    longest, where equal trees are best.
    """
    if len(sequences) == 1:
        return [sequences[0].propose(limit=limit)]
    # 1. The roots and the windows, as far as these leave room in an equal share of the budget.
    together, rows, layouts = power_of_two(len(sequences)), 0, list[WindowLayout]()
    for sequence in sequences:
        layout = sequence.layout(sequence.share(together))
        layouts.append(layout)
        rows += layout.size
    if limit is not None and rows > limit:
        layouts, rows = [sequence.root_alone for sequence in sequences], len(sequences)
    # 2. Every sequence offers guesses, best first. Where they are `kept`, it takes them all, as its config says.
    offers, filled = list[Offer](), 0
    for sequence, layout in zip(sequences, layouts, strict=True):
        config = sequence.config
        if config.shared and (cost is not None or config.step_cost is None):
            offer = sequence.standing_offer if layout is sequence.root_alone else None
            offers.append(offer or sequence.offer(layout, config.budget, config.step_cost, sequence.trust, False))
            if config.budget > filled:
                filled = config.budget
        else:
            own = sequence.share(together)
            weighed = None if own < config.budget else config.step_cost
            offers.append(sequence.offer(layout, own, weighed, sequence.trust, True))
    # 3. The step takes the best of all.
    most = None if cost is not None else filled - sum([offer.layout.size for offer in offers if not offer.kept])
    floor = SLACK * max([sequence.best_refused for sequence in sequences])
    share = Share(cost, most, None if limit is None else limit - rows, floor)
    trees, cut = sequences[0].drafter.choose(offers, share)
    refused = floor if cut is None else cut
    for sequence in sequences:
        sequence.best_refused = refused
    return trees
