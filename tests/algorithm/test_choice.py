"""The choice across sequences against a brute-force search of all sets of draft tokens, and configs, limits
and padding."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from toy import targets_of, toy_model

from lookahead.algorithm.budget import best_counts, without_cost
from lookahead.algorithm.choice import DraftBudget, choose_trees
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.draft import RECYCLE_BONUS
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory, Trust
from lookahead.config import LookaheadConfig, StopRules

# Against brute force.


@dataclass
class Offered:
    """A sequence's draft tokens, best first, none above its parent; `parents` count from 1, and 0 is the root."""

    scores: list[float]
    parents: list[int]

    def closed(self) -> list[tuple[int, ...]]:
        """All sets of draft tokens that hold the parents of their draft tokens."""
        sets = []
        for chosen in product((False, True), repeat=len(self.scores)):
            if all(not taken or not parent or chosen[parent - 1] for taken, parent in zip(chosen, self.parents)):  # noqa: B905
                sets.append(tuple(i for i, taken in enumerate(chosen) if taken))
        return sets


@st.composite
def offered(draw: st.DrawFn) -> Offered:
    """Few different scores, so that there are ties; or any."""
    score = st.sampled_from((0.1, 0.3, 0.5, 0.9)) if draw(st.booleans()) else st.floats(0.001, 1.0)
    scores = sorted(draw(st.lists(score, max_size=4)), reverse=True)
    return Offered(scores, [draw(st.integers(0, i)) for i in range(len(scores))])


@st.composite
def costs(draw: st.DrawFn) -> list[float]:
    """Times that never fall: smooth, or a staircase as of passes that are padded to some sizes."""
    rises = draw(st.lists(st.floats(0.0, 0.6), min_size=1, max_size=24))
    steps = draw(st.integers(1, 5))
    return [1.0 + sum(rises[: k - k % steps]) for k in range(len(rises))]


def brute(sequences: list[Offered], weights: list[float], bonuses: list[float], rows: int, cost: list[float]) -> float:
    """The best ratio of any choice that the cost table reaches; the roots alone are always possible."""
    best = len(sequences) / cost[min(rows, len(cost)) - 1]
    for chosen in product(*(one.closed() for one in sequences)):
        taken = sum(map(len, chosen))
        if rows + taken <= len(cost):
            worth = [
                one.scores[i] * weight + bonus
                for one, taken_nodes, weight, bonus in zip(sequences, chosen, weights, bonuses, strict=True)
                for i in taken_nodes
            ]
            best = max(best, (len(sequences) + sum(worth)) / cost[rows + taken - 1])
    return best


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(offered(), min_size=2, max_size=4), costs(), st.integers(0, 3), st.data())
def test_the_best_set_of_all_sequences_is_taken(
    sequences: list[Offered], cost: list[float], more: int, data: st.DataObject
) -> None:
    few = [replace(one, scores=one.scores[:3], parents=one.parents[:3]) for one in sequences]
    sequences = sequences if len(sequences) < 4 else few
    count, rows = len(sequences), len(sequences) + more
    weights = data.draw(st.lists(st.sampled_from((0.5, 1.0, 1.3)), min_size=count, max_size=count))
    bonuses = data.draw(st.lists(st.sampled_from((0.0, RECYCLE_BONUS)), min_size=count, max_size=count))
    scores = [array("d", one.scores) for one in sequences]
    counts, refused = best_counts(scores, weights, bonuses, [False] * count, rows, len(cost) - rows, cost)
    taken = sum(counts)
    worth = [
        sum(score * weight + bonus for score in one.scores[:first])
        for one, first, weight, bonus in zip(sequences, counts, weights, bonuses, strict=True)
    ]
    ratio = (count + sum(worth)) / cost[min(rows + taken, len(cost)) - 1]
    assert ratio == pytest.approx(brute(sequences, weights, bonuses, rows, cost), rel=1e-9)
    assert (refused is None) == (taken == sum(len(one.scores) for one in sequences))


