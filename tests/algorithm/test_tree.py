"""The tree's mask is the paper's Figure 2(b), worked out here a second way, from rows and columns."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree, below_chunk, window_layout
from lookahead.algorithm.visibility import dense_visibility, packed_visibility, visibility
from lookahead.config import LookaheadConfig, StopRules

Place = tuple[Any, ...]
ROOT: Place = ("c",)
SIZES = list(product(range(7), range(2, 6)))


def lookahead_places(window: int, ngram: int) -> list[Place]:
    """The root and every window token as ("window", row, column). The oldest row's column 0 is the root."""
    places = [("window", r, j) for r in range(ngram - 1) for j in range(window)]
    return [ROOT, *[place for place in places if place[1:] != (0, 0)]]


def paper_sees(query: Place, key: Place) -> bool:
    """The paper's section 3.3, by coordinates: no parents, no ancestors.

    A lookahead token in row r, column j sees c, the oldest row up to column j, and column j up to row r.
    A guess's token ("guess", g, i) sees c and that guess's tokens up to i. Branches never see each other.
    """
    if key == ROOT or query == ROOT:
        return key == ROOT
    if query[0] != key[0]:
        return False
    if query[0] == "guess":
        return query[1] == key[1] and key[2] <= query[2]
    (_, r, j), (_, key_row, key_column) = query, key
    if key_row == 0:
        return key_column <= j
    return key_column == j and key_row <= r


def paper_mask(places: list[Place]) -> npt.NDArray[np.bool_]:
    return np.array([[paper_sees(query, key) for key in places] for query in places])


