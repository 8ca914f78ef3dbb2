"""What more GPUs would buy: a projection of lookahead parallelism, made of measured parts.

    time per token = (t(share) + exchange) / S

S and the shares are counted on real text: one rank decodes, and a `Rehearsal` deals every tree to 2, 4 and 8 ranks as
`parallel` would, the tokens that a rank has to catch up with included. t(K) is the measured time of a step of K tokens.
Only the exchange is reckoned, from its bytes and a stated link. S does not depend on the number of ranks, so each
number of ranks takes the setting that suits it best: more ranks, larger steps, fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory, wants_top
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import StepOutput
from lookahead.backends.base import Backend, StepInput
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.loading.step_cost import StepCost
from lookahead.parallel.backend import HEADER, ROWS
from lookahead.parallel.deal import Share, deal

RANKS = (1, 2, 4, 8)

SETTINGS = {
    f"W={window}, N={ngram}, G={guesses}, K={budget}": LookaheadConfig(window, ngram, guesses, budget)
    for window, ngram, guesses, budget in (
        (5, 5, 8, 128),
        (8, 5, 12, 192),
        (10, 5, 15, 256),
        (15, 5, 20, 384),
        (20, 5, 30, 512),
    )
}
"""The default, and what more ranks have room for."""

PAPER = {
    f"paper ({ngram},{window},{guesses})": LookaheadConfig.paper(window, ngram, guesses, prompt=True)
    for ngram, window, guesses in ((5, 15, 15), (5, 30, 30), (6, 30, 30), (7, 40, 40))
}
"""The paper's method alone, with prompt n-grams."""


@dataclass(frozen=True)
class Link:
    """How ranks reach each other: bytes per second in one direction, and the seconds that any exchange takes."""

    name: str
    bytes_per_second: float
    latency: float

    def gather(self, ranks: int, size: int) -> float:
        """Seconds until all ranks have `size` bytes of every other."""
        return self.latency + (ranks - 1) * size / self.bytes_per_second if ranks > 1 else 0.0


NVLINK = Link("450 GB/s and 30 us per exchange", 450e9, 30e-6)
"""NVLink 4's 450 GB/s in one direction; the 30 us of a small collective and its way to the host are assumed."""


@dataclass
class Measured:
    """A setting on some prompts: tokens and steps, tokens per step, and the largest share of R ranks, summed.

    `top` is how many likeliest tokens a row is exchanged with: none unless they are recycled.
    """

    setting: str
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    shares: dict[int, int] | None = None
    top: int = KEPT_TOKENS

    @property
    def compression(self) -> float:
        return self.tokens / max(1, self.steps)

    def share(self, ranks: int) -> float:
        """Mean tokens of the fullest of so many ranks."""
        assert self.shares is not None
        return self.shares[ranks] / max(1, self.steps)


@dataclass(frozen=True)
class Projected:
    """One line of the projection. `sent` are the bytes that a rank sends in a step."""

    ranks: int
    setting: str
    compression: float
    share: float
    sent: int
    step_ms: float
    exchange_ms: float
    token_ms: float
    speedup: float


class Rehearsal:
    """A backend that decodes on one rank and counts what several would have run."""

    def __init__(self, inner: Backend, ranks: Sequence[int] = RANKS) -> None:
        self.inner, self.max_length = inner, inner.max_length
        self.shares = dict.fromkeys(ranks, 0)
        self._lacks: dict[tuple[int, int], list[int]] = {}
        self._last: dict[tuple[int, int], list[Share]] = {}

    def open(self) -> int:
        return self.inner.open()

    def close(self, slot: int) -> None:
        self.inner.close(slot)
        for kept in (self._lacks, self._last):
            for key in [key for key in kept if key[0] == slot]:
                del kept[key]

    def length(self, slot: int) -> int:
        return self.inner.length(slot)

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        for ranks in self.shares:
            loads = [0] * ranks
            for item in inputs:
                lacks = self._lacks.get((item.slot, ranks), [0] * ranks)
                dealt = self._last[item.slot, ranks] = deal(item.tree, ranks, lacks)
                loads = [a + len(b.nodes) + c for a, b, c in zip(loads, dealt, lacks, strict=True)]
            self.shares[ranks] += max(loads)
        return self.inner.launch(inputs)

    def collect(self, launched: Any) -> list[StepOutput]:
        return self.inner.collect(launched)

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, path in accepted:
            for ranks in self.shares:
                dealt = self._last.pop((slot, ranks))
                self._lacks[slot, ranks] = [len(path) - len(share.local(path)) for share in dealt]
        self.inner.commit(accepted)


