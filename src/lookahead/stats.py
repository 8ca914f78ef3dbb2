"""The counters of a request. Steps, S and tokens per second are defined here, for every method alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class Stats:
    """Counters of one request.

    A step is one forward pass that accepts tokens; the pass over the prompt, which gives the first token, is one too.
    `compression` is the paper's S. `expected_tokens` is what `generated_tokens` should be by the scores of the guesses
    that were taken: one token per step, and the chance of every guess. `accepted_by_depth[d]` counts the steps that
    accepted a guess at depth d + 1. `accepted_by_source` counts the accepted guesses of each source. `seconds` includes
    `queue_seconds`, the time that the request waited before it ran, and after a preemption.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    expected_tokens: float = 0.0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    propose_seconds: float = 0.0
    forward_seconds: float = 0.0
    absorb_seconds: float = 0.0
    queue_seconds: float = 0.0
    seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def compression(self) -> float:
        """S = generated tokens / steps."""
        return self.generated_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens divided by the wall time from the prompt to the last token."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean size of a step's tree. The prompt is not counted."""
        return self.step_tokens / self.steps if self.steps else 0.0

    def count_step(self, tree_tokens: int, accepted: int, sources: Sequence[str], expected: float = 0.0) -> None:
        """Count a step: its tree's tokens, its accepted tokens, the source of each accepted guess, and how many guesses
        were expected to be accepted."""
        self.steps += 1
        self.expected_tokens += 1 + expected
        self.step_tokens += tree_tokens
        self.generated_tokens += accepted
        for depth, source in enumerate(sources):
            if depth == len(self.accepted_by_depth):
                self.accepted_by_depth.append(0)
            self.accepted_by_depth[depth] += 1
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1

    def count_times(self, propose: float, forward: float, absorb: float, seconds: float) -> None:
        """Add one step's times. `seconds` is the total time of the request."""
        self.propose_seconds += propose
        self.forward_seconds += forward
        self.absorb_seconds += absorb
        self.seconds = seconds
        if not self.first_token_seconds:
            self.first_token_seconds = seconds

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """The sum of several requests, such as the turns of a chat. The first token's time is the first request's."""
        total = cls()
        for index, one in enumerate(parts):
            for name in ("prompt_tokens", "generated_tokens", "steps", "step_tokens", "expected_tokens"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            for name in ("propose_seconds", "forward_seconds", "absorb_seconds", "queue_seconds", "seconds"):
                setattr(total, name, getattr(total, name) + getattr(one, name))
            depths = zip_longest(total.accepted_by_depth, one.accepted_by_depth, fillvalue=0)
            total.accepted_by_depth = [a + b for a, b in depths]
            for source, count in one.accepted_by_source.items():
                total.accepted_by_source[source] = total.accepted_by_source.get(source, 0) + count
            if index == 0:
                total.first_token_seconds = one.first_token_seconds
        return total
