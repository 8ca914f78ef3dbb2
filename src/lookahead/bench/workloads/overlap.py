"""How much of an answer stood somewhere before: what a small model's text says about a larger one's speed.

A draft can only propose what it has seen or what the model's own logits gave it. A larger model writes other texts,
but the share of them that repeats the prompt, the transcript or earlier answers is a property of the work, so it
carries over where tokens per second do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SIZES = (4, 12)
"""Tokens of an n-gram: 4 is what a draft needs to begin, 12 are a copy."""


def ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@dataclass
class Overlap:
    """Counts n-grams of answers: all, those that the context held, and those of the others that earlier answers held.

    The context of an n-gram is its prompt, with all earlier turns, and the answer before it.
    """

    counted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    in_context: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    in_earlier: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    _earlier: dict[int, set[tuple[int, ...]]] = field(default_factory=lambda: {size: set() for size in SIZES})

    def add(self, prompt: Sequence[int], answers: Iterable[Sequence[int]]) -> None:
        """Answers to one prompt, none of which knows the others."""
        answers = list(answers)
        for size in SIZES:
            before = set(ngrams(prompt, size))
            for answer in answers:
                seen = set(before)
                for ngram in ngrams(answer, size):
                    self.counted[size] += 1
                    if ngram in seen:
                        self.in_context[size] += 1
                    elif ngram in self._earlier[size]:
                        self.in_earlier[size] += 1
                    seen.add(ngram)
            for answer in answers:
                self._earlier[size].update(ngrams(answer, size))

    def next(self) -> Overlap:
        """A new count, with the same earlier answers."""
        return Overlap(_earlier=self._earlier)

    def shares(self) -> dict[str, dict[str, float]]:
        """By size: the shares of n-grams in the context, and in earlier answers only."""
        return {
            str(size): {
                "context": round(self.in_context[size] / max(1, self.counted[size]), 4),
                "earlier": round(self.in_earlier[size] / max(1, self.counted[size]), 4),
            }
            for size in SIZES
        }
