"""The packet, which is written for all sequences at once, against one that is written row by row."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from chains import chain

from lookahead.algorithm.native.build import library
from lookahead.algorithm.tree import NO_DRAFT_TOKENS, Forest, TokenTree, WindowLayout, window_layout
from lookahead.backends.base import NO_TREE, StepInput
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.targets_packet import TargetsPacket
from lookahead.config import SamplingParams

WINDOWED = window_layout(3, 4).tree(range(20, 29), NO_DRAFT_TOKENS)
FORKED = TokenTree([5, 6, 7, 8], [-1, 0, 0, 2], [0, 1, 1, 2], [0, 1, 2, 3])
SEQUENCES: dict[str, list[tuple[int, Sequence[int], TokenTree]]] = {
    "trees": [(3, (), FORKED), (70, (), chain([9], 1)), (0, (), FORKED)],
    "a window": [(3, (), FORKED), (12, (), WINDOWED)],
    "chunks": [(3, (), FORKED), (0, range(100, 105), chain([9], 1)), (64, [1, 2, 3], NO_TREE), (5, (), WINDOWED)],
    "one chunk": [(0, [4] * 7, NO_TREE)],
}


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("queries", [(1, 16), (4, 2)])
def test_all_sequences_at_once(case: str, queries: tuple[int, int]) -> None:
    sequences, (group, block) = SEQUENCES[case], queries
    packet = Packet(32, 24, [80, 40], 2, False)
    for field in packet.fields.values():
        field.fill(77)  # what an earlier step has left
    packet.begin()
    lengths, chunks, trees = (list(part) for part in zip(*sequences, strict=True))
    starts = packet.write_rows([10 + i for i in range(len(sequences))], lengths, chunks, trees, [queries, (1, 64)])
    packet.write_commits([0, 2], [[8, 9, 10, 11], [4, 5, 6, 7]], [5, 3, 90, 4])

    tokens, parents, owners, needed = list[int](), list[int](), list[int](), list[int]()
    expected, tiles, begins = list[list[int]](), list[list[int]](), list[int]()
    for i, (length, chunk, tree) in enumerate(sequences):
        slot, first, begin = 10 + i, len(tokens), length + len(chunk)
        root = first + len(chunk)
        begins.append(len(needed))
        needed += [root + node for node in tree.needed]
        tokens += [*chunk, *tree.tokens]
        parents += [*[-1] * len(chunk), *tree.parents]
        owners += [i] * (len(chunk) + len(tree))
        expected.append([slot, length, first, len(chunk), len(tree)])
        for start, rows, is_tree in ((first, len(chunk), 0), (root, len(tree), 1)):
            tiles += [[slot, begin, start, rows, n, is_tree] for n in range(-(-rows * group // block))]
    others = sum(-(-len(rows) // 64) for _, chunk, tree in sequences for rows in (chunk, tree.tokens))
    fields, pad = packet.fields, 32 - len(tokens)
    assert (starts, packet.needed) == (begins, len(needed))
    assert fields["tokens"].tolist() == tokens + [0] * pad
    assert fields["parents"].tolist() == parents + [-1] * pad
    assert fields["sequence_of"].tolist() == owners + [-1] * pad
    assert fields["needed"].tolist() == needed + [0] * (24 - len(needed))
    assert fields["sequences"][: len(sequences)].tolist() == expected
    assert fields["tiles_0"][: len(tiles)].tolist() == tiles
    assert fields["counts"].tolist() == [[len(tiles), 1], [others, 1]]
    assert fields["commits"][0].tolist() == [0, 2]
    assert fields["moves"][:, :2].tolist() == [[[8, 9], [10, 11]], [[4, 5], [6, 7]]]
    assert (fields["changed"].tolist(), fields["changes"][:2].tolist()) == ([2], [[5, 3], [90, 4]])
    packet.write_commits((), [(), ()])
    assert fields["changed"].tolist() == [0]


def forest(*shapes: tuple[WindowLayout, int]) -> list[TokenTree]:
    """Random trees of one forest: a layout and a number of draft tokens each."""
    rng, rows = random.Random(1), sum(layout.size + drafted for layout, drafted in shapes)
    tokens, parents = [rng.randrange(1000) for _ in range(rows)], list[int]()
    for layout, drafted in shapes:
        parents += [*layout.parents, *[rng.randrange(layout.size + node) for node in range(drafted)]]
    joined = Forest(array("i", [*tokens, *parents, *[0] * 2 * rows]), rows)
    return joined.trees(*zip(*shapes, strict=True), [0.0] * len(shapes))


FORESTS = {
    "one tree": [(window_layout(0, 4), 20)],
    "bare roots": [(window_layout(0, 4), 0)] * 3,
    "windows": [(window_layout(3, 4), 4), (window_layout(0, 4), 3), (window_layout(3, 2), 2), (window_layout(5, 2), 0)],
    "full": [(window_layout(0, 4), 5), (window_layout(0, 4), 25)],
}


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("case", FORESTS)
@pytest.mark.parametrize("queries", [[(1, 16), (1, 64)], [(4, 2), (3, 7)]])
def test_the_rows_in_c(case: str, queries: list[tuple[int, int]]) -> None:
    trees = forest(*FORESTS[case])
    found = []
    for in_c in (False, True):
        packet = Packet(32, 32, [130, 100], 2, False)
        for field in packet.fields.values():
            field.fill(77)
        if not in_c:
            packet._rows_in_c = lambda queries: None  # type: ignore[method-assign]
        packet.begin()
        slots, lengths = range(9, 9 + len(trees)), range(100, 100 + len(trees))
        starts = packet.write_rows(slots, lengths, [()] * len(trees), trees, queries)
        packet.write_commits((), [(), ()])
        assert (packet._in_c is not None) is in_c
        found.append((starts, packet.needed, {name: field.tolist() for name, field in packet.fields.items()}))
    assert found[0] == found[1]


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_trees_without_room_are_not_written() -> None:
    packet, trees = Packet(4, 4, [9], 1, False), forest((window_layout(0, 4), 4))
    with pytest.raises(IndexError):
        packet.write_rows([0], [0], [()], trees, [(1, 16)])
    assert not packet.fields["tokens"].any()


def test_what_has_no_room_becomes_the_overflow() -> None:
    """Commits with their moves, or changes of page tables; the rest stands in the fields as usual."""
    packet = Packet(1, 1, [1], 2, False)
    moves = [[5, 4] * packet.moves_room, [7, 6] * packet.moves_room]
    changes = [3, 2] * packet.changes_room
    packet.write_commits([0, packet.moves_room], moves, changes)
    assert (packet.overflow.commits, packet.overflow.changes) == ((), ())
    assert packet.fields["counts"].tolist() == [[0, 1]]
    assert packet.fields["changed"].tolist() == [packet.changes_room]
    packet.write_commits([0, packet.moves_room + 1], [[*own, 9, 8] for own in moves], [9, 9])
    assert packet.overflow.commits == [0, packet.moves_room + 1]
    assert [own[-2:] for own in packet.overflow.moves] == [[9, 8]] * 2
    assert packet.fields["counts"].tolist() == [[0, 0]]
    assert packet.fields["changed"].tolist() == [1]
    packet.write_commits([0, 1, 1, 1], [[5, 4, 3, 2]] * 2, [*changes, 1, 1])
    assert (packet.overflow.commits, packet.overflow.changes) == ([0, 1, 1, 1], [*changes, 1, 1])
    assert packet.fields["changed"].tolist() == [0]
    packet.write_commits((), [(), ()])
    assert (packet.overflow.commits, packet.overflow.changes) == ((), ())


def test_draws_of_different_requests() -> None:
    greedy, drawn = SamplingParams(), SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    inputs = [
        StepInput(0, (), FORKED, drawn, [0.1, 0.2, 0.3, 0.4]),
        StepInput(1, (), chain([9], 1), greedy, ()),
        StepInput(2, (), chain([9], 1), drawn, [0.5], next_uniforms=[0.6, 0.7]),
    ]
    packet = TargetsPacket(8, False, drawn=True, adjusted=False, most_rows=8)
    packet.fields["draws"].fill(77)
    packet.write_draws(inputs)
    settings = [0.7, 5.0, 0.9, 0.1]
    found = packet.fields["draws"].tolist()
    assert found[:4] == [[*settings, uniform] for uniform in (0.1, 0.2, 0.3, 0.4)]
    assert found[4:6] == [[0.0, 0.0, 1.0, 0.0, 0.0], [*settings, 0.5]]
    assert [row[0] for row in found[6:]] == [0.0, 0.0]
    assert packet.fields["next_uniforms"][5, :2].tolist() == [0.6, 0.7]


def test_more_tiles_than_there_is_room_for() -> None:
    """They would be written over other fields, or get no program of attention."""
    packet = Packet(32, 24, [2], 1, False)
    packet.write_rows([1, 2], [3, 70], [(), ()], [FORKED, FORKED], [(1, 16)])
    for chunks, trees in (([(), [1, 2]], [FORKED, FORKED]), ([()] * 3, forest(*[(window_layout(0, 4), 2)] * 3))):
        packet.fields["commits"].fill(77)
        with pytest.raises(ValueError, match="3 tiles of attention in a step that has room for 2"):
            packet.write_rows(range(len(trees)), range(len(trees)), chunks, trees, [(1, 16)])
        assert (packet.fields["commits"] == 77).all()  # the field after the tiles
