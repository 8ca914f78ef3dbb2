"""Partition a step's tree among R ranks (the paper's Figure 3): the nodes that each computes, and those it owns.

Columns of the window and branches of guesses do not attend to each other, so different ranks can compute them. Their
common ancestors (the root `c`, the oldest window row, shared prefixes of guesses) are computed by every rank that holds
a node below them. `partition_tree` is a pure function of the tree, so every rank knows all shares.

Sets of nodes are integers here: bit i is set if node i is in the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.visibility import visibility

GRAINS = (1, 2)
"""Subtrees are split until none is larger than an even share divided by the grain. Coarse pieces recompute fewer common
ancestors, fine pieces pack better; both are tried and the better one is used. Over 290 random trees and R from
2 to 8, the largest share is on average 1.001 times, and at worst 1.07 times, the best that grains 1 to 8 give (with
grain 1 alone, 1.008 and 1.20 times)."""
GOOD = 1.1
"""Finer pieces are not tried if the largest share is at most this many times the even share."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a tree.

    `nodes` are the nodes it computes, in tree order: the root first, and all ancestors of every node. `needed` are the
    tree's needed nodes that this rank owns; each has exactly one owner.
    """

    nodes: list[int]
    needed: list[int]

    def tree(self, full: TokenTree) -> TokenTree:
        """The share as a tree of its own. A share that owns no node still needs its root."""
        index = {node: i for i, node in enumerate(self.nodes)}
        return TokenTree(
            tokens=[full.tokens[node] for node in self.nodes],
            parents=[-1, *[index[full.parents[node]] for node in self.nodes[1:]]],
            depths=[full.depths[node] for node in self.nodes],
            needed=[index[node] for node in self.needed] or [0],
        )

    def local(self, path: Sequence[int]) -> list[int]:
        """The longest prefix of a path below the root that the share holds, as nodes of the share's tree."""
        index = {node: i for i, node in enumerate(self.nodes)}
        found: list[int] = []
        for node in path:
            if node not in index:
                break
            found.append(index[node])
        return found


def partition_tree(tree: TokenTree, ranks: int, loads: Sequence[int] | None = None) -> list[Share]:
    """One share per rank, minimising the largest. `loads` are tokens that the ranks must run in addition.

    Greedy: assign pieces from the largest down, each to the rank that then has the fewest tokens, counting ancestors
    that the rank lacks.
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
    """The needed nodes and their ancestors."""
    above = visibility(tree.parents)
    bits = 0
    for node in tree.needed:
        bits |= above[node]
    return bits


def _below(parents: Sequence[int], needed: int) -> list[int]:
    """Per node, the nodes of its subtree that are in `needed`, itself included."""
    below = [(1 << node) & needed for node in range(len(parents))]
    for node in range(len(parents) - 1, 0, -1):
        below[parents[node]] |= below[node]
    return below


def _pieces(tree: TokenTree, below: list[int], most: int) -> list[int]:
    """Nodes whose subtrees cover all needed nodes below the root. Subtrees of more than `most` nodes are split.

    A chain is not split: a rank that computes its end must also compute its start.
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
    """Whether any node of this subtree has two children."""
    while len(children[node]) == 1:
        node = children[node][0]
    return len(children[node]) > 1


def _pack(pieces: list[int], above: list[int], below: list[int], before: Sequence[int]) -> list[int]:
    """Per rank, the nodes it computes. Ties go to the rank that gains fewer nodes."""
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
    """The most tokens of any rank."""
    return max(load + bits.bit_count() for load, bits in zip(before, held, strict=True))


def _with_owners(tree: TokenTree, held: list[int]) -> list[Share]:
    """The shares, with one owner per needed node: among the ranks that hold it, the one that owns the fewest so far.

    Nodes that only one rank holds are assigned first.
    """
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
    """The nodes of a set, in order."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
