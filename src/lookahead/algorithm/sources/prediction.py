"""`prediction`: a text that the output is expected to resemble, such as a file that is to be edited.

It is not part of the context: the model never reads it. Wherever the output is found in it, what follows there is
proposed. Where the output has left it, the source looks for the place where it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome

LONGEST = 12
"""The most tokens that are compared to find the output's end in the prediction."""
SCAN = 24
"""The most places that are compared: those nearest to where the output was last. A bound on time, not tuned."""
BRANCHES = 3


class PredictionSource:
    """Proposes how the prediction goes on after the output's last tokens.

    `accepted` counts the predicted tokens that became output where they were expected. A token's rate depends on how
    many tokens matched before it, plus its depth.
    """

    proposes_once, learns_early = False, True

    # Rates by matched length: the first is for a place where nothing matches, and the last for 12 tokens and more. They
    # were guessed; the calibration corrects them.
    PRIORS = (0.2, 0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95, 0.96)

    def __init__(self, calibration: Calibration, tokens: Sequence[int], length: int) -> None:
        self.tokens, self.length = list(tokens), length
        origin = calibration.prior("prediction", self.PRIORS)
        last = len(self.PRIORS) - 1
        self.origins = [origin + min(matched, last) for matched in range(LONGEST + length + 1)]
        self.accepted = 0
        self._ends: dict[int, list[int]] = {}
        for place, token in enumerate(self.tokens):
            self._ends.setdefault(token, []).append(place)
        self._next = 0  # where the output goes on, if it follows the prediction
        self._strayed = 0  # output tokens since it did
        self.places: list[tuple[int, int]] = [(0, LONGEST)]  # (where to go on, how many tokens match before it)

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def learn_while_running(self) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        for place, matched in self.places:
            tokens = self.tokens[place : place + self.length]
            if tokens:
                candidates.add_chain(tokens, self.origins[matched : matched + len(tokens)])

    def absorb(self, outcome: Outcome) -> None:
        pass

    def follow(self, output: Sequence[int], new: Sequence[int]) -> None:
        """The output has these `new` tokens at its end. It is called for every step, the last one included."""
        # 1. Which of the proposed places did it follow, and how far?
        place, followed = max(((place, self._common(place, new)) for place, _ in self.places), key=lambda one: one[1])
        self.accepted += followed
        if followed:
            self._next, self._strayed = place + followed, 0
        self._strayed += len(new) - followed
        # 2. Where may it go on?
        if not self._strayed:
            self.places = [(self._next, LONGEST)]
            return
        places = dict(self._matches(output))
        for place in (self._next + self._strayed, self._next):  # tokens were replaced, or inserted
            places.setdefault(place, 0)
        self.places = list(places.items())[:BRANCHES]

    def _common(self, place: int, new: Sequence[int]) -> int:
        count = 0
        while count < len(new) and place + count < len(self.tokens) and self.tokens[place + count] == new[count]:
            count += 1
        return count

    def _matches(self, output: Sequence[int]) -> list[tuple[int, int]]:
        """The places after the longest matches of the output's end: the longest first, then the nearest."""
        ends = sorted(self._ends.get(output[-1], ()), key=lambda end: abs(end + 1 - self._next))[:SCAN]
        found = []
        for end in ends:
            matched = 1
            most = min(LONGEST, len(output), end + 1)
            while matched < most and self.tokens[end - matched] == output[-1 - matched]:
                matched += 1
            found.append((end + 1, matched))
        return sorted(found, key=lambda match: -match[1])[: BRANCHES - 1]
