"""The choice of guesses against a brute-force enumeration of every candidate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookahead.algorithm.draft import CHAIN_MASS, LEARNED, Draft, Guesses, Row, Successors, Table

TEXT = [3, 1, 2]
VOCABULARY = 4
ROW_ORIGIN = 10
"""Origins below belong to chains, those from here on to rows."""

Path = tuple[int, ...]
Chain = tuple[list[int], list[int]]


def paths_of(guesses: Guesses) -> list[Path]:
    """Every guess as the tokens from below the root down to it."""
    paths: list[Path] = [()]
    for token, parent in zip(guesses.tokens, guesses.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def random_rows(seed: int, density: float, rates: Sequence[float]) -> Successors:
    """A row for some of the last three tokens, its buckets best first; one table for all of them."""
    table: Table = (list(rates), list(range(ROW_ORIGIN, ROW_ORIGIN + len(rates))))

    def successors(before2: int, before: int, token: int) -> tuple[Row, Table] | None:
        rng = random.Random(repr((seed, before2, before, token)))
        if rng.random() > density:
            return None
        tokens = rng.sample(range(VOCABULARY), rng.randint(1, VOCABULARY))
        buckets = sorted(rng.choices(range(len(rates)), k=len(tokens)))
        return (*tokens, *buckets), table

    return successors


@dataclass
class Case:
    """Chains, rows and rates; `rates[ROW_ORIGIN:]` are the rows' own, falling."""

    rates: list[float]
    chains: list[Chain]
    successors: Successors | None = None

    def draft(self) -> Draft:
        draft = Draft(TEXT, self.rates)
        for chain in self.chains:
            draft.chain(*chain)
        draft.successors = self.successors
        return draft

    def candidates(self, max_depth: int, path: Path = (), score: float = 1.0) -> dict[Path, tuple[float, float]]:
        """Path -> (score, rate) of every candidate there is, by the definition."""
        if len(path) == max_depth:
            return {}
        offered: dict[int, float] = {}
        for tokens, origins in self.chains:
            if tuple(tokens[: len(path)]) == path and len(tokens) > len(path):
                token, rate = tokens[len(path)], self.rates[origins[len(path)]]
                offered[token] = max(rate, offered.get(token, 0.0))
        row = {}
        if self.successors is not None and (found := self.successors(*[*TEXT, *path][-3:])):
            entries, table = found
            half = len(entries) // 2
            row = {token: table[0][bucket] for token, bucket in zip(entries[:half], entries[half:], strict=True)}
        offered = {token: max(rate, row.get(token, 0.0)) for token, rate in offered.items()}
        left = 1 - min(sum(offered.values()), CHAIN_MASS)
        below = {token: (score * rate, rate) for token, rate in offered.items()}
        below |= {token: (score * left * rate, rate) for token, rate in row.items() if token not in offered}
        found_all = {}
        for token, (child_score, rate) in below.items():
            found_all[(*path, token)] = child_score, rate
            found_all |= self.candidates(max_depth, (*path, token), child_score)
        return found_all


rate = st.floats(0.01, 1.0)
token = st.integers(0, VOCABULARY - 1)


