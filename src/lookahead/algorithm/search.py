"""The best-first search for a step's draft tokens, in Python. `draft` defines its inputs and outputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from lookahead.algorithm.budget import best_count, best_counts
from lookahead.algorithm.draft import (
    MAX_DRAFT_TOKENS,
    NO_LIMITS,
    RECYCLE_BONUS,
    Candidates,
    Draft,
    Limits,
    StepLimits,
    TextSettings,
)
from lookahead.algorithm.successors import SuccessorDict, Successors, SuccessorTable
from lookahead.algorithm.tree import NO_DRAFT_TOKENS, DraftTokens, TokenTree
from lookahead.algorithm.verify import PythonVerification, Verification

CHAIN_MASS = 0.95
"""The most probability that the chains below a node take in total. Its other successors are scaled by the rest."""


class PythonDrafter:
    """The best-first search in Python: easy to read, and used if there is no C compiler."""

    def new_table(self) -> SuccessorTable:
        return SuccessorDict()

    def new_text(self, settings: TextSettings) -> None:
        """None: the sources find their chains themselves."""

    def prepare_search(self) -> None:
        pass

    def draft_trees(
        self, drafts: Sequence[Draft], limits: StepLimits = NO_LIMITS
    ) -> tuple[list[TokenTree], float | None]:
        found = [
            NO_DRAFT_TOKENS if draft.candidates is None else self.search(draft.candidates, draft.limits(limits.floor))
            for draft in drafts
        ]
        scores = [tokens.scores for tokens in found]
        most = sum(map(len, scores))
        if limits.max_weighed is not None:
            unweighed = sum(len(own) for own, draft in zip(scores, drafts, strict=True) if draft.all_taken)
            most = max(0, limits.max_weighed) + unweighed
        counts, refused = best_counts(
            scores,
            [draft.trust for draft in drafts],
            [draft.bonus for draft in drafts],
            [draft.all_taken for draft in drafts],
            sum(draft.layout.size for draft in drafts),
            most if limits.max_tokens is None else min(most, limits.max_tokens),
            limits.cost,
        )
        drafted = zip(drafts, found, counts, strict=True)
        return [draft.layout.tree(draft.branch, tokens, count) for draft, tokens, count in drafted], refused

    def verification(self, trees: Sequence[TokenTree], learners: Sequence[Candidates | None]) -> Verification:
        return PythonVerification(trees)

    def search(self, candidates: Candidates, limits: Limits) -> DraftTokens:
        if candidates.text is not None:
            raise TypeError(f"the Python drafter cannot read a {type(candidates.text).__name__}")
        trie, rates, tables = Trie(candidates), candidates.rates, candidates.tables
        most = min(limits.max_tokens, MAX_DRAFT_TOKENS)
        taken = [Taken(candidates.text_end[2], -1, 0, -1, 1.0, 0)]
        heap: list[Candidate] = []
        while len(taken) <= most:
            # 1. The node taken last proposes the tokens of its chains and the best of its successors.
            node = taken[-1]
            if candidates.chain:
                heap.clear()
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
        bonus = 0.0 if tables is None else RECYCLE_BONUS
        scores = [node.score for node in taken]
        end = len(taken) if limits.cost is None else best_count(scores, limits.cost, limits.branch, bonus)
        nodes = taken[1:end]
        return DraftTokens(
            tokens=array("i", [node.token for node in nodes]),
            parents=array("i", [node.parent + limits.branch - 1 if node.parent else 0 for node in nodes]),
            depths=array("i", [node.depth for node in nodes]),
            origins=array("i", [node.origin for node in nodes]),
            scores=array("d", scores[1:end]),
        )

    def _queue(self, heap: list[Candidate], taken: list[Taken], candidates: Candidates, trie: Trie) -> None:
        """Queue the candidates below the node taken last."""
        parent, node, rates = len(taken) - 1, taken[-1], candidates.rates
        known = None if candidates.tables is None else candidates.tables.look_up(*_last_three(taken, candidates))
        if known is not None:
            node.successors, node.first_origin = known
        likely = node.successors
        half = len(likely) // 2
        mass = 0.0
        children = trie.children[node.trie_node] if node.trie_node >= 0 else {}
        for token, child in children.items():
            # A token that is also a successor takes the higher of its two rates.
            rate = rates[trie.origins[child]]
            if token in likely and (index := likely.index(token)) < half:
                other = node.first_origin + likely[half + index]
                if rates[other] > rate:
                    rate, trie.origins[child] = rates[other], other
            mass += rate
            heappush(heap, (-node.score * rate, parent, -1, child))
        node.weight = node.score * (1 - min(mass, CHAIN_MASS)) if children else node.score
        if half:
            heappush(heap, (-node.weight * rates[node.first_origin + likely[half]], parent, 0, -1))


Candidate = tuple[float, int, int, int]
"""Minus the score, the parent's index in the taken nodes, the index in the parent's successors (-1 for a chain's token)
and the trie node of a chain's token (else -1)."""


@dataclass(slots=True)
class Taken:
    """A taken draft token, or the root. `trie_node` is -1 outside the chains; `weight` scales its successors."""

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
    """The candidates' chains: node 0 is the root, and chains with a common prefix share nodes.

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
    index = len(taken) - 1
    while index >= 0 and len(path) < 3:
        path.append(taken[index].token)
        index = taken[index].parent
    before2, before, _ = candidates.text_end
    third, second, last = [before2, before, *reversed(path)][-3:]
    return third, second, last
