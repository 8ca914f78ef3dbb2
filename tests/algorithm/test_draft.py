"""The choice of draft tokens against a brute-force enumeration of every candidate."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples

from lookahead.algorithm.draft import RECYCLE_BONUS, Candidates, Drafter, Limits
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.search import CHAIN_MASS, PythonDrafter
from lookahead.algorithm.successors import ORIGIN_GROUPS, Successors, SuccessorTables
from lookahead.algorithm.tree import DraftTokens

TEXT = [3, 1, 2]
VOCABULARY = 4
FIRST_ORIGIN = 10
"""Origins below belong to chains, those from here on to successors."""
DRAFTERS = list({type(drafter): drafter for drafter in (PythonDrafter(), choose_drafter())}.values())
"""The one in Python and, where there is a compiler, the one in C: every test here is of both."""

Path = tuple[int, ...]
Chain = tuple[list[int], list[int]]


@pytest.fixture(params=DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return request.param


def draft_of(
    drafter: Drafter,
    rates: Sequence[float],
    chains: Sequence[Chain] = (),
    likely: dict[Path, Successors] | None = None,
    text: Sequence[int] = TEXT,
) -> Candidates:
    """Candidates after the text with these chains and successors."""
    padded = [*rates, *[0.0] * (FIRST_ORIGIN + ORIGIN_GROUPS * LEVELS - len(rates))]
    candidates = Candidates.after(text, array("d", padded))
    for chain in chains:
        candidates.add_chain(*chain)
    if likely is not None:
        candidates.tables = SuccessorTables(drafter.new_table(), drafter.new_table(), None, FIRST_ORIGIN)
        for key, successors in likely.items():
            candidates.tables.own.put(key, successors)
    return candidates


def paths_of(drafted: DraftTokens) -> list[Path]:
    """Every draft token as the tokens from below the root down to it."""
    paths: list[Path] = [()]
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def random_successors(seed: int, density: float, levels: int) -> dict[Path, Successors]:
    """Successors for some of all keys of three tokens, their levels best first."""
    rng = random.Random(seed)
    found = {}
    for key in product(range(VOCABULARY), repeat=3):
        if rng.random() <= density:
            tokens = rng.sample(range(VOCABULARY), rng.randint(1, VOCABULARY))
            found[key] = (*tokens, *sorted(rng.choices(range(levels), k=len(tokens))))
    return found


@dataclass
class Case:
    """Chains, successors and rates; `rates[FIRST_ORIGIN:]` are the successors' own, falling."""

    rates: list[float]
    chains: list[Chain]
    successors: dict[Path, Successors] | None = None

    def search(self, drafter: Drafter, limits: Limits) -> DraftTokens:
        return drafter.search(draft_of(drafter, self.rates, self.chains, self.successors), limits)

    def candidates(self, max_depth: int, path: Path = (), score: float = 1.0) -> dict[Path, tuple[float, float]]:
        """Path -> (score, rate) of every candidate there is, by the definition."""
        if len(path) == max_depth:
            return {}
        offered: dict[int, float] = {}
        for tokens, origins in self.chains:
            if tuple(tokens[: len(path)]) == path and len(tokens) > len(path):
                token, rate = tokens[len(path)], self.rates[origins[len(path)]]
                offered[token] = max(rate, offered.get(token, 0.0))
        likely = {}
        if found := (self.successors or {}).get(tuple([*TEXT, *path][-3:])):
            half = len(found) // 2
            levels = zip(found[:half], found[half:], strict=True)
            likely = {token: self.rates[FIRST_ORIGIN + level] for token, level in levels}
        offered = {token: max(rate, likely.get(token, 0.0)) for token, rate in offered.items()}
        left = 1 - min(sum(offered.values()), CHAIN_MASS)
        below = {token: (score * rate, rate) for token, rate in offered.items()}
        below |= {token: (score * left * rate, rate) for token, rate in likely.items() if token not in offered}
        found_all = {}
        for token, (child_score, rate) in below.items():
            found_all[(*path, token)] = child_score, rate
            found_all |= self.candidates(max_depth, (*path, token), child_score)
        return found_all


rate = st.floats(0.01, 1.0)
token = st.integers(0, VOCABULARY - 1)


