"""`suffix`: finds where the text's last tokens occurred before, and proposes what followed them there."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration, chain_length, match_bucket
from lookahead.algorithm.sources.source import Outcome

SCAN = 24
"""The most earlier positions that a lookup compares: a bound on its time, not tuned."""


class SuffixSource:
    """Continuations of the longest earlier matches of the text's end.

    The paper's pool is keyed by one token only, which the paper calls a weakness. Here the longest match wins: matches
    are ranked by length (up to `key` tokens), then the newest first, or with `oldest` the oldest first, as in
    transformers' prompt lookup. A token's rate depends on the matched length plus its depth in the continuation, since
    all tokens before it count as matched. A continuation has at most `length` tokens, and ends where its scores no
    longer pay (`calibration.chain_length`); with `oldest` it does not end before.
    """

    proposes_once, learns_early = False, False

    # Rates by `match_bucket`, estimates that the calibration corrects; no match has bucket 0. Those of 16 tokens and
    # more are lower than measured: until a text has shown that it copies, short matches get no chains of 64 tokens.
    PRIORS = (1e-9, 0.15, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.82, 0.85, 0.87, 0.89, 0.9, 0.88, 0.88, 0.9, 0.92, 0.95)

    def __init__(
        self,
        calibration: Calibration,
        key: int = 64,
        branches: int = 4,
        length: int = 64,
        oldest: bool = False,
    ) -> None:
        self.key, self.branches, self.length, self.oldest = key, branches, length, oldest
        self.origin = calibration.set_prior("suffix", self.PRIORS)
        self.origins = [self.origin + match_bucket(matched) for matched in range(key + length)]
        self._token_ends: dict[int, list[int]] = {}
        self._pair_ends: dict[tuple[int, int], list[int]] = {}
        self._indexed = 0

    def start(self, prompt: Sequence[int]) -> None:
        self._index(prompt)

    def learn_from(self, outcome: Outcome) -> None:
        self._index(outcome.text)

    def _index(self, text: Sequence[int]) -> None:
        """Index where every token and every pair of tokens ends. The last token is indexed when another follows it."""
        for i in range(self._indexed, len(text) - 1):
            self._token_ends.setdefault(text[i], []).append(i)
            if i:
                self._pair_ends.setdefault((text[i - 1], text[i]), []).append(i)
        self._indexed = max(self._indexed, len(text) - 1)

    def matches(self, text: list[int]) -> list[tuple[int, int]]:
        """The best earlier matches, best first: (matched length, end of the match)."""
        last = text[-1]
        ends = self._pair_ends.get((text[-2], last)) if len(text) > 1 and self.key > 1 else None
        if not ends:
            ends = self._token_ends.get(last, [])
            best = ends[: self.branches] if self.oldest else ends[: -self.branches - 1 : -1]
            return [(1, end) for end in best]
        matches = []
        for end in ends if self.oldest else ends[: -SCAN - 1 : -1]:
            matched = 2
            while matched < self.key and matched <= end and text[end - matched] == text[-1 - matched]:
                matched += 1
            matches.append((matched, end))
        matches.sort(key=lambda match: -match[0])
        return matches[: self.branches]

    def learn_while_running(self) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        for matched, end in self.matches(text):
            length = min(self.length, len(text) - 1 - end)
            origins = self.origins[matched : matched + length]
            if not self.oldest:
                length = chain_length(candidates.rates, origins)
            candidates.add_chain(text[end + 1 : end + 1 + length], origins[:length])
