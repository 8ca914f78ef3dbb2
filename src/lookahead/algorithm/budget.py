"""How many draft tokens a step takes: all rules and constants of this decision.

A step of n sequences gives at least n tokens. A draft token adds its *score*, the estimated probability that it is
accepted, and one row to the forward pass, which costs time. The best step maximises the expected tokens per second:

    (n + sum of scores) / t(rows)

`cost` knows t, and `search` finds every sequence's draft tokens, best first. A child never scores above its parent, so
for every number of draft tokens the best set is the top of one list, merged over all sequences, and the top of that
list always contains the parents of its tokens (`best_counts`; `best_count` for one sequence). `choice.choose_trees`
applies the rules to the sequences of a step, and `DecodingSequence.propose` to a single one. What else matters:

- *The config.* With a `step_cost` the draft tokens are weighed, and `budget` is the most that one sequence gets. A
  config without one was written by hand: every sequence fills its budget, regardless of cost.
- *Nearly free.* If t(budget) was measured as at most FLAT times t(1), one sequence fills its budget: scores are
  estimates, and the sources learn even from a draft token that is refused. On a GPU this is the usual case.
- *Other values.* With several sequences a score is first multiplied by `trust`, the ratio of accepted to expected draft
  tokens in the last steps (`sources.calibration`). With the source `recycle` every draft token is worth RECYCLE_BONUS
  more, because its successors serve later drafts.
- *The window* of the lookahead branch costs rows, too. It stays if its rows make a step of one sequence at most FREE
  times as long (`fit_config`), and is left out of steps where it would fill more than half of an equal share. A default
  config has none where the model's bigrams are known: its rows then give more as draft tokens (`for_bigrams`).
- *Many sequences.* The merged list is cut by the time of the whole pass. A sequence drafts no more than it would take
  alone.
- *Backends that pad.* A pass costs n times its longest tree, so a long tree makes every sequence pay. All get an equal
  share, no larger than what makes the pass FREE times as long as one without draft tokens (`equal_share`).
- *Chains.* Where trees cannot branch, a refused draft token makes the accepted ones of its pass run again, as rows of
  the next pass. `chain_length` weighs these rows, too. Sequences that run at once draft nothing, if draft tokens are
  weighed at all: chains of different lengths cannot share a pass.
- *The current load.* The engine's `choice.DraftBudget` corrects t by the passes it has run (`PassCost`). If t comes
  from a quick measurement, or steps are chains, a `DraftGuard` also compares steps with and without draft tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from lookahead.algorithm.cost import CostCurve, Costs
from lookahead.config import LookaheadConfig

FLAT = 1.4
"""If a step of the whole budget costs at most this many times a step of one token, every step takes the whole budget.
In simulations that was best at a ratio of 1.3, and weighing each draft token against its cost best at 1.6."""
FREE = 1.1
"""Rows are nearly free if they make a pass at most this many times as long. For equal shares, weighing each tree
against t(n x its size) gave 4% fewer tokens per second than this limit in simulations of 4 sequences: the longest tree
of a step is longer than most."""


def fit_config(config: LookaheadConfig, curve: CostCurve) -> LookaheadConfig:
    """The config for a machine with this curve: draft tokens are weighed by it, the window stays if it is nearly free,
    and a step is never larger than the curve's reach."""
    if curve.reach < config.budget:
        window = config.window if config.window_tokens <= curve.reach else 0
        config = replace(config, budget=curve.reach, window=window)
    if config.budget == 1:
        return config
    table = curve.table(config.budget)
    fitted = replace(config, step_cost=table)
    if weighing_curve(fitted) is None or table[config.window_tokens - 1] <= FREE * table[0]:
        return fitted
    return replace(fitted, window=0)


