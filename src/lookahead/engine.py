"""The engine steps one or many sequences through one backend: propose, one forward pass, absorb, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from lookahead.backends.base import Backend, StepInput
from lookahead.sequence import DecodingSequence
from lookahead.sources import TOP


@dataclass(slots=True)
class Accepted:
    """What a step gave one sequence: a whole accepted block. `sequence.finish_reason` tells whether it ended."""

    sequence: DecodingSequence
    tokens: list[int]


class Engine:
    """Continuous batching with ragged acceptance: sequences join and leave between steps.

    Every sequence has its own config, sampling and stop rules. A newcomer's first step carries its prompt and runs by
    itself (padding the others to a prompt's length would cost more); from then on it shares the batch's forward pass.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._slots: dict[DecodingSequence, int] = {}

    def add(self, sequence: DecodingSequence) -> None:
        """Let a sequence take part from the next step on."""
        self._slots[sequence] = self.backend.open()

    def remove(self, sequence: DecodingSequence) -> None:
        """Let a sequence leave before it has finished."""
        self.backend.close(self._slots.pop(sequence))

    @property
    def running(self) -> list[DecodingSequence]:
        return list(self._slots)

    def step(self) -> list[Accepted]:
        """One decoding step of every running sequence. Finished ones leave."""
        newcomers = [s for s, slot in self._slots.items() if not self.backend.length(slot)]
        others = [s for s in self._slots if s not in newcomers]
        results = []
        for group in [*([s] for s in newcomers), others]:
            if group:
                results += self._step(group)
        for result in results:
            if result.sequence.finish_reason is not None:
                self.remove(result.sequence)
        return results

    def _step(self, group: Sequence[DecodingSequence]) -> list[Accepted]:
        # 1. Propose: each sequence's tree.
        begin = perf_counter()
        inputs = []
        for sequence in group:
            slot, tree = self._slots[sequence], sequence.propose()
            trail = sequence.tokens[self.backend.length(slot) : -1]
            top = TOP if sequence.wants_top else 0
            inputs.append(StepInput(slot, trail, tree, sequence.sampling, sequence.uniforms(tree), top))
        # 2. One forward pass over all of them.
        proposed = perf_counter()
        targets = self.backend.step(inputs)
        ran = perf_counter()
        # 3. Absorb: each sequence accepts what it can, and learns.
        results, paths = [], []
        for sequence, item, result in zip(group, inputs, targets, strict=True):
            tokens, path = sequence.absorb(item.tree, result)
            results.append(Accepted(sequence, tokens))
            paths.append((item.slot, path))
        absorbed = perf_counter()
        # 4. Commit: the accepted tokens' K/V move next to the prefix.
        self.backend.commit(paths)
        done = perf_counter()
        for sequence in group:
            sequence.stats.propose_seconds += (proposed - begin) / len(group)
            sequence.stats.forward_seconds += ran - proposed + done - absorbed
            sequence.stats.absorb_seconds += (absorbed - ran) / len(group)
        return results
