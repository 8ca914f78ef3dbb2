"""One step's draft tokens: sources write chains into the candidates, and a drafter takes the best of them.

A candidate's score is the estimated probability that it is accepted: its own rate times its parent's score. So a child
never scores above its parent, and a best-first search takes every parent before its child. The expected number of
accepted tokens of a step is 1 + the sum of the scores taken. From the cost of a step of each size, the drafter knows
before the step runs which size gives most tokens per second (`budget.best_count`).

`search.PythonDrafter` is the search in plain Python. `native.drafter.NativeDrafter` is the same search in C, with the
same results bit for bit. Only `native.choose_drafter` chooses between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lookahead.algorithm.cost import Costs
from lookahead.algorithm.successors import BEFORE_TEXT, SuccessorTable, SuccessorTables
from lookahead.algorithm.tree import DraftTokens, TokenTree, WindowLayout
from lookahead.algorithm.verify import Verification

MAX_DRAFT_TOKENS = 1 << 16
"""The most draft tokens of a step: a bound on the memory that the C drafter allocates in advance."""

RECYCLE_BONUS = 0.008
"""What a draft token is worth, in tokens, besides its chance to be accepted, with the source `recycle`: accepted or
not, the step computes its successors, from which later drafts are made."""


@dataclass(slots=True)
class Candidates:
    """The candidates for one step's draft tokens: chains below the root, and successors that continue any path.

    `text_end` are the text's last three tokens, the root last. `rates[origin]` is how often a draft token of this
    origin was right. The chains are concatenated in `chain_tokens` and `chain_origins`; the drafter adds those that it
    finds in its own `text`. With `chain` every draft token hangs from the one before it: the draft is one chain. A
    sequence uses one object for all its steps; `in_c` is the C drafter's copy.
    """

    text_end: tuple[int, int, int]
    rates: array[float]
    tables: SuccessorTables | None = None
    text: DraftText | None = None
    chain: bool = False
    chain_tokens: list[int] = field(default_factory=list)
    chain_origins: list[int] = field(default_factory=list)
    chain_lengths: list[int] = field(default_factory=list)
    in_c: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def after(cls, text: Sequence[int], rates: array[float]) -> Candidates:
        """No candidates yet for what follows this text."""
        candidates = cls((BEFORE_TEXT, BEFORE_TEXT, BEFORE_TEXT), rates)
        candidates.restart(text)
        return candidates

    def restart(self, text: Sequence[int]) -> None:
        """Drop the chains, for a draft that continues this text."""
        before2 = text[-3] if len(text) > 2 else BEFORE_TEXT
        self.text_end = before2, text[-2] if len(text) > 1 else BEFORE_TEXT, text[-1]
        if self.chain_lengths:
            self.chain_tokens, self.chain_origins, self.chain_lengths = [], [], []

    def add_chain(self, tokens: Sequence[int], origins: Sequence[int]) -> None:
        """Add a chain of draft tokens below the root, with the origin of each."""
        if len(tokens) != len(origins):
            raise ValueError(f"a chain of {len(tokens)} tokens with {len(origins)} origins")
        self.chain_tokens += tokens
        self.chain_origins += origins
        self.chain_lengths.append(len(tokens))


class TextSettings(NamedTuple):
    """The settings of the sources that search the text, for a drafter that does their work (C's `TextSettings`).

    `ngram` and `guesses` are N and G. `key`, `branches` and `reach` are the suffix index's: the longest match, the
    number of matches, and the length of their continuations. `suffix`, `prompt` and `jacobi` are the first origins of
    these sources, or -1 for a source that is not in use; `longest_match` and `deepest` are the last buckets of the
    suffix index and of the others. `oldest`: of equal matches the oldest goes first.
    """

    ngram: int
    guesses: int
    key: int
    branches: int
    reach: int
    suffix: int
    prompt: int
    jacobi: int
    longest_match: int
    deepest: int
    oldest: bool = False


class DraftText(Protocol):
    """A sequence's text in the drafter, with the indexes of its sources. `handle` is C's pointer to it."""

    handle: int

    def extend(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """Append tokens to the text, and add the window's n-grams."""
        ...


@dataclass(slots=True)
class Limits:
    """The limits of one sequence's draft.

    At most `max_tokens` draft tokens, none deeper than `max_depth`, and the first that scores below `floor` ends the
    search. `cost[k]` is the time of a step of k + 1 tokens; without it, all of them are taken. `branch` tokens,
    including the root, are in the step in any case.
    """

    max_tokens: int
    max_depth: int
    cost: Sequence[float] | None = None
    branch: int = 1
    floor: float = 0.0


@dataclass(slots=True)
class CachedInputs:
    """The inputs of a cached draft that the C drafter reads itself in every step.

    `trust` is an array of one number. The root and the end of the text are those of the candidates' text in C. Draft
    tokens never extend that text beyond `max_text` tokens. After its first step, the draft is at the address `step`, in
    `memory`.
    """

    trust: array[float]
    max_text: int
    step: int = 0
    memory: Any = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class Draft:
    """A sequence's part of a step, before the step decides how many draft tokens it takes.

    The root and the lookahead branch are always in the step: `branch` are their tokens, in the order of `layout`. Draft
    tokens come from the `candidates`, at most `max_tokens`; None means no draft. For `max_depth` and `cost` see
    `Limits`.

    A draft token's *weighted score* is its score times `trust`, and its value is that plus `bonus`. A step takes all
    tokens of a draft with `all_taken`, and those of the highest value of the others. In a `cached` draft, which only
    the C drafter reads, `branch` and `trust` are not used.
    """

    layout: WindowLayout
    branch: Sequence[int]
    candidates: Candidates | None
    max_tokens: int
    max_depth: int
    cost: Sequence[float] | None = None
    trust: float = 1.0
    bonus: float = 0.0
    all_taken: bool = True
    cached: CachedInputs | None = None

    def limits(self, floor: float) -> Limits:
        """The limits of the search. Unless all draft tokens are taken, weighted scores must reach the `floor`."""
        least = 0.0 if self.all_taken else floor / self.trust
        return Limits(self.max_tokens, self.max_depth, self.cost, self.layout.size, least)


class Drafts(tuple[Draft, ...]):
    """The drafts of the same sequences in all their steps: all of them are cached. `in_c` is the C drafter's copy."""

    in_c: Any = None


@dataclass(slots=True)
class StepLimits:
    """The limits that all drafts of a step share.

    `cost[k]` is the time of a pass of k + 1 tokens (see `choice`). Weighed drafts (not `all_taken`) get at most
    `max_weighed` draft tokens in total, all drafts at most `max_tokens`; None means no limit. Weighed drafts are not
    searched below a weighted score of `floor`.
    """

    cost: Costs | None = None
    max_weighed: int | None = None
    max_tokens: int | None = None
    floor: float = 0.0


NO_LIMITS = StepLimits()
"""Every draft is taken as it is."""


class Drafter(Protocol):
    """Searches for draft tokens. It reads only tables that its own `new_table` created."""

    def new_table(self) -> SuccessorTable: ...

    def new_text(self, settings: TextSettings) -> DraftText | None:
        """A text in which the drafter finds the chains of these sources itself, or None if it cannot."""
        ...

    def prepare_search(self) -> None:
        """Wake search threads if the next step will need them, as the last one did."""
        ...

    def search(self, candidates: Candidates, limits: Limits) -> DraftTokens:
        """The best candidates of one sequence, best first, within the limits."""
        ...

    def draft_trees(
        self, drafts: Sequence[Draft], limits: StepLimits = NO_LIMITS
    ) -> tuple[list[TokenTree], float | None]:
        """The trees of a step, and the weighted score of the best draft token that it refuses, or None if it takes
        all. No two drafts share candidates."""
        ...

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        """Prepare the verification of a step of these trees, while the device runs it.

        `learners[i]` learns from tree i in the call that verifies (see `Verdict.learned`), unless it is None.
        """
        ...
