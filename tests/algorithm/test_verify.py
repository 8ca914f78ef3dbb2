"""Acceptance against a naive search, and every way a block can end at every offset."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookahead.algorithm.tree import TokenTree, window_layout
from lookahead.algorithm.verify import accept, cut_at_stop
from lookahead.config import StopRules

FOREVER = 10**6


def build(guesses: Sequence[Sequence[int]], window: int = 0, ngram: int = 3) -> TokenTree:
    """A tree with these guesses as a trie. Window tokens are 0, which the guesses use as well."""
    layout = window_layout(window, ngram)
    tokens, parents, depths = [0] * layout.size, list(layout.parents), list(layout.depths)
    known: dict[tuple[int, int], int] = {}
    for guess in guesses:
        parent = 0
        for token in guess:
            if (parent, token) not in known:
                known[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
            parent = known[parent, token]
    newest = [node for node in layout.newest if node]
    rows = [0, *newest, *range(layout.size, len(tokens))]
    return TokenTree(tokens, parents, depths, rows, layout.size, window, [0] * (len(tokens) - layout.size))


def naive(tree: TokenTree, guesses: Sequence[Sequence[int]], target_of: dict[int, int]) -> list[int]:
    """The longest beginning of any guess that the targets confirm token by token, and the target after it."""

    def node_of(path: Sequence[int]) -> int:
        at = 0
        for token in path:
            children = [n for n in range(tree.branch, len(tree)) if tree.parents[n] == at]
            (at,) = [n for n in children if tree.tokens[n] == token]
        return at

    best: list[int] = []
    for guess in guesses:
        for length in range(1, len(guess) + 1):
            path = list(guess[:length])
            confirmed = all(target_of[node_of(path[:i])] == path[i] for i in range(length))
            if confirmed and length > len(best):
                best = path
    return [*best, target_of[node_of(best)]]


# Three token ids: collisions between branches, guesses and targets are the rule.
token = st.integers(0, 2)


@given(
    st.lists(st.lists(token, min_size=1, max_size=4), max_size=6),
    st.sampled_from([(0, 2), (0, 4), (1, 2), (3, 2), (1, 3), (4, 4)]),
    st.data(),
)
def test_accept_equals_a_naive_search(guesses: list[list[int]], size: tuple[int, int], data: st.DataObject) -> None:
    tree = build(guesses, *size)
    targets = data.draw(st.lists(token, min_size=len(tree.needed), max_size=len(tree.needed)))
    target_of = dict(zip(tree.needed, targets, strict=True))
    path, tokens = accept(tree, targets)
    assert tokens == naive(tree, guesses, target_of)
    # The nodes are a path of guesses from the root, and they hold the accepted tokens but the last.
    assert len(tokens) == len(path) + 1
    assert [tree.tokens[node] for node in path] == tokens[:-1]
    assert [tree.parents[node] for node in path] == [0, *path][: len(path)]
    assert all(node >= tree.branch for node in path)


def test_no_guesses_give_one_token() -> None:
    assert accept(build([]), [7]) == ([], [7])
    assert accept(build([], 3, 4), [7, 1, 1, 1]) == ([], [7])


def test_a_window_token_is_never_accepted() -> None:
    """Every window token equals its parent's target, but only guesses are candidates."""
    tree = build([[5]], 3, 3)
    path, tokens = accept(tree, [0] * len(tree.needed))
    assert (path, tokens) == ([], [0])


@pytest.mark.parametrize("right", range(6))
def test_acceptance_stops_at_the_first_wrong_guess(right: int) -> None:
    tree = build([[1, 2, 3, 4, 5]])
    targets = [1, 2, 3, 4, 5, 6]
    targets[right] = 9
    assert accept(tree, targets) == (list(range(1, right + 1)), [*range(1, right + 1), 9])


def test_of_two_guesses_alike_the_first_is_accepted() -> None:
    tree = TokenTree([0, 5, 5, 6], [-1, 0, 0, 1], [0, 1, 1, 2], [0, 1, 2, 3])
    assert accept(tree, [5, 6, 7, 8]) == ([1, 3], [5, 6, 8])


def test_the_branch_is_switched_where_the_targets_do() -> None:
    tree = build([[1, 2, 3], [1, 4, 5], [6]], 2, 4)
    target_of = dict.fromkeys(tree.needed, 9)
    first = tree.branch
    target_of |= {0: 1, first: 4, first + 3: 5}
    path, tokens = accept(tree, [target_of[row] for row in tree.needed])
    assert path == [first, first + 3, first + 4]
    assert tokens == [1, 4, 5, 9]


