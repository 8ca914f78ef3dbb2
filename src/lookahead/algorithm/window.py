"""The 2-D Jacobi window of the lookahead branch: W columns of future positions, N-1 rows of history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice


class Window:
    """N-1 rows of W guessed tokens, oldest row first. Row r, column j guesses position p + j + r.

    Column 0 of the oldest row is always the last accepted token `c`, so the stored value there is not used.
    """

    def __init__(self, window: int, ngram: int, prompt: Sequence[int]) -> None:
        """Start from the prompt's last tokens, as if they came once more.

        The paper starts at random (Algorithm 2, line 4). A stretch of real text settles sooner: S on 20 MT-Bench
        prompts, paper mode (5,15,15), is 2.07 against 2.00 for random tokens of the prompt (2.25 against 2.19 with
        prompt n-grams).
        """
        self.width = window
        stretch = list(islice(cycle(prompt[-(window + ngram - 2) :]), window + ngram - 2)) if window else []
        self.rows = [stretch[row : row + window] for row in range(ngram - 1)]

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
        """Drop the oldest row, take the new targets as the newest; once per step, however many tokens it accepted.

        When a step accepts a > 1 tokens the columns could move a - 1 places to the left, so that every guess keeps its
        position, with something new on the right; or, to the letter of Algorithm 2 (lines 7-9), a - 1 random rows could
        enter. Both throw trajectories away. Keeping all columns leaves each guess a - 1 positions further right than it
        was made for, and that accepts more; probably because what a column yields is an n-gram
        that will be used wherever its first token turns up. S on 20 prompts each, paper mode (5,15,15), embedded
        model, fp32, random start (`benchmarks/acceptance.py` holds the alternatives):

            columns kept (this)               MT-Bench 2.01   HumanEval 1.93
            shifted, a stretch of the prompt           1.96             1.86
            shifted, a walk through the pool           1.96             1.81
            shifted, random prompt tokens              1.86             1.80
            random rows                                1.63             1.65
        """
        self.rows.pop(0)
        self.rows.append(list(new))
