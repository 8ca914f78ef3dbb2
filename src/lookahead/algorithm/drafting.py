"""Drafting for a batch: three methods, which the engine calls in this order in every step.

    propose   the trees of a forward pass, before the device runs it
    learn     while the device runs: deferred learning from the last step, and preparation of `verify`
    verify    what every sequence accepts, when the device has finished

A `draft.Drafter` does the work, in C or in Python; only `native.choose_drafter` chooses between them. All sequences of
a batch share one, that of their model's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import Verdict, Verification


class Drafting:
    """Proposes and verifies draft tokens, one batch after the other.

    `budget` decides how many a step takes. With `pads` a pass is padded to its longest tree; with `chains` no tree may
    branch.
    """

    def __init__(self, budget: DraftBudget | None = None, *, pads: bool = False, chains: bool = False) -> None:
        self.budget, self._pads, self._chains = budget or DraftBudget(), pads, chains
        self._running: tuple[Drafter, Verification] | None = None

    def propose(
        self,
        sequences: Sequence[DecodingSequence],
        limit: int | None = None,
        chunk_tokens: int = 0,
        again: Sequence[int] = (),
        *,
        runs_ahead: bool = False,
    ) -> list[TokenTree]:
        """One tree per sequence, at most `limit` tokens in total, for a pass that also has `chunk_tokens` prompt
        tokens. Before chain i there are `again[i]` accepted tokens that run for the second time; none by default.
        `runs_ahead`: see `choose_trees`."""
        counts = (again or [0] * len(sequences)) if self._chains else None
        trees = self.budget.choose_trees(
            sequences, limit, chunk_tokens, pads=self._pads, again=counts, runs_ahead=runs_ahead
        )
        # Enforce the limit again: a pass must never have more rows than the backend supports.
        excess = 0 if limit is None else sum([tree.size for tree in trees]) - limit
        largest_last = sorted(range(len(trees)), key=lambda index: trees[index].size) if excess > 0 else []
        while excess > 0 and largest_last:
            index = largest_last.pop()
            excess -= trees[index].size - 1
            trees[index] = sequences[index].bare_root()
        return trees

    def learn(
        self, sequences: Sequence[DecodingSequence], trees: Sequence[TokenTree], verified_elsewhere: Sequence[bool]
    ) -> dict[int, Exception]:
        """Do the deferred part of learning from the last pass, and prepare the verification of the running one.

        `trees` are those of the running pass, which may differ from the proposed ones: a prompt chunk has none. A
        sequence that is `verified_elsewhere`, by its request's verifier, may accept other tokens than its targets, so
        nothing is learned from these. Returns the exceptions of failed sequences by their index.
        """
        failed = dict[int, Exception]()
        for index, sequence in enumerate(sequences):
            try:
                sequence.learn_while_running()
            except Exception as error:
                failed[index] = error
        learners = [
            None if elsewhere else sequence.learner
            for sequence, elsewhere in zip(sequences, verified_elsewhere, strict=True)
        ]
        drafter = sequences[0].drafter
        self._running = drafter, drafter.verification(trees, learners)
        return failed

    def verify(self, outputs: Sequence[StepOutput]) -> list[Verdict | Exception]:
        """What each sequence of the last `learn` accepts, or an exception. Stop rules are applied later."""
        if self._running is None:
            raise RuntimeError("verify() follows learn(), once for each pass")
        (drafter, verification), self._running = self._running, None
        drafter.prepare_search()
        return verification.accept(outputs)
