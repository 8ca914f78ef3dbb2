"""The step's token tree: tokens, parents, depths, needed nodes, and which node sees which.

One rule makes the whole attention pattern of the paper's Figure 2(b): *a token sees the prefix, its ancestors
and itself, nothing else.* Node 0 is the root `c`, the last accepted token; a node's position is the root's plus
its depth. Parents always come before their children.

    lookahead branch      c - o1 - o2 - ...        the oldest window row: a chain, c is its column 0
                          |   |    |
                          g0  g1   g2              window row 1: one chain per column, hanging from the oldest one
                          |   |    |
                          r0  r1   r2              the newest window row, N-2
    verification branch   c - draft - draft        a trie of draft tokens hanging from c
                            \\ draft
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import Any

TreeFields = tuple["array[int]", "array[int]", "array[int]", "array[int]"]
"""Tokens, parents, depths and origins."""


class TokenTree:
    """One step's tokens. The first `branch` nodes are the root and a lookahead branch of `width` columns, the rest
    are draft tokens.

    `needed` are the nodes whose logits are computed: the root, the newest window row, the draft tokens. `origins` are
    the origins of the draft tokens (see `sources.calibration`). All are 32-bit integers, which numpy and the C drafter
    read without a copy. `expected` is the sum of the draft tokens' scores: the expected number of accepted ones. `size`
    is the number of nodes.

    The C drafter writes all trees of a step into one `forest`; this one begins at row `start`. Its tokens, parents,
    depths and origins are copied from there on first access, which may be while the device runs. `needed_count` is
    len(needed).
    """

    __slots__ = (
        "_draft_children", "_fields", "_layout", "_needed", "_packed", "branch", "expected", "forest", "needed_count",
        "size", "start", "width",
    )  # fmt: skip

    _layout: WindowLayout  # of a tree in a forest

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
        self._fields: TreeFields | None = (tokens, parents, depths, origins)
        self._needed: array[int] | None = needed
        self._draft_children: dict[int, list[int]] | None = None
        self._packed: bytes | None = None
        self.branch, self.width, self.expected = branch, width, expected
        self.forest: Forest | None
        self.forest, self.start, self.size, self.needed_count = None, 0, len(tokens), len(needed)

    @property
    def tokens(self) -> array[int]:
        return (self._fields or self._copy_fields())[0]

    @property
    def parents(self) -> array[int]:
        return (self._fields or self._copy_fields())[1]

    @property
    def depths(self) -> array[int]:
        return (self._fields or self._copy_fields())[2]

    @property
    def origins(self) -> array[int]:
        return (self._fields or self._copy_fields())[3]

    @property
    def needed(self) -> array[int]:
        if self._needed is None:
            self._needed = self._layout.needed(self.size - self.branch)
        return self._needed

    def _copy_fields(self) -> TreeFields:
        """Copy this tree's fields from its forest."""
        if self.forest is None:
            raise AttributeError("a tree without a forest is created with all its fields")
        numbers, rows, first, size = self.forest.numbers, self.forest.rows, self.start, self.size
        second, third, fourth = first + rows, first + 2 * rows, first + 3 * rows
        self._fields = (
            numbers[first : first + size], numbers[second : second + size], numbers[third : third + size],
            numbers[fourth : fourth + size - self.branch],
        )  # fmt: skip
        return self._fields

    def first_of_chain(self, count: int, expected: float) -> TokenTree:
        """The root and the first `count` draft tokens of a chain, whose scores have this sum."""
        if count >= self.size - 1:
            return self
        size = count + 1
        return TokenTree(
            self.tokens[:size], self.parents[:size], self.depths[:size], self.needed[:size],
            origins=self.origins[:count], expected=expected,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, TokenTree) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = ("tokens", "parents", "depths", "needed", "branch", "width", "origins", "expected")
        return f"TokenTree({', '.join(f'{name}={value!r}' for name, value in zip(names, self._key(), strict=True))})"

    def _key(self) -> tuple[Any, ...]:
        """The fields that `==` compares."""
        return (
            self.tokens, self.parents, self.depths, self.needed, self.branch, self.width, self.origins, self.expected,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.size

    def needed_index(self, node: int) -> int:
        """The index in `needed` of the root or a draft token (not of a node of the window)."""
        return node - self.size + len(self.needed) if node else 0

    def path_tokens(self, node: int) -> list[int]:
        """The tokens on the path from the root, which is left out, to this node."""
        tokens, parents, path = self.tokens, self.parents, list[int]()
        while (parent := parents[node]) >= 0:
            path.append(tokens[node])
            node = parent
        return path[::-1]

    def draft_children(self) -> dict[int, list[int]]:
        """The draft tokens below each node that has any, in the tree's order. The root is node 0."""
        if self._draft_children is None:
            self._draft_children = {}
            for node, parent in enumerate(self.parents[self.branch :], start=self.branch):
                self._draft_children.setdefault(parent, []).append(node)
        return self._draft_children

    def packed(self) -> bytes:
        """The tokens, the parents and the needed nodes in one buffer, as C reads them."""
        if self._packed is None:
            self._packed = b"".join((self.tokens, self.parents, self.needed))
        return self._packed

    def draft_child(self, node: int, token: int) -> int | None:
        """The child of `node` that drafts this token, or None."""
        return next((child for child in self.draft_children().get(node, ()) if self.tokens[child] == token), None)


@dataclass(slots=True)
class Forest:
    """All trees of a step in one array: the tokens of all of them, then their parents, depths and origins.

    Each of these fields has `rows` numbers. A tree has fewer origins than rows; the rest of its origins is unused.
    """

    numbers: array[int]
    rows: int

    def trees(
        self, layouts: Iterable[WindowLayout], drafted: Iterable[int], expected: Iterable[float]
    ) -> list[TokenTree]:
        """The trees, the first one at row 0: each has a branch with its layout, followed by `drafted` draft tokens."""
        trees: list[TokenTree] = []
        start = 0
        for layout, count, scores in zip(layouts, drafted, expected, strict=True):
            tree = TokenTree.__new__(TokenTree)
            tree._fields = tree._needed = tree._draft_children = tree._packed = None  # until they are needed
            tree.forest, tree.start, tree.expected, tree._layout = self, start, scores, layout
            tree.branch, tree.width = layout.size, layout.width
            tree.size = size = layout.size + count
            tree.needed_count = size - layout.unneeded
            trees.append(tree)
            start += size
        return trees


def forest_of(trees: Sequence[TokenTree]) -> Forest | None:
    """The forest that consists of exactly these trees in this order, or None."""
    forest, row = trees[0].forest, 0
    for tree in trees:
        if tree.forest is not forest or tree.start != row:
            return None
        row += tree.size
    return forest if forest is not None and row == forest.rows else None


def _integers(numbers: Iterable[int]) -> array[int]:
    """32-bit integers. An array is not copied: no tree changes its arrays."""
    return numbers if isinstance(numbers, array) else array("i", numbers)


def below_chunk(chunk: Sequence[int], tree: TokenTree) -> TokenTree:
    """One tree: the prompt chunk as a chain, with `tree` below its last token. Its root becomes node len(chunk)."""
    shift = len(chunk)
    return TokenTree(
        tokens=[*chunk, *tree.tokens],
        parents=[*range(-1, shift), *[parent + shift for parent in tree.parents[1:]]],
        depths=[*range(shift), *[depth + shift for depth in tree.depths]],
        needed=[node + shift for node in tree.needed],
    )


@dataclass(slots=True)
class DraftTokens:
    """The draft tokens that a search found, parents first. `parents` are node numbers of the tree."""

    tokens: array[int]
    parents: array[int]
    depths: array[int]
    origins: array[int]
    scores: array[float]


NO_DRAFT_TOKENS = DraftTokens(array("i"), array("i"), array("i"), array("i"), array("d"))


class WindowLayout:
    """The nodes of a (W, N) window's lookahead branch. `newest` are those of the newest window row.

    `parent_array` and `depth_array` are `parents` and `depths` in the format of a tree, and `parents_and_depths` is
    both in one buffer, as C reads them.
    """

    def __init__(self, width: int, parents: Sequence[int], depths: Sequence[int], newest: Sequence[int]) -> None:
        self.width, self.size = width, len(parents)
        self.parents, self.depths, self.newest = tuple(parents), tuple(depths), tuple(newest)
        self.parent_array, self.depth_array = array("i", parents), array("i", depths)
        self.parents_and_depths = self.parent_array.tobytes() + self.depth_array.tobytes()
        self._needed_branch = array("i", [0, *(node for node in newest if node)])  # N = 2: the root is one of them
        self._needed: dict[int, array[int]] = {}
        self.unneeded = self.size - len(self._needed_branch)  # nodes of the branch whose logits are not computed

    def tree(self, tokens: Sequence[int], drafted: DraftTokens, count: int | None = None) -> TokenTree:
        """The branch with these tokens, the root's first, followed by the best `count` draft tokens (None: all).

        The best ones always form a tree, because parents come before their children.
        """
        self.check_branch(tokens)
        if count is None:
            count = len(drafted.tokens)
        return TokenTree(
            array("i", tokens) + drafted.tokens[:count],
            self.parent_array + drafted.parents[:count],
            self.depth_array + drafted.depths[:count],
            self.needed(count),
            self.size,
            self.width,
            drafted.origins[:count],
            reduce(add, drafted.scores[:count], 0.0),  # not `sum`, which rounds differently from C since Python 3.12
        )

    def check_branch(self, tokens: Sequence[int]) -> None:
        """Raise ValueError unless there is one token for each node of the branch."""
        if len(tokens) != self.size:
            raise ValueError(f"a branch of {len(tokens)} tokens for a layout of {self.size}")

    def needed(self, count: int) -> array[int]:
        """The nodes whose logits are computed in a tree with `count` draft tokens."""
        needed = self._needed.get(count)
        if needed is None:
            drafted = range(self.size, self.size + count)
            needed = self._needed[count] = self._needed_branch + array("i", drafted)
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
