"""The preset `scaling`: what 2, 4 and 8 GPUs would buy, projected from what is measured on one.

    time per token = (t(share) + exchange) / S

S and the shares are counted on real text (see `Rehearsal`), t(K) is the measured time of a step of K tokens. Only the
exchange is reckoned, from its bytes and a stated link. S does not depend on the number of ranks, so each number of
ranks takes the setting that suits it best: more ranks, larger steps, fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from lookahead.algorithm.sources import SharedMemory, wants_top
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import StepOutput
from lookahead.backends.base import Backend, StepInput
from lookahead.bench.report.plots import Curves, Points
from lookahead.bench.report.sections import Section, times
from lookahead.bench.run import costs
from lookahead.bench.run.decode import decode
from lookahead.bench.run.methods import plain
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.results import Record, key_of
from lookahead.bench.run.runner import prompt_ids
from lookahead.bench.run.summary import BenchRun
from lookahead.config import LookaheadConfig, StopRules
from lookahead.loading.step_cost import StepCost
from lookahead.loading.timing import WIDE_SIZES
from lookahead.parallel.deal import Share, deal
from lookahead.parallel.results import HEADER, ROWS
from lookahead.stats import Stats
from lookahead.tune.candidates import at

OUR_SIZES = ((5, 5, 8, 128), (8, 5, 12, 192), (10, 5, 15, 256), (15, 5, 20, 384), (20, 5, 30, 512))
OUR_SETTINGS = {
    f"W={window}, N={ngram}, G={guesses}, K={budget}": LookaheadConfig(window, ngram, guesses, budget)
    for window, ngram, guesses, budget in OUR_SIZES
}
"""The default, and what more ranks have room for."""
PAPER_SETTINGS = {
    f"paper ({ngram},{window},{guesses})": LookaheadConfig.paper(window, ngram, guesses, prompt=True)
    for ngram, window, guesses in ((5, 15, 15), (5, 30, 30), (6, 30, 30), (7, 40, 40))
}
"""The paper's method alone, with prompt n-grams."""
FAMILIES = {"ours": OUR_SETTINGS, "paper": PAPER_SETTINGS}
WHOSE = {"ours": "our sources", "paper": "the paper's method"}


RANKS = (1, 2, 4, 8)
"""Numbers of ranks that are rehearsed."""


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
        self.inner, self.capabilities, self.max_length = inner, inner.capabilities, inner.max_length
        self.most_rows, self.most_nodes, self.dtype = inner.most_rows, inner.most_nodes, inner.dtype
        self.open, self.length, self.collect = inner.open, inner.length, inner.collect
        self.reserve, self.holds, self.remember = inner.reserve, inner.holds, inner.remember
        self.shares = dict.fromkeys(ranks, 0)
        self._lacks: dict[tuple[int, int], list[int]] = {}
        self._last: dict[tuple[int, int], list[Share]] = {}

    @property
    def captures(self) -> int:
        return self.inner.captures

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


class Link(NamedTuple):
    """How ranks reach each other: bytes per second in one direction, and the seconds that any exchange takes."""

    bytes_per_second: float
    latency: float


NVLINK = Link(450e9, 30e-6)
"""NVLink 4's 450 GB/s in one direction; the 30 us of a small collective and its way to the host are assumed."""


@dataclass(frozen=True)
class Projected:
    """A setting on so many ranks. `sent` are the bytes that a rank sends in a step."""

    ranks: int
    of: Rehearsed
    share: float
    sent: int
    step_ms: float
    exchange_ms: float
    token_ms: float
    speedup: float


def exchanged(share: float, top: int = KEPT_TOKENS) -> int:
    """Bytes that a rank sends in a step: a fixed-size tensor of targets and likeliest tokens."""
    rows = max(ROWS, 1 << max(0, int(share) - 1).bit_length())
    return 4 * (HEADER + rows * (1 + 2 * top))