@st.composite
def cases(draw: st.DrawFn, successors: bool = True) -> Case:
    falling = sorted(draw(st.lists(rate, min_size=4, max_size=4)), reverse=True)
    rates = draw(st.lists(rate, min_size=FIRST_ORIGIN, max_size=FIRST_ORIGIN)) + falling
    chains = []
    for tokens in draw(st.lists(st.lists(token, min_size=1, max_size=4), max_size=5)):
        origin = st.integers(0, FIRST_ORIGIN - 1)
        chains.append((tokens, draw(st.lists(origin, min_size=len(tokens), max_size=len(tokens)))))
    density = draw(st.sampled_from([0.3, 0.7, 1.0]))
    likely = random_successors(draw(st.integers(0, 999)), density, len(falling))
    return Case(rates, chains, likely if successors else None)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(DRAFTERS), cases(), st.integers(0, 30), st.integers(0, 3))
@example(DRAFTERS[0], Case([0.5] * 14, []), 10, 3)
@example(DRAFTERS[-1], Case([0.5] * 14, []), 10, 3)
def test_the_best_candidates_are_taken(drafter: Drafter, case: Case, room: int, max_depth: int) -> None:
    drafted = case.search(drafter, Limits(room, max_depth))
    paths = paths_of(drafted)
    everything = case.candidates(max_depth)

    # A trie, parents first, within the room and the depth.
    assert len(paths) == min(room, len(everything))
    assert len(set(paths)) == len(paths)
    assert all(parent <= i for i, parent in enumerate(drafted.parents))
    assert list(drafted.depths) == [len(path) for path in paths]
    assert max(drafted.depths, default=0) <= max_depth

    # Each has the score of the definition, and no candidate left out scores above one that was taken.
    assert list(drafted.scores) == pytest.approx([everything[path][0] for path in paths])
    assert [case.rates[origin] for origin in drafted.origins] == pytest.approx([everything[p][1] for p in paths])
    best = sorted((score for score, _ in everything.values()), reverse=True)
    assert list(drafted.scores) == pytest.approx(best[:room])
    assert all(
        score <= ([1.0, *drafted.scores][parent]) for score, parent in zip(drafted.scores, drafted.parents, strict=True)
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(DRAFTERS), cases(successors=False), st.randoms(use_true_random=False))
def test_scores_of_chains_are_products_of_rates_in_any_order(drafter: Drafter, case: Case, rng: random.Random) -> None:
    drafted = case.search(drafter, Limits(100, 100))
    scores = dict(zip(paths_of(drafted), drafted.scores, strict=True))
    for path, score in scores.items():
        along = [
            max(case.rates[o[d]] for t, o in case.chains if tuple(t[: d + 1]) == path[: d + 1])
            for d in range(len(path))
        ]
        assert score == pytest.approx(math.prod(along))
    rng.shuffle(case.chains)
    again = case.search(drafter, Limits(100, 100))
    assert dict(zip(paths_of(again), again.scores, strict=True)) == pytest.approx(scores)


def test_the_likelier_origin_names_a_shared_node(drafter: Drafter) -> None:
    rates = [0.2, 0.6, 0.4]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        drafted = drafter.search(draft_of(drafter, rates, [([5], [origin]) for origin in order]), Limits(9, 9))
        assert [list(x) for x in (drafted.tokens, drafted.origins, drafted.scores)] == [[5], [1], [0.6]]


def test_a_chain_and_successors_side_by_side(drafter: Drafter) -> None:
    """Tokens 5 and 6 are in both: each takes its better rate, and 7 gets what the two leave over."""
    rates = [0.3, 0.2, *[0.0] * 8, 0.25, 0.4, 0.1]
    candidates = draft_of(drafter, rates, [([5], [0]), ([6], [1])], {(3, 1, 2): (5, 6, 7, 0, 1, 2)})
    drafted = drafter.search(candidates, Limits(9, 9))
    assert list(drafted.tokens) == [6, 5, 7]
    assert list(drafted.origins) == [11, 0, 12]
    assert list(drafted.scores) == pytest.approx([0.4, 0.3, (1 - 0.7) * 0.1])


def test_chains_leave_successors_something(drafter: Drafter) -> None:
    candidates = draft_of(drafter, [1.0, *[0.0] * 9, 0.5], [([5], [0])], {(3, 1, 2): (7, 0)})
    assert list(drafter.search(candidates, Limits(9, 9)).scores) == pytest.approx([1.0, (1 - CHAIN_MASS) * 0.5])


def test_a_level_is_not_a_token(drafter: Drafter) -> None:
    """The second half of successors are levels: that level 1 equals the chain's token 1 means nothing."""
    candidates = draft_of(drafter, [0.2, *[0.0] * 9, 0.9, 0.5], [([1], [0])], {(3, 1, 2): (7, 1)})
    drafted = drafter.search(candidates, Limits(9, 1))
    assert (list(drafted.tokens), list(drafted.origins)) == ([7, 1], [11, 0])
    assert list(drafted.scores) == pytest.approx([0.8 * 0.5, 0.2])


