"""The graph backend: Llama-like models with a static K/V buffer, fused layers, and the whole step as one CUDA graph.

A step of a captured size (batch, K) is: write one packet of integers into pinned memory, replay the graph, read one
packet back. The graph (`captured.CapturedStep`) copies the packet in, moves the K/V of the tokens accepted last, runs
the layers, picks targets and top-8, and copies them out. Lengths and positions are read on the device, so that one graph serves
every context. Token by token not even the packet is needed: see `ahead`.

On a CPU the same steps run uncaptured on the kernels' slow twins: for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lookahead.algorithm.sampling import pick
from lookahead.algorithm.tree import StepOutput, TokenTree, below_trail
from lookahead.backends.base import StepInput, padded
from lookahead.backends.graph.ahead import RunningStep, StepAhead, stream_of
from lookahead.backends.graph.captured import CapturedStep
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.packet import LONGEST_PATH
from lookahead.backends.graph.products import products_of
from lookahead.backends.graph.sizes import bucket, sizes_to
from lookahead.backends.graph.weights import check_graph, relay
from lookahead.backends.support import check_supported, context_length
from lookahead.config import SamplingParams

PREFILL_TOKENS = 512
"""Prompt tokens per pass."""
LONGEST_TRAIL = 32
"""The longest trail behind cached tokens that runs within the step's own pass: the few tokens that another rank of
lookahead parallelism computed. Longer ones, and prompts, run by themselves."""
LEAST_CAPACITY = 2048
"""The K/V buffer's smallest capacity; it grows by a quarter at least. Growing it captures the graphs anew."""


@dataclass(slots=True)
class Pending:
    """A commit that has not run: the next step moves it along."""

    length: int
    path: list[int]


P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(call: Callable[Concatenate[GraphBackend, P], R]) -> Callable[Concatenate[GraphBackend, P], R]:
    """A method that launches: on the GPU that has the model, whichever is the current one."""

    @wraps(call)
    def run(self: GraphBackend, /, *args: P.args, **options: P.kwargs) -> R:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return call(self, *args, **options)
        with torch.cuda.device(self.device):
            return call(self, *args, **options)

    return run


