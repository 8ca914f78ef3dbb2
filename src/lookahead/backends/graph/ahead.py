"""The step ahead: in plain decoding, the device starts the next step while the host still reads the last one.

A step of one token per sequence needs nothing from the host: its token is the last target, and its position the next
one. So when all inputs of a step are marked `continues_alone`, the graph backend launches the following step right
after it, and the device does not wait for the host. If the host then asks for that very step, it is already running or
done.

If the host asks for something else (a sequence stopped, another one joined), the step ahead is dropped. That is
harmless: it wrote the K/V of one token per sequence after the cached ones, and the next step runs after it and
overwrites them. Recurrent states got the roots of the step before it, which are accepted tokens (see `kv.states`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from lookahead.algorithm.output import StepOutput, StepResults
from lookahead.backends.base import MOST_AHEAD, StepInput
from lookahead.backends.graph.running import RunningStep


@dataclass(slots=True)
class LaunchedStep:
    """A launched step and its inputs.

    `starts` are the indices of each input's first needed row, `lengths` the positions of the roots. `ahead`: the number
    of steps since the last one with a packet. `kept`: for a step ahead of a model with recurrent states, its first row
    among the kept ones. `results`, and with them the `outputs`, are filled by `read`; if it `reads_more`, some outputs
    have logits or log-probabilities.
    """

    inputs: list[StepInput]
    starts: list[int]
    lengths: list[int]
    running: RunningStep
    ahead: int = 0
    kept: int = 0
    outputs: list[StepOutput] | None = None
    reads_more: bool = False
    results: StepResults | None = None

    def make_outputs(self) -> list[StepOutput]:
        """Create the outputs, still without results, while the device runs."""
        ends = [*self.starts[1:], self.starts[-1] + self.inputs[-1].tree.needed_count]
        self.outputs, self.results = [], self.running.new_results(ends[-1])
        self.reads_more = any(sequence.logits or sequence.logprobs is not None for sequence in self.inputs)
        for start, end, sequence in zip(self.starts, ends, self.inputs, strict=True):
            self.outputs.append(StepOutput.of_results(self.results, start, end, sequence.top))
        return self.outputs

    def read(self) -> list[StepOutput]:
        """Copy the results, which have arrived on the host."""
        running, outputs = self.running, self.make_outputs() if self.outputs is None else self.outputs
        assert self.results is not None
        running.copy_results(self.results)
        for start, sequence, output in zip(self.starts, self.inputs, outputs, strict=True) if self.reads_more else ():
            if sequence.logits or sequence.logprobs is not None:
                end = start + len(sequence.tree.needed)
                if sequence.logits and end > start:
                    output.logits = running.logits(start, end)
                if sequence.logprobs is not None and (found := running.logprobs(start, end, sequence.logprobs)):
                    output.likely, output.logprobs = found
        return outputs


class StepAhead:
    """At most one step that runs before the host asks for it.

    Two engines that take turns on one backend would waste every step ahead. So after one was wasted, none is started
    until the same sequences step twice in a row.
    """

    def __init__(self, order_after: Callable[[RunningStep], None]) -> None:
        """`order_after` orders work launched from now on after a step."""
        self._order_after = order_after
        self._running: LaunchedStep | None = None  # the step ahead
        self._before: LaunchedStep | None = None  # the step that it follows
        self._roots: list[list[int]] = []  # that step's targets, which are the roots of the step ahead
        self._paused = False
        self._last_slots: list[int] = []  # slots of the last step, recorded while paused

    @property
    def watches(self) -> bool:
        """Whether `take_matching` must see the next step: one runs ahead, or steps ahead are paused."""
        return self._running is not None or self._paused

    def may_follow(self, before: LaunchedStep) -> bool:
        """Whether the inputs of the step after `before` are already known."""
        if self._paused or not all(sequence.continues_alone and is_plain(sequence) for sequence in before.inputs):
            return False
        drawn = [sequence for sequence in before.inputs if sequence.uniforms]
        return not drawn or (before.ahead < MOST_AHEAD and all(sequence.next_uniforms for sequence in drawn))

    def note_started(self, before: LaunchedStep, running: RunningStep, kept: int) -> None:
        """Record the step ahead that was started right after `before`. `kept`: see `LaunchedStep`."""
        lengths = [length + 1 for length in before.lengths]
        self._running = LaunchedStep(before.inputs, before.starts, lengths, running, before.ahead + 1, kept)
        self._before = before

    def note_results(self, launched: LaunchedStep, results: Sequence[StepOutput]) -> None:
        """Record the results of a step: its targets are the roots of the step ahead."""
        if launched is self._before:
            self._roots = [list(result.targets) for result in results]

    def take_matching(
        self, inputs: Sequence[StepInput], lengths: Sequence[int], open: Container[int]
    ) -> LaunchedStep | None:
        """The step ahead if it is the step of these inputs. Otherwise drop it and return None.

        `lengths` are the inputs' cached tokens, `open` the open slots.
        """
        roots, running, slots = self._roots, self.drop(), [sequence.slot for sequence in inputs]
        if running is None:  # paused: resume when the same slots step again
            self._paused, self._last_slots = slots != self._last_slots, slots
            return None
        if slots != [sequence.slot for sequence in running.inputs]:  # wasted: pause, unless one of its sequences ended
            self._paused, self._last_slots = all(sequence.slot in open for sequence in running.inputs), slots
            return None
        if not all(map(is_plain, inputs)) or list(lengths) != running.lengths:
            return None
        if [list(sequence.tree.tokens) for sequence in inputs] != roots:
            return None
        if any(sequence.sampling != old.sampling for sequence, old in zip(inputs, running.inputs, strict=True)):
            return None
        return replace(running, inputs=list(inputs), outputs=None, results=None)

    def drop(self) -> LaunchedStep | None:
        """Drop the step ahead and return it. Work launched from now on, on any stream, runs after it."""
        launched = self._running
        if launched is not None:
            self._order_after(launched.running)
        self._running, self._before, self._roots = None, None, []
        return launched


def is_plain(sequence: StepInput) -> bool:
    """Whether an input is just its root, with unadjusted logits, and returns neither logits nor log-probabilities."""
    if sequence.adjustment is not None or sequence.logprobs is not None:
        return False
    return len(sequence.tree) == 1 and not sequence.chunk and not sequence.logits
