"""One step's guesses: sources write chains into a draft, and a drafter takes the best candidates, best first.

A candidate's score is the estimated probability that it is accepted: its own rate times its parent's score. So a child
never scores above its parent, and taking candidates best-first takes every parent before its child. The expected
number of accepted tokens of a step is 1 + the sum of the scores taken. Given what a step of each size costs, the
drafter knows before the step runs which size gives most tokens per second (`worth`).

`PythonDrafter` is the search in plain Python. `native.drafter.NativeDrafter` is the same search in C, with the same
results bit for bit. `native.choose_drafter` is the one place that chooses between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from typing import Any, Protocol

from lookahead.algorithm.counts import Costs, best_counts
from lookahead.algorithm.successors import NOTHING, SuccessorDict, Successors, SuccessorTable, SuccessorTables
from lookahead.algorithm.tree import NO_GUESSES, Guesses, TokenTree, WindowLayout
from lookahead.algorithm.verify import PythonVerification, Verification

MOST_GUESSES = 1 << 16
"""The most guesses of a step: a bound on the memory that the C drafter takes for them beforehand."""

CHAIN_MASS = 0.95
"""The chains below a node take at most this probability together. Its other successors are scaled by the rest."""

TAUGHT = 0.008
"""What a guess is worth beside its chance to be accepted, in tokens, where successors are recycled: refused or not, the
step computes the guess's own successors, from which later guesses are made."""


@dataclass(slots=True)
class Draft:
    """What one step's guesses are chosen from: chains below the root, and successors that continue any path.

    `text_end` are the text's last three tokens, the root last. `rates[origin]` is how often a guess of this origin was
    right. The chains stand one after the other in `chain_tokens` and `chain_origins`. Those of a `text` in C, which
    only the C drafter reads, go behind them. A sequence has one draft for all its steps; `in_c` is what the C drafter
    keeps of it.
    """

    text_end: tuple[int, int, int]
    rates: array[float]
    tables: SuccessorTables | None = None
    text: Any = None
    chain_tokens: list[int] = field(default_factory=list)
    chain_origins: list[int] = field(default_factory=list)
    chain_lengths: list[int] = field(default_factory=list)
    in_c: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def after(cls, text: Sequence[int], rates: array[float]) -> Draft:
        """An empty draft of what follows this text."""
        draft = cls((NOTHING, NOTHING, NOTHING), rates)
        draft.restart(text)
        return draft

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
class Standing:
    """What the C drafter reads by itself at every step, so that an offer may stay as it is.

    `trust` is the one number in this array. Root and end of the text are those of the draft's text in C. No guess goes
    beyond the first `most_tokens` tokens of that text.
    """

    trust: array[float]
    most_tokens: int


@dataclass(slots=True)
class Offer:
    """A sequence's part of a step before it is known how many of its guesses the step takes.

    The root and the lookahead branch are in the step anyway: `branch` are their tokens, as in `layout`. Guesses come
    from the `draft`; without one there are none. At most `most` are offered; for `max_depth` and `cost` see `Limits`.
    A guess's *weighted score* is its score times `trust`, and it is worth that plus `bonus`. A step takes all guesses
    of an offer that is `kept`, and of the others those that are worth most. In a `standing` offer, which only the C
    drafter reads, `branch` and `trust` mean nothing.
    """

    layout: WindowLayout
    branch: Sequence[int]
    draft: Draft | None
    most: int
    max_depth: int
    cost: Sequence[float] | None = None
    trust: float = 1.0
    bonus: float = 0.0
    kept: bool = True
    standing: Standing | None = None

    def limits(self, floor: float) -> Limits:
        """The limits of its guesses. Unless they are kept, their weighted scores must reach the `floor`."""
        least = 0.0 if self.kept else floor / self.trust
        return Limits(self.most, self.max_depth, self.cost, self.layout.size, least)


