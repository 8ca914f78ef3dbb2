"""A job: one conversation (of a set) x method x temperature x repeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.bench.methods import Method
from lookahead.bench.prompts import Prompt
from lookahead.bench.results import Row, key_of


@dataclass(frozen=True)
class Job:
    """One conversation by one method, once."""

    data: str
    number: int
    prompt: Prompt = field(repr=False)
    method: Method
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 0
    warm: bool = False

    def facts(self) -> Row:
        return {
            "kind": "answer",
            "set": self.data,
            "prompt": self.prompt.id,
            "text": key_of({"turns": self.prompt.turns, "system": self.prompt.system, "raw": self.prompt.raw}),
            "method": self.method.facts(),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "repeat": self.repeat,
            "warm": [self.warm, self.number] if self.warm else False,
        }

    @property
    def key(self) -> str:
        return key_of(self.facts())

    @property
    def group(self) -> tuple[str, Method, float, int]:
        """Jobs that a warm method runs as one: what it has learned from one prompt helps with the next."""
        return self.data, self.method, self.temperature, self.repeat
