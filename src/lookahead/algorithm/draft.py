"""One step's guesses: sources write candidates into a trie, the best ones are taken, best first.

A candidate's score is the estimated probability that it is accepted: its own rate times its parent's score. So a child
never scores above its parent, and taking candidates best-first takes every parent before its child. The expected
number of accepted tokens of a step is 1 + the sum of the scores taken; given what a step of each size costs, the size
that gives most tokens per second is known before the step is run.

The search runs in C where it can (`native`). `Draft._grow` is the same search in Python, to read and to fall back on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from lookahead.algorithm.native import build as native
from lookahead.algorithm.native.drafter import Drawn, Memories, NativeText, Row
from lookahead.algorithm.tree import TokenTree, WindowLayout

Table = tuple[list[float], list[int]]
"""What the buckets of a row mean: the rate of each, and its origin."""

Successors = Callable[[int, int, int], "tuple[Row, Table] | None"]
"""The last three tokens of a path -> the row of the last one, if there is one, and the row's table."""

MOST = 1 << 16
"""The most guesses of a step: a bound on the memory that is taken for them beforehand."""

CHAIN_MASS = 0.95
"""The most probability that the chains at one node claim together; what is left over scales the row beside them."""

LEARNED = 0.008
"""What a guess is worth beside its chance to be accepted, in tokens, where rows of successors are recycled: refused or
not, it brings a row, from which later guesses are made."""


@dataclass(slots=True)
class Guesses:
    """The taken candidates, parents first, as C's ints. Parent 0 is the root, parent `base` + i is guess i."""

    tokens: array[int]
    parents: array[int]
    depths: array[int]
    origins: array[int]
    scores: array[float]


NO_GUESSES = Guesses(array("i"), array("i"), array("i"), array("i"), array("d"))


