"""One step's guesses: sources write chains into the candidates, and a drafter takes the best of them.

A candidate's score is the estimated probability that it is accepted: its own rate times its parent's score. So a child
never scores above its parent, and taking candidates best-first takes every parent before its child. The expected
number of accepted tokens of a step is 1 + the sum of the scores taken. Given what a step of each size costs, the
drafter knows before the step runs which size gives most tokens per second (`budget.worth`).

`search.PythonDrafter` is the search in plain Python. `native.drafter.NativeDrafter` is the same search in C, with the
same results bit for bit. `native.choose_drafter` is the one place that chooses between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lookahead.algorithm.cost import Costs
from lookahead.algorithm.successors import NOTHING, SuccessorTable, SuccessorTables
from lookahead.algorithm.tree import Guesses, TokenTree, WindowLayout
from lookahead.algorithm.verify import Verification

MOST_GUESSES = 1 << 16
"""The most guesses of a step: a bound on the memory that the C drafter takes for them beforehand."""

TAUGHT = 0.008
"""What a guess is worth beside its chance to be accepted, in tokens, where successors are recycled: refused or not, the
step computes the guess's own successors, from which later guesses are made."""


@dataclass(slots=True)
class Candidates:
    """What one step's guesses are chosen from: chains below the root, and successors that continue any path.

    `text_end` are the text's last three tokens, the root last. `rates[origin]` is how often a guess of this origin was
    right. The chains stand one after the other in `chain_tokens` and `chain_origins`; those that the drafter finds in
    its own `text` go behind them. A sequence has one of these for all its steps; `in_c` is what the C drafter keeps
    of it.
    """

    text_end: tuple[int, int, int]
    rates: array[float]
    tables: SuccessorTables | None = None
    text: DraftText | None = None
    chain_tokens: list[int] = field(default_factory=list)
    chain_origins: list[int] = field(default_factory=list)
    chain_lengths: list[int] = field(default_factory=list)
    in_c: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def after(cls, text: Sequence[int], rates: array[float]) -> Candidates:
        """No candidates yet for what follows this text."""
        candidates = cls((NOTHING, NOTHING, NOTHING), rates)
        candidates.restart(text)
        return candidates

    def restart(self, text: Sequence[int]) -> None:
        """Drop the chains: the next guesses follow this text."""
        before2 = text[-3] if len(text) > 2 else NOTHING
        self.text_end = before2, text[-2] if len(text) > 1 else NOTHING, text[-1]
        if self.chain_lengths:
            self.chain_tokens, self.chain_origins, self.chain_lengths = [], [], []

    def add_chain(self, tokens: Sequence[int], origins: Sequence[int]) -> None:
        """Add a run of guessed tokens below the root, with the origin of each."""
        if len(tokens) != len(origins):
            raise ValueError(f"a chain of {len(tokens)} tokens with {len(origins)} origins")
        self.chain_tokens += tokens
        self.chain_origins += origins
        self.chain_lengths.append(len(tokens))


class TextSettings(NamedTuple):
    """What the sources that follow the text are set to, for a drafter that does their work (C's `Settings`).

    `ngram` and `guesses` are N and G. `key`, `branches` and `reach` are the suffix index's: the longest match, how many
    there are, and how far each goes on. `suffix`, `prompt` and `jacobi` are the first origins of these sources, or -1
    where one is not in use; `longest_match` and `deepest` are the last buckets of the suffix index and of the others.
    `oldest`: of equal matches the oldest goes first.
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
    """A sequence's text where the drafter reads it, with what its sources know of it. `handle` is C's pointer to it."""

    handle: int

    def take(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """The text goes on with these tokens, and the window has made these n-grams."""
        ...


@dataclass(slots=True)
class Limits:
    """How many guesses a step may take, and how many pay.

    At most `most` guesses, none deeper than `max_depth`, and the first that scores below `floor` ends the search.
    `cost[k]` is the time of a step of k + 1 tokens; without it, all `most` are taken. `branch` tokens, the root among
    them, are in the step anyway.
    """

    most: int
    max_depth: int
    cost: Sequence[float] | None = None
    branch: int = 1
    floor: float = 0.0


@dataclass(slots=True)
class Cached:
    """What the C drafter reads by itself at every step, so that a draft may stay as it is.

    `trust` is the one number in this array. Root and end of the text are those of the candidates' text in C. No guess
    goes beyond the first `most_tokens` tokens of that text.
    """

    trust: array[float]
    most_tokens: int


@dataclass(slots=True)
class Draft:
    """A sequence's part of a step before it is known how many of its guesses the step takes.

    The root and the lookahead branch are in the step anyway: `branch` are their tokens, as in `layout`. Guesses come
    from the `candidates`; without them there are none. At most `most` are proposed; for `max_depth` and `cost` see
    `Limits`.
    A guess's *weighted score* is its score times `trust`, and it is worth that plus `bonus`. A step takes all guesses
    of a draft with `all_taken`, and of the others those that are worth most. In a `cached` draft, which only the C
    drafter reads, `branch` and `trust` mean nothing.
    """

    layout: WindowLayout
    branch: Sequence[int]
    candidates: Candidates | None
    most: int
    max_depth: int
    cost: Sequence[float] | None = None
    trust: float = 1.0
    bonus: float = 0.0
    all_taken: bool = True
    cached: Cached | None = None

    def limits(self, floor: float) -> Limits:
        """The limits of its guesses. Unless all are taken, their weighted scores must reach the `floor`."""
        least = 0.0 if self.all_taken else floor / self.trust
        return Limits(self.most, self.max_depth, self.cost, self.layout.size, least)


@dataclass(slots=True)
class Share:
    """What all drafts of a step share.

    `cost[k]` is the time of a pass of k + 1 tokens (see `choice`). Drafts that are weighed (not `all_taken`) get `most`
    guesses together, all drafts `room`; None means any number. Weighed ones are not searched for guesses whose weighted
    scores are less than the `floor`.
    """

    cost: Costs | None = None
    most: int | None = None
    room: int | None = None
    floor: float = 0.0


ALONE = Share()
"""Each draft is taken as it is."""


class Drafter(Protocol):
    """Chooses a step's guesses. It reads only tables that its own `new_table` made."""

    def new_table(self) -> SuccessorTable: ...

    def new_text(self, settings: TextSettings) -> DraftText | None:
        """A text in which the drafter finds the chains of these sources by itself, or None: then the sources do it."""
        ...

    def get_ready(self) -> None:
        """A choice like the last one follows soon."""
        ...

    def grow(self, candidates: Candidates, limits: Limits) -> Guesses:
        """Take the best candidates of one sequence, best first, within the limits."""
        ...

    def choose(self, drafts: Sequence[Draft], share: Share = ALONE) -> tuple[list[TokenTree], float | None]:
        """The trees of a step, and the weighted score of the best guess that it refuses, if it refuses one. Every draft
        has candidates of its own."""
        ...

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        """Get ready to verify a step of these trees, while the device runs it.

        `learners[i]` may learn from the step of tree i in the same call (see `Verdict.learned`); None: it may not.
        """
        ...