def counted(scores: list[list[float]], most: int = 99, cost: list[float] | None = None, **more: object) -> list[int]:
    count = len(scores)
    given_ = {"weights": [1.0] * count, "bonuses": [0.0] * count, "all_taken": [False] * count, "rows": count, **more}
    return best_counts([array("d", one) for one in scores], most=most, cost=cost, **given_)[0]  # type: ignore[arg-type]


def test_equal_scores_are_equal_shares() -> None:
    falling = [0.8, 0.4, 0.2, 0.1]
    assert [counted([falling] * 3, most) for most in (0, 3, 6, 9, 12)] == [[n] * 3 for n in range(5)]
    assert counted([falling] * 3, 5) == [2, 2, 1]


def test_a_sure_sequence_takes_what_an_unsure_one_leaves() -> None:
    assert counted([[0.9] * 6, [0.2, 0.1], []], 6) == [6, 0, 0]
    assert counted([[0.9] * 6, [0.2, 0.1], []], 7) == [6, 1, 0]


def test_a_draft_token_inside_the_padding_is_free() -> None:
    """Passes of 3 to 4 and of 5 to 8 rows take as long: 0.02 of a token is worth a free row, and 0.3 no dear one."""
    cost = [1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3]
    assert counted([[0.3, 0.02], [0.02], [0.02]], cost=cost) == [1, 0, 0]
    assert counted([[0.9, 0.9, 0.9], [0.02, 0.01], [0.02, 0.01]], cost=cost) == [3, 1, 1]
    assert counted([[0.3, 0.1], [0.2]], cost=[1.0, 1.0, 3.0]) == [0, 0]


def test_nothing_pays_beyond_the_table() -> None:
    assert counted([[0.9], [0.9]], most=0, cost=[1.0]) == [0, 0]
    assert counted([[0.9], [0.9]], most=-1, cost=[1.0]) == [0, 0]


def test_what_is_taken_anyway_comes_first() -> None:
    assert counted([[0.1, 0.1], [0.9, 0.9]], 3, all_taken=[True, False]) == [2, 1]
    assert counted([[0.1, 0.1], [0.9, 0.9]], 1, all_taken=[True, False]) == [1, 0]
    assert counted([[0.1, 0.1], [0.9, 0.9]], cost=[1.0, 1.0, 5.0, 9.0, 99.0, 99.0], all_taken=[True, False]) == [2, 0]


# Sequences.

OWN = LookaheadConfig(window=4, ngram=4, guesses=4, budget=48)
CONFIG = without_cost(OWN)
PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [5, 4, 5], [2], [3, 1, 4, 1, 5, 1, 4], [1, 2, 1, 2, 1])


def now(table: list[float] | None) -> PassCost | None:
    return None if table is None else PassCost(table)


def warm(*configs: LookaheadConfig, steps: int = 3, tokens: int = 60) -> list[DecodingSequence]:
    """Sequences that have seen some steps."""
    memory, model = SharedMemory(), toy_model(6, seed=3, order=2)
    made = [
        DecodingSequence(prompt, config, rules=StopRules(max_tokens=tokens), memory=memory)
        for prompt, config in zip(PROMPTS, configs, strict=False)
    ]
    for sequence in made:
        for _ in range(steps):
            tree = sequence.propose()
            sequence.accept_step(tree, targets_of(sequence, tree, model))
            sequence.learn_while_running()
    return made


@pytest.mark.parametrize("config", [CONFIG, OWN, LookaheadConfig.autoregressive()])
@pytest.mark.parametrize("cost", [None, [1.0 + 0.1 * k for k in range(64)]])
def test_one_sequence_is_what_it_proposes_itself(config: LookaheadConfig, cost: list[float] | None) -> None:
    (sequence,) = warm(config)
    assert choose_trees([sequence], None, now(cost)) == [sequence.propose()]
    assert choose_trees([sequence], 500, now(cost)) == [sequence.propose()]
    for limit in (1, 2, 8, 20):
        assert len(choose_trees([sequence], limit, now(cost))[0]) <= limit


