"""The best-first search for a step's guesses, in Python. `draft` says what goes in and what comes out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from lookahead.algorithm.budget import best_counts, worth
from lookahead.algorithm.draft import ALONE, MOST_GUESSES, TAUGHT, Candidates, Draft, Limits, Share, TextSettings
from lookahead.algorithm.successors import SuccessorDict, Successors, SuccessorTable
from lookahead.algorithm.tree import NO_GUESSES, Guesses, TokenTree
from lookahead.algorithm.verify import PythonVerification, Verification

CHAIN_MASS = 0.95
"""The chains below a node take at most this probability together. Its other successors are scaled by the rest."""


class PythonDrafter:
    """The best-first search in Python: easy to read, and used where there is no C compiler."""

    def new_table(self) -> SuccessorTable:
        return SuccessorDict()

    def new_text(self, settings: TextSettings) -> None:
        """The sources find their chains themselves."""

    def get_ready(self) -> None:
        pass

    def choose(self, drafts: Sequence[Draft], share: Share = ALONE) -> tuple[list[TokenTree], float | None]:
        guesses = [
            NO_GUESSES if one.candidates is None else self.grow(one.candidates, one.limits(share.floor))
            for one in drafts
        ]
        each = [len(one.scores) for one in guesses]
        count = sum(each)
        if share.most is not None:
            count = max(0, share.most) + sum(own for own, one in zip(each, drafts, strict=True) if one.all_taken)
        counts, refused = best_counts(
            [one.scores for one in guesses],
            [one.trust for one in drafts],
            [one.bonus for one in drafts],
            [one.all_taken for one in drafts],
            sum(one.layout.size for one in drafts),
            count if share.room is None else min(count, share.room),
            share.cost,
        )
        parts = zip(drafts, guesses, counts, strict=True)
        return [draft.layout.tree(draft.branch, own, count) for draft, own, count in parts], refused

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        return PythonVerification(trees)

    def grow(self, candidates: Candidates, limits: Limits) -> Guesses:
        if candidates.text is not None:
            raise TypeError(f"the Python drafter cannot read a {type(candidates.text).__name__}")
        trie, rates, tables = Trie(candidates), candidates.rates, candidates.tables
        room = min(limits.most, MOST_GUESSES)
        taken = [Taken(candidates.text_end[2], -1, 0, -1, 1.0, 0)]
        heap: list[Candidate] = []
        while len(taken) <= room:
            # 1. The node taken last proposes the tokens of its chains and the best of its successors.
            node = taken[-1]
            if node.depth < limits.max_depth:
                self._queue(heap, taken, candidates, trie)
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

    def _queue(self, heap: list[Candidate], taken: list[Taken], candidates: Candidates, trie: Trie) -> None:
        """Queue what may follow the node taken last."""
        place, node, rates = len(taken) - 1, taken[-1], candidates.rates
        answer = None if candidates.tables is None else candidates.tables.look_up(*_last_three(taken, candidates))
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
    """The candidates' chains: node 0 is the root, and chains that share a beginning share nodes.

    A node that two chains share has the origin with the higher rate.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.tokens, self.origins = [candidates.text_end[2]], [-1]
        self.children: list[dict[int, int]] = [{}]
        rates, end = candidates.rates, 0
        for length in candidates.chain_lengths:
            node, start, end = 0, end, end + length
            for token, origin in zip(
                candidates.chain_tokens[start:end], candidates.chain_origins[start:end], strict=True
            ):
                below = self.children[node]
                node = below.get(token, 0)
                if not node:
                    node = below[token] = len(self.tokens)
                    self.tokens.append(token)
                    self.origins.append(origin)
                    self.children.append({})
                elif rates[origin] > rates[self.origins[node]]:
                    self.origins[node] = origin


def _last_three(taken: list[Taken], candidates: Candidates) -> tuple[int, int, int]:
    """The last three tokens of the path down to the node taken last, the text before the root included."""
    path: list[int] = []
    place = len(taken) - 1
    while place >= 0 and len(path) < 3:
        path.append(taken[place].token)
        place = taken[place].parent
    before2, before, _ = candidates.text_end
    third, second, last = [before2, before, *reversed(path)][-3:]
    return third, second, last
