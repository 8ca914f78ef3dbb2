"""Count on one rank what several would run: S on real text, and the tokens of the fullest of 2, 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lookahead.algorithm.sources import SharedMemory, wants_top
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import StepOutput
from lookahead.backends.base import Backend, StepInput
from lookahead.bench.run.decode import decode
from lookahead.bench.run.results import Record
from lookahead.config import LookaheadConfig, StopRules
from lookahead.parallel.deal import Share, deal
from lookahead.stats import Stats

RANKS = (1, 2, 4, 8)


@dataclass
class Rehearsed:
    """A setting on some prompts: tokens, steps, and the fullest rank's tokens by number of ranks, all summed.

    `top` is how many likeliest tokens of a row the ranks exchange: none unless they are recycled.
    """

    setting: str
    tokens: int
    steps: int
    step_tokens: int
    shares: dict[int, int]
    top: int = KEPT_TOKENS

    @classmethod
    def of(cls, record: Record) -> Rehearsed:
        """From a record; JSON's keys are text."""
        facts = {one.name: record[one.name] for one in fields(cls)}
        return cls(**facts | {"shares": {int(ranks): share for ranks, share in record["shares"].items()}})

    @property
    def compression(self) -> float:
        return self.tokens / max(1, self.steps)

    def share(self, ranks: int) -> float:
        """Mean tokens of the fullest of so many ranks."""
        return self.shares[ranks] / max(1, self.steps)


class Rehearsal:
    """A backend that decodes on one rank, and deals every tree to several ranks as `parallel` would.

    A rank's tokens include those that it has to run again because another rank's were accepted.
    """

    def __init__(self, inner: Backend, ranks: Sequence[int] = RANKS) -> None:
        self.inner, self.max_length = inner, inner.max_length
        self.open, self.length, self.collect = inner.open, inner.length, inner.collect
        self.shares = dict.fromkeys(ranks, 0)
        self._lacks: dict[tuple[int, int], list[int]] = {}
        self._last: dict[tuple[int, int], list[Share]] = {}

    def close(self, slot: int) -> None:
        self.inner.close(slot)
        for ranks in self.shares:
            self._lacks.pop((slot, ranks), None)
            self._last.pop((slot, ranks), None)

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        for ranks in self.shares:
            loads = [0] * ranks
            for item in inputs:
                lacks = self._lacks.get((item.slot, ranks), [0] * ranks)
                dealt = self._last[item.slot, ranks] = deal(item.tree, ranks, lacks)
                loads = [a + len(b.nodes) + c for a, b, c in zip(loads, dealt, lacks, strict=True)]
            self.shares[ranks] += max(loads)
        return self.inner.launch(inputs)

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, path in accepted:
            for ranks in self.shares:
                dealt = self._last.pop((slot, ranks))
                self._lacks[slot, ranks] = [len(path) - len(share.local(path)) for share in dealt]
        self.inner.commit(accepted)


def rehearse(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    name: str,
    config: LookaheadConfig,
    rules: StopRules,
    ranks: Sequence[int] = RANKS,
) -> Rehearsed:
    """S and shares of a setting that starts cold and keeps what it learns from prompt to prompt."""
    rehearsal, memory = Rehearsal(backend, ranks), SharedMemory()
    stats = Stats.total(decode(rehearsal, [prompt], config, rules, memory).stats for prompt in prompts)
    top = KEPT_TOKENS if wants_top(config) else 0
    return Rehearsed(name, stats.generated_tokens, stats.steps, stats.step_tokens, rehearsal.shares, top)
