"""Recycled rows: which key answers, what is newest, and what outlives a request."""

from __future__ import annotations

from itertools import combinations

import pytest

from lookahead.algorithm.draft import Row, Successors
from lookahead.algorithm.native import build as native
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory, build, wants_top
from lookahead.algorithm.sources import recycle as module
from lookahead.algorithm.sources.calibration import Calibration, Outcome
from lookahead.algorithm.sources.recycle import Key, Memory, RecycleSource, new_memory
from lookahead.algorithm.tree import TokenTree
from lookahead.config import LookaheadConfig


def row(*tokens: int) -> Row:
    return (*tokens, *[0] * len(tokens))


@pytest.fixture(params=["Python", "C"], autouse=True)
def memories(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with both kinds of memory."""
    if request.param == "Python":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("needs a C compiler")


def rows_after(source: RecycleSource) -> Successors:
    """What the source answers when a draft asks."""
    return source.successors()


def memory_of(rows: dict[Key, Row]) -> Memory:
    memory = new_memory()
    memory.update(rows)
    return memory


def absorb(source: RecycleSource, text: list[int], top: Row) -> None:
    """A step without guesses: the row of the text's last token."""
    after = [*text, top[0]]
    source.absorb(Outcome(after, after[-1:], TokenTree([text[-1]], [-1], [0], [0]), [], [top[0]], [top], []))


def test_a_row_is_kept_under_its_last_three_two_and_one_tokens() -> None:
    source = RecycleSource(None, Calibration())
    absorb(source, [1, 2, 3], row(50))
    after = rows_after(source)
    assert after(1, 2, 3)[0] == after(9, 2, 3)[0] == after(9, 9, 3)[0] == row(50)
    assert after(1, 2, 9) is None
    # Each key length has its own rates: the longer the match, the likelier the row.
    tables = [after(1, 2, 3)[1], after(9, 2, 3)[1], after(9, 9, 3)[1]]
    assert [table[0] for table in tables] == [list(rates) for rates in RecycleSource.PRIORS]
    origins = [origin for table in tables for origin in table[1]]
    assert origins == list(range(source.origin, source.origin + 3 * LEVELS))


def test_newest_wins() -> None:
    source = RecycleSource(None, Calibration())
    absorb(source, [1, 2, 3], row(50))
    absorb(source, [1, 2, 3], row(51))
    absorb(source, [9, 2, 3], row(52))
    absorb(source, [9, 9, 3], row(53))
    after = rows_after(source)
    assert [after(*key)[0] for key in ((1, 2, 3), (9, 2, 3), (0, 2, 3), (0, 0, 3))] == [
        row(51), row(52), row(52), row(53),
    ]  # fmt: skip


# The row of (1, 2, 3) under one key only, of the last step, of the request's steps before, or in the shared memory.
# Longer than one token goes before one token, and within each the request's own goes before what others left.
ANSWER_ORDER = [
    ("last", 3), ("own", 3), ("last", 2), ("own", 2), ("shared", 3), ("shared", 2),
    ("last", 1), ("own", 1), ("shared", 1),
]  # fmt: skip


def keyed(text: list[int], length: int) -> Memory:
    """A memory that holds what `text` ends with under this many tokens, and nothing else."""
    source = RecycleSource(None, Calibration())
    absorb(source, text, row(0))
    by_length = dict(zip((3, 2, 1), source.last, strict=True))
    return memory_of({by_length[length]: row(0)})


def holding(*entries: tuple[str, int]) -> RecycleSource:
    """A source with these entries; the row of entry i of ANSWER_ORDER is i."""
    source = RecycleSource(new_memory(), Calibration())
    for entry in entries:
        owner, length = entry
        memory = {"last": source.last, "own": source.memory, "shared": source.shared}[owner]
        memory.update(dict.fromkeys(keyed([1, 2, 3], length), row(ANSWER_ORDER.index(entry))))
    return source


@pytest.mark.parametrize("entry", ANSWER_ORDER)
def test_every_entry_answers_its_key_with_its_own_rates(entry: tuple[str, int]) -> None:
    owner, length = entry
    after = rows_after(holding(entry))
    texts = {3: (1, 2, 3), 2: (9, 2, 3), 1: (9, 9, 3)}
    for known, text in texts.items():
        found = after(*text)
        assert (found is not None) == (known >= length)
        if found is not None:
            place = (owner == "shared") * 3 + 3 - length
            assert found[1][1][0] == RecycleSource(new_memory(), Calibration()).origin + place * LEVELS


@pytest.mark.parametrize(("first", "second"), list(combinations(ANSWER_ORDER, 2)))
def test_the_better_of_two_entries_answers(first: tuple[str, int], second: tuple[str, int]) -> None:
    for entries in ((first, second), (second, first)):
        assert rows_after(holding(*entries))(1, 2, 3)[0] == row(ANSWER_ORDER.index(first))


def test_rows_of_a_tree_are_kept_under_their_paths() -> None:
    """Root 3 after 1 2; guesses 4 -> 5 and 6 below it; the rows come in the order of `tree.needed`."""
    tree = TokenTree([3, 4, 6, 5], [-1, 0, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3])
    source = RecycleSource(None, Calibration())
    text = [1, 2, 3, 4, 7]
    source.absorb(Outcome(text, [4, 7], tree, [1], [4, 7, 0, 0], [row(40), row(41), row(42), row(43)], []))
    after = rows_after(source)
    assert after(1, 2, 3)[0] == row(40)
    assert after(2, 3, 4)[0] == row(41)
    assert after(2, 3, 6)[0] == row(42)
    assert after(3, 4, 5)[0] == row(43)
    longest = after(3, 4, 5)[1]
    assert all(after(*path)[1] == longest for path in ((1, 2, 3), (2, 3, 4), (2, 3, 6)))
    assert after(2, 3, 5)[1] != longest


def test_rows_that_were_not_needed_leave_no_trace() -> None:
    """Window tokens of older rows have no row; the newest window row hangs below them."""
    tree = TokenTree([3, 4, 5, 6], [-1, 0, 1, 2], [0, 1, 2, 3], [0, 3], branch=4, width=1)
    source = RecycleSource(None, Calibration())
    source.absorb(Outcome([1, 2, 3, 9], [9], tree, [], [9, 0], [row(40), row(43)], []))
    after = rows_after(source)
    assert (after(3, 4, 5), after(2, 3, 4)) == (None, None)
    assert after(4, 5, 6)[0] == row(43)


def test_the_first_tokens_of_a_text() -> None:
    source = RecycleSource(None, Calibration())
    absorb(source, [3], row(50))
    assert rows_after(source)(-1, -1, 3)[0] == row(50)
    absorb(source, [3, 4], row(51))
    assert rows_after(source)(-1, 3, 4)[0] == row(51)
    # Nothing before is not token 0 before.
    three_tokens = rows_after(holding(("own", 3)))(1, 2, 3)[1]
    assert rows_after(source)(0, 3, 4)[1] != three_tokens
    assert rows_after(source)(0, 0, 3)[1] != three_tokens


# What outlives a request.


def test_rows_are_shared_while_the_next_step_runs() -> None:
    shared = new_memory()
    first, second = RecycleSource(shared, Calibration()), RecycleSource(shared, Calibration())
    absorb(first, [1, 2, 3], row(50))
    assert rows_after(second)(1, 2, 3) is None
    first.learn_while_running()
    assert len(shared) == 3
    assert rows_after(second)(1, 2, 3)[0] == row(50)
    absorb(second, [1, 2, 3], row(51))
    assert rows_after(first)(1, 2, 3)[0] == row(50)
    second.learn_while_running()
    first.learn_while_running()
    assert len(shared) == 3
    assert rows_after(RecycleSource(shared, Calibration()))(1, 2, 3)[0] == row(51)


def test_rows_are_shared_in_order() -> None:
    """Also where nobody has called `meanwhile`: what is shared is never older than what was."""
    shared = new_memory()
    source = RecycleSource(shared, Calibration())
    for number in (50, 51):
        absorb(source, [1, 2, 3], row(number))
    assert shared[3] == row(50)
    source.learn_while_running()
    source.learn_while_running()
    assert shared[3] == row(51)


def test_own_rows_are_asked_before_shared_ones() -> None:
    """So it makes no difference to a request when its rows are shared."""
    shared = new_memory()
    source = RecycleSource(shared, Calibration())
    absorb(source, [1, 2, 3], row(50))
    own = rows_after(source)(1, 2, 3)
    source.learn_while_running()
    assert rows_after(source)(1, 2, 3) == own


def test_the_oldest_keys_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes again keeps its place, and has the newest row."""
    monkeypatch.setattr(module, "LIMIT", 9)
    shared = new_memory()
    for token in (1, 2, 3, 1, 4):
        source = RecycleSource(shared, Calibration())
        absorb(source, [token], row(token if len(shared) < 9 else 9))
        source.learn_while_running()
        assert len(source.memory) == 3
    assert list(shared) == [(-1, -1, 2), (-1, 2), 2, (-1, -1, 3), (-1, 3), 3, (-1, -1, 4), (-1, 4), 4]
    assert shared[4] == row(9)


@pytest.mark.parametrize("scope", ["request", "model"])
def test_scope_request_neither_reads_nor_leaves_anything(scope: str) -> None:
    memory = SharedMemory()
    memory.successors.update(keyed([7, 8, 9], 3))
    before = dict(memory.successors)
    config = LookaheadConfig(window=0, sources=("recycle",), recycle_scope=scope)
    (source,) = build(config, memory)
    assert (rows_after(source)(7, 8, 9) is None) == (scope == "request")
    absorb(source, [1, 2, 3], row(50))
    source.learn_while_running()
    assert (memory.successors == before) == (scope == "request")


def test_scope_off_asks_for_no_top_rows() -> None:
    for scope, wanted in (("off", False), ("request", True), ("model", True)):
        config = LookaheadConfig(recycle_scope=scope)
        assert wants_top(config) == DecodingSequence([1], config).wants_top == wanted
        sources = [type(source) for source in build(config, SharedMemory())]
        assert (RecycleSource in sources) == wanted
        assert len(sources) == (3 if native.library() is None else 1) + wanted
    assert not wants_top(LookaheadConfig(sources=("jacobi", "suffix")))
