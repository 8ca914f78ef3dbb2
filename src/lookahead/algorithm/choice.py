"""Chooses the trees of a step by the rules of `budget`, and by the times that an engine's own passes took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lookahead.algorithm.budget import DraftGuard
from lookahead.algorithm.cost import Costs, PassCost
from lookahead.algorithm.draft import Draft, Drafts, StepLimits
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree, WindowLayout

SLACK = 0.5
"""Draft tokens below this fraction of the best score that the last step refused are not searched for."""


class StepDrafts(NamedTuple):
    """One draft per sequence of a step. `rows` are those of the roots and the windows, and `times` is the longest of
    the configs' curves, if draft tokens are weighed."""

    drafts: Sequence[Draft]
    rows: int
    times: Costs


class SequenceBatch(tuple[DecodingSequence, ...]):
    """Sequences that run in the same steps. Their `drafts` are the same in all of these if no sequence has a window
    and all drafts are cached."""

    drafts: StepDrafts | None = None


def power_of_two(count: int) -> int:
    """The next power of two. The budget is divided by it, so that a new or finished sequence seldom changes the others'
    share."""
    return 1 << (count - 1).bit_length()


def choose_trees(
    sequences: Sequence[DecodingSequence],
    limit: int | None = None,
    cost: PassCost | None = None,
    chunk_tokens: int = 0,
    *,
    pads: bool = False,
    runs_ahead: bool = False,
) -> list[TokenTree]:
    """One tree per sequence, for one step of all of them.

    `limit` is the most tokens of all trees together; the roots are always in. `cost` is the current cost of a pass,
    which also has `chunk_tokens` rows of prompts; without it, the curves of the sequences' configs are used. A pass
    never has more draft tokens than these times cover. With `pads` a pass is padded to its longest tree. `runs_ahead`:
    a step without draft tokens would run ahead of the host, so that it is shorter (see `PassCost.plain_seconds`).
    """
    if len(sequences) == 1:
        return [sequences[0].propose(limit, cost, runs_ahead=runs_ahead)]
    # 1. One draft per sequence, best tokens first.
    known = sequences.drafts if isinstance(sequences, SequenceBatch) else None
    drafts, rows, table = draft_all(sequences, limit, pads=pads) if known is None else known
    # 2. The step takes the best draft tokens of all sequences.
    plain = len(sequences) if runs_ahead else 0
    times = table if cost is None or not len(table) else cost.times_after(chunk_tokens, plain)
    floor = SLACK * max([sequence.best_refused for sequence in sequences])
    limits = StepLimits(times if len(times) else None, None, None if limit is None else limit - rows, floor)
    trees, refused = sequences[0].drafter.draft_trees(drafts, limits)
    best_refused = floor if refused is None else refused
    for sequence in sequences:
        sequence.best_refused = best_refused
    return trees


def draft_all(sequences: Sequence[DecodingSequence], limit: int | None, *, pads: bool) -> StepDrafts:
    """The drafts of a step of several sequences. A `SequenceBatch` keeps them if its other steps have the same ones."""
    # 1. The roots and the windows, unless a window would fill more than half of an equal share of the budget.
    together, layouts, windows = power_of_two(len(sequences)), list[WindowLayout](), False
    known, share = None, 0
    table: Costs = ()
    for sequence in sequences:
        if sequence.config is not known:  # most sequences share one config
            known, share = sequence.config, sequence.share(together, pads)
            if known.step_cost is not None and not pads and len(known.step_cost) > len(table):
                table = known.step_cost
        has_window = share >= sequence.min_window_share
        layouts.append(sequence.layout(share) if has_window else sequence.root_alone)
        windows = windows or has_window
    rows = sum([layout.size for layout in layouts])
    if limit is not None and rows > limit:
        layouts, rows = [sequence.root_alone for sequence in sequences], len(sequences)
    # 2. One draft per sequence, best tokens first. With `all_taken` the step takes all of it.
    drafts = list[Draft]()
    for sequence, layout in zip(sequences, layouts, strict=True):
        draft = sequence.cached_draft
        if draft is None or pads or layout is not sequence.root_alone:
            config = sequence.config
            if config.step_cost is None or pads:
                draft = sequence.draft(layout, sequence.share(together, pads), None, sequence.trust, True)
            else:
                draft = sequence.draft(layout, config.budget, sequence.weighing_times, sequence.trust, False)
        drafts.append(draft)
    if windows or not isinstance(sequences, SequenceBatch) or any(draft.cached is None for draft in drafts):
        return StepDrafts(drafts, rows, table)
    sequences.drafts = StepDrafts(Drafts(drafts), rows, table)
    return sequences.drafts


