"""`prediction`: a text that the output is expected to resemble, such as a file that is to be edited.

It is not part of the context: the model never reads it. The source finds the output's last tokens in it and proposes
what follows there. When the output deviates from it, the source searches for the position where it may resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration, chain_length
from lookahead.algorithm.sources.source import Outcome

LONGEST = 12
"""The longest match that is compared to find the output's end in the prediction."""
SCAN = 24
"""The most positions that are compared: those nearest to the last known one. A bound on time, not tuned."""
BRANCHES = 3


class PredictionSource:
    """Proposes the prediction's tokens after the output's last tokens.

    `accepted` counts the predicted tokens that became output where they were expected. A token's rate depends on the
    length of the match before it, plus its depth.
    """

    proposes_once, learns_early = False, True

    # Rates by matched length: the first is for a position without a match, and the last for 12 tokens and more. Rough
    # estimates that the calibration corrects.
    PRIORS = (0.2, 0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95, 0.96)

    def __init__(self, calibration: Calibration, tokens: Sequence[int], length: int) -> None:
        self.tokens, self.length = list(tokens), length
        origin = calibration.set_prior("prediction", self.PRIORS)
        last = len(self.PRIORS) - 1
        self.origins = [origin + min(matched, last) for matched in range(LONGEST + length + 1)]
        self.accepted = 0
        self._occurrences: dict[int, list[int]] = {}
        for index, token in enumerate(self.tokens):
            self._occurrences.setdefault(token, []).append(index)
        self._next = 0  # where the output continues, if it follows the prediction
        self._deviated = 0  # output tokens since it last did
        self.starts: list[tuple[int, int]] = [(0, LONGEST)]  # (index of the next token, length of the match before it)

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def learn_while_running(self) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        for start, matched in self.starts:
            length = min(self.length, len(self.tokens) - start)
            if length > 0:
                origins = self.origins[matched : matched + length]
                length = chain_length(candidates.rates, origins)
                candidates.add_chain(self.tokens[start : start + length], origins[:length])

    def learn_from(self, outcome: Outcome) -> None:
        pass

    def record_output(self, output: Sequence[int], new: Sequence[int]) -> None:
        """Record the `new` tokens at the end of the output. It is called for every step, the last one included."""
        # 1. Which of the proposed starts did it follow, and for how many tokens?
        common = ((start, self._common_length(start, new)) for start, _ in self.starts)
        start, followed = max(common, key=lambda candidate: candidate[1])
        self.accepted += followed
        if followed:
            self._next, self._deviated = start + followed, 0
        self._deviated += len(new) - followed
        # 2. Where may it continue?
        if not self._deviated:
            self.starts = [(self._next, LONGEST)]
            return
        starts = dict(self._matches(output))
        for start in (self._next + self._deviated, self._next):  # tokens were replaced, or inserted
            starts.setdefault(start, 0)
        self.starts = list(starts.items())[:BRANCHES]

    def _common_length(self, start: int, new: Sequence[int]) -> int:
        count = 0
        while count < len(new) and start + count < len(self.tokens) and self.tokens[start + count] == new[count]:
            count += 1
        return count

    def _matches(self, output: Sequence[int]) -> list[tuple[int, int]]:
        """The longest matches of the output's end, with the index after each: the longest first, then the nearest."""
        ends = sorted(self._occurrences.get(output[-1], ()), key=lambda end: abs(end + 1 - self._next))[:SCAN]
        found = []
        for end in ends:
            matched = 1
            most = min(LONGEST, len(output), end + 1)
            while matched < most and self.tokens[end - matched] == output[-1 - matched]:
                matched += 1
            found.append((end + 1, matched))
        return sorted(found, key=lambda match: -match[1])[: BRANCHES - 1]
