"""`suffix`, `prompt` and `jacobi` in C, where it can be had: all that follows from the text, as one source.

Those three do a little for every token of a text, which in Python is most of what the host does in a step. Here they
share one copy of the text, and their guesses go from there into the draft. They are what they were: the same guesses
with the same origins in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import MOST, Draft
from lookahead.algorithm.native.drafter import NativeText
from lookahead.algorithm.sources.calibration import Outcome
from lookahead.algorithm.sources.pool import JacobiSource, PoolSource, PromptSource
from lookahead.algorithm.sources.suffix import SuffixSource


class TextSource:
    """In the place of these sources, which it asks for no more than their settings."""

    def __init__(self, sources: Sequence[SuffixSource | PoolSource]) -> None:
        by_kind = {type(source): source for source in sources}
        suffix = next((source for source in sources if isinstance(source, SuffixSource)), None)
        pooled = next((source for source in sources if isinstance(source, PoolSource)), None)
        self.text = NativeText(
            *((pooled.ngram, pooled.pool.guesses) if pooled else (2, 0)),
            *((suffix.key, suffix.branches, suffix.length) if suffix else (1, 1, 1)),
            *(by_kind[kind].origin if kind in by_kind else -1 for kind in (SuffixSource, PromptSource, JacobiSource)),
            len(SuffixSource.PRIORS) - 1,
            len(PoolSource.PRIORS) - 1,
        )
        self.windowed = JacobiSource in by_kind

    @staticmethod
    def stands_for(source: SuffixSource | PoolSource) -> bool:
        """Whether C has what this source does."""
        if isinstance(source, SuffixSource):
            return not source.oldest and max(source.key, source.branches, source.length) < MOST
        return max(source.ngram, source.pool.guesses) < MOST

    def start(self, prompt: Sequence[int]) -> None:
        self.text.take(prompt, ())

    def propose(self, text: list[int], draft: Draft) -> None:
        draft.whole = self.text

    def absorb(self, outcome: Outcome) -> None:
        self.text.take(outcome.accepted, outcome.ngrams if self.windowed else ())

    def learn_while_running(self) -> None:
        pass
