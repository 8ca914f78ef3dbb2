"""Plain steps in a row, which a backend can run ahead of the host, while draft tokens do not pay.

A step with draft tokens waits for the host, who needs the last step's tokens to draft. A plain step needs nothing from
it: a backend that `runs_ahead` starts it while the host still reads the last step. So where draft tokens gain less than
the host's part of a step, none are better.

Whether a step is plain has to be known one step before: if the best choice for a step is a bare root for every
sequence, it may be launched with the hint that the next one is plain, too. That one then is, whatever could be drafted
for it. It is drafted all the same, while the device runs it, to decide whether the step after it is plain as well. So a
text that begins to repeat is noticed one step late, and `PlainRun` learns when that costs more than the host does.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.engine.batch import ScheduledBatch

LONGEST_RUN = 4
"""Steps without draft tokens that are counted: one more tells nothing new about the next step."""
NEWEST = 0.1
"""The weight of the newest step among all after as many steps without draft tokens."""


class PlainRun:
    """Decides which steps are plain and run ahead. `runs_ahead` is the backend's capability.

    `_gains[k]` is the mean gain of the hint after k steps without draft tokens, in tokens: the time of the host if
    there is nothing to draft for the next step, otherwise a loss, of what its draft tokens would have given.
    """

    def __init__(self, budget: DraftBudget, *, runs_ahead: bool) -> None:
        self._budget, self._runs_ahead = budget, runs_ahead
        self._expected: list[int] = []  # the ids of the requests whose next step is plain
        self._bare = 0  # steps in a row for which nothing was drafted
        self._gains = [0.0] * (LONGEST_RUN + 1)

    def is_possible(self, batch: ScheduledBatch, *, only_batch: bool) -> bool:
        """Whether the step of this batch, without draft tokens, could run ahead of the host."""
        return self._runs_ahead and only_batch and not batch.prefilling and batch.plain

    def choose_trees(self, batch: ScheduledBatch, proposed: list[TokenTree], *, possible: bool) -> list[TokenTree]:
        """The trees of a batch: bare roots if this step was expected to be plain, otherwise the proposed ones. Sets
        whether the batch `ran_ahead` and whether its `next_is_plain`."""
        expected = self._expected
        batch.ran_ahead = possible and bool(expected) and batch.ids == expected
        batch.next_is_plain = possible and self._continues(batch.sequences, proposed)
        self._expected = batch.ids if batch.next_is_plain else []
        return [sequence.bare_root() for sequence in batch.sequences] if batch.ran_ahead else proposed

    def _continues(self, sequences: Sequence[DecodingSequence], proposed: Sequence[TokenTree]) -> bool:
        """Whether the next step of these sequences should be plain."""
        if all(sequence.never_drafts for sequence in sequences):
            return _have_next(sequences)
        if not self._budget.weighs_drafts(sequences):
            return False
        if self._bare:
            gain = self._budget.gain_of_waiting(proposed)
            self._gains[self._bare] -= NEWEST * (gain + self._gains[self._bare])
        drafted = any(tree.size > 1 for tree in proposed)
        self._bare = 0 if drafted else min(self._bare + 1, LONGEST_RUN)
        return not drafted and self._gains[self._bare] >= 0 and _have_next(sequences)


def _have_next(sequences: Sequence[DecodingSequence]) -> bool:
    """Whether no sequence ends with this step, if it gives one token."""
    return all(sequence.left > 1 for sequence in sequences)