BLOCK = [10, 11, 12, 13, 14]
OFFSETS = range(len(BLOCK))


def test_a_block_that_ends_nothing_stands_whole() -> None:
    assert cut_at_stop(BLOCK, 0, FOREVER, StopRules()) == (5, None)
    assert cut_at_stop(BLOCK, 0, FOREVER, StopRules(eos_ids=frozenset({99})), lambda _: False) == (5, None)


@pytest.mark.parametrize("at", OFFSETS)
def test_eos_at_every_offset(at: int) -> None:
    assert cut_at_stop(BLOCK, 3, FOREVER, StopRules(eos_ids=frozenset({BLOCK[at]}))) == (at + 1, "eos")


@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.parametrize("later", OFFSETS)
def test_the_first_of_several_eos_ids_counts(at: int, later: int) -> None:
    rules = StopRules(eos_ids=frozenset({99, BLOCK[at], BLOCK[later]}))
    assert cut_at_stop(BLOCK, 0, FOREVER, rules) == (min(at, later) + 1, "eos")


@pytest.mark.parametrize("generated", [0, 1, 17])
@pytest.mark.parametrize("at", OFFSETS)
def test_length_at_every_offset(at: int, generated: int) -> None:
    assert cut_at_stop(BLOCK, generated, generated + at + 1, StopRules()) == (at + 1, "length")


@pytest.mark.parametrize("generated", [0, 1, 17])
def test_a_length_one_past_the_block_does_not_end_it(generated: int) -> None:
    assert cut_at_stop(BLOCK, generated, generated + len(BLOCK) + 1, StopRules()) == (5, None)


@pytest.mark.parametrize("at", OFFSETS)
def test_stop_callback_at_every_offset(at: int) -> None:
    asked: list[int] = []

    def ends(token: int) -> bool:
        asked.append(token)
        return token == BLOCK[at]

    assert cut_at_stop(BLOCK, 0, FOREVER, StopRules(), ends) == (at + 1, "stop")
    assert asked == BLOCK[: at + 1]  # once per token that stands, in order, and no further


def one_by_one(
    tokens: Sequence[int], generated: int, room: int, eos: frozenset[int], stops: frozenset[int]
) -> tuple[int, str | None]:
    """Autoregressive decoding: a block of one token, again and again."""
    for done, tok in enumerate(tokens):
        _, reason = cut_at_stop([tok], generated + done, room, StopRules(eos_ids=eos), lambda t: t in stops)
        if reason is not None:
            return done + 1, reason
    return len(tokens), None


@pytest.mark.parametrize(
    ("eos", "stop", "length", "reason"),
    [
        (True, True, True, "eos"),
        (True, True, False, "eos"),
        (True, False, True, "eos"),
        (False, True, True, "stop"),
        (False, True, False, "stop"),
        (False, False, True, "length"),
    ],
)
@pytest.mark.parametrize("at", OFFSETS)
def test_on_one_token_eos_goes_before_stop_before_length(
    at: int, eos: bool, stop: bool, length: bool, reason: str
) -> None:
    rules = StopRules(eos_ids=frozenset({BLOCK[at]} if eos else ()))
    room = at + 1 if length else FOREVER
    assert cut_at_stop(BLOCK, 0, room, rules, lambda t: stop and t == BLOCK[at]) == (at + 1, reason)


@pytest.mark.parametrize("eos", OFFSETS)
@pytest.mark.parametrize("stop", OFFSETS)
@pytest.mark.parametrize("length", OFFSETS)
def test_the_earliest_token_that_ends_the_sequence_wins(eos: int, stop: int, length: int) -> None:
    found = cut_at_stop(BLOCK, 0, length + 1, StopRules(eos_ids=frozenset({BLOCK[eos]})), lambda t: t == BLOCK[stop])
    first = min(eos, stop, length)
    reason = "eos" if eos == first else "stop" if stop == first else "length"
    assert found == (first + 1, reason)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(1, 30),
    st.frozensets(st.integers(0, 5), max_size=2),
    st.frozensets(st.integers(0, 5), max_size=2),
)
@example([1, 2], 4, 5, frozenset(), frozenset())
def test_a_block_ends_where_single_tokens_would(
    tokens: list[int], generated: int, left: int, eos: frozenset[int], stops: frozenset[int]
) -> None:
    room = generated + left
    found = cut_at_stop(tokens, generated, room, StopRules(eos_ids=eos), lambda t: t in stops)
    assert found == one_by_one(tokens, generated, room, eos, stops)