@pytest.mark.parametrize("cost", [None, [1.0] * 300, [1.0 + 0.01 * k for k in range(300)]])
@pytest.mark.parametrize("limit", [None, 3, 7, 30, 100])
@pytest.mark.parametrize("shared", [True, False])
def test_trees_stay_in_the_limit_and_are_closed(cost: list[float] | None, limit: int | None, shared: bool) -> None:
    sequences = warm(*[CONFIG if shared else OWN] * 3)
    for _ in range(3):  # what a choice refused narrows the next search
        trees = choose_trees(sequences, limit, now(cost))
        for sequence, tree in zip(sequences, trees, strict=True):
            assert tree.tokens[0] == sequence.tokens[-1]
            assert len(tree) <= CONFIG.budget
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert [tree.depths[parent] + 1 for parent in tree.parents[1:]] == list(tree.depths[1:])
        assert sum(map(len, trees)) <= (999 if limit is None else limit)
        if shared and cost is None:
            assert sum(map(len, trees)) <= CONFIG.budget
        if not shared and limit is None:
            assert trees == [sequence.propose() for sequence in sequences]


def test_without_a_cost_the_largest_budget_is_filled() -> None:
    sequences = warm(CONFIG, replace(CONFIG, budget=16, window=0), CONFIG)
    trees = choose_trees(sequences)
    assert sum(map(len, trees)) == 48
    assert len(trees[1]) <= 16


@pytest.mark.parametrize("cost", [None, [1.0] * 200])
def test_every_config_keeps_its_own_rules(cost: list[float] | None) -> None:
    """Plain decoding never drafts, and a config without a step cost fills its budget whatever the others do."""
    sequences = warm(LookaheadConfig.autoregressive(), OWN, replace(CONFIG, window=0, step_cost=(1.0,) * 96), CONFIG)
    plain, whole, *weighed = choose_trees(sequences, None, now(cost))
    assert len(plain) == 1
    assert whole == sequences[1].propose()
    assert all(len(tree) > 1 for tree in weighed)


STEEP = replace(OWN, window=0, step_cost=tuple(1.0 + 0.1 * max(0, k - 8) for k in range(48)))


def test_where_passes_are_padded_all_weighed_trees_have_an_equal_share() -> None:
    """Nine rows are nearly free: two for each of four sequences. A config of its own is not bound by that."""
    sequences = warm(*[STEEP] * 3, OWN)
    *weighed, whole = choose_trees(sequences, pads=True)
    assert [len(tree) for tree in weighed] == [2] * 3
    assert whole == sequences[3].propose()
    merged = choose_trees(warm(*[STEEP] * 3, STEEP))
    assert max(map(len, merged)) > 2, "without padding a sure sequence gets more than an unsure one"


def test_without_a_measured_pass_the_configs_curves_decide() -> None:
    sequences = warm(*[STEEP] * 4)
    assert choose_trees(sequences) == choose_trees(warm(*[STEEP] * 4), None, PassCost(STEEP.step_cost or ()))


@pytest.mark.parametrize("slope", [1.0, 4.0])
def test_one_sequence_is_weighed_by_what_a_pass_costs_now(slope: float) -> None:
    """Passes that take longer by their rows than the curve says leave fewer draft tokens."""
    gentle = replace(STEEP, step_cost=tuple(1.0 + 0.02 * k for k in range(48)))
    (sequence,), (other,) = warm(gentle), warm(gentle)
    cost = PassCost(gentle.step_cost or ())
    cost.slope, cost.constant = slope, 1.0 - slope
    other.weighing_times = tuple(cost.times_after(0).tolist())
    assert choose_trees([sequence], None, cost) == [other.propose()]
    assert (len(other.propose()) < len(sequence.propose())) == (slope > 1)


