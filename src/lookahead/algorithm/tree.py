"""The step's token tree: tokens, parents, depths, needed nodes, and which node sees which.

One rule makes the whole attention pattern of the paper's Figure 2(b): *a token sees the prefix, its ancestors
and itself, nothing else.* Node 0 is the root `c`, the last accepted token; a node's position is the root's plus
its depth. Parents always stand before their children.

    lookahead branch      c - o1 - o2 - ...        the oldest window row: a chain, c is its column 0
                          |   |    |
                          g0  g1   g2              window row 1: one chain per column, hanging from the oldest one
                          |   |    |
                          r0  r1   r2              the newest window row, N-2
    verification branch   c - guess - guess        a trie of guesses hanging from c
                            \\ guess
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt


class TokenTree:
    """One step's tokens. The first `branch` nodes are the root and a lookahead branch of `width` columns, the rest
    are guesses.

    `needed` are the nodes whose logits are computed: the root, the newest window row, the guesses. `origins` tells for
    every guess which source proposed it (see `sources.calibration`). All are 32-bit integers, which numpy and the C
    drafter read in place. `expected` is the sum of the guesses' scores: how many of them should be accepted. `size` is
    how many nodes there are.

    The C drafter makes the trees of a step in one piece, a `forest`, in which this one begins at row `start`. Its
    tokens, parents, depths and origins are cut out when they are first asked for: that may be while the device runs.
    """

    __slots__ = (
        "_below", "_depths", "_origins", "_packed", "_parents", "_tokens", "branch", "expected", "forest", "needed",
        "size", "start", "width",
    )  # fmt: skip

    def __init__(
        self,
        tokens: Iterable[int],
        parents: Iterable[int],
        depths: Iterable[int],
        needed: Iterable[int],
        branch: int = 1,
        width: int = 0,
        origins: Iterable[int] = (),
        expected: float = 0.0,
    ) -> None:
        if not (type(tokens) is type(parents) is type(depths) is type(needed) is type(origins) is array):
            tokens, parents, depths = _integers(tokens), _integers(parents), _integers(depths)
            needed, origins = _integers(needed), _integers(origins)
        self._tokens: array[int] | None = tokens
        self._parents: array[int] | None = parents
        self._depths: array[int] | None = depths
        self._origins: array[int] | None = origins
        self.needed, self.branch, self.width, self.expected = needed, branch, width, expected
        self.forest: Forest | None = None
        self.size, self.start = len(tokens), 0
        self._below: dict[int, list[int]] | None = None
        self._packed: bytes | None = None

    @classmethod
    def of_forest(cls, forest: Forest, start: int, layout: WindowLayout, guesses: int, expected: float) -> TokenTree:
        """The tree that begins at this row: a branch of this layout, and this number of guesses behind it."""
        tree = cls.__new__(cls)
        tree.forest, tree.start, tree.size = forest, start, layout.size + guesses
        tree.needed, tree.branch, tree.width = layout.needed(guesses), layout.size, layout.width
        tree.expected, tree._below, tree._packed = expected, None, None
        tree._tokens = tree._parents = tree._depths = tree._origins = None
        return tree

    @property
    def tokens(self) -> array[int]:
        if self._tokens is None:
            self._tokens = self._cut(0, self.size)
        return self._tokens

    @property
    def parents(self) -> array[int]:
        if self._parents is None:
            self._parents = self._cut(1, self.size)
        return self._parents

    @property
    def depths(self) -> array[int]:
        if self._depths is None:
            self._depths = self._cut(2, self.size)
        return self._depths

    @property
    def origins(self) -> array[int]:
        if self._origins is None:
            self._origins = self._cut(3, self.size - self.branch)
        return self._origins

    def _cut(self, field: int, count: int) -> array[int]:
        """The first `count` numbers of this tree in one of the forest's fields."""
        if self.forest is None:
            raise AttributeError("a tree outside of a forest has all its fields")
        start = field * self.forest.rows + self.start
        return self.forest.numbers[start : start + count]

    def __eq__(self, other: object) -> bool:
        return self._all() == other._all() if isinstance(other, TokenTree) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = ("tokens", "parents", "depths", "needed", "branch", "width", "origins", "expected")
        return f"TokenTree({', '.join(f'{name}={value!r}' for name, value in zip(names, self._all(), strict=True))})"

    def _all(self) -> tuple[Any, ...]:
        """What makes two trees equal."""
        return (
            self.tokens, self.parents, self.depths, self.needed, self.branch, self.width, self.origins, self.expected,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.size

    def place(self, node: int) -> int:
        """Where the root or a guess (not a node of the window) stands in `needed`."""
        return node - self.size + len(self.needed) if node else 0

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root to this node's own."""
        tokens, parents, path = self.tokens, self.parents, list[int]()
        while (parent := parents[node]) >= 0:
            path.append(tokens[node])
            node = parent
        return path[::-1]

    def guesses_below(self) -> dict[int, list[int]]:
        """Per node that has some, the guesses right below it, in the tree's order. The root is node 0."""
        if self._below is None:
            self._below = {}
            for guess, parent in enumerate(self.parents[self.branch :], start=self.branch):
                self._below.setdefault(parent, []).append(guess)
        return self._below

    def packed(self) -> bytes:
        """The tokens, the parents and the needed nodes, one after the other, as C reads them."""
        if self._packed is None:
            self._packed = b"".join((self.tokens, self.parents, self.needed))
        return self._packed

    def guess_below(self, node: int, token: int) -> int | None:
        """The guess of this token right below a node, if there is one."""
        return next((guess for guess in self.guesses_below().get(node, ()) if self.tokens[guess] == token), None)


@dataclass(slots=True)
class Forest:
    """All trees of a step, one after the other: the tokens of all of them, then their parents, depths and origins.

    Each of these fields takes `rows` numbers. A tree has fewer origins than rows; what follows them is not used.
    """

    numbers: array[int]
    rows: int

    @property
    def tokens(self) -> array[int]:
        return self.numbers[: self.rows]

    @property
    def parents(self) -> array[int]:
        return self.numbers[self.rows : 2 * self.rows]


def forest_of(trees: Sequence[TokenTree]) -> Forest | None:
    """The forest that consists of these trees, in this order, if there is one."""
    forest, row = trees[0].forest, 0
    for tree in trees:
        if tree.forest is not forest or tree.start != row:
            return None
        row += tree.size
    return forest if forest is not None and row == forest.rows else None


def _integers(numbers: Iterable[int]) -> array[int]:
    """32-bit integers. An array is taken as it is: no tree changes its arrays."""
    return numbers if isinstance(numbers, array) else array("i", numbers)


def below_chunk(chunk: Sequence[int], tree: TokenTree) -> TokenTree:
    """One tree: the prompt chunk as a chain, and `tree` at its end. Its root becomes node len(chunk)."""
    shift = len(chunk)
    return TokenTree(
        tokens=[*chunk, *tree.tokens],
        parents=[*range(-1, shift), *[parent + shift for parent in tree.parents[1:]]],
        depths=[*range(shift), *[depth + shift for depth in tree.depths]],
        needed=[node + shift for node in tree.needed],
    )


@dataclass(slots=True)
class Guesses:
    """The guesses that a drafter took, parents first. Their parents are numbered as in the tree."""

    tokens: array[int]
    parents: array[int]
    depths: array[int]
    origins: array[int]
    scores: array[float]


NO_GUESSES = Guesses(array("i"), array("i"), array("i"), array("i"), array("d"))


class WindowLayout:
    """Where the lookahead branch of a (W, N) window stands in the tree. `newest` are the newest window row's nodes.

    `parent_array` and `depth_array` are the same numbers as `parents` and `depths`, as trees have them, and
    `parents_and_depths` are both one after the other, as C has them.
    """

    def __init__(self, width: int, parents: Sequence[int], depths: Sequence[int], newest: Sequence[int]) -> None:
        self.width, self.size = width, len(parents)
        self.parents, self.depths, self.newest = tuple(parents), tuple(depths), tuple(newest)
        self.parent_array, self.depth_array = array("i", parents), array("i", depths)
        self.parents_and_depths = self.parent_array.tobytes() + self.depth_array.tobytes()
        self._branch_needs = array("i", [0, *(node for node in newest if node)])  # N = 2: the root is one of them
        self._needed: dict[int, array[int]] = {}

    def tree(self, tokens: Sequence[int], guesses: Guesses, count: int | None = None) -> TokenTree:
        """The branch with these tokens, the root's first, and the guesses behind it: the best `count` of them, or all.

        The best ones are as good as a tree: no guess stands before its parent.
        """
        self.check(tokens)
        if count is None:
            count = len(guesses.tokens)
        return TokenTree(
            array("i", tokens) + guesses.tokens[:count],
            self.parent_array + guesses.parents[:count],
            self.depth_array + guesses.depths[:count],
            self.needed(count),
            self.size,
            self.width,
            guesses.origins[:count],
            reduce(add, guesses.scores[:count], 0.0),  # not `sum`, which rounds otherwise than C since Python 3.12
        )

    def check(self, tokens: Sequence[int]) -> None:
        """Raise ValueError unless these are as many tokens as the branch has."""
        if len(tokens) != self.size:
            raise ValueError(f"a branch of {len(tokens)} tokens for a layout of {self.size}")

    def needed(self, count: int) -> array[int]:
        """The nodes whose logits are computed, with so many guesses behind the branch."""
        needed = self._needed.get(count)
        if needed is None:
            guesses = range(self.size, self.size + count)
            needed = self._needed[count] = self._branch_needs + array("i", guesses)
        return needed


@lru_cache(maxsize=256)
def window_layout(window: int, ngram: int) -> WindowLayout:
    """Figure 2(b)'s lookahead branch: window row r, column j is at depth j + r; the root is row 0, column 0."""
    parents, depths = [-1], [0]
    if not window:
        return WindowLayout(0, parents, depths, ())
    row = list(range(window))
    for column in range(1, window):
        parents.append(column - 1)
        depths.append(column)
    for r in range(1, ngram - 1):
        above, row = row, list(range(len(parents), len(parents) + window))
        for column in range(window):
            parents.append(above[column])
            depths.append(column + r)
    return WindowLayout(window, parents, depths, row)


def visibility(parents: Sequence[int]) -> list[int]:
    """Per node, the nodes of this tree that it sees, as the bits of an int: its parent's bits and its own."""
    seen: list[int] = []
    bit = 1
    for parent in parents:
        seen.append(seen[parent] | bit if parent >= 0 else bit)
        bit <<= 1
    return seen


def packed_visibility(parents: Sequence[int]) -> npt.NDArray[np.uint32]:
    """[K, words]: bit j % 32 of word j // 32 of line i says whether node i sees node j."""
    words = (len(parents) + 31) // 32
    raw = b"".join([bits.to_bytes(4 * words, "little") for bits in visibility(parents)])
    return np.frombuffer(raw, dtype="<u4").reshape(len(parents), words)


def dense_visibility(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[K, K] booleans: entry (i, j) says whether node i sees node j."""
    size = len(parents)
    packed = packed_visibility(parents).view(np.uint8)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :size].astype(np.bool_)
