"""The 2-D Jacobi window of the lookahead branch: W columns of future positions, N-1 rows of history."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Window:
    """N-1 rows of W guessed tokens, oldest row first. Row r, column j guesses position p + j + r.

    Column 0 of the oldest row is always the last accepted token `c`, so the stored value there is not used.
    """

    def __init__(self, window: int, ngram: int, prompt: Sequence[int], rng: random.Random) -> None:
        """Algorithm 2, line 4: a random start. Tokens of the prompt, so that every id is a likely one."""
        self.width = window
        self.rows = [rng.choices(prompt, k=window) if window else [] for _ in range(ngram - 1)]

    def flat(self) -> list[int]:
        """The branch's tokens after `c`, in the order of `tree.window_layout`."""
        tokens = self.rows[0][1:]
        for row in self.rows[1:]:
            tokens += row
        return tokens

    def ngrams(self, root: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """One n-gram per column, oldest token to newest target (Algorithm 2, 'update n-gram pool')."""
        first = [root, *self.rows[0][1:]]
        return list(zip(first, *self.rows[1:], new, strict=True))

    def roll(self, new: Sequence[int]) -> None:
        """Drop the oldest row, take the new targets as the newest."""
        self.rows.pop(0)
        self.rows.append(list(new))