class GraphBackend:
    """Slots, K/V and steps as `EagerBackend` has them, for the models that `check_graph` lets through.

    `invariant` makes a row's result in half precision independent of K and of the other rows, bit for bit, in steps of
    up to 128 tokens: attention adds up each row in the order of its positions, and so do the matrix products (see
    `products`).
    """

    def __init__(self, model: Any, *, invariant: bool = True, capture: bool | None = None) -> None:
        check_supported(model)
        check_graph(model)
        self.model, self.invariant = model, invariant
        self.weights = relay(model)
        self.device, self.dtype = self.weights.embedding.device, self.weights.embedding.dtype
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.max_length = context_length(model.config)
        self.vocab_size: int = len(self.weights.embedding)
        self.ops = Ops(self.device)
        self.products = products_of(self.device, self.dtype, invariant)
        self.pool = self._new_pool()
        self.capture_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        w = self.weights
        self.cache = torch.zeros(len(w.layers), 2, 1, w.kv_heads, 0, w.dim, dtype=self.dtype, device=self.device)
        self._room = 1, 0  # lanes and tokens of the buffer; a tensor takes microseconds to tell its sizes
        self.cosine, self.sine = w.tables(1)
        self._steps: dict[tuple[int, int, bool], CapturedStep] = {}
        self._lane: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._pending: dict[int, Pending] = {}
        self._next_slot = 0
        self._ahead = StepAhead(self.device)

    # Slots

    @on_its_device
    def open(self) -> int:
        slot = self._next_slot
        self._next_slot += 1
        taken = set(self._lane.values())
        self._lane[slot] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        self._length[slot] = 0
        self._reserve(self._lane[slot] + 1, 1)
        return slot

    def close(self, slot: int) -> None:
        del self._lane[slot], self._length[slot]
        self._pending.pop(slot, None)

    def length(self, slot: int) -> int:
        return self._length[slot]

    def _reserve(self, lanes: int, capacity: int) -> None:
        """Room for this many lanes and tokens."""
        if lanes > self._room[0] or capacity > self._room[1]:
            self._grow(lanes, capacity)

    @torch.inference_mode()
    def _grow(self, lanes: int, capacity: int) -> None:
        """A larger buffer. It drops the graphs, which hold the old buffer's address."""
        old = self.cache
        size = max(old.shape[4], LEAST_CAPACITY)
        if capacity > size:
            size = -(-max(capacity, size + size // 4) // 512) * 512
        if lanes > old.shape[2]:
            lanes = max(lanes, 2 * old.shape[2])
        w = self.weights
        self._ahead.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no step that nobody waits for uses what is given back here
        self._flush()
        self.cache = old.new_zeros(len(w.layers), 2, max(lanes, old.shape[2]), w.kv_heads, size, w.dim)
        self.cache[:, :, : old.shape[2], :, : old.shape[4]] = old
        self._room = self.cache.shape[2], size
        self.cosine, self.sine = w.tables(size)
        self._steps.clear()
        self.pool = self._new_pool()  # the old one ends with the last graph that used it

    def _new_pool(self) -> Any:
        """Memory that the graphs share: they never run at the same time."""
        return torch.cuda.graph_pool_handle() if self.capture else None

    @on_its_device
    def prepare(self, tokens: int, budget: int) -> None:
        """Capture what one sequence of so many tokens in steps of at most `budget` may need, before it is there.

        Else the first prompt of some length, and the first step of some size, would wait for it.
        """
        self._ahead.forget()
        self._reserve(1, tokens + bucket(budget))
        slot = self.open()
        try:
            for size in sizes_to(min(tokens, PREFILL_TOKENS)):
                self._prefill(StepInput(slot, [0] * size, chain([0]), SamplingParams(), ()))
                self._length[slot] = 0
            for size in sizes_to(budget):
                continues_alone = size == 1  # so its step ahead is captured, too
                self.step(
                    [StepInput(slot, (), chain([0] * size), SamplingParams(), (), continues_alone=continues_alone)]
                )
        finally:
            self._ahead.forget()
            self.close(slot)

    # A step.

    @on_its_device
    def launch(self, inputs: Sequence[StepInput]) -> RunningStep:
        """Start a step, if it did not run ahead, and the one that is ahead of it; the host is free until `collect`."""
        running = self._ahead.take(inputs, self._length)
        if running is None:
            running = self._start(inputs)
        self._ahead.start(running, self._room[1])
        return running

    def _start(self, inputs: Sequence[StepInput]) -> RunningStep:
        taken: list[StepInput] = []
        longest, most = 0, 1
        for item in inputs:
            if len(item.trail) > LONGEST_TRAIL or not self._length[item.slot]:
                self._prefill(item)
            if item.trail:
                item = replace(item, tree=below_trail(item.trail, item.tree))
            taken.append(item)
            longest, most = max(longest, self._length[item.slot]), max(most, item.tree.sizes[0])
        batch = padded(len(taken))
        count = bucket(most, batch)
        nobody = 0  # else the lane that takes the padding of a batch
        if batch > len(taken):
            nobody = max(self._lane.values()) + 1
        self._reserve(nobody + 1, longest + count)
        step = self._captured_step(batch, count, head=True)
        for place, item in enumerate(taken):
            self._fill(step, place, item)
            self._length[item.slot] += len(item.trail)  # now it is the root's place, from which `commit` goes on
        for place in range(len(taken), batch):
            self._fill_nothing(step, place, nobody)
        step.run()
        lengths = [self._length[item.slot] for item in taken]
        return RunningStep(step, taken, lengths, 0, stream_of(self.device))

    @on_its_device
    def collect(self, running: RunningStep) -> list[StepOutput]:
        """Wait for a step and read its targets and top rows."""
        running.wait()
        top, count = running.step.top, running.step.count
        assert top is not None
        rows, results = top.rows[running.turn], []
        for place, item in enumerate(running.inputs):
            start, end = place * count, place * count + item.tree.sizes[1]
            # Later steps write over all of it: what is handed out is copied.
            result = StepOutput(rows[start:end, 0].tolist())
            if item.top:
                result.top = top.best(rows[start:end], item.top)
            if item.logits or not item.sampling.greedy:
                self._read_logits(running.step, start, end, item, result)
            results.append(result)
        self._ahead.collected(running, results)
        return results

    @torch.inference_mode()
    def _read_logits(self, step: CapturedStep, start: int, end: int, item: StepInput, result: StepOutput) -> None:
        """What targets and top rows alone do not tell: draws, and the logits themselves."""
        assert step.logits is not None
        if not item.sampling.greedy:
            result.targets = pick(step.logits[start:end], item.sampling, item.uniforms).tolist()
        if item.logits:
            result.logits = step.logits[start:end].clone()

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    @on_its_device
    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The root stands where it belongs; the accepted nodes move with the next step."""
        for slot, path in accepted:
            self._pending[slot] = Pending(self._length[slot], list(path))
            self._length[slot] += 1 + len(path)
            if len(path) > LONGEST_PATH:
                self._flush()

    def _captured_step(self, batch: int, count: int, head: bool) -> CapturedStep:
        key = (batch, count, head)
        if key not in self._steps:
            with torch.inference_mode():
                self._steps[key] = CapturedStep(self, *key)
        return self._steps[key]

    def _fill(self, step: CapturedStep, place: int, item: StepInput) -> None:
        """One input's part of the packet."""
        fields, length, pending = step.packet.fields, self._length[item.slot], self._pending.pop(item.slot, None)
        fields["lanes"][place] = self._lane[item.slot]
        fields["lengths"][place] = length
        fields["commit_lengths"][place] = pending.length if pending else 0
        fields["commit_counts"][place] = len(pending.path) if pending else 0
        if pending and pending.path:
            fields["commit_paths"][place, : len(pending.path)] = pending.path
        step.packet.put_tree(place, item.tree, length)

    def _fill_nothing(self, step: CapturedStep, place: int, lane: int) -> None:
        """Padding of a batch: tokens that see themselves, in a lane of the buffer that belongs to nobody."""
        fields = step.packet.fields
        fields["lanes"][place] = lane
        for name in ("lengths", "commit_lengths", "commit_counts"):
            fields[name][place] = 0
        step.packet.put_tree(place, chain([0]), 0)

    def _prefill(self, item: StepInput) -> None:
        """Run the trail in passes of its own, as chains without a head."""
        while item.trail:
            chunk, item.trail = item.trail[:PREFILL_TOKENS], item.trail[PREFILL_TOKENS:]
            self._reserve(1, self._length[item.slot] + bucket(len(chunk)))
            step = self._captured_step(1, bucket(len(chunk)), head=False)
            self._fill(step, 0, StepInput(item.slot, (), chain(chunk), item.sampling, ()))
            step.run()
            self._length[item.slot] += len(chunk)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the packet's memory is free again

    @torch.inference_mode()
    def _flush(self) -> None:
        """Run the commits that wait for a step."""
        for slot, pending in self._pending.items():
            numbers = [[self._lane[slot]], [pending.length], [len(pending.path)]]
            lanes, lengths, counts = torch.tensor(numbers, dtype=torch.int32, device=self.device)
            paths = torch.tensor([pending.path or [0]], dtype=torch.int32, device=self.device)
            self.ops.move_accepted(self.cache, lanes, lengths, paths, counts)
        self._pending.clear()

    # K/V from and for elsewhere.

    @on_its_device
    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As `EagerBackend.adopt`."""
        self._ahead.forget()  # it has seen what was there before, or has the lane for its padding
        self._reserve(1, length)
        for layer, (keys, values) in enumerate(layers):
            for i, part in enumerate((keys, values)):
                self.cache[layer, i, self._lane[slot], :, length - part.shape[1] : length] = part
        self._length[slot] = length

    @on_its_device
    def cached(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `EagerBackend.cached`."""
        self._flush()
        part = self.cache[:, :, self._lane[slot], :, : self._length[slot]]
        return [(keys.clone(), values.clone()) for keys, values in part]


def chain(tokens: Sequence[int]) -> TokenTree:
    """Tokens in a row, none of whose logits are needed."""
    size = len(tokens)
    return TokenTree(list(tokens), list(range(-1, size - 1)), list(range(size)), [])
