"""Dealing a step's tree to R ranks (the paper's Figure 3): who computes which nodes, and who answers for which rows.

Columns of the window and branches of guesses do not see each other, so ranks can take them apart; what two of them
hang from (the root `c`, the window's oldest row, the beginning of shared guesses) is computed by every rank that holds
something below it. All of it is plain integers made from the tree alone, so that every rank deals alike and knows all
the others' shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.algorithm.tree import TokenTree, visibility

GRAINS = (1, 2)
"""Subtrees are cut until none is larger than a rank's even share divided by this. Coarse pieces recompute fewer shared
ancestors, fine ones pack better; the better of the two is taken. Over 290 random trees and R from 2 to 8 the largest
share is 1.001 times the best of all grains from 1 to 8 on average and 1.07 times at worst (with 1 alone 1.008 and
1.20)."""
GOOD = 1.1
"""A largest share of at most this many times the even one is not looked at again with finer pieces."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a tree: `nodes` in the tree's order, the root first, with all their ancestors; and the needed
    `rows` (nodes, too) that this rank answers for. Every needed row has one owner."""

    nodes: list[int]
    needed: list[int]

    def tree(self, whole: TokenTree) -> TokenTree:
        """The share as a tree of its own. A share that answers for nothing still runs its root."""
        place = {node: i for i, node in enumerate(self.nodes)}
        return TokenTree(
            tokens=[whole.tokens[node] for node in self.nodes],
            parents=[-1, *[place[whole.parents[node]] for node in self.nodes[1:]]],
            depths=[whole.depths[node] for node in self.nodes],
            needed=[place[node] for node in self.needed] or [0],
        )

    def local(self, path: Sequence[int]) -> list[int]:
        """As much of a path below the root as the share holds, in the share's own numbers."""
        place = {node: i for i, node in enumerate(self.nodes)}
        found: list[int] = []
        for node in path:
            if node not in place:
                break
            found.append(place[node])
        return found


def deal(tree: TokenTree, ranks: int, loads: Sequence[int] | None = None) -> list[Share]:
    """One share per rank, so that the largest is small. `loads` are tokens that the ranks have to run anyway.

    Greedy: the largest piece first, each to the rank that is least full with it, the ancestors it lacks counted.
    """
    before = list(loads or [0] * ranks)
    needed = _needed(tree)
    if ranks == 1:
        return [Share(_nodes(needed | 1), list(tree.needed))]
    above, below = visibility(tree.parents), _below(tree.parents, needed)
    even = -(-(needed.bit_count() - 1 + sum(before)) // ranks)
    best: list[int] | None = None
    for grain in GRAINS:
        held = _pack(_pieces(tree, below, max(1, even // grain)), above, below, before)
        if best is None or _largest(held, before) < _largest(best, before):
            best = held
        if _largest(best, before) <= GOOD * even + 1:
            break
    assert best is not None
    return _with_owners(tree, best)


def _needed(tree: TokenTree) -> int:
    """The needed rows and their ancestors, as bits."""
    above = visibility(tree.parents)
    bits = 0
    for node in tree.needed:
        bits |= above[node]
    return bits


def _below(parents: Sequence[int], needed: int) -> list[int]:
    """Per node, the needed nodes of its subtree, as bits; itself included."""
    below = [(1 << node) & needed for node in range(len(parents))]
    for node in range(len(parents) - 1, 0, -1):
        below[parents[node]] |= below[node]
    return below


def _pieces(tree: TokenTree, below: list[int], most: int) -> list[int]:
    """Nodes whose subtrees cover all that is needed below the root, none of more than `most` nodes if it can be cut.

    A chain is not cut: its lower part would bring the upper part along.
    """
    children: list[list[int]] = [[] for _ in below]
    for node in range(1, len(below)):
        if below[node]:
            children[tree.parents[node]].append(node)
    pieces: list[int] = []
    waiting = [0]
    while waiting:
        for node in children[waiting.pop()]:
            if below[node].bit_count() > most and _forks(node, children):
                waiting.append(node)
            else:
                pieces.append(node)
    return pieces


def _forks(node: int, children: list[list[int]]) -> bool:
    while len(children[node]) == 1:
        node = children[node][0]
    return len(children[node]) > 1


def _pack(pieces: list[int], above: list[int], below: list[int], before: Sequence[int]) -> list[int]:
    """Per rank, the nodes it holds, as bits. Ties go to the rank that gains fewer nodes, then to the first."""
    held, full = [1] * len(before), list(before)
    for node in sorted(pieces, key=lambda node: (-below[node].bit_count(), node)):
        bits = above[node] | below[node]
        chosen, least, gain = 0, -1, 0
        for rank, one in enumerate(held):
            more = (bits & ~one).bit_count()
            load = full[rank] + more
            if least < 0 or load < least or (load == least and more < gain):
                chosen, least, gain = rank, load, more
        held[chosen] |= bits
        full[chosen] = least
    return held


def _largest(held: list[int], before: Sequence[int]) -> int:
    return max(load + bits.bit_count() for load, bits in zip(before, held, strict=True))


def _with_owners(tree: TokenTree, held: list[int]) -> list[Share]:
    """Rows that one rank holds are its own; the others, from the first on, go to the holder that owns fewest."""
    nodes = [_nodes(bits) for bits in held]
    once, twice = 0, 0
    for bits in held:
        twice |= once & bits
        once |= bits
    owner = [0] * len(tree)
    for rank, own in enumerate(nodes):
        for node in own:
            owner[node] = rank
    answered: list[list[int]] = [[] for _ in held]
    shared = []
    for node in tree.needed:
        if twice >> node & 1:
            shared.append(node)
        else:
            answered[owner[node]].append(node)
    for node in shared:
        holders = [rank for rank, bits in enumerate(held) if bits >> node & 1]
        answered[min(holders, key=lambda rank: len(answered[rank]))].append(node)
    return [Share(own, sorted(needed)) for own, needed in zip(nodes, answered, strict=True)]


def _nodes(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
