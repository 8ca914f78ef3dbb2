"""Where a step's K/V stand: every position in its own block, parents before children, chains at home."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_tree

from lookahead.backends.cpu.cells import BLOCK, HOME, SPARE, blocks_for, cells_of, home, positions_of


def test_home_cells_leave_the_spare_ones_of_each_block_free() -> None:
    assert home(np.array([0, HOME - 1, HOME, 2 * HOME + 5])).tolist() == [0, HOME - 1, BLOCK, 2 * BLOCK + 5]
    positions = positions_of(2 * BLOCK)
    assert home(positions[positions < 2 * HOME]).tolist() == [*range(HOME), *range(BLOCK, BLOCK + HOME)]
    assert (positions[HOME:BLOCK] > 1 << 60).all()
    assert [blocks_for(n) for n in (0, 1, HOME, HOME + 1)] == [0, 1, 1, 2]


@given(st.integers(0, 400), st.integers(0, 150), st.integers(1, 40))
def test_a_chain_is_at_home(length: int, chunk: int, nodes: int) -> None:
    """So an accepted chain need not move."""
    if (length + chunk) % HOME + nodes <= HOME + SPARE:
        cells = cells_of(length, chunk, range(nodes))
        assert cells.tolist() == home(np.arange(length, length + chunk + nodes)).tolist()


@given(st.integers(0, 400), st.integers(0, 120), st.integers(1, SPARE + 1), st.integers(0, 99))
def test_trees_keep_the_order_of_sums(length: int, chunk: int, size: int, seed: int) -> None:
    """Each node stands in the block of its position, behind its ancestors of that block, in a cell of its own."""
    tree = random_tree(size, seed)
    cells = cells_of(length, chunk, tree.depths)[chunk:]
    assert len(set(cells.tolist())) == size
    root = length + chunk
    assert cells[0] == home(np.array([root]))[0]
    for node in range(1, size):
        assert cells[node] // BLOCK == (root + tree.depths[node]) // HOME
        parent = cells[tree.parents[node]]
        assert parent < cells[node]
        assert cells[node] > cells[0]


@given(st.integers(0, 400), st.integers(SPARE + 2, 500), st.integers(0, 99))
def test_a_larger_tree_spills_into_free_cells(length: int, size: int, seed: int) -> None:
    tree = random_tree(size, seed)
    cells = cells_of(length, 0, tree.depths)
    assert len(set(cells.tolist())) == size
    assert cells.min() == home(np.array([length]))[0]
    cached = set(home(np.arange(length)).tolist())
    assert not cached & set(cells.tolist())
