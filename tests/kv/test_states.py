"""Kept rows: which rows of past steps are replayed into recurrent states."""

from __future__ import annotations

import pytest

from lookahead.kv.states import KeptRows


def test_accepted_nodes_become_walks() -> None:
    kept = KeptRows(8)
    assert kept.take_pending() == ([], [])
    first = kept.take(5)
    second = first + 3  # of the second sequence's tree
    kept.commit(4, first, [2], begins=True)
    kept.commit(1, second, [], begins=False)
    assert kept.take_pending() == ([4, 1, 0, 2, 2, 1, 0, 2, 1, 1], [0, 2, 3])
    assert kept.take_pending() == ([], [])


def test_rows_are_taken_in_a_ring() -> None:
    kept = KeptRows(8)
    assert [kept.take(nodes) for nodes in (6, 0, 4)] == [0, 6, 6]
    kept.commit(0, 6, [1, 3], begins=False)
    assert kept.take_pending() == ([0, 0, 0, 3, 3], [6, 7, 1])
    with pytest.raises(RuntimeError, match="10 rows were kept since this step; there is room for 8"):
        kept.commit(0, 0, [], begins=False)


def test_a_sequence_that_ends_is_not_replayed() -> None:
    kept = KeptRows(8)
    first = kept.take(4)
    kept.commit(0, first, [1], begins=False)
    kept.commit(1, first + 2, [], begins=False)
    kept.drop(0)
    kept.drop(5)
    assert kept.take_pending() == ([1, 0, 0, 1, 1], [2])
