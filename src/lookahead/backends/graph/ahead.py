"""The step ahead: token by token, the device starts the next step by itself while the host reads the last one.

A step of one token per sequence needs nothing from the host: its token is the last target, and its position the next
one. So when all inputs of a step say that they continue alone, the graph backend starts the following step right behind
it, and the device does not have to wait for the host. If the host then asks for that very step, it is running already
or done.

If the host asks for something else (a sequence stopped, another one joined), the step ahead is forgotten. It does no
harm: it wrote the K/V of one token per sequence, behind all that is cached, and whatever comes next runs after it and
overwrites that.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch

from lookahead.algorithm.output import StepOutput, StepResults
from lookahead.backends.base import MOST_AHEAD, StepInput
from lookahead.backends.graph.captured import CapturedStep


@dataclass(slots=True)
class RunningStep:
    """A step that was launched.

    `starts` are where the needed rows of each input begin, `lengths` the positions of its roots, `turn` the host copy
    that gets its results, `stream` the CUDA stream it runs on (None on a CPU). `done` is set when a step ahead follows
    on the same stream: waiting for the stream would wait for that step, too, so the host waits for this event instead.
    `ahead`: how many steps ahead it is from the last one that the host sent a packet for. `results`, and with them the
    `outputs`, are filled when they are read.
    """

    step: CapturedStep
    inputs: list[StepInput]
    starts: list[int]
    lengths: list[int]
    turn: int
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None = None
    ahead: int = 0
    outputs: list[StepOutput] | None = None
    results: StepResults = field(default_factory=StepResults)

    def wait(self) -> None:
        """Block until the results are on the host. On a CPU they are there at once."""
        if self.done is not None:
            self.done.synchronize()
        elif self.stream is not None:
            self.stream.synchronize()

    def get_ready(self) -> list[StepOutput]:
        """Make the outputs, still without results, while the device runs."""
        ends = [*self.starts[1:], self.starts[-1] + len(self.inputs[-1].tree.needed)]
        self.outputs, results = [], self.results
        for start, end, item in zip(self.starts, ends, self.inputs, strict=True):
            self.outputs.append(StepOutput.of_results(results, start, end, item.top))
        return self.outputs

    def read(self, logits: torch.Tensor) -> list[StepOutput]:
        """Copies of the results, which are on the host; `logits` [N, V] are the step's, on the device."""
        step, outputs = self.step, self.get_ready() if self.outputs is None else self.outputs
        # One copy of everything: a call to NumPy takes as long for all inputs as for one.
        self.results.rows = step.top.arrays[self.turn][: self.starts[-1] + len(self.inputs[-1].tree.needed)].copy()
        for start, item, output in zip(self.starts, self.inputs, outputs, strict=True):
            if item.logits or item.logprobs is not None:
                end = start + len(item.tree.needed)
                if item.logits and end > start:
                    with torch.inference_mode():
                        output.logits = logits[start:end].clone()
                if item.logprobs is not None and step.logprobs is not None:
                    output.likely = step.logprobs.likely[start:end, : item.logprobs].copy()
                    output.logprobs = step.logprobs.array[start:end, : 1 + item.logprobs].copy()
        return outputs


class StepAhead:
    """At most one step that runs before the host asks for it.

    Two engines that step in turn on one backend would waste every step ahead. So after one was wasted on other
    sequences, none is started until the same sequences step twice in a row.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: RunningStep | None = None  # the step ahead
        self._before: RunningStep | None = None  # the step that it follows
        self._roots: list[list[int]] = []  # that step's targets, which the step ahead has taken as its roots
        self._paused = False
        self._last_slots: list[int] = []  # those of the last step, noted while paused

    @property
    def watches(self) -> bool:
        """Whether `take` must see the next step: one runs ahead, or none does until the same sequences step again."""
        return self._running is not None or self._paused

    def may_follow(self, before: RunningStep) -> bool:
        """Whether the inputs of the step after `before` are known."""
        if self._paused or not all(item.continues_alone and is_plain(item) for item in before.inputs):
            return False
        drawn = [item for item in before.inputs if item.uniforms]
        return not drawn or (before.ahead < MOST_AHEAD and all(item.next_uniforms for item in drawn))

    def start(self, before: RunningStep) -> None:
        """Start the step after `before`, whose inputs are known and have pages for it."""
        if before.stream is not None:
            before.done = before.stream.record_event()
        turn, lengths = 1 - before.turn, [length + 1 for length in before.lengths]
        before.step.run_ahead(turn)
        stream = stream_of(self._device)
        self._running = RunningStep(
            before.step, before.inputs, before.starts, lengths, turn, stream, ahead=before.ahead + 1
        )
        self._before = before

    def collected(self, running: RunningStep, results: Sequence[StepOutput]) -> None:
        """Note the results that the host has read of a step: the step ahead follows from them."""
        if running is self._before:
            self._roots = [list(result.targets) for result in results]

    def take(self, inputs: Sequence[StepInput], lengths: Sequence[int], open: Container[int]) -> RunningStep | None:
        """The step ahead if it is the step of these inputs. Else forget it and return None.

        `lengths` are the inputs' cached tokens, `open` the slots that are open.
        """
        roots, running, slots = self._roots, self.forget(), [item.slot for item in inputs]
        if running is None:  # paused: go on when the same slots step again
            self._paused, self._last_slots = slots != self._last_slots, slots
            return None
        if slots != [item.slot for item in running.inputs]:  # wasted: pause, unless one of its sequences has ended
            self._paused, self._last_slots = all(item.slot in open for item in running.inputs), slots
            return None
        if not all(map(is_plain, inputs)) or list(lengths) != running.lengths:
            return None
        if [list(item.tree.tokens) for item in inputs] != roots:
            return None
        if any(item.sampling != old.sampling for item, old in zip(inputs, running.inputs, strict=True)):
            return None
        return replace(running, inputs=list(inputs), outputs=None, results=StepResults())

    def forget(self) -> RunningStep | None:
        """Give up the step ahead. Work that is launched next, on any stream, will run after it."""
        running = self._running
        if running is not None and running.stream is not None:
            here = stream_of(self._device)
            if here is not None and here != running.stream:
                here.wait_stream(running.stream)
        self._running, self._before, self._roots = None, None, []
        return running


def is_plain(item: StepInput) -> bool:
    """Whether this is a step of the root alone that takes the logits as they come, and returns nothing of them."""
    if item.adjustment is not None or item.logprobs is not None:
        return False
    return len(item.tree) == 1 and not item.chunk and not item.logits


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The CUDA stream that work is launched on now. None on a CPU, where work is done when a call returns."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
