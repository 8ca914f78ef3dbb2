"""A job: one conversation of a set, answered once by one method."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.bench.run.methods import Method
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.results import Record, key_of


@dataclass(frozen=True)
class Job:
    """`number` is the prompt's index in its set, `repeat` counts the times that the same answer is timed."""

    data: str
    number: int
    prompt: Prompt = field(repr=False)
    method: Method
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 0
    warm: bool = False

    @property
    def key(self) -> str:
        """The name of everything that decides the answer and its time."""
        prompt = self.prompt
        facts: Record = {
            "kind": "answer",
            "set": self.data,
            "prompt": prompt.id,
            "text": key_of({"turns": prompt.turns, "system": prompt.system, "raw": prompt.raw}),
            "method": self.method.facts(),
            "warm": [self.warm, self.number] if self.warm else False,
        }
        return key_of(facts | self.settings)

    @property
    def settings(self) -> Record:
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "seed", "repeat")}

    @property
    def group(self) -> tuple[str, Method, float, int]:
        """Jobs that a warm method runs as one: what it learned from one prompt helps with the next."""
        return self.data, self.method, self.temperature, self.repeat