def choose_chains(
    sequences: Sequence[DecodingSequence],
    again: Sequence[int],
    limit: int | None = None,
    cost: PassCost | None = None,
) -> list[TokenTree]:
    """One chain per sequence, for one step of all of them. `again[i]` tokens of sequence i run for the second time.

    Sequences that run at once draft only where no cost is known: chains of different lengths cannot share a pass, and
    single tokens can.
    """
    if len(sequences) == 1:
        return [sequences[0].propose_chain(limit, cost, again[0])]
    return [
        sequence.propose_chain(None, None, rows) if sequence.config.step_cost is None else sequence.bare_root()
        for sequence, rows in zip(sequences, again, strict=True)
    ]


def all_weigh(sequences: Sequence[DecodingSequence]) -> bool:
    """Whether all of these sequences weigh their draft tokens against the time of a step."""
    return None not in [sequence.config.step_cost for sequence in sequences]


class DraftBudget:
    """Decides how many draft tokens an engine's steps take, and corrects this by their times, which the engine records
    in `cost`.

    Without a `cost` the decision depends on the sequences' configs alone, not on a clock: ranks that run one model
    together must choose the same trees. A `guarded` budget compares steps with and without draft tokens, for each batch
    size, unless a sequence's config has no curve, so that it drafts whatever that costs. It may outlive an engine.
    """

    def __init__(self, cost: PassCost | None = None, *, guarded: bool = False) -> None:
        self.cost, self.guarded = cost, guarded
        self._guards: dict[int, DraftGuard] = {}

    def choose_trees(
        self,
        sequences: Sequence[DecodingSequence],
        limit: int | None = None,
        chunk_tokens: int = 0,
        *,
        pads: bool = False,
        runs_ahead: bool = False,
        again: Sequence[int] | None = None,
    ) -> list[TokenTree]:
        """One tree per sequence (see `choose_trees`); only roots while drafting does not pay.

        With `again` all are chains (see `choose_chains`).
        """
        if self.guarded and all_weigh(sequences) and not self._guard(len(sequences)).drafts:
            return [sequence.bare_root() for sequence in sequences]
        if again is not None:
            return choose_chains(sequences, again, limit, self.cost)
        return choose_trees(sequences, limit, self.cost, chunk_tokens, pads=pads, runs_ahead=runs_ahead)

    def weighs_drafts(self, sequences: Sequence[DecodingSequence]) -> bool:
        """Whether draft tokens are weighed against the current times of passes: a step without any is then a choice,
        not just a step for which nothing was found."""
        if self.cost is None:
            return False
        if len(sequences) == 1:
            return sequences[0].weighing_times is not None
        return all_weigh(sequences)

    def gain_of_waiting(self, trees: Sequence[TokenTree]) -> float:
        """The tokens that a step of these trees gives more than plain steps that run ahead give in its time; negative
        where these give more."""
        if self.cost is None:
            return 0.0
        tokens, rows = sum([1.0 + tree.expected for tree in trees]), sum([tree.size for tree in trees])
        return tokens - len(trees) * self.cost.seconds(rows) / self.cost.plain_seconds(len(trees))

    def record_step(self, sequences: int, drafted: bool, tokens: float, seconds: float) -> None:
        """Record a step without prompts that gave each sequence this many tokens, for a guarded budget."""
        self._guard(sequences).record(drafted, tokens, seconds)

    def _guard(self, sequences: int) -> DraftGuard:
        return self._guards.setdefault(power_of_two(sequences), DraftGuard())
