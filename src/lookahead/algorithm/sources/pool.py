"""The paper's n-gram pool, and the two sources that feed it: `jacobi` (the window) and `prompt` (the text)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome


class NGramPool:
    """First token -> n-grams: at most G per first token, the newest first, no duplicates.

    Each n-gram has a *feeder*, the source that added it.
    """

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses
        self._entries: dict[int, dict[tuple[int, ...], str]] = {}

    def add(self, ngram: tuple[int, ...], feeder: str) -> None:
        if not self.guesses:
            return
        entries = self._entries.setdefault(ngram[0], {})
        rest = ngram[1:]
        entries.pop(rest, None)
        entries[rest] = feeder
        if len(entries) > self.guesses:
            del entries[next(iter(entries))]

    def lookup(self, first: int, feeder: str | None = None) -> list[tuple[int, ...]]:
        """The n-grams that start with `first`, without it, newest first, from one feeder or from all."""
        entries = self._entries.get(first)
        if entries is None:
            return []
        return [rest for rest, fed_by in reversed(entries.items()) if feeder is None or fed_by == feeder]


class PoolSource:
    """Proposes the n-grams that it added to the pool."""

    feeder: str
    proposes_once, learns_early = False, False
    # Rates by depth, given that the parent was right: rough estimates that the calibration corrects.
    PRIORS = (0.12, 0.35, 0.45, 0.5)

    def __init__(self, pool: NGramPool, calibration: Calibration, ngram: int) -> None:
        self.pool = pool
        self.ngram = ngram
        self.origin, last = calibration.set_prior(self.feeder, self.PRIORS), len(self.PRIORS) - 1
        self.origins = [self.origin + min(depth, last) for depth in range(ngram - 1)]

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        for ngram in self.pool.lookup(text[-1], self.feeder):
            candidates.add_chain(ngram, self.origins)

    def learn_from(self, outcome: Outcome) -> None:
        self.feed(outcome.ngrams)

    def learn_while_running(self) -> None:
        pass

    def feed(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        for ngram in ngrams:
            self.pool.add(ngram, self.feeder)


class JacobiSource(PoolSource):
    """The window's n-grams: a column's tokens from oldest to newest, and its new target."""

    feeder = "jacobi"


class PromptSource(PoolSource):
    """Every n-gram of the prompt, and of the output as it grows."""

    feeder = "prompt"

    def start(self, prompt: Sequence[int]) -> None:
        self._feed_text(prompt, 0)

    def learn_from(self, outcome: Outcome) -> None:
        self._feed_text(outcome.text, len(outcome.text) - len(outcome.accepted) - self.ngram + 1)

    def _feed_text(self, text: Sequence[int], start: int) -> None:
        for i in range(max(0, start), len(text) - self.ngram + 1):
            self.pool.add(tuple(text[i : i + self.ngram]), self.feeder)
