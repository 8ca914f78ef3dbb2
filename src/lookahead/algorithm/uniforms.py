"""The uniforms of a request that samples: one for each position of its output, whatever the tree."""

from __future__ import annotations

import random

from lookahead.algorithm.sampling import NO_DRAW
from lookahead.algorithm.tree import TokenTree

UNIFORMS_AHEAD = 64
"""Output positions whose uniforms are drawn before a step needs them, while the device runs."""


class Uniforms:
    """Drawn one after the other from the request's seeded generator, as positions need them."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)
        self._drawn: list[float] = []

    def of_tree(self, tree: TokenTree, generated: int) -> list[float]:
        """One for each needed node, that of the output position it predicts, after `generated` tokens of output. The
        window's nodes take the argmax."""
        drawn, branch = self._drawn, tree.branch
        if len(drawn) <= generated + tree.size - branch:
            self.draw(generated + tree.size - branch + 1)  # a depth is at most the number of draft tokens
        if tree.size == 1:
            return drawn[generated : generated + 1]
        if branch == 1:
            return [drawn[generated + depth] for depth in tree.depths]
        window = tree.needed_count - 1 - (tree.size - branch)
        depths = tree.depths[branch:]
        return [drawn[generated], *[NO_DRAW] * window, *[drawn[generated + depth] for depth in depths]]

    def between(self, first: int, end: int) -> list[float]:
        """Those of the output positions from `first` to before `end`."""
        self.draw(end)
        return self._drawn[first:end]

    def draw(self, count: int) -> None:
        """Draw those of the first `count` output positions that have not been drawn yet."""
        while len(self._drawn) < count:
            self._drawn.append(self._random.random())
