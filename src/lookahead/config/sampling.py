"""How a target token is drawn from logits, and when a sequence ends."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookahead.config.checks import at_least

MOST_LOGPROBS = 20
"""The most likely tokens whose log-probabilities a request may have."""


def new_seed() -> int:
    """A random seed."""
    return random.SystemRandom().getrandbits(31)


@dataclass(frozen=True)
class SamplingParams:
    """How a node's logits become its target. `temperature` 0 is greedy.

    `repetition_penalty` is for tokens of prompt and output: a score above 0 is divided by it, one below multiplied.
    `presence_penalty` is taken from the score of every token of the output, `frequency_penalty` once for each time that
    it occurs there. `logit_bias` is added to the scores of some tokens; -inf bans one. It may be given as a mapping,
    and is stored as sorted pairs. `sampling.adjusted` defines all four. `logprobs` requests log-probabilities: of the
    chosen token (0), and of the n likeliest ones (n).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be a number")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be a number from 0 (greedy) up, such as 0.8")
        at_least("top_k", self.top_k, 0)
        at_least("seed", self.seed, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 (keeps every token) and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 (1 changes nothing)")
        for name in penalties[1:]:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number (0 changes nothing)")
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.logprobs is not None and at_least("logprobs", self.logprobs, 0) > MOST_LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs} must be at most {MOST_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is stored: pairs of a token id and a number, by token id."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        """Whether a target depends on which tokens the text has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class StopRules:
    """When a sequence ends. The rules are tested after every accepted token, not once per step.

    `max_length` is the model's context: the most tokens of prompt and output together. With `last_is_free`
    there may be one more, because the last token is never run through the model and needs no position. The first
    `min_tokens` tokens of the output cannot be one of `eos_ids`.
    """

    max_tokens: int = 256
    eos_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    last_is_free: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        at_least("max_tokens", self.max_tokens, 1)
        if at_least("min_tokens", self.min_tokens, 0) > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")

    def room(self, prompt_tokens: int) -> int:
        """How many tokens may be generated after a prompt of this length."""
        if self.max_length is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_length + self.last_is_free - prompt_tokens)


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping from token ids to numbers, or pairs of these -> sorted pairs, without those that add 0."""
    try:
        pairs = sorted(dict(given or ()).items())
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={given!r:.60} must map token ids to numbers, such as {{42: -1.5}}") from None
    for token, value in pairs:
        at_least("a token id of logit_bias", token, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value < math.inf:
            raise ValueError(f"logit_bias={{{token}: {value!r}}} must be a number; -inf bans the token")
    return tuple((token, float(value)) for token, value in pairs if value)
