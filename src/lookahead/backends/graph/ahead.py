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

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from lookahead.algorithm.output import StepOutput, StepResults
from lookahead.backends.base import MOST_AHEAD, StepInput
from lookahead.backends.graph.running import RunningStep


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device runs, and whose it is.

    `starts` are where the needed rows of each input begin, `lengths` the positions of its roots. `ahead`: how many
    steps ahead it is from the last one that the host sent a packet for. `results`, and with them the `outputs`, are
    filled when they are read.
    """

    inputs: list[StepInput]
    starts: list[int]
    lengths: list[int]
    running: RunningStep
    ahead: int = 0
    outputs: list[StepOutput] | None = None
    results: StepResults = field(default_factory=StepResults)

    def get_ready(self) -> list[StepOutput]:
        """Make the outputs, still without results, while the device runs."""
        ends = [*self.starts[1:], self.starts[-1] + len(self.inputs[-1].tree.needed)]
        self.outputs, results = [], self.results
        for start, end, item in zip(self.starts, ends, self.inputs, strict=True):
            self.outputs.append(StepOutput.of_results(results, start, end, item.top))
        return self.outputs

    def read(self) -> list[StepOutput]:
        """Copies of the results, which are on the host."""
        running, outputs = self.running, self.get_ready() if self.outputs is None else self.outputs
        # One copy of everything: a call to NumPy takes as long for all inputs as for one.
        self.results.rows = running.results(self.starts[-1] + len(self.inputs[-1].tree.needed))
        for start, item, output in zip(self.starts, self.inputs, outputs, strict=True):
            if item.logits or item.logprobs is not None:
                end = start + len(item.tree.needed)
                if item.logits and end > start:
                    output.logits = running.logits(start, end)
                if item.logprobs is not None and (found := running.logprobs(start, end, item.logprobs)):
                    output.likely, output.logprobs = found
        return outputs


class StepAhead:
    """At most one step that runs before the host asks for it.

    Two engines that step in turn on one backend would waste every step ahead. So after one was wasted on other
    sequences, none is started until the same sequences step twice in a row.
    """

    def __init__(self, follow: Callable[[RunningStep], None]) -> None:
        """`follow` lets work that is launched next run after a step."""
        self._follow = follow
        self._running: LaunchedStep | None = None  # the step ahead
        self._before: LaunchedStep | None = None  # the step that it follows
        self._roots: list[list[int]] = []  # that step's targets, which the step ahead has taken as its roots
        self._paused = False
        self._last_slots: list[int] = []  # those of the last step, noted while paused

    @property
    def watches(self) -> bool:
        """Whether `take` must see the next step: one runs ahead, or none does until the same sequences step again."""
        return self._running is not None or self._paused

    def may_follow(self, before: LaunchedStep) -> bool:
        """Whether the inputs of the step after `before` are known."""
        if self._paused or not all(item.continues_alone and is_plain(item) for item in before.inputs):
            return False
        drawn = [item for item in before.inputs if item.uniforms]
        return not drawn or (before.ahead < MOST_AHEAD and all(item.next_uniforms for item in drawn))

    def start(self, before: LaunchedStep, running: RunningStep) -> None:
        """Note the step that was started right after `before`, whose inputs were known."""
        lengths = [length + 1 for length in before.lengths]
        self._running = LaunchedStep(before.inputs, before.starts, lengths, running, before.ahead + 1)
        self._before = before

    def collected(self, launched: LaunchedStep, results: Sequence[StepOutput]) -> None:
        """Note the results that the host has read of a step: the step ahead follows from them."""
        if launched is self._before:
            self._roots = [list(result.targets) for result in results]

    def take(self, inputs: Sequence[StepInput], lengths: Sequence[int], open: Container[int]) -> LaunchedStep | None:
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

    def forget(self) -> LaunchedStep | None:
        """Drop the step ahead. Work that is launched next, on any stream, will run after it."""
        launched = self._running
        if launched is not None:
            self._follow(launched.running)
        self._running, self._before, self._roots = None, None, []
        return launched


def is_plain(item: StepInput) -> bool:
    """Whether this is a step of the root alone that takes the logits as they come, and returns nothing of them."""
    if item.adjustment is not None or item.logprobs is not None:
        return False
    return len(item.tree) == 1 and not item.chunk and not item.logits