def measure(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, LookaheadConfig],
    rules: StopRules,
    ranks: Sequence[int] = RANKS,
) -> list[Measured]:
    """S and shares of every setting, each from cold."""
    found = []
    for name, config in settings.items():
        rehearsal, memory = Rehearsal(backend, ranks), SharedMemory()
        measured = Measured(name, shares=rehearsal.shares, top=KEPT_TOKENS if wants_top(config) else 0)
        for prompt in prompts:
            sequence = DecodingSequence(prompt, config, rules=rules, memory=memory)
            engine = Engine(cast(Backend, rehearsal))
            engine.submit(Request(sequence))
            while engine.running:
                engine.step()
            measured.tokens += sequence.stats.generated_tokens
            measured.steps += sequence.stats.steps
            measured.step_tokens += sequence.stats.step_tokens
        found.append(measured)
    return found


def exchanged(share: float, top: int = KEPT_TOKENS) -> int:
    """Bytes that a rank sends in a step: a fixed-size tensor of targets and top rows."""
    rows = max(ROWS, 1 << max(0, int(share) - 1).bit_length())
    return 4 * (HEADER + rows * (1 + 2 * top))


def project(measured: Sequence[Measured], cost: StepCost, link: Link, host: float = 0.0) -> list[Projected]:
    """For each number of ranks the setting with the least time per token. `host` are seconds a step adds to t(K).

    The speedup is over one rank that decodes token by token.
    """
    ranks = sorted({r for one in measured for r in one.shares or {}})
    longest = max((one.share(r) for one in measured for r in ranks), default=1.0)
    table = cost.table(int(longest) + 2)
    found = []
    for r in ranks:
        lines = [_line(one, r, table, link, host) for one in measured]
        found.append(min(lines, key=lambda line: line.token_ms))
    return found


def _line(one: Measured, ranks: int, table: Sequence[float], link: Link, host: float) -> Projected:
    share = one.share(ranks)
    below = int(share)
    step = table[below - 1] + (share - below) * (table[below] - table[below - 1])
    sent = exchanged(share, one.top)
    exchange = link.gather(ranks, sent)
    token = (step + host + exchange) / one.compression
    speedup = (table[0] + host) / token
    return Projected(
        ranks, one.setting, one.compression, share, sent, 1e3 * (step + host), 1e3 * exchange, 1e3 * token, speedup
    )


@dataclass(frozen=True)
class Traffic:
    """What one kind of parallelism sends per generated token: collectives (or sends), and bytes from each rank."""

    kind: str
    collectives: float
    sent: float


def traffic(layers: int, hidden: int, ranks: int, compression: float, sent: int, width: int = 2) -> list[Traffic]:
    """On paper, batch 1: tensor parallel reduces two vectors of `hidden` numbers of `width` bytes per layer, as a ring;
    pipeline parallel hands one on from stage to stage (and makes no single answer faster); lookahead parallel gathers
    one tensor of integers per step, of `sent` bytes from each rank.
    """
    vector = hidden * width
    return [
        Traffic("tensor", 2 * layers, 2 * layers * 2 * (ranks - 1) / ranks * vector),
        Traffic("pipeline", ranks - 1, (ranks - 1) / ranks * vector),
        Traffic("lookahead", 1 / compression, (ranks - 1) * sent / compression),
    ]


def markdown(title: str, lines: Sequence[Projected], link: Link) -> str:
    """The projection as a table that says what it is."""
    rows = [
        f"| {p.ranks} | {p.setting} | {p.compression:.2f} | {p.share:.0f} | {p.step_ms:.2f} | {p.exchange_ms:.3f} "
        f"| {p.token_ms:.2f} | {p.speedup:.2f}x |"
        for p in lines
    ]
    head = "| GPUs | setting | S | tokens of the fullest | step ms | exchange ms | ms per token | speedup |"
    about = f"**{title}** (projection: S, shares and t(K) measured, exchange reckoned at {link.name})"
    return "\n".join([about, "", head, "|" + "---|" * 8, *rows])
