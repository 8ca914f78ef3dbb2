"""The settings of one request: one field per keyword of `generate` and `stream`, with the same default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lookahead.config import LookaheadConfig, SamplingParams, new_seed, reject_unknown


@dataclass(frozen=True)
class RequestSettings:
    """The settings of one answer as they were given; `LookaheadModel.generate` describes them.

    They are checked where they are used: by `SamplingParams`, `StopRules` and `LookaheadConfig`. None stands for what
    the model or a random generator supplies: the fitted config, the generation config's repetition penalty, a seed.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    stop: str | Sequence[str] | None = ()
    raw: bool = False
    method: str = "lookahead"
    config: LookaheadConfig | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> RequestSettings:
        """The settings in `parameters`, the `locals()` of `generate` or `stream`. Its entry `unknown` has the keywords
        that are not settings; the first raises a TypeError that suggests the nearest setting."""
        names = [field.name for field in fields(cls)]
        reject_unknown(parameters["unknown"], names)
        return cls(**{name: parameters[name] for name in names})

    def sampling(self, repetition_penalty: float) -> SamplingParams:
        """The sampling parameters, with this repetition penalty if none was given, and a random seed if none was."""
        return SamplingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            new_seed() if self.seed is None else self.seed,
            repetition_penalty if self.repetition_penalty is None else self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logit_bias or (),
            self.logprobs,
        )

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a sequence."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()