def project(rehearsed: Sequence[Rehearsed], cost: StepCost, link: Link = NVLINK) -> list[Projected]:
    """For each number of ranks the setting with the least time per token.

    The speedup is over one rank that decodes token by token.
    """
    table = cost.table(WIDE_SIZES[-1])

    def projected(one: Rehearsed, ranks: int) -> Projected:
        share = one.share(ranks)
        sent = exchanged(share, one.top)
        step, others = 1e3 * at(table, share), ranks - 1
        exchange = 1e3 * (link.latency + others * sent / link.bytes_per_second) if others else 0.0
        token = (step + exchange) / one.compression
        return Projected(ranks, one, share, sent, step, exchange, token, 1e3 * table[0] / token)

    numbers = [ranks for ranks in RANKS if ranks in rehearsed[0].shares]
    return [min((projected(one, r) for one in rehearsed), key=lambda line: line.token_ms) for r in numbers]


def measure(run: BenchRun) -> None:
    lm = run.models.own
    for data, prompts in run.prompts.items():
        rules = StopRules(run.max_tokens[data], lm.stop_ids, lm.backend.max_length)
        ids = [prompt_ids(lm, prompt) for prompt in prompts]
        for family, settings in FAMILIES.items():
            for name, config in settings.items():
                key = _key(run, data, family, name)
                if key not in run.results:
                    run.say(f"{data}: S and shares of {name}")
                    facts = {"set": data, "family": family, "config": plain(config)}
                    facts |= asdict(rehearse(lm.backend, ids, name, config, rules))
                    run.results.add({"kind": "share", "key": key, **facts})
    costs.measured(run)


def work(prompts: dict[str, list[Prompt]], tokens: dict[str, int]) -> tuple[int, int]:
    """How many answers `measure` generates, and how many tokens those may have. Only first turns are asked."""
    settings = sum(map(len, FAMILIES.values()))
    return settings * sum(map(len, prompts.values())), settings * sum(len(p) * tokens[d] for d, p in prompts.items())


def _key(run: BenchRun, data: str, family: str, name: str) -> str:
    chosen = [prompt.id for prompt in run.prompts[data]]
    facts = {"set": data, "prompts": chosen, "tokens": run.max_tokens[data], "of": [family, name]}
    return key_of({"kind": "share", **facts})


def show(run: BenchRun) -> list[Section]:
    cost = costs.known(run)
    made: list[Section] = []
    for data in run.prompts:
        for family, settings in FAMILIES.items():
            keys = [_key(run, data, family, name) for name in settings]
            rehearsed = [Rehearsed.of(run.results.records[key]) for key in keys if key in run.results]
            if rehearsed and cost is not None:
                made.append(_projection(run, data, WHOSE[family], project(rehearsed, cost)))
    return made or [Section("Projection", notes=["Nothing was measured yet: run the same command again."])]


def _projection(run: BenchRun, data: str, whose: str, lines: Sequence[Projected]) -> Section:
    head = ("GPUs", "setting", "S", "tokens of the fullest", "step ms", "exchange ms", "ms per token", "speedup")
    section = Section(f"Projection: {data}, {whose}", head)
    for p in lines:
        section.rows.append([
            str(p.ranks), p.of.setting, f"{p.of.compression:.2f}", f"{p.share:.0f}", f"{p.step_ms:.2f}",
            f"{p.exchange_ms:.3f}", f"{p.token_ms:.2f}", times(p.speedup),
        ])  # fmt: skip
    source = f"from {run.step_cost}" if run.step_cost else "measured on this machine"
    section.notes = [
        f"A projection, not a measurement on several GPUs: S and shares measured on one rank, t(K) {source}, the "
        "exchange reckoned at 450 GB/s and 30 us per exchange. The speedup is over one rank that decodes token by "
        "token.",
        "The paper measured up to 4x on ClassEval with 8 A100s (LLaMA and CodeLlama, 7B and 13B).",
    ]
    curves: dict[str, Points] = {"projection": [(p.ranks, p.speedup) for p in lines]}
    if data == "classeval":
        curves["paper: 4x with 8 GPUs"] = [(8, 4)]
    section.plots.append(Curves(f"{data}: projected speedup, {whose}", "GPUs", "times", curves, list(curves)[1:]))
    return section
