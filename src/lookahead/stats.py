"""What happened: the one place that defines a step, S and tokens per second, for every method."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters of one request.

    A step is one forward pass that accepts tokens; the prefill's first token counts as one. `compression` is the
    paper's S. `accepted_by_depth[d]` counts the steps in which a guess at depth d + 1 was accepted;
    `accepted_by_source` the accepted guesses by the source that proposed them.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    propose_seconds: float = 0.0
    forward_seconds: float = 0.0
    absorb_seconds: float = 0.0
    seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def compression(self) -> float:
        """S = generated tokens / steps."""
        return self.generated_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time from prompt to last token."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean K: tokens fed per step, the prompt not counted."""
        return self.step_tokens / self.steps if self.steps else 0.0

    def count_step(self, tree_tokens: int, accepted: int, sources: list[str]) -> None:
        """One step of `tree_tokens` tokens that gave `accepted` tokens, the first ones guessed by `sources`."""
        self.steps += 1
        self.step_tokens += tree_tokens
        self.generated_tokens += accepted
        for depth, source in enumerate(sources):
            if depth == len(self.accepted_by_depth):
                self.accepted_by_depth.append(0)
            self.accepted_by_depth[depth] += 1
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