class Drafter(Protocol):
    """Chooses a step's guesses. It reads only tables that its own `new_table` made."""

    def new_table(self) -> SuccessorTable: ...

    def get_ready(self) -> None:
        """A choice like the last one follows soon."""
        ...

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        """Take the best candidates of one sequence, best first, within the limits."""
        ...

    def choose(
        self,
        offers: Sequence[Offer],
        cost: Costs | None = None,
        most: int | None = None,
        room: int | None = None,
        floor: float = 0.0,
    ) -> tuple[list[TokenTree], float | None]:
        """The trees of a step, and the weighted score of the best guess that it refuses, if it refuses one.

        Every offer has a draft of its own. `cost[k]` is the time of a pass of k + 1 tokens (see `choice`). Offers that
        are not kept get `most` guesses together, all offers `room`; None means any number. They are not searched for
        guesses whose weighted scores are less than the `floor`.
        """
        ...

    def verification(self, trees: Sequence[TokenTree], drafts: Sequence[Draft | None]) -> Verification:
        """Get ready to verify a step of these trees, while the device runs it.

        `drafts[i]` may learn from the step of tree i in the same call (see `Verdict.learned`); None: it may not.
        """
        ...


class PythonDrafter:
    """The best-first search in Python: easy to read, and used where there is no C compiler."""

    def new_table(self) -> SuccessorTable:
        return SuccessorDict()

    def get_ready(self) -> None:
        pass

    def choose(
        self,
        offers: Sequence[Offer],
        cost: Costs | None = None,
        most: int | None = None,
        room: int | None = None,
        floor: float = 0.0,
    ) -> tuple[list[TokenTree], float | None]:
        guesses = [NO_GUESSES if one.draft is None else self.grow(one.draft, one.limits(floor)) for one in offers]
        each = [len(one.scores) for one in guesses]
        count = sum(each)
        if most is not None:
            count = max(0, most) + sum(own for own, one in zip(each, offers, strict=True) if one.kept)
        counts, refused = best_counts(
            [one.scores for one in guesses],
            [one.trust for one in offers],
            [one.bonus for one in offers],
            [one.kept for one in offers],
            sum(one.layout.size for one in offers),
            count if room is None else min(count, room),
            cost,
        )
        parts = zip(offers, guesses, counts, strict=True)
        return [offer.layout.tree(offer.branch, own, count) for offer, own, count in parts], refused

    def verification(self, trees: Sequence[TokenTree], drafts: Sequence[Draft | None]) -> Verification:
        return PythonVerification(trees)

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        if draft.text is not None:
            raise TypeError(f"the Python drafter cannot read a {type(draft.text).__name__}")
        trie, rates, tables = Trie(draft), draft.rates, draft.tables
        room = min(limits.most, MOST_GUESSES)
        taken = [Taken(draft.text_end[2], -1, 0, -1, 1.0, 0)]
        heap: list[Candidate] = []
        while len(taken) <= room:
            # 1. The node taken last offers the tokens of its chains and the best of its successors.
            node = taken[-1]
            if node.depth < limits.max_depth:
                self._offer(heap, taken, draft, trie)
            # 2. Take the best candidate. If it is a successor, its parent's next successor becomes a candidate.
            best = None
            while heap and best is None:
                negative, parent, index, trie_node = heap[0]
                above = taken[parent]
                if index < 0:
                    heappop(heap)
                    best = Taken(
                        trie.tokens[trie_node], parent, above.depth + 1, trie.origins[trie_node], -negative, trie_node
                    )
                    break
                likely = above.successors
                half = len(likely) // 2
                token, origin = likely[index], above.first_origin + likely[half + index]
                if index + 1 < half:
                    rate = rates[above.first_origin + likely[half + index + 1]]
                    heapreplace(heap, (-above.weight * rate, parent, index + 1, -1))
                else:
                    heappop(heap)
                if above.trie_node < 0 or token not in trie.children[above.trie_node]:
                    best = Taken(token, parent, above.depth + 1, origin, -negative, -1)
            if best is None or best.score < limits.floor:
                break
            taken.append(best)
        # 3. Keep as many as pay for their time.
        taught = 0.0 if tables is None else TAUGHT
        scores = [node.score for node in taken]
        keep = len(taken) if limits.cost is None else worth(scores, limits.cost, limits.branch, taught)
        kept = taken[1:keep]
        return Guesses(
            tokens=array("i", [node.token for node in kept]),
            parents=array("i", [node.parent + limits.branch - 1 if node.parent else 0 for node in kept]),
            depths=array("i", [node.depth for node in kept]),
            origins=array("i", [node.origin for node in kept]),
            scores=array("d", scores[1:keep]),
        )

    def _offer(self, heap: list[Candidate], taken: list[Taken], draft: Draft, trie: Trie) -> None:
        """Queue what may follow the node taken last."""
        place, node, rates = len(taken) - 1, taken[-1], draft.rates
        answer = None if draft.tables is None else draft.tables.look_up(*_last_three(taken, draft))
        if answer is not None:
            node.successors, node.first_origin = answer
        likely = node.successors
        half = len(likely) // 2
        mass = 0.0
        children = trie.children[node.trie_node] if node.trie_node >= 0 else {}
        for token, child in children.items():
            # A token that the successors name, too, takes the better of its two rates.
            rate = rates[trie.origins[child]]
            if token in likely and (index := likely.index(token)) < half:
                other = node.first_origin + likely[half + index]
                if rates[other] > rate:
                    rate, trie.origins[child] = rates[other], other
            mass += rate
            heappush(heap, (-node.score * rate, place, -1, child))
        node.weight = node.score * (1 - min(mass, CHAIN_MASS)) if children else node.score
        if half:
            heappush(heap, (-node.weight * rates[node.first_origin + likely[half]], place, 0, -1))