def for_bigrams(config: LookaheadConfig) -> LookaheadConfig:
    """The config for a model whose bigrams are known: all rows are for draft tokens.

    On an H200, with 128 nodes, S of two samples of 60 prompts was 4.58 and 4.89 with the window of 20 nodes, and 4.72
    and 5.03 without it (empty memory; 4.75, 5.07 and 4.90, 5.16 with a memory that is kept).
    """
    return replace(config, window=0)


def without_cost(config: LookaheadConfig) -> LookaheadConfig:
    """The config for a machine whose times are unknown: with a flat cost, so that one sequence fills its budget, and
    the sequences of a batch share it."""
    return replace(config, step_cost=(1.0,) * config.budget)


def weighing_curve(config: LookaheadConfig) -> tuple[float, ...] | None:
    """The times against which one sequence's draft tokens are weighed, or None if it fills its budget."""
    times = config.step_cost
    if times is None or times[min(config.budget, len(times)) - 1] <= FLAT * times[0]:
        return None
    return times


def equal_share(config: LookaheadConfig, sequences: int, *, pads: bool) -> int:
    """The most tokens of a tree if all sequences get equal shares of the budget. If a pass `pads`, or if one sequence
    would not fill its budget, a share is also limited to what is nearly free.

    A config without a step cost gives every sequence the whole budget.
    """
    times = config.step_cost
    if times is None:
        return config.budget
    part = max(1, config.budget // sequences)
    if not pads and weighing_curve(config) is None:
        return part
    of_passes = times[sequences - 1 :: sequences][:part]
    return max(1, sum(time <= FREE * of_passes[0] for time in of_passes))


def best_count(scores: Sequence[float], cost: Sequence[float], branch: int, bonus: float) -> int:
    """How many of the `scores` (the root's 1.0, then the draft tokens', best first) give most tokens per second,
    including the root. `branch` rows are always in the step. A draft token has a value of its score plus `bonus`."""
    last, expected = len(cost) - 1, enumerate(accumulate(scores))
    gains = [(tokens + bonus * k) / cost[min(branch - 1 + k, last)] for k, tokens in expected]
    return gains.index(max(gains)) + 1


def chain_length(scores: Sequence[float], cost: Costs, again: int, bonus: float) -> int:
    """How many draft tokens of a chain give most tokens per second. `scores` are theirs, and `cost` the table of times.

    The pass has `again` tokens that run for the second time, then the root, then the chain. If draft token i is
    refused, these, the root and the accepted draft tokens are rows of the next pass, in front of its root: that costs
    what they make it longer.
    """
    last = len(cost) - 1
    best, best_gain, expected, rerun, above = 0, 1.0 / cost[min(again, last)], 1.0, 0.0, 1.0
    for drafted, score in enumerate(scores, 1):
        if again + drafted > last:
            break
        rerun += (above - score) * (cost[again + drafted] - cost[0])
        expected, above = expected + score, score
        gain = (expected + bonus * drafted) / (cost[again + drafted] + rerun)
        if gain > best_gain:
            best, best_gain = drafted, gain
    return best


def best_counts(
    scores: Sequence[array[float]],
    weights: Sequence[float],
    bonuses: Sequence[float],
    all_taken: Sequence[bool],
    rows: int,
    most: int,
    cost: Costs | None,
) -> tuple[list[int], float | None]:
    """How many of each sequence's draft tokens a step takes, and the weighted score of the best one it refuses.

    The value of a draft token of sequence i is its score times `weights[i]`, plus `bonuses[i]`. Those of a sequence
    with `all_taken` are taken before those of any other. `rows` are always in the step, and at most `most` draft tokens
    are taken; the weighed ones end where the `cost` table does.

    The C version in `native/choice.c` takes a fifth of the time for 16 sequences; tests/algorithm/native compares them.
    """
    joined = array("d")
    for sequence_scores in scores:
        joined += sequence_scores
    owners = np.repeat(np.arange(len(scores)), [len(sequence_scores) for sequence_scores in scores])
    weighted = np.frombuffer(joined) * np.array(weights)[owners]
    value = weighted + np.array(bonuses)[owners]
    rank = value + 2.0 * np.array(all_taken)[owners] if any(all_taken) else value
    order = np.argsort(-rank, kind="stable")
    count = max(0, min(most, len(order)))
    unweighed = sum(len(found) for found, takes_all in zip(scores, all_taken, strict=True) if takes_all)
    least = min(count, unweighed)
    if cost is not None:
        count = max(least, min(count, len(cost) - rows))
    if cost is not None and count > least:
        tokens = np.empty(count + 1)
        tokens[0] = len(scores)
        tokens[1:] = value[order[:count]]
        gains = np.cumsum(tokens)[least:] / np.asarray(cost)[rows - 1 + least : rows + count]
        count = least + int(np.argmax(gains))
    refused = None if count == len(order) else float(weighted[order[count]])
    return np.bincount(owners[order[:count]], minlength=len(scores)).tolist(), refused


class DraftGuard:
    """Pauses drafting while it does not pay, regardless of curve and scores.

    From time to time it requests steps without draft tokens, and compares their tokens per second with those of steps
    with draft tokens. In simulations (tests/engine/test_budget_simulated.py) of a slow CPU whose curve was measured at
    half its true times, drafting had 0.89 times plain decoding's speed with a guard and 0.78 without; on a GPU with the
    right curve and a text that accepts nothing 0.94 and 0.73. Where drafting pays, the comparisons cost up to 3%.
    """

    HISTORY, MIN_STEPS = 32, 16
    """Steps with draft tokens that are remembered, and how many are needed for a decision. With half as many, drafting
    was paused by chance: a text that gave 1.43 times plain decoding's speed gave 1.33."""
    MARGIN = 0.95
    """Drafting is paused below this fraction of plain decoding's speed."""
    EVERY, COMPARED, FIRST = 64, 2, 8
    """After EVERY steps with draft tokens in a row COMPARED steps have none, for the first time after FIRST. More than
    one, because caches may be cold in the first."""
    CLEAR = 2.0
    """No comparison is needed while drafting gives this many times as many tokens per second."""
    SHORTEST, LONGEST = 32, 512
    """Steps of a pause, which doubles each time that drafting still does not pay."""

    def __init__(self) -> None:
        self._drafted: deque[tuple[float, float]] = deque(maxlen=self.HISTORY)  # (tokens per sequence, seconds)
        self._plain_seconds = 0.0
        self._pause, self._paused = self.SHORTEST, 0
        self._compare, self._since = 0, self.EVERY - self.FIRST

    @property
    def drafts(self) -> bool:
        """Whether the next step should have draft tokens."""
        return not self._paused and not self._compare

    def record(self, drafted: bool, tokens: float, seconds: float) -> None:
        """Record a step that gave each sequence `tokens` tokens on average."""
        if drafted:
            self._drafted.append((tokens, seconds))
        else:
            before = self._plain_seconds or seconds
            self._plain_seconds = before + (min(seconds, 2 * before) - before) / 8
        if self._paused:
            self._paused -= 1
            return
        self._compare = max(0, self._compare - 1)
        self._since = self._since + 1 if drafted else 0
        speedup = self._speedup()
        if self._since >= self.EVERY and speedup <= self.CLEAR:
            self._compare, self._since = self.COMPARED, 0
        if len(self._drafted) >= self.MIN_STEPS and self._plain_seconds and not self._compare:
            if speedup < self.MARGIN:
                self._paused, self._pause = self._pause, min(2 * self._pause, self.LONGEST)
                self._drafted.clear()
            elif len(self._drafted) == self.HISTORY:
                self._pause = self.SHORTEST

    def _speedup(self) -> float:
        """Tokens per second with draft tokens relative to those without; 0 if either is unknown."""
        seconds = sum(taken for _, taken in self._drafted)
        return self._plain_seconds * sum(tokens for tokens, _ in self._drafted) / seconds if seconds else 0.0
