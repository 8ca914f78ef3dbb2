"""The step ahead: token by token, the device goes on by itself while the host reads what the last step gave.

A step of one token needs nothing of the host that is not on the device: its token is the last target, its place the
next one. So where the inputs say that they go on, the graph backend starts the following step behind the one that it
was asked for, and the device does not wait for the host. If that step is what the host asks for next, it has begun or
is done. If not (a stop token, a newcomer), it is forgotten: it has written one row of K/V per sequence, behind all that
is cached, and whatever comes next runs after it and writes over that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lookahead.algorithm.tree import StepOutput
from lookahead.backends.base import StepInput
from lookahead.backends.graph.captured import CapturedStep


@dataclass(slots=True)
class RunningStep:
    """A step on its way: its roots' places, which of the host's two copies gets its results, and its stream.

    `done` comes to pass after it, where another step was given to the stream meanwhile.
    """

    step: CapturedStep
    inputs: list[StepInput]
    lengths: list[int]
    turn: int
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until its results are there. On a CPU they are."""
        if self.done is not None:
            self.done.synchronize()
        elif self.stream is not None:
            self.stream.synchronize()


class StepAhead:
    """At most one step that runs before it is asked for.

    When one was in vain because other sequences had their turn, none is started until the same have two turns running:
    two engines that step in turn would waste every one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: RunningStep | None = None
        self._before: RunningStep | None = None
        self._roots: list[list[int]] = []
        self._in_turns = False
        self._slots: list[int] = []  # of the last turn

    def start(self, before: RunningStep, capacity: int) -> None:
        """Start the step after `before`, if it is known and has room. It never makes room: then `before` goes alone."""
        if self._in_turns or not all(item.continues_alone and alone(item) for item in before.inputs):
            return
        if max(before.lengths) + 2 > capacity:
            return
        if before.stream is not None:
            before.done = before.stream.record_event()
        turn, lengths = 1 - before.turn, [length + 1 for length in before.lengths]
        before.step.run_ahead(turn)
        self._step = RunningStep(before.step, before.inputs, lengths, turn, stream_of(self._device))
        self._before = before

    def collected(self, running: RunningStep, results: Sequence[StepOutput]) -> None:
        """The host has read a step: if it is the one before, its targets are what the step ahead took as tokens."""
        if running is self._before:
            self._roots = [list(result.targets) for result in results]

    def take(self, inputs: Sequence[StepInput], cached: Mapping[int, int]) -> RunningStep | None:
        """The step ahead, if it is the step of these inputs. Else it is forgotten. `cached` are the lengths by slot."""
        if self._step is None and not self._in_turns:
            return None
        roots, step, slots = self._roots, self.forget(), [item.slot for item in inputs]
        if step is None:
            self._in_turns, self._slots = slots != self._slots, slots
            return None
        if slots != [item.slot for item in step.inputs]:
            self._in_turns, self._slots = all(item.slot in cached for item in step.inputs), slots
            return None
        if not all(map(alone, inputs)) or [cached[slot] for slot in slots] != step.lengths:
            return None
        if [item.tree.tokens for item in inputs] != roots:
            return None
        return replace(step, inputs=list(inputs))

    def forget(self) -> RunningStep | None:
        """Expect nothing of the step ahead. What follows runs behind it, on whichever stream."""
        step = self._step
        if step is not None and step.stream is not None:
            here = stream_of(self._device)
            if here is not None and here != step.stream:
                here.wait_stream(step.stream)
        self._step, self._before, self._roots = None, None, []
        return step


def alone(item: StepInput) -> bool:
    """A step of the root alone, of which nothing but the target is wanted."""
    return len(item.tree) == 1 and not item.trail and item.sampling.greedy and not item.logits


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that the device is given work on. On a CPU nothing is left to do."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
