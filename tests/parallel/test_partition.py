"""Dealing: every needed row has one owner, every share is closed under ancestors, and shares are balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.algorithm.tree import TokenTree, window_layout
from lookahead.parallel.partition import Share, partition_tree


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Any tree, any needed rows; or a window with guesses beside it."""
    if draw(st.booleans()):
        return window_tree(draw(st.integers(0, 12)), draw(st.integers(2, 6)), draw(parents_of(40)))
    parents = draw(parents_of(60))
    rows = sorted({0, *draw(st.sets(st.integers(0, len(parents) - 1)))})
    return tree_of(parents, rows)


def parents_of(most: int) -> st.SearchStrategy[list[int]]:
    """Parents of a tree: each node hangs from one before it."""
    return st.lists(st.integers(0, 10**6), max_size=most).map(lambda xs: [-1, *[x % (i + 1) for i, x in enumerate(xs)]])


def tree_of(parents: list[int], rows: list[int], branch: int = 1, width: int = 0) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return TokenTree(list(range(100, 100 + len(parents))), parents, depths, rows, branch, width)


def window_tree(window: int, ngram: int, guesses: list[int]) -> TokenTree:
    """A window, and guesses with these parents (0 is the root)."""
    layout = window_layout(window, ngram)
    shift = layout.size - 1
    parents = [*layout.parents, *[parent + shift if parent else 0 for parent in guesses[1:]]]
    newest = layout.newest if ngram > 2 else layout.newest[1:]
    rows = [0, *newest, *range(layout.size, len(parents))]
    return tree_of(parents, rows, layout.size, window)


def ancestors(tree: TokenTree, node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = tree.parents[node]
    return found


@given(trees(), st.integers(1, 8), st.data())
def test_every_needed_row_has_one_owner_who_can_compute_it(tree: TokenTree, ranks: int, data: st.DataObject) -> None:
    loads = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    shares = partition_tree(tree, ranks, loads)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share.needed) == list(tree.needed)
    for share in shares:
        assert share.nodes[0] == 0
        assert share.nodes == sorted(set(share.nodes))
        assert set(share.needed) <= set(share.nodes)
        for node in share.nodes:
            assert ancestors(tree, node) <= set(share.nodes)
    # Nobody runs a node that no needed row stands below.
    needed = set().union(*(ancestors(tree, row) for row in tree.needed))
    assert set().union(*(share.nodes for share in shares)) == needed


@given(trees(), st.integers(1, 8))
def test_a_share_is_a_tree_of_its_own(tree: TokenTree, ranks: int) -> None:
    for share in partition_tree(tree, ranks):
        own = share.tree(tree)
        assert own.parents[0] == -1
        assert all(parent < node for node, parent in enumerate(own.parents))
        for index, node in enumerate(share.nodes):
            assert own.tokens[index] == tree.tokens[node]
            assert own.depths[index] == tree.depths[node] == len(ancestors(own, index)) - 1
            assert [share.nodes[i] for i in sorted(ancestors(own, index))] == sorted(ancestors(tree, node))
        assert [share.nodes[row] for row in own.needed] == (share.needed or [0])


@given(trees(), st.integers(2, 8))
def test_balance(tree: TokenTree, ranks: int) -> None:
    """No share exceeds an even one by more than what hangs together: the deepest path and one uncut piece."""
    shares = partition_tree(tree, ranks)
    nodes = sum(1 for _ in set().union(*(share.nodes for share in shares))) - 1
    deepest = max(tree.depths)
    assert max(len(share.nodes) for share in shares) <= 1 + 2 * (-(-nodes // ranks)) + 2 * deepest


@pytest.mark.parametrize(
    ("window", "ngram", "guesses", "ranks", "most"),
    [
        (15, 5, 60, 2, 62),
        (15, 5, 60, 4, 40),
        (15, 5, 60, 8, 27),
        (5, 5, 108, 4, 37),
        (5, 5, 108, 8, 21),
        (0, 5, 127, 8, 18),
    ],
)
def test_a_usual_step_is_cut_well(window: int, ngram: int, guesses: int, ranks: int, most: int) -> None:
    """Guess branches of four tokens, as the pool's n-grams are. An even share of 120 tokens on 8 ranks is 16."""
    parents = [-1]
    while len(parents) <= guesses:
        parents += [0, *range(len(parents), len(parents) + 3)]
    shares = partition_tree(window_tree(window, ngram, parents[: guesses + 1]), ranks)
    assert max(len(share.nodes) for share in shares) <= most
    rows = [len(share.needed) for share in shares]
    assert max(rows) < sum(rows)


def test_more_ranks_never_hold_more() -> None:
    tree = window_tree(15, 5, [-1, *[0] * 60])
    largest = [max(len(share.nodes) for share in partition_tree(tree, ranks)) for ranks in range(1, 9)]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] == len(tree)


def test_who_has_to_catch_up_gets_less() -> None:
    """Four equal branches and a rank that lacks as much as two of them: it gets none."""
    tree = window_tree(0, 2, [-1, 0, 1, 0, 3, 0, 5, 0, 7])
    assert [len(share.nodes) for share in partition_tree(tree, 2)] == [5, 5]
    assert [len(share.nodes) for share in partition_tree(tree, 2, [8, 0])] == [1, 9]


def test_columns_of_the_window_are_dealt() -> None:
    """Two columns to each of two ranks: the last one's rank computes the whole oldest row, as in the paper."""
    tree = window_tree(4, 4, [-1])
    shares = partition_tree(tree, 2)
    assert sorted(len(share.needed) for share in shares) == [2, 3]
    assert max(len(share.nodes) for share in shares) < len(tree)
    oldest = {0, 1, 2, 3}
    assert any(oldest <= set(share.nodes) for share in shares)


def test_a_rank_without_work_runs_the_root() -> None:
    shares = partition_tree(TokenTree([7], [-1], [0], [0]), 3)
    assert shares == [Share([0], [0]), Share([0], []), Share([0], [])]
    assert shares[1].tree(TokenTree([7], [-1], [0], [0])).needed.tolist() == [0]


def test_a_path_is_kept_as_far_as_the_share_goes() -> None:
    share = Share([0, 2, 5, 9], [5])
    assert share.local([2, 5, 9]) == [1, 2, 3]
    assert share.local([2, 6, 9]) == [1]
    assert share.local([3]) == []
    assert share.local([]) == []
