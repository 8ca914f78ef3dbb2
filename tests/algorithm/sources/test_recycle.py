"""Recycled successors: which key answers, what is newest, and what outlives a request."""

from __future__ import annotations

from array import array
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from lookahead.algorithm.draft import Candidates, Drafter, Limits
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory, build_sources, wants_top
from lookahead.algorithm.sources import recycle as module
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.recycle import RecycleSource
from lookahead.algorithm.sources.source import Outcome
from lookahead.algorithm.successors import Key, Successors, SuccessorTable
from lookahead.algorithm.tree import TokenTree
from lookahead.config import LookaheadConfig

DRAFTERS = list({type(drafter): drafter for drafter in (PythonDrafter(), choose_drafter())}.values())


def likely(*tokens: int) -> Successors:
    return (*tokens, *[0] * len(tokens))


def top_of(*successors: Successors) -> np.ndarray[Any, Any]:
    return np.array(successors, dtype=np.int32)


@pytest.fixture(params=DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    """Every test with both kinds of table."""
    return request.param


def source_of(drafter: Drafter, shared: SuccessorTable | None = None) -> RecycleSource:
    return RecycleSource(drafter.new_table, shared, Calibration())


def kind_of(source: RecycleSource, found: tuple[Successors, int] | None) -> int:
    """0 to 6: which kind of key answered."""
    assert found is not None
    kind, level = divmod(found[1] - source.tables.first_origin, LEVELS)
    assert level == 0
    return kind


def absorb(source: RecycleSource, text: list[int], top: Successors) -> None:
    """A step without draft tokens: the successors of the text's last token."""
    after = [*text, top[0]]
    source.learn_from(Outcome(after, after[-1:], TokenTree([text[-1]], [-1], [0], [0]), [], [top[0]], top_of(top), []))


def test_successors_are_kept_under_their_last_three_two_and_one_tokens(drafter: Drafter) -> None:
    source = source_of(drafter)
    absorb(source, [1, 2, 3], likely(50))
    look_up = source.tables.look_up
    found = [look_up(1, 2, 3), look_up(9, 2, 3), look_up(9, 9, 3)]
    assert [answer[0] for answer in found if answer] == [likely(50)] * 3
    assert look_up(1, 2, 9) is None
    # Each key length has its own rates: the longer the match, the likelier the successors.
    assert [kind_of(source, answer) for answer in found] == [0, 1, 2]
    calibration = Calibration()
    first = RecycleSource(drafter.new_table, None, calibration).tables.first_origin
    for kind, priors in enumerate((*RecycleSource.PRIORS, *RecycleSource.PRIORS, RecycleSource.BIGRAM_PRIOR)):
        start = first + kind * LEVELS
        assert calibration.rates[start : start + LEVELS].tolist() == list(priors)


def test_newest_wins(drafter: Drafter) -> None:
    source = source_of(drafter)
    for text, token in (([1, 2, 3], 50), ([1, 2, 3], 51), ([9, 2, 3], 52), ([9, 9, 3], 53)):
        absorb(source, text, likely(token))
    found = [source.tables.look_up(*key) for key in ((1, 2, 3), (9, 2, 3), (0, 2, 3), (0, 0, 3))]
    assert [answer[0][0] for answer in found if answer] == [51, 52, 52, 53]


# The successors of (1, 2, 3) under one key only, of the last step, of the request's steps before, shared, or the
# model's bigrams. Longer than one token goes before one token, and within each the request's own goes before others.
ANSWER_ORDER = [
    ("last", 3), ("own", 3), ("last", 2), ("own", 2), ("shared", 3), ("shared", 2),
    ("last", 1), ("own", 1), ("bigrams", 1), ("shared", 1),
]  # fmt: skip


def group_of(owner: str, length: int) -> int:
    """The group of origins of an entry."""
    return 6 if owner == "bigrams" else (owner == "shared") * 3 + 3 - length


def holding(drafter: Drafter, *entries: tuple[str, int]) -> RecycleSource:
    """A source with these entries; the successor of entry i of ANSWER_ORDER is token i."""
    source = RecycleSource(drafter.new_table, drafter.new_table(), Calibration(), drafter.new_table())
    for owner, length in entries:
        key: Key = (1, 2, 3)[3 - length :]
        getattr(source.tables, owner).put(key, likely(ANSWER_ORDER.index((owner, length))))
    return source


@pytest.mark.parametrize("entry", ANSWER_ORDER)
def test_every_entry_answers_its_key_with_its_own_rates(drafter: Drafter, entry: tuple[str, int]) -> None:
    owner, length = entry
    source = holding(drafter, entry)
    for known, text in {3: (1, 2, 3), 2: (9, 2, 3), 1: (9, 9, 3)}.items():
        found = source.tables.look_up(*text)
        assert (found is not None) == (known >= length)
        assert found is None or kind_of(source, found) == group_of(owner, length)


@pytest.mark.parametrize(("first", "second"), list(combinations(ANSWER_ORDER, 2)))
def test_the_better_of_two_entries_answers(drafter: Drafter, first: tuple[str, int], second: tuple[str, int]) -> None:
    for entries in ((first, second), (second, first)):
        found = holding(drafter, *entries).tables.look_up(1, 2, 3)
        assert found is not None
        assert found[0] == likely(ANSWER_ORDER.index(first))


@pytest.mark.parametrize(("first", "second"), list(combinations(ANSWER_ORDER, 2)))
def test_the_drafter_asks_in_the_same_order(drafter: Drafter, first: tuple[str, int], second: tuple[str, int]) -> None:
    """`look_up` has a twin in C, which only the search calls."""
    source = holding(drafter, first, second)
    candidates = Candidates.after([1, 2, 3], Calibration().rates)
    source.propose([1, 2, 3], candidates)
    first_origin = source.tables.first_origin
    candidates.rates[first_origin:] = array("d", [0.5]) * len(candidates.rates[first_origin:])
    drafted = drafter.search(candidates, Limits(1, 1))
    assert list(drafted.tokens) == [ANSWER_ORDER.index(first)]
    owner, length = first
    assert drafted.origins[0] == source.tables.first_origin + group_of(owner, length) * LEVELS


def test_successors_of_a_tree_are_kept_under_their_paths(drafter: Drafter) -> None:
    """Root 3 after 1 2; draft tokens 4 -> 5 and 6 below it; the successors come in the order of `tree.needed`."""
    tree = TokenTree([3, 4, 6, 5], [-1, 0, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3])
    source = source_of(drafter)
    top = top_of(likely(40), likely(41), likely(42), likely(43))
    source.learn_from(Outcome([1, 2, 3, 4, 7], [4, 7], tree, [1], [4, 7, 0, 0], top, []))
    look_up = source.tables.look_up
    found = [look_up(*path) for path in ((1, 2, 3), (2, 3, 4), (2, 3, 6), (3, 4, 5))]
    assert [answer[0][0] for answer in found if answer] == [40, 41, 42, 43]
    assert {kind_of(source, answer) for answer in found} == {0}
    assert kind_of(source, look_up(2, 3, 5)) == 2


def test_nodes_that_were_not_needed_leave_no_trace(drafter: Drafter) -> None:
    """Window tokens of older window rows have no logits; the newest window row hangs below them."""
    tree = TokenTree([3, 4, 5, 6], [-1, 0, 1, 2], [0, 1, 2, 3], [0, 3], branch=4, width=1)
    source = source_of(drafter)
    source.learn_from(Outcome([1, 2, 3, 9], [9], tree, [], [9, 0], top_of(likely(40), likely(43)), []))
    look_up = source.tables.look_up
    assert (look_up(3, 4, 5), look_up(2, 3, 4)) == (None, None)
    assert look_up(4, 5, 6) == (likely(43), source.tables.first_origin)


def test_the_first_tokens_of_a_text(drafter: Drafter) -> None:
    source = source_of(drafter)
    absorb(source, [3], likely(50))
    assert source.tables.look_up(-1, -1, 3) == (likely(50), source.tables.first_origin)
    absorb(source, [3, 4], likely(51))
    assert source.tables.look_up(-1, 3, 4) == (likely(51), source.tables.first_origin)
    # Nothing before is not token 0 before.
    assert kind_of(source, source.tables.look_up(0, 3, 4)) == 1
    assert kind_of(source, source.tables.look_up(0, 0, 3)) == 2


def test_a_step_without_top_tokens_is_a_mistake(drafter: Drafter) -> None:
    tree = TokenTree([3], [-1], [0], [0])
    with pytest.raises(ValueError, match="'recycle' needs the likeliest tokens"):
        source_of(drafter).learn_from(Outcome([3, 4], [4], tree, [], [4], None, []))


# What outlives a request.


def test_successors_are_shared_while_the_next_step_runs(drafter: Drafter) -> None:
    shared = drafter.new_table()
    first, second = source_of(drafter, shared), source_of(drafter, shared)
    absorb(first, [1, 2, 3], likely(50))
    assert second.tables.look_up(1, 2, 3) is None
    first.learn_while_running()
    assert len(shared) == 3
    assert shared.get((1, 2, 3)) == likely(50)
    absorb(second, [1, 2, 3], likely(51))
    assert shared.get((3,)) == likely(50)
    second.learn_while_running()
    first.learn_while_running()
    assert len(shared) == 3
    assert shared.get((1, 2, 3)) == likely(51)


def test_successors_are_shared_in_order(drafter: Drafter) -> None:
    """Also where nobody has called `learn_while_running`: what is shared is never older than what was."""
    shared = drafter.new_table()
    source = source_of(drafter, shared)
    for number in (50, 51):
        absorb(source, [1, 2, 3], likely(number))
    assert shared.get((3,)) == likely(50)
    source.learn_while_running()
    source.learn_while_running()
    assert shared.get((3,)) == likely(51)


def test_it_makes_no_difference_to_a_request_when_its_successors_are_shared(drafter: Drafter) -> None:
    source = source_of(drafter, drafter.new_table())
    absorb(source, [1, 2, 3], likely(50))
    own = source.tables.look_up(1, 2, 3)
    source.learn_while_running()
    assert source.tables.look_up(1, 2, 3) == own


def test_the_oldest_keys_go_first(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes again keeps its place, and has the newest successors."""
    monkeypatch.setattr(module, "KEY_LIMIT", 9)
    shared = drafter.new_table()
    for token in (1, 2, 3, 1, 4):
        source = source_of(drafter, shared)
        absorb(source, [token], likely(token if len(shared) < 9 else 9))
        source.learn_while_running()
        assert len(source.tables.own) == 3
    keys = [key for key, _ in shared.items()]
    assert keys == [(-1, -1, 2), (-1, 2), (2,), (-1, -1, 3), (-1, 3), (3,), (-1, -1, 4), (-1, 4), (4,)]
    assert shared.get((4,)) == likely(9)


@pytest.mark.parametrize("scope", ["request", "model"])
def test_scope_request_neither_reads_nor_leaves_anything(drafter: Drafter, scope: str) -> None:
    memory = SharedMemory(drafter)
    memory.successors.put((7, 8, 9), likely(0))
    config = LookaheadConfig(window=0, sources=("recycle",), recycle_scope=scope)
    (source,) = build_sources(config, memory)
    assert isinstance(source, RecycleSource)
    assert (source.tables.look_up(7, 8, 9) is None) == (scope == "request")
    absorb(source, [1, 2, 3], likely(50))
    source.learn_while_running()
    assert (len(memory.successors) == 1) == (scope == "request")


def test_scope_off_asks_for_no_top_tokens() -> None:
    for scope, wanted in (("off", False), ("request", True), ("model", True)):
        config = LookaheadConfig(recycle_scope=scope)
        assert wants_top(config) == DecodingSequence([1], config).wants_top == wanted
        sources = [type(source) for source in build_sources(config, SharedMemory(PythonDrafter()))]
        assert (RecycleSource in sources) == wanted
        assert len(sources) == 3 + wanted
    assert not wants_top(LookaheadConfig(sources=("jacobi", "suffix")))
