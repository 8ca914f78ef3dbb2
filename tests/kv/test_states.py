"""Kept rows: which rows of past steps are replayed into recurrent states."""

from __future__ import annotations

import pytest

from lookahead.kv.states import KeptRows, Snapshots


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


def test_snapshots_are_known_once_their_pages_are() -> None:
    snapshots = Snapshots(10, 3)
    places = [snapshots.take(4, 1), snapshots.take(4, 3)]
    assert sorted(places) == [11, 12]
    assert b"a" not in snapshots
    snapshots.remember(4, [b"a", b"b", b"c"])
    assert [digest in snapshots for digest in (b"a", b"b", b"c")] == [True, False, True]
    assert [snapshots.use(b"a"), snapshots.use(b"c")] == places
    snapshots.remember(4, [b"a", b"b", b"c", b"d"])  # nothing new
    assert snapshots.take(5, 9) == 10
    snapshots.drop(5)
    assert snapshots.take(6, 1) == 10
    snapshots.remember(6, [b"a"])  # the same text: the first copy stays
    assert snapshots.use(b"a") == places[0]


def test_the_least_recently_used_snapshot_is_replaced() -> None:
    snapshots = Snapshots(0, 2)
    for number, digest in enumerate((b"a", b"b")):
        snapshots.take(number, 1)
        snapshots.remember(number, [digest])
    place = snapshots.use(b"b")
    snapshots.use(b"a")
    assert snapshots.take(7, 1) == place
    assert b"b" not in snapshots
    assert snapshots.take(8, 1) is not None
    assert snapshots.take(9, 1) is None  # both are being filled
    assert Snapshots(5, 0).take(0, 1) is None