@pytest.mark.parametrize("text", [[3, 1, 2], [1, 2], [2]])
def test_the_last_three_tokens_of_a_path_are_asked_for(drafter: Drafter, text: list[int]) -> None:
    before = [-1, -1, *text][-3:]
    likely = {tuple(before): (3, 0), (before[1], 2, 3): (4, 0), (2, 3, 4): (5, 0), (3, 4, 5): (6, 0)}
    candidates = draft_of(drafter, [*[0.0] * 10, 0.9], likely=likely, text=text)
    assert list(drafter.search(candidates, Limits(3, 9)).tokens) == [3, 4, 5]


# What a step costs.


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(DRAFTERS),
    cases(),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=25),
    st.integers(1, 6),
    st.integers(0, 15),
)
def test_the_kept_count_gives_most_tokens_per_time(
    drafter: Drafter, case: Case, rises: list[float], branch: int, room: int
) -> None:
    cost = [sum(rises[: k + 1]) for k in range(len(rises))]
    everything = case.search(drafter, Limits(room, 3, None, branch))
    kept = case.search(drafter, Limits(room, 3, cost, branch))
    taught = 0.0 if case.successors is None else RECYCLE_BONUS

    def gain(count: int) -> float:
        """A step of `branch` tokens and this many draft tokens; a table that ends stays at its last entry."""
        return (1 + sum(everything.scores[:count]) + taught * count) / cost[min(branch + count, len(cost)) - 1]

    count = len(kept.tokens)
    best = max(gain(k) for k in range(len(everything.tokens) + 1))
    assert gain(count) == pytest.approx(best, rel=1e-12)
    assert kept.tokens == everything.tokens[:count]
    assert kept.parents == everything.parents[:count]
    assert kept.scores == everything.scores[:count]
    assert len(kept.depths) == len(kept.origins) == count


def fallen(drafter: Drafter, limits: Limits) -> list[int]:
    """What is taken of one chain with the scores 1/2, 1/4, 1/8."""
    return list(drafter.search(draft_of(drafter, [0.5], [([5, 6, 7], [0, 0, 0])]), limits).tokens)


def test_a_flat_cost_keeps_all_and_a_steep_one_none(drafter: Drafter) -> None:
    assert fallen(drafter, Limits(9, 9, [1.0] * 10)) == [5, 6, 7]
    assert fallen(drafter, Limits(9, 9, [1.0, 2.0, 3.0, 4.0])) == []
    # Half a token more for 40% more time pays; a quarter for 40% of the first time no longer does.
    assert fallen(drafter, Limits(9, 9, [1.0, 1.4, 1.8, 2.2])) == [5]


def test_tokens_that_are_in_the_step_anyway_are_counted(drafter: Drafter) -> None:
    """The fourth token makes the step ten times as dear: it depends on the branch which draft token that is."""
    cost = [1.0, 1.0, 1.0, 10.0, 10.0, 10.0, 10.0]
    assert [len(fallen(drafter, Limits(9, 9, cost, branch))) for branch in (1, 2, 3, 4, 5)] == [2, 1, 0, 3, 3]


@pytest.mark.parametrize("room", [-3, 0])
def test_no_room_no_draft_tokens(drafter: Drafter, room: int) -> None:
    assert fallen(drafter, Limits(room, 9)) == []
    assert fallen(drafter, Limits(room, 9, [1.0])) == []


def test_no_depth_no_draft_tokens(drafter: Drafter) -> None:
    assert fallen(drafter, Limits(9, 0)) == []


def test_a_chain_needs_an_origin_for_every_token(drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="a chain of 2 tokens with 1 origins"):
        draft_of(drafter, [0.5], [([5, 6], [0])])


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(DRAFTERS), cases(), st.floats(0.0, 1.0))
def test_a_floor_ends_the_search(drafter: Drafter, case: Case, floor: float) -> None:
    everything, above = case.search(drafter, Limits(30, 3)), case.search(drafter, Limits(30, 3, floor=floor))
    count = len(above.tokens)
    for name in ("tokens", "parents", "depths", "origins", "scores"):
        assert getattr(above, name) == getattr(everything, name)[:count]
    assert min(above.scores, default=1.0) >= floor
    assert count == len(everything.tokens) or everything.scores[count] < floor
