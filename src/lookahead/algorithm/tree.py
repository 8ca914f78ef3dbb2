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

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class TokenTree:
    """One step's tokens. The first `branch` nodes are the root and a lookahead branch of `width` columns, the rest
    are guesses.

    `rows` are the nodes whose logits are needed: the root, the newest window row, the guesses.
    `origins` tells for every guess which source proposed it (see `sources.base`).

    A tree is lists or `packed` numbers to begin with, and becomes the other when that is asked for; it does not change.
    `sizes`: how many nodes and needed rows. There may be more numbers than the tree has.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    needed: list[int]
    branch: int = 1
    width: int = 0
    origins: list[int] = field(default_factory=list)
    sizes: tuple[int, int] = field(init=False, repr=False, compare=False)
    _numbers: array[int] | None = field(default=None, init=False, repr=False, compare=False)
    _guesses: dict[tuple[int, int], int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.sizes = len(self.tokens), len(self.needed)

    @classmethod
    def of(cls, numbers: array[int], sizes: tuple[int, int], branch: int, width: int) -> TokenTree:
        """A tree from its `packed` numbers."""
        tree = cls.__new__(cls)
        tree._numbers, tree.sizes, tree.branch, tree.width = numbers, sizes, branch, width
        tree._guesses = None
        return tree

    def packed(self) -> array[int]:
        """Tokens, depths, parents, rows and origins, one after the other, as the functions in C read them."""
        if self._numbers is None:
            nodes, rows = self.sizes
            lengths = len(self.tokens), len(self.depths), len(self.parents), len(self.needed)
            if lengths != (nodes, nodes, nodes, rows):
                raise ValueError(f"a tree of {nodes} nodes and {rows} needed rows has lists of {lengths}")
            self._numbers = array("i", [*self.tokens, *self.depths, *self.parents, *self.needed, *self.origins])
        return self._numbers

    def unpack(self) -> None:
        """Make the lists of a tree that came as numbers."""
        assert self._numbers is not None
        numbers, (nodes, rows) = self._numbers.tolist(), self.sizes
        self.tokens, self.depths = numbers[:nodes], numbers[nodes : 2 * nodes]
        self.parents, numbers = numbers[2 * nodes : 3 * nodes], numbers[3 * nodes :]
        self.needed, self.origins = numbers[:rows], numbers[rows : rows + nodes - self.branch]

    def __getattr__(self, name: str) -> list[int]:
        """Python comes here for a field that has no value: for the lists that are not made yet."""
        if name not in ("tokens", "parents", "depths", "needed", "origins"):
            raise AttributeError(f"a token tree has no {name!r}", name=name, obj=self)
        self.unpack()
        made: list[int] = object.__getattribute__(self, name)
        return made

    def __len__(self) -> int:
        return self.sizes[0]

    def row(self, node: int) -> int:
        """Where the root or a guess stands in `rows`."""
        nodes, rows = self.sizes
        return node - nodes + rows if node else 0

    def guesses(self) -> dict[tuple[int, int], int]:
        """By parent and token, the guess: the first, where two are alike. Verification asks for it."""
        if self._guesses is None:
            parents, tokens = self.parents[self.branch :], self.tokens[self.branch :]
            backwards = zip(reversed(parents), reversed(tokens), strict=True)
            self._guesses = dict(zip(backwards, range(len(self) - 1, self.branch - 1, -1), strict=True))
        return self._guesses

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
        needed=[row + shift for row in tree.needed],
    )


@dataclass(slots=True)
class StepOutput:
    """What a forward pass says of the tree's needed rows: their targets and, if wanted, their likeliest tokens.

    A row of `top` holds n tokens, best first, and then their n probability levels (see `sampling.top_rows`); a list of
    tuples, or an array where nobody had time to make one.
    `logits` are the rows themselves, [len(rows), V] on the backend's device, for who asked for them (`walk.Walk`).
    """

    targets: list[int]
    top: list[tuple[int, ...]] | npt.NDArray[np.int32] = field(default_factory=list)
    logits: Any = None


class Guessed(Protocol):
    """Guesses as `draft.Draft.grow` takes them: C ints, the parents numbered as in the tree."""

    tokens: array[int]
    parents: array[int]
    depths: array[int]
    origins: array[int]


@dataclass
class WindowLayout:
    """Where the lookahead branch of a (W, N) window stands in the tree.

    `first` of its rows are needed; `numbers` are its depths, parents and needed rows, as C reads them.
    """

    width: int
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    newest: tuple[int, ...]

    def __post_init__(self) -> None:
        self.size = len(self.parents)
        self._parents, self._depths = array("i", self.parents), array("i", self.depths)
        self._rows = array("i", [0, *(node for node in self.newest if node)])  # the root may be one of the newest row
        self.first = len(self._rows)
        self.numbers = self._depths + self._parents + self._rows

    def tree(self, tokens: Sequence[int], guesses: Guessed) -> TokenTree:
        """The branch with these tokens, the root's first, and the guesses behind it."""
        nodes = array("i", tokens) + guesses.tokens
        parents, depths = self._parents + guesses.parents, self._depths + guesses.depths
        rows = self._rows + array("i", range(self.size, len(nodes)))
        numbers = nodes + depths + parents + rows + guesses.origins
        return TokenTree.of(numbers, (len(nodes), len(rows)), self.size, self.width)


@lru_cache(maxsize=256)
def window_layout(window: int, ngram: int) -> WindowLayout:
    """Figure 2(b)'s lookahead branch: row r, column j sits at depth j + r; c is row 0, column 0."""
    parents, depths = [-1], [0]
    if not window:
        return WindowLayout(0, (-1,), (0,), ())
    row = [0, *range(1, window)]
    for column in range(1, window):
        parents.append(column - 1)
        depths.append(column)
    for r in range(1, ngram - 1):
        above, row = row, list(range(len(parents), len(parents) + window))
        for column in range(window):
            parents.append(above[column])
            depths.append(column + r)
    return WindowLayout(window, tuple(parents), tuple(depths), tuple(row))


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
