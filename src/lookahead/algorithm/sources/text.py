"""`suffix`, `prompt` and `jacobi` in C, as one source. With many sequences they were half of the host's part of a step.

The three share one copy of the text in C, from which their chains go straight into the search. The guesses are those of
the Python sources, with the same origins and in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import MOST_GUESSES, Draft
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.sources.pool import JacobiSource, PoolSource, PromptSource
from lookahead.algorithm.sources.source import Outcome, Source
from lookahead.algorithm.sources.suffix import SuffixSource


class TextSource:
    """Takes the place of the sources that follow the text, of which it reads only the settings."""

    proposes_once, learns_early = True, True

    def __init__(self, sources: Sequence[SuffixSource | PoolSource], drafter: NativeDrafter) -> None:
        origins = {type(source): source.origin for source in sources}
        suffix = next((source for source in sources if isinstance(source, SuffixSource)), None)
        pooled = next((source for source in sources if isinstance(source, PoolSource)), None)
        self.windowed = JacobiSource in origins
        self.text = drafter.new_text(
            *((pooled.ngram, pooled.pool.guesses) if pooled else (2, 0)),
            *((suffix.key, suffix.branches, suffix.length) if suffix else (1, 1, 1)),
            *(origins.get(kind, -1) for kind in (SuffixSource, PromptSource, JacobiSource)),
            len(SuffixSource.PRIORS) - 1,
            len(PoolSource.PRIORS) - 1,
        )

    def start(self, prompt: Sequence[int]) -> None:
        self.text.take(prompt)

    def propose(self, text: list[int], draft: Draft) -> None:
        draft.text = self.text

    def absorb(self, outcome: Outcome) -> None:
        if not outcome.learned:
            self.text.take(outcome.accepted, outcome.ngrams if self.windowed else ())

    def learn_while_running(self) -> None:
        pass


def text_in_c(sources: list[Source], drafter: NativeDrafter) -> list[Source]:
    """The same sources, but those that follow the text as one in C, if it can do all that they do."""
    following = [source for source in sources if isinstance(source, SuffixSource | PoolSource)]
    if not following or not all(map(_fits, following)):
        return sources
    return [TextSource(following, drafter), *(source for source in sources if source not in following)]


def _fits(source: SuffixSource | PoolSource) -> bool:
    """True when C can do what this source does: its numbers are small, and the newest match goes first."""
    if isinstance(source, SuffixSource):
        return not source.oldest and max(source.key, source.branches, source.length) < MOST_GUESSES
    return max(source.ngram, source.pool.guesses) < MOST_GUESSES
