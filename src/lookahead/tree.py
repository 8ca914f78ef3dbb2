"""The step's token tree: tokens, parents, depths, needed rows, and who sees whom.

One rule makes the whole attention pattern of the paper's Figure 2(b): *a token sees the prefix, its ancestors
and itself, nothing else.* Node 0 is the root `c`, the last accepted token; a node's position is the root's plus
its depth. Parents always stand before their children.

    lookahead branch      c - o1 - o2 - ...        the oldest row: a chain, c is its column 0
                          |   |    |
                          g0  g1   g2              row 1: one chain per column, hanging from the oldest row
                          |   |    |
                          r0  r1   r2              the newest row, N-2
    verification branch   c - guess - guess        a trie of guesses hanging from c
                            \\ guess
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class TokenTree:
    """One step's tokens. The first `branch` nodes are the root and a lookahead branch of `width` columns, the rest
    are guesses.

    `rows` are the nodes whose logits are needed: the root, the newest window row, the guesses.
    `origins` tells for every guess which source proposed it (see `sources.base`).
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    rows: list[int]
    branch: int = 1
    width: int = 0
    origins: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, node: int) -> int:
        """Where the root or a guess stands in `rows`."""
        return node - len(self) + len(self.rows) if node else 0

    def guesses_below(self, parent: int) -> Iterator[int]:
        """The guesses right below a node."""
        node = max(parent, self.branch - 1)
        try:
            while True:
                node = self.parents.index(parent, node + 1)
                yield node
        except ValueError:
            return


def below_trail(trail: Sequence[int], tree: TokenTree) -> TokenTree:
    """The tree hanging from a chain of tokens before it: the root is node len(trail), the rows are the same ones."""
    shift = len(trail)
    return TokenTree(
        tokens=[*trail, *tree.tokens],
        parents=[*range(-1, shift), *[parent + shift for parent in tree.parents[1:]]],
        depths=[*range(shift), *[depth + shift for depth in tree.depths]],
        rows=[row + shift for row in tree.rows],
    )


@dataclass(slots=True)
class Targets:
    """What a forward pass says of the tree's needed rows: their targets and, if wanted, their likeliest tokens.

    A row of `top` holds n tokens, best first, and then their n probability levels (see `sampling.top_rows`); a list of
    tuples, or an array where nobody had time to make one.
    `logits` are the rows themselves, [len(rows), V] on the backend's device, for who asked for them (`walk.Walk`).
    """

    targets: list[int]
    top: list[tuple[int, ...]] | npt.NDArray[np.int32] = field(default_factory=list)
    logits: Any = None


@dataclass(frozen=True)
class WindowLayout:
    """Where the lookahead branch of a (W, N) window stands in the tree."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    newest: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.parents)


@lru_cache(maxsize=256)
def window_layout(window: int, ngram: int) -> WindowLayout:
    """Figure 2(b)'s lookahead branch: row r, column j sits at depth j + r; c is row 0, column 0."""
    parents, depths = [-1], [0]
    if not window:
        return WindowLayout((-1,), (0,), ())
    row = [0, *range(1, window)]
    for column in range(1, window):
        parents.append(column - 1)
        depths.append(column)
    for r in range(1, ngram - 1):
        above, row = row, list(range(len(parents), len(parents) + window))
        for column in range(window):
            parents.append(above[column])
            depths.append(column + r)
    return WindowLayout(tuple(parents), tuple(depths), tuple(row))


def visibility(parents: Sequence[int]) -> list[int]:
    """Per node, the in-step nodes it sees, as the bits of an int: its parent's bits and its own."""
    seen: list[int] = []
    bit = 1
    for parent in parents:
        seen.append(seen[parent] | bit if parent >= 0 else bit)
        bit <<= 1
    return seen


def packed_visibility(parents: Sequence[int], words: int | None = None) -> npt.NDArray[np.uint32]:
    """[K, words], as many as K bits need if not told; bit j % 32 of word j // 32 of row i: does node i see node j?"""
    words = words or (len(parents) + 31) // 32
    raw = b"".join([bits.to_bytes(4 * words, "little") for bits in visibility(parents)])
    return np.frombuffer(raw, dtype="<u4").reshape(len(parents), words)


def dense_visibility(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[K, K] booleans: entry (i, j) says whether node i sees node j."""
    size = len(parents)
    packed = packed_visibility(parents).view(np.uint8)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :size].astype(np.bool_)