@st.composite
def cases(draw: st.DrawFn, rows: bool = True) -> Case:
    falling = sorted(draw(st.lists(rate, min_size=4, max_size=4)), reverse=True)
    rates = draw(st.lists(rate, min_size=ROW_ORIGIN, max_size=ROW_ORIGIN)) + falling
    chains = []
    for tokens in draw(st.lists(st.lists(token, min_size=1, max_size=4), max_size=5)):
        origin = st.integers(0, ROW_ORIGIN - 1)
        chains.append((tokens, draw(st.lists(origin, min_size=len(tokens), max_size=len(tokens)))))
    density = draw(st.sampled_from([0.3, 0.7, 1.0]))
    return Case(rates, chains, random_rows(draw(st.integers(0, 999)), density, falling) if rows else None)


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 30), st.integers(0, 3))
@example(Case([0.5] * 14, []), 10, 3)
def test_the_best_candidates_are_taken(case: Case, room: int, max_depth: int) -> None:
    guesses = case.draft().grow(room, max_depth)
    paths = paths_of(guesses)
    everything = case.candidates(max_depth)

    # A trie, parents first, within the room and the depth.
    assert len(paths) == min(room, len(everything))
    assert len(set(paths)) == len(paths)
    assert all(parent <= i for i, parent in enumerate(guesses.parents))
    assert list(guesses.depths) == [len(path) for path in paths]
    assert max(guesses.depths, default=0) <= max_depth

    # Each has the score of the definition, and no candidate left out scores above one that was taken.
    assert list(guesses.scores) == pytest.approx([everything[path][0] for path in paths])
    assert [case.rates[origin] for origin in guesses.origins] == pytest.approx([everything[p][1] for p in paths])
    best = sorted((score for score, _ in everything.values()), reverse=True)
    assert list(guesses.scores) == pytest.approx(best[:room])
    assert all(
        score <= ([1.0, *guesses.scores][parent]) for score, parent in zip(guesses.scores, guesses.parents, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(cases(rows=False), st.randoms(use_true_random=False))
def test_scores_of_chains_are_products_of_rates_in_any_order(case: Case, rng: random.Random) -> None:
    guesses = case.draft().grow(100, 100)
    scores = dict(zip(paths_of(guesses), guesses.scores, strict=True))
    for path, score in scores.items():
        along = [
            max(case.rates[o[d]] for t, o in case.chains if tuple(t[: d + 1]) == path[: d + 1])
            for d in range(len(path))
        ]
        assert score == pytest.approx(math.prod(along))
    rng.shuffle(case.chains)
    again = case.draft().grow(100, 100)
    assert dict(zip(paths_of(again), again.scores, strict=True)) == pytest.approx(scores)


def test_the_likelier_origin_names_a_shared_node() -> None:
    rates = [0.2, 0.6, 0.4]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        draft = Draft(TEXT, rates)
        for origin in order:
            draft.chain([5], [origin])
        guesses = draft.grow(9, 9)
        assert [list(x) for x in (guesses.tokens, guesses.origins, guesses.scores)] == [[5], [1], [0.6]]


def test_a_chain_and_a_row_side_by_side() -> None:
    """Tokens 5 and 6 are in both: each takes its better rate, and 7 gets what the two leave over."""
    rates = [0.3, 0.2, 0.5, 0.4, 0.1]
    draft = Draft(TEXT, rates)
    draft.chain([5], [0])
    draft.chain([6], [1])
    row = (5, 6, 7, 0, 1, 2)
    draft.successors = lambda *last: (row, ([0.25, 0.4, 0.1], [12, 13, 14])) if last == (3, 1, 2) else None
    guesses = draft.grow(9, 9)
    assert list(guesses.tokens) == [6, 5, 7]
    assert list(guesses.origins) == [13, 0, 14]
    assert list(guesses.scores) == pytest.approx([0.4, 0.3, (1 - 0.7) * 0.1])


def test_chains_leave_a_row_something() -> None:
    draft = Draft(TEXT, [1.0])
    draft.chain([5], [0])
    draft.successors = lambda *last: ((7, 0), ([0.5], [12])) if last[-1] == 2 else None
    assert list(draft.grow(9, 9).scores) == pytest.approx([1.0, (1 - CHAIN_MASS) * 0.5])


def test_a_level_is_not_a_token() -> None:
    """The row's second half are levels: that level 1 equals the chain's token 1 means nothing."""
    draft = Draft(TEXT, [0.2])
    draft.chain([1], [0])
    draft.successors = lambda *last: ((7, 1), ([0.9, 0.5], [12, 13])) if last[-1] == 2 else None
    guesses = draft.grow(9, 1)
    assert (list(guesses.tokens), list(guesses.origins)) == ([7, 1], [13, 0])
    assert list(guesses.scores) == pytest.approx([0.8 * 0.5, 0.2])


def test_the_last_three_tokens_of_a_path_are_asked_for() -> None:
    asked = []
    for text in ([3, 1, 2], [1, 2], [2]):
        draft = Draft(text, [])
        draft.successors = lambda *last: asked.append(last) or ((last[-1] + 1, 0), ([0.9], [12]))
        draft.grow(3, 9)
    assert asked == [
        (3, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (-1, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (-1, -1, 2),
        (-1, 2, 3),
        (2, 3, 4),
    ]


# What a step costs.


@settings(max_examples=200, deadline=None)
@given(cases(), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=25), st.integers(1, 6), st.integers(0, 15))
def test_the_kept_count_gives_most_tokens_per_time(case: Case, rises: list[float], base: int, room: int) -> None:
    cost = [sum(rises[: k + 1]) for k in range(len(rises))]
    everything = case.draft().grow(room, 3, None, base)
    kept = case.draft().grow(room, 3, cost, base)
    taught = 0.0 if case.successors is None else LEARNED

    def gain(count: int) -> float:
        """A step of `base` tokens and this many guesses; a table that ends stays at its last entry."""
        return (1 + sum(everything.scores[:count]) + taught * count) / cost[min(base + count, len(cost)) - 1]

    count = len(kept.tokens)
    best = max(gain(k) for k in range(len(everything.tokens) + 1))
    assert gain(count) == pytest.approx(best, rel=1e-12)
    assert kept.tokens == everything.tokens[:count]
    assert kept.parents == everything.parents[:count]
    assert kept.scores == everything.scores[:count]
    assert len(kept.depths) == len(kept.origins) == count


def fallen() -> Draft:
    """One chain with the scores 1/2, 1/4, 1/8."""
    draft = Draft(TEXT, [0.5])
    draft.chain([5, 6, 7], [0, 0, 0])
    return draft


def test_a_flat_cost_keeps_all_and_a_steep_one_none() -> None:
    assert list(fallen().grow(9, 9, [1.0] * 10).tokens) == [5, 6, 7]
    assert list(fallen().grow(9, 9, [1.0, 2.0, 3.0, 4.0]).tokens) == []
    # Half a token more for 40% more time pays; a quarter for 40% of the first time no longer does.
    assert list(fallen().grow(9, 9, [1.0, 1.4, 1.8, 2.2]).tokens) == [5]


def test_tokens_that_are_in_the_step_anyway_are_counted() -> None:
    """The fourth token makes the step ten times as dear: it depends on `base` which guess that is."""
    cost = [1.0, 1.0, 1.0, 10.0, 10.0, 10.0, 10.0]
    assert [len(fallen().grow(9, 9, cost, base).tokens) for base in (1, 2, 3, 4, 5)] == [2, 1, 0, 3, 3]


@pytest.mark.parametrize("room", [-3, 0])
def test_no_room_no_guesses(room: int) -> None:
    assert list(fallen().grow(room, 9).tokens) == []
    assert list(fallen().grow(room, 9, [1.0]).tokens) == []


def test_no_depth_no_guesses() -> None:
    assert list(fallen().grow(9, 0).tokens) == []
