"""Trees that are a single chain."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.tree import TokenTree


def chain(tokens: Sequence[int], needed: int = 0) -> TokenTree:
    """A tree that is a single chain of these tokens. The logits of the first `needed` are needed."""
    size = len(tokens)
    return TokenTree(list(tokens), list(range(-1, size - 1)), list(range(size)), list(range(needed)))