def test_a_table_shorter_than_the_budget_does_not_weigh_one_sequence() -> None:
    (sequence,) = warm(STEEP)
    assert choose_trees([sequence], None, PassCost([1.0, 9.0])) == [sequence.propose()]


def test_a_guarded_budget_stops_drafting_where_it_does_not_pay() -> None:
    sequences, budget = warm(CONFIG, CONFIG, CONFIG), DraftBudget(guarded=True)
    drafted = 0
    for _ in range(100):
        trees = budget.choose_trees(sequences)
        drafts = any(len(tree) > 1 for tree in trees)
        drafted += drafts
        budget.record_step(3, drafts, 1.0, 2.0 if drafts else 1.0)
    assert 16 <= drafted < 40
    assert len(budget.choose_trees(sequences[:1])[0]) > 1, "other batch sizes are judged by their own steps"
    assert any(len(tree) > 1 for tree in DraftBudget().choose_trees(sequences))


def test_a_steep_cost_takes_no_draft_token() -> None:
    sequences = warm(*[replace(CONFIG, window=0)] * 4)
    assert [len(tree) for tree in choose_trees(sequences, None, PassCost([2.0**k for k in range(60)]))] == [1] * 4


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(2, 5), st.sampled_from([None, 12, 40]), st.floats(0.0, 0.1))
@example(4, 40, 0.0)
def test_batches_give_the_text_of_each_alone(count: int, limit: int | None, slope: float) -> None:
    model, cost = toy_model(6, seed=3, order=2), [1.0 + slope * k for k in range(64)]
    sequences = warm(*[CONFIG] * count, steps=0, tokens=24)
    running = sequences
    while running:
        for sequence, tree in zip(running, choose_trees(running, limit, now(cost)), strict=True):
            sequence.count_step(tree, sequence.accept_step(tree, targets_of(sequence, tree, model)))
            sequence.learn_while_running()
        running = [sequence for sequence in running if sequence.finish_reason is None]
    for sequence, prompt in zip(sequences, PROMPTS, strict=False):
        text = list(prompt)
        for _ in range(24):
            row = model(text)
            text.append(row.index(max(row)))
        assert sequence.output == text[len(prompt) :]
        assert sequence.stats.expected_tokens >= sequence.stats.steps


# How far scores can be trusted.


def test_trust_follows_what_was_accepted() -> None:
    trust = Trust()
    assert trust.ratio == 1.0
    for _ in range(2000):
        trust.record_step(3, 2.0)
    assert trust.ratio == pytest.approx((20 + 600) / (20 + 400), rel=1e-3)
    for _ in range(2000):
        trust.record_step(0, 2.0)
    assert 0 < trust.ratio < 0.06


def test_scores_that_came_true_more_often_buy_more_rows() -> None:
    cost = [1.0 + 0.25 * k for k in range(40)]
    sizes = []
    for accepted in (0, 2, 6):
        sequences = warm(*[replace(CONFIG, window=0)] * 2)
        for _ in range(200):
            sequences[0]._memory.calibration.trust.record_step(accepted, 2.0)
        sizes.append(sum(map(len, choose_trees(sequences, None, now(cost)))))
    assert sizes[0] == 2 < sizes[1] < sizes[2]


def test_expected_tokens_are_counted_as_they_are_trusted() -> None:
    (sequence,) = warm(CONFIG, steps=0)
    model = toy_model(6, seed=3, order=2)
    expected = 0.0
    for _ in range(6):
        tree = sequence.propose()
        sequence.learn_while_running()
        expected += 1 + sequence.trust * tree.expected
        sequence.count_step(tree, sequence.accept_step(tree, targets_of(sequence, tree, model)))
        assert sequence.stats.expected_tokens == pytest.approx(expected)
    assert expected > 6
