"""The engine steps one or many sequences through one backend: propose, one forward pass, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import TOP
from lookahead.algorithm.tree import StepOutput
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import Backend, StepInput, padded
from lookahead.config import SamplingParams


@dataclass(slots=True)
class Accepted:
    """What a step gave one sequence: a whole accepted block. `sequence.finish_reason` tells whether it ended."""

    sequence: DecodingSequence
    tokens: list[int]


@dataclass(slots=True)
class StepResult:
    """One sequence's part of a step that ran: what went in, what came out."""

    sequence: DecodingSequence
    item: StepInput
    result: StepOutput


Judge = Callable[[Sequence[StepResult]], list[Verdict]]
"""Verifies all sequences of a step together, from their logits (see `walk`)."""


GREEDY = SamplingParams()
"""Where a judge chooses the tokens, the backend's targets are only hints for the window and the sources."""


class Engine:
    """Continuous batching with ragged acceptance: sequences join and leave between steps.

    Every sequence has its own config, sampling and stop rules. A newcomer's first step carries its prompt and runs by
    itself (padding the others to a prompt's length would cost more); from then on it shares the batch's forward pass.
    A `judge` verifies in place of the sequences themselves. `leaving` is told of every sequence that leaves, and its
    slot, while the backend still holds its K/V.
    """

    def __init__(
        self,
        backend: Backend,
        judge: Judge | None = None,
        leaving: Callable[[DecodingSequence, int], None] | None = None,
    ) -> None:
        self.backend, self.judge, self.leaving = backend, judge, leaving
        self._slots: dict[DecodingSequence, int] = {}
        self._spent: Sequence[
            StepResult
        ] = ()  # the last step, whose many small parts are let go while the next one runs

    def add(self, sequence: DecodingSequence, slot: int | None = None) -> None:
        """Let a sequence take part from the next step on; `slot` may hold the K/V of its first tokens already."""
        self._slots[sequence] = self.backend.open() if slot is None else slot

    def remove(self, sequence: DecodingSequence) -> None:
        """Let a sequence leave before it has finished."""
        slot = self._slots.pop(sequence)
        if self.leaving is not None:
            self.leaving(sequence, slot)
        self.backend.close(slot)

    def clear(self) -> None:
        """Let all that still run go, before they have finished, and tell nobody."""
        while self._slots:
            self.backend.close(self._slots.popitem()[1])

    @property
    def running(self) -> list[DecodingSequence]:
        return list(self._slots)

    def step(self) -> list[Accepted]:
        """One decoding step of every running sequence. Finished ones leave."""
        # 1. Propose, and one forward pass: over those that go on together, over each newcomer by itself.
        cached = self.backend.length
        others: list[DecodingSequence] = []
        ran: list[StepResult] = []
        for sequence, slot in list(self._slots.items()):
            if cached(slot) < len(sequence.tokens) - 1:
                ran += self._forward([sequence])
            else:
                others.append(sequence)
        if others:
            ran += self._forward(others)
        return self.settle(ran)

    def settle(self, ran: Sequence[StepResult], *, commit: bool = True) -> list[Accepted]:
        """The rest of a step that ran. Without `commit` it had no guesses, and its root's K/V is in place already."""
        # 2. Verify and absorb: each sequence accepts what it can, and learns.
        begin = perf_counter()
        verdicts: Sequence[Verdict | None] = [None] * len(ran) if self.judge is None else self.judge(ran)
        accepted = [
            (one, one.sequence.absorb(one.item.tree, one.result, verdict))
            for one, verdict in zip(ran, verdicts, strict=True)
        ]
        absorbed = perf_counter()
        # 3. Commit: the accepted tokens' K/V move next to the prefix. Finished sequences leave.
        if commit:
            self.backend.commit([(one.item.slot, verdict.path) for one, verdict in accepted])
        done = perf_counter()
        for one, verdict in accepted:
            one.sequence.stats.absorb_seconds += (absorbed - begin) / len(ran)
            one.sequence.stats.forward_seconds += done - absorbed
            if verdict.finish_reason is not None:
                self.remove(one.sequence)
        self._spent = ran
        return [Accepted(one.sequence, verdict.tokens) for one, verdict in accepted]

    def _forward(self, group: Sequence[DecodingSequence]) -> list[StepResult]:
        """Propose each sequence's tree and run all of them in one pass."""
        begin = perf_counter()
        inputs = []
        together = len(group) == len(self._slots)  # so the next step's group is this one
        for sequence in group:
            slot, tree = self._slots[sequence], sequence.propose(padded(len(group)))
            trail = sequence.tokens[self.backend.length(slot) : -1]
            top = TOP if sequence.wants_top else 0
            if self.judge is None:
                item = StepInput(slot, trail, tree, sequence.sampling, sequence.uniforms(tree), top)
                item.continues_alone = together and sequence.continues_alone
                inputs.append(item)
            else:
                inputs.append(StepInput(slot, trail, tree, GREEDY, (), top, logits=True))
        proposed = perf_counter()
        launched = self.backend.launch(inputs)
        self._learn_while_running(group, inputs)
        results = self.backend.collect(launched)
        ran = perf_counter()
        for sequence in group:
            sequence.stats.propose_seconds += (proposed - begin) / len(group)
            sequence.stats.forward_seconds += ran - proposed
        return [StepResult(*parts) for parts in zip(group, inputs, results, strict=True)]

    def _learn_while_running(self, group: Sequence[DecodingSequence], inputs: Sequence[StepInput]) -> None:
        """What can wait until the device runs: the trees as verification reads them, and what the last step left."""
        self._spent = ()
        for sequence in group:
            sequence.learn_while_running()
        for item in inputs:
            item.tree.guesses()