class Draft:
    """A trie of chains below the root, and a rule that continues any path with a row of likely successors.

    `text` ends with the root token. The rule is `successors`, or `memories`, recycled rows that the C code asks by
    itself (see `sources.recycle`). `whole` is the text in C, which adds chains of its own (see `sources.text`).
    """

    def __init__(self, text: Sequence[int], rates: Sequence[float]) -> None:
        self.root = text[-1]
        self.before = text[-2] if len(text) > 1 else -1
        self.before2 = text[-3] if len(text) > 2 else -1
        self.rates = rates
        self.successors: Successors | None = None
        self.memories: Memories | None = None
        self.whole: NativeText | None = None
        self._chains: tuple[list[int], list[int], list[int]] = [], [], []

    def chain(self, tokens: Sequence[int], origins: Sequence[int]) -> None:
        """Add a chain below the root."""
        if len(tokens) != len(origins):
            raise ValueError(f"a chain of {len(tokens)} tokens with {len(origins)} origins")
        all_tokens, all_origins, lengths = self._chains
        all_tokens += tokens
        all_origins += origins
        lengths.append(len(tokens))

    def grow(self, room: int, max_depth: int, cost: Sequence[float] | None = None, base: int = 1) -> Guesses:
        """Take at most `room` candidates, best first, none deeper than `max_depth`.

        With `cost` (`cost[k]` is the time of a step of k + 1 tokens) only as many as give the best
        (1 + sum of scores + what they teach) / time. `base` tokens, the root among them, are in the step anyway.
        """
        if min(room, max_depth) < 1:
            return NO_GUESSES
        if self._in_c:
            return Guesses(*self._drawn(room, max_depth, cost, base).grow())
        assert self.whole is None  # sources are in C together, or not at all
        return self._grow(min(room, MOST), max_depth, cost, base)

    def tree(
        self, layout: WindowLayout, tokens: Sequence[int], room: int, max_depth: int, cost: Sequence[float] | None
    ) -> TokenTree:
        """The step's tree: a branch of this layout with these tokens, and behind it the guesses that `grow` takes."""
        if not self._in_c or min(room, max_depth) < 1:
            return layout.tree(tokens, self.grow(room, max_depth, cost, layout.size))
        numbers, taken = self._drawn(room, max_depth, cost, layout.size).tree(tokens, layout.numbers)
        return TokenTree.of(numbers, (layout.size + taken, layout.first + taken), layout.size, layout.width)

    @property
    def _in_c(self) -> bool:
        return self.successors is None and native.library() is not None

    def _drawn(self, room: int, max_depth: int, cost: Sequence[float] | None, base: int) -> Drawn:
        text, taught = (self.before2, self.before, self.root), LEARNED if self.memories is not None else 0.0
        room = min(room, MOST)
        max_depth = min(max_depth, room)  # which fits C's int
        return Drawn(self.memories, self.whole, self.rates, text, self._chains, room, max_depth, cost, base, taught)

    def _plant(self) -> None:
        """The trie of the chains: node 0 is the root; chains that share a prefix share nodes.

        Where a chain runs along an earlier one, the likelier origin names the node.
        """
        children: list[dict[int, int]] = [{}]
        node_tokens, node_origins, rates = [self.root], [-1], self.rates
        tokens, origins, lengths = self._chains
        end = 0
        for length in lengths:
            node, start, end = 0, end, end + length
            for token, origin in zip(tokens[start:end], origins[start:end], strict=True):
                below = children[node]
                node = below.get(token, 0)
                if not node:
                    node = below[token] = len(node_origins)
                    children.append({})
                    node_origins.append(origin)
                    node_tokens.append(token)
                elif rates[origin] > rates[node_origins[node]]:
                    node_origins[node] = origin
        self._tokens, self._origins, self._children = node_tokens, node_origins, children

    def _grow(self, room: int, max_depth: int, cost: Sequence[float] | None, base: int) -> Guesses:
        """The search itself."""
        self._plant()
        # Entry 0 of each list is the root. Per taken node: its row of successors, what scales the row's rates, and its
        # trie node (-1 outside the chains).
        tokens, parents, depths, origins, scores, tries = [self.root], [-1], [0], [-1], [1.0], [0]
        rows: list[tuple[Row, Table] | None] = []
        weights: list[float] = []
        # (-score, parent, index in the parent's row, or -1 for a chain; trie node of a chain)
        heap: list[tuple[float, int, int, int]] = []
        successors, children = self.successors, self._children
        before, before2, token, score, depth, trie = self.before, self.before2, self.root, 1.0, 0, 0
        node = 0
        while node < room:
            # 1. The node taken last offers its chains' tokens and the best of its row.
            found, weight = None, score
            if depth < max_depth:
                if successors is not None:
                    found = successors(before2, before, token)
                if trie >= 0 and children[trie]:
                    weight = self._offer_chains(heap, node, trie, score, found)
                if found is not None:
                    row, table = found
                    heappush(heap, (-weight * table[0][row[len(row) // 2]], node, 0, -1))
            rows.append(found)
            weights.append(weight)
            # 2. Take the best candidate there is. Its next sibling of the row is a candidate from now on.
            while heap:
                negative, parent, index, trie = heap[0]
                if index < 0:
                    heappop(heap)
                    token, origin = self._tokens[trie], self._origins[trie]
                    break
                row, (rates, row_origins) = rows[parent]  # type: ignore[misc]
                half = len(row) // 2
                token, origin = row[index], row_origins[row[half + index]]
                index += 1
                if index < half:
                    heapreplace(heap, (-weights[parent] * rates[row[half + index]], parent, index, -1))
                else:
                    heappop(heap)
                if tries[parent] < 0 or token not in children[tries[parent]]:
                    break
            else:
                break
            score, depth, before = -negative, depths[parent] + 1, tokens[parent]
            before2 = tokens[parents[parent]] if parent else self.before
            node += 1
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            origins.append(origin)
            scores.append(score)
            tries.append(trie)
        taught = LEARNED if successors is not None else 0.0
        keep = len(tokens) if cost is None else _worth(scores, cost, base, taught)
        nodes = [parent + base - 1 if parent else 0 for parent in parents[1:keep]]
        return Guesses(
            array("i", tokens[1:keep]),
            array("i", nodes),
            array("i", depths[1:keep]),
            array("i", origins[1:keep]),
            array("d", scores[1:keep]),
        )

    def _offer_chains(
        self,
        heap: list[tuple[float, int, int, int]],
        node: int,
        trie: int,
        score: float,
        found: tuple[Row, Table] | None,
    ) -> float:
        """Queue the chains' tokens below a taken node; return what is left of its score for the row beside them.

        A token that the row names too takes the better of its two rates.
        """
        rates, origins = self.rates, self._origins
        row, table = found if found is not None else ((), ([], []))
        half = len(row) // 2
        mass = 0.0
        for token, child in self._children[trie].items():
            rate = rates[origins[child]]
            if token in row and (index := row.index(token)) < half:
                bucket = row[half + index]
                if table[0][bucket] > rate:
                    rate, origins[child] = table[0][bucket], table[1][bucket]
            mass += rate
            heappush(heap, (-score * rate, node, -1, child))
        return score * (1 - min(mass, CHAIN_MASS))


def _worth(scores: Sequence[float], cost: Sequence[float], base: int, taught: float) -> int:
    """How many entries of `scores` (the root's 1.0 first, then best first) give most tokens per unit of time."""
    last, expected = len(cost) - 1, enumerate(accumulate(scores))
    gains = [(tokens + taught * k) / cost[min(base - 1 + k, last)] for k, tokens in expected]
    return gains.index(max(gains)) + 1