Candidate = tuple[float, int, int, int]
"""Minus the score, the parent's place among the taken nodes, the index among the parent's successors (or -1 for a
chain's token), and the trie's node of a chain's token (else -1)."""


@dataclass(slots=True)
class Taken:
    """A guess that was taken, or the root. `trie_node` is -1 outside the chains; `weight` scales its successors."""

    token: int
    parent: int
    depth: int
    origin: int
    score: float
    trie_node: int
    successors: Successors = ()
    first_origin: int = 0
    weight: float = 0.0


class Trie:
    """A draft's chains: node 0 is the root, and chains that share a beginning share nodes.

    A node that two chains share has the origin with the higher rate.
    """

    def __init__(self, draft: Draft) -> None:
        self.tokens, self.origins = [draft.text_end[2]], [-1]
        self.children: list[dict[int, int]] = [{}]
        rates, end = draft.rates, 0
        for length in draft.chain_lengths:
            node, start, end = 0, end, end + length
            for token, origin in zip(draft.chain_tokens[start:end], draft.chain_origins[start:end], strict=True):
                below = self.children[node]
                node = below.get(token, 0)
                if not node:
                    node = below[token] = len(self.tokens)
                    self.tokens.append(token)
                    self.origins.append(origin)
                    self.children.append({})
                elif rates[origin] > rates[self.origins[node]]:
                    self.origins[node] = origin


def worth(scores: Sequence[float], cost: Sequence[float], branch: int, taught: float) -> int:
    """How many of the `scores` (the root's 1.0, then the guesses best first) give most tokens per unit of time. The
    root is counted."""
    last, expected = len(cost) - 1, enumerate(accumulate(scores))
    gains = [(tokens + taught * k) / cost[min(branch - 1 + k, last)] for k, tokens in expected]
    return gains.index(max(gains)) + 1


def _last_three(taken: list[Taken], draft: Draft) -> tuple[int, int, int]:
    """The last three tokens of the path down to the node taken last, the text before the root included."""
    path: list[int] = []
    place = len(taken) - 1
    while place >= 0 and len(path) < 3:
        path.append(taken[place].token)
        place = taken[place].parent
    before2, before, _ = draft.text_end
    third, second, last = [before2, before, *reversed(path)][-3:]
    return third, second, last
