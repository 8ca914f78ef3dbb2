"""`suffix`, `prompt` and `jacobi` as one source, for a drafter that finds their chains in the text itself.

The three then share one copy of the text, whose chains the search reads directly. The draft tokens are those of the
separate sources, with the same origins and in the same order. In Python, with many sequences, the three took half of a
step's host time.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Candidates, Drafter, DraftText, TextSettings
from lookahead.algorithm.sources.pool import JacobiSource, PoolSource, PromptSource
from lookahead.algorithm.sources.source import Outcome, Source
from lookahead.algorithm.sources.suffix import SuffixSource


class TextSource:
    """Replaces the sources that search the text. `windowed`: the source `jacobi` is one of them, so the window's
    n-grams are added."""

    proposes_once, learns_early = True, True

    def __init__(self, text: DraftText, windowed: bool) -> None:
        self.text, self.windowed = text, windowed

    def start(self, prompt: Sequence[int]) -> None:
        self.text.extend(prompt)

    def propose(self, text: list[int], candidates: Candidates) -> None:
        candidates.text = self.text

    def learn_from(self, outcome: Outcome) -> None:
        if not outcome.learned:
            self.text.extend(outcome.accepted, outcome.ngrams if self.windowed else ())

    def learn_while_running(self) -> None:
        pass


def join_text_sources(sources: list[Source], drafter: Drafter) -> list[Source]:
    """The sources, with those that search the text merged into one if the drafter supports all of them."""
    searching = [source for source in sources if isinstance(source, SuffixSource | PoolSource)]
    text = drafter.new_text(settings_of(searching)) if searching else None
    if text is None:
        return sources
    windowed = any(isinstance(source, JacobiSource) for source in searching)
    return [TextSource(text, windowed), *(source for source in sources if source not in searching)]


def settings_of(sources: Sequence[SuffixSource | PoolSource]) -> TextSettings:
    """The settings of these sources, at most one of each kind."""
    origins = {type(source): source.origin for source in sources}
    suffix = next((source for source in sources if isinstance(source, SuffixSource)), None)
    pooled = next((source for source in sources if isinstance(source, PoolSource)), None)
    return TextSettings(
        ngram=pooled.ngram if pooled else 2,
        guesses=pooled.pool.guesses if pooled else 0,
        key=suffix.key if suffix else 1,
        branches=suffix.branches if suffix else 1,
        reach=suffix.length if suffix else 1,
        suffix=origins.get(SuffixSource, -1),
        prompt=origins.get(PromptSource, -1),
        jacobi=origins.get(JacobiSource, -1),
        longest_match=len(SuffixSource.PRIORS) - 1,
        deepest=len(PoolSource.PRIORS) - 1,
        oldest=suffix is not None and suffix.oldest,
    )
