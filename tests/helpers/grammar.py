"""A mask of allowed tokens that stands for a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree


class Alternating:
    """A little grammar: odd and even tokens alternate, and every fourth token of the output is a multiple of three.

    It walks the tree by itself, as a grammar matcher does, and leaves the window's rows empty.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.output: list[int] = []

    @staticmethod
    def allows(output: Sequence[int], token: int) -> bool:
        if output and token % 2 == output[-1] % 2:
            return False
        return len(output) % 4 != 3 or token % 3 == 0

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> Any:
        assert self.output == sequence.output
        if not self.output and not tree.draft_children().get(0):
            return None  # anything may come first
        rows = np.zeros((len(tree.needed), -(-self.vocabulary // 32)), np.uint32)
        self._fill(rows, tree, 0, self.output)
        return rows

    def _fill(self, rows: Any, tree: TokenTree, node: int, output: list[int]) -> None:
        for token in range(self.vocabulary):
            if self.allows(output, token):
                rows[tree.needed_index(node), token // 32] |= np.uint32(1 << token % 32)
        for guess in tree.draft_children().get(node, ()):
            if self.allows(output, tree.tokens[guess]):
                self._fill(rows, tree, guess, [*output, tree.tokens[guess]])

    def accept(self, tokens: Sequence[int]) -> None:
        self.output += tokens