def unpack(packed: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.bool_]:
    """Bit by bit, in plain Python."""
    return np.array([[bool(int(row[j // 32]) >> j % 32 & 1) for j in range(size)] for row in packed])


def window_of(tree: TokenTree, ngram: int) -> list[Place]:
    places = lookahead_places(tree.width, ngram)
    assert len(places) == tree.branch
    return places


@pytest.mark.parametrize("guesses", range(5))
@pytest.mark.parametrize(("window", "ngram"), SIZES)
@pytest.mark.thinned(1, most=30)
def test_mask_is_figure_2b(window: int, ngram: int, guesses: int) -> None:
    layout = window_layout(window, ngram)
    places, parents = lookahead_places(window, ngram), list(layout.parents)
    for g in range(guesses):
        for i in range(ngram - 1):
            parents.append(len(parents) - 1 if i else 0)
            places.append(("guess", g, i))
    expected = paper_mask(places)
    dense = dense_visibility(parents)
    assert dense.dtype == np.bool_
    assert dense.shape == (len(places), len(places))
    assert (dense == expected).all()
    packed = packed_visibility(parents)
    assert packed.dtype == np.uint32
    assert packed.shape == (len(places), -(-len(places) // 32))
    assert (unpack(packed, len(places)) == expected).all()


@pytest.mark.parametrize(("window", "ngram"), SIZES)
def test_layout_positions_and_newest_row(window: int, ngram: int) -> None:
    layout = window_layout(window, ngram)
    places = lookahead_places(window, ngram)
    assert layout.size == len(places) == max(1, window * (ngram - 1))
    assert layout.depths == tuple(0 if place == ROOT else place[1] + place[2] for place in places)
    assert all(parent < node for node, parent in enumerate(layout.parents))
    # A token's position is one after its parent's, and it predicts the one after its own.
    for node in range(1, layout.size):
        assert layout.depths[node] == layout.depths[layout.parents[node]] + 1
    newest = [ROOT if (ngram, j) == (2, 0) else ("window", ngram - 2, j) for j in range(window)]
    assert layout.newest == tuple(places.index(place) for place in newest)


def test_red_six_of_the_papers_example() -> None:
    """'Only the green token at position 5 and all orange tokens are visible to the red token 6.'"""
    layout = window_layout(5, 4)
    places = lookahead_places(5, 4)
    red = places.index(("window", 2, 4))
    assert layout.depths[red] == 6
    seen = [places[j] for j in np.flatnonzero(dense_visibility(layout.parents)[red])]
    assert seen == [ROOT, *[("window", 0, j) for j in range(1, 5)], ("window", 1, 4), ("window", 2, 4)]


@pytest.mark.parametrize("ngram", range(2, 6))
def test_no_window_is_the_root_alone(ngram: int) -> None:
    layout = window_layout(0, ngram)
    assert (layout.parents, layout.depths, layout.newest) == ((-1,), (0,), ())


@pytest.mark.parametrize("ngram", range(2, 6))
def test_one_column_is_a_chain(ngram: int) -> None:
    layout = window_layout(1, ngram)
    assert layout.parents == tuple(range(-1, ngram - 2))
    assert layout.newest == (ngram - 2,)


@pytest.mark.parametrize("window", range(1, 7))
def test_two_grams_have_one_row_that_is_oldest_and_newest(window: int) -> None:
    layout = window_layout(window, 2)
    assert layout.parents == tuple(range(-1, window - 1))
    assert layout.newest == tuple(range(window))


# Trees that a sequence proposes. The text repeats: the pool has guesses, and some share their beginning.
TEXT = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 9, 1, 2, 8, 8, 4, 9, 1, 7, 7, 5, 3, 9, 1]


def step(sequence: DecodingSequence, target: int = 1) -> None:
    """A step in which the model answers `target` everywhere."""
    tree = sequence.propose()
    sequence.accept_step(tree, StepOutput([target] * len(tree.needed)))


def guess_paths(tree: TokenTree) -> dict[int, tuple[int, ...]]:
    """Guess node -> its tokens from the root's child down, found by walking parents."""
    paths = {}
    for node in range(tree.branch, len(tree)):
        path, at = [], node
        while at:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        paths[node] = tuple(reversed(path))
    return paths


@pytest.mark.parametrize("guesses", range(5))
@pytest.mark.parametrize(("window", "ngram"), SIZES)
@pytest.mark.thinned(1, most=30)
def test_proposed_trees(window: int, ngram: int, guesses: int) -> None:
    sequence = DecodingSequence(TEXT, LookaheadConfig.paper(window, ngram, guesses, prompt=True))
    for _ in range(3):
        tree = sequence.propose()
        assert tree.tokens[0] == sequence.tokens[-1]
        assert (tree.width, tree.branch) == (window, window_layout(window, ngram).size)

        # The guesses: a trie of at most G chains of at most N - 1 tokens, every node once.
        paths = guess_paths(tree)
        assert len(set(paths.values())) == len(paths)
        assert all(tree.depths[node] == len(path) <= ngram - 1 for node, path in paths.items())
        leaves = len([node for node in paths if node not in tree.parents])
        assert leaves <= guesses
        assert bool(paths) == bool(guesses)

        # Who sees whom: the window by its coordinates, the guesses by their tokens.
        places = window_of(tree, ngram)
        expected = np.zeros((len(tree), len(tree)), dtype=np.bool_)
        expected[: tree.branch, : tree.branch] = paper_mask(places)
        for node, path in paths.items():
            expected[node, 0] = True
            for other, beginning in paths.items():
                expected[node, other] = path[: len(beginning)] == beginning
        assert (dense_visibility(tree.parents) == expected).all()
        assert (unpack(packed_visibility(tree.parents), len(tree)) == expected).all()

        # Needed rows: c, the newest window row (c is its column 0 when there is but one row), the guesses.
        newest = [i for i, place in enumerate(places) if place != ROOT and place[1] == ngram - 2]
        assert list(tree.needed) == [0, *newest, *range(tree.branch, len(tree))]
        assert len(tree.origins) == len(paths)
        step(sequence)


def test_guesses_with_a_shared_beginning_share_nodes() -> None:
    """W=5, N=4, G=2, the guesses 2 3 4 and 2 3 6: four nodes, not six."""
    sequence = DecodingSequence([1, 2, 3, 4, 9, 1, 2, 3, 6, 9, 1], LookaheadConfig.paper(5, 4, 2, prompt=True))
    paths = guess_paths(sequence.propose())
    assert set(paths.values()) == {(2,), (2, 3), (2, 3, 4), (2, 3, 6)}


def test_a_window_past_the_context_is_left_out() -> None:
    """The last column stands W + N - 3 after the root, and no token of a tree stands outside the context."""
    for limit in range(len(TEXT) + 1, len(TEXT) + 12):
        rules = StopRules(max_tokens=100, max_length=limit)
        sequence = DecodingSequence(TEXT, LookaheadConfig.paper(5, 4, 3, prompt=True), rules=rules)
        while sequence.finish_reason is None:
            tree = sequence.propose()
            last = len(sequence.tokens) - 1 + max(tree.depths)
            assert last < limit
            assert tree.width == (5 if len(sequence.tokens) - 1 + 5 + 4 - 3 < limit else 0)
            step(sequence)
        assert len(sequence.tokens) == limit


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 140))
    return [-1, *[draw(st.integers(0, node - 1)) for node in range(1, size)]]


@given(random_parents())
def test_a_node_sees_its_ancestors_and_itself(parents: list[int]) -> None:
    dense = dense_visibility(parents)
    for node in range(len(parents)):
        ancestors, at = {node}, node
        while parents[at] >= 0:
            at = parents[at]
            ancestors.add(at)
        assert set(np.flatnonzero(dense[node]).tolist()) == ancestors


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 130])
def test_packed_equals_dense_bit_by_bit(size: int) -> None:
    chain = list(range(-1, size - 1))
    star = [-1] + [0] * (size - 1)
    heap = [-1, *[(node - 1) // 2 for node in range(1, size)]]
    for parents in (chain, star, heap):
        packed, dense = packed_visibility(parents), dense_visibility(parents)
        assert packed.shape == (size, (size + 31) // 32)
        assert (unpack(packed, size) == dense).all()
        # Bits past the last node stay clear, so a kernel may read whole words.
        assert [sum(int(word) << 32 * w for w, word in enumerate(row)) for row in packed] == visibility(parents)
    assert dense_visibility(chain).sum() == size * (size + 1) // 2
    assert all(a < b for a, b in pairwise(visibility(chain)))


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_tree_below_a_chunk(size: int, count: int) -> None:
    """The root hangs from the chunk's last token, and every row is the node it was."""
    parents = [-1, *[max(0, i - 3) for i in range(1, size)]]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tree = TokenTree(list(range(50, 50 + size)), parents, depths, list(range(0, size, 2)))
    chunk = list(range(count))
    joined = below_chunk(chunk, tree)
    assert list(joined.tokens) == [*chunk, *tree.tokens]
    assert [joined.tokens[row] for row in joined.needed] == [tree.tokens[row] for row in tree.needed]
    seen = visibility(joined.parents)
    for node, before in enumerate(visibility(tree.parents)):
        assert seen[node + count] == before << count | (1 << count) - 1
        assert joined.depths[node + count] == tree.depths[node] + count
    assert list(joined.depths[:count]) == chunk


def test_path_tokens_lead_from_below_the_root() -> None:
    tree = TokenTree([9, 1, 2, 3, 4], [-1, 0, 1, 1, 3], [0, 1, 2, 2, 3], range(5))
    assert [tree.path_tokens(node) for node in range(5)] == [[], [1], [1, 2], [1, 3], [1, 3, 4]]
