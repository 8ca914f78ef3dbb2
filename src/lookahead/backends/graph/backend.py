"""The graph backend: Llama-like models, with a static K/V buffer, fused layers, and each step as one CUDA graph.

To run a step, the host writes one packet of integers into pinned memory, replays the graph that was captured for the
step's size (batch, K), and reads one array of results back. The graph (`captured.CapturedStep`) copies the packet to
the device, moves the K/V of the tokens accepted last, runs the layers, computes targets and top tokens, and copies them
to the host. It reads lengths and positions on the device, so that one graph serves every context length. A plain
one-token step can even start before the host asks for it: see `ahead`.

On a CPU the same steps run uncaptured, on the kernels' slow twins. That is for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lookahead.algorithm.sampling import pick
from lookahead.algorithm.tree import StepOutput, TokenTree, below_trail
from lookahead.backends.base import Layers, StepInput, padded
from lookahead.backends.graph.ahead import RunningStep, StepAhead, stream_of
from lookahead.backends.graph.captured import CapturedStep, DeviceState
from lookahead.backends.graph.lanes import KVLanes
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.packet import LONGEST_PATH
from lookahead.backends.graph.products import products_of
from lookahead.backends.graph.sizes import bucket, sizes_to
from lookahead.backends.graph.weights import check_graph, relay
from lookahead.backends.support import UnsupportedModelError, check_supported, context_length
from lookahead.config import SamplingParams

PREFILL_TOKENS = 512
"""The most prompt tokens per forward pass."""
LONGEST_TRAIL = 32
"""The longest trail that runs in the same pass as its tree. In lookahead parallelism a rank has such short trails: the
few tokens that another rank computed. Longer trails, and prompts, run in passes of their own."""

SPARE_BYTES = 1 << 30
"""What captured steps and their logits may need besides the K/V buffer."""


@dataclass(slots=True)
class Pending:
    """A commit whose K/V has not moved yet: the accepted nodes `path` of a step whose root stands at `length`."""

    length: int
    path: list[int]


P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(call: Callable[Concatenate[GraphBackend, P], R]) -> Callable[Concatenate[GraphBackend, P], R]:
    """Decorate a method that launches GPU work: it runs with the model's GPU as the current device."""

    @wraps(call)
    def run(self: GraphBackend, /, *args: P.args, **options: P.kwargs) -> R:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return call(self, *args, **options)
        with torch.cuda.device(self.device):
            return call(self, *args, **options)

    return run


class GraphBackend:
    """A `Backend` for the models that `check_graph` accepts.

    With `invariant`, a row's result in half precision depends neither on K nor on the other rows, bit for bit, in steps
    of up to 128 rows: attention adds up each row in the order of its positions (see `kernels.attention`), and the
    matrix products add in one order, too (see `products`). `capture=False` runs the steps uncaptured.
    """

    def __init__(self, model: Any, *, invariant: bool = True, capture: bool | None = None) -> None:
        check_supported(model)
        check_graph(model)
        self.model, self.invariant = model, invariant
        self.weights = relay(model)
        self.device, self.dtype = self.weights.embedding.device, self.weights.embedding.dtype
        self.max_length = context_length(model.config)
        self.most_rows: int | None = None
        self.vocab_size: int = len(self.weights.embedding)
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.kv = KVLanes(self.weights)
        self.state = DeviceState(
            weights=self.weights,
            ops=Ops(self.device),
            products=products_of(self.device, self.dtype, invariant),
            kv=self.kv,
            invariant=invariant,
            capture=self.capture,
            pool=self._new_pool(),
            stream=torch.cuda.Stream(self.device) if self.device.type == "cuda" else None,
        )
        self._steps: dict[tuple[int, int, bool], CapturedStep] = {}  # by batch, K, and whether it has a head
        self._lane: dict[int, int] = {}  # these three by slot
        self._length: dict[int, int] = {}
        self._pending: dict[int, Pending] = {}
        self._next_slot = 0
        self._ahead = StepAhead(self.device)

    # Slots and lanes.

    @on_its_device
    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A slot for a new sequence, in the first free lane."""
        slot = self._next_slot
        self._next_slot += 1
        taken = set(self._lane.values())
        self._lane[slot] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        self._length[slot] = 0
        self._reserve(self._lane[slot] + 1, 1)
        return slot

    def close(self, slot: int) -> None:
        """Give the slot and its lane back. A commit that has not moved is dropped."""
        del self._lane[slot], self._length[slot]
        self._pending.pop(slot, None)

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        return self._length[slot]

    def reserve(self, slot: int, tokens: int) -> bool:
        """The buffer grows when a step needs it."""
        return True

    def holds(self) -> int | None:
        return None

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing is shared between sequences here."""

    def check_room(self, lanes: int, tokens: int) -> None:
        """Raise UnsupportedModelError if so many sequences of so many tokens do not fit into the free memory."""
        if self.device.type != "cuda" or self.kv.has_room(lanes, tokens):
            return
        free = torch.cuda.mem_get_info(self.device)[0] + (
            torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        )
        needed = self.kv.bytes_of(lanes, tokens) + SPARE_BYTES
        if needed > free:
            raise UnsupportedModelError(
                f"the graph backend's K/V buffer for {lanes} x {tokens} tokens needs {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free"
            )

    def _reserve(self, lanes: int, tokens: int) -> None:
        """Make sure that there are this many lanes, with room for this many tokens each."""
        if not self.kv.has_room(lanes, tokens):
            self._grow(lanes, tokens)

    @torch.inference_mode()
    def _grow(self, lanes: int, tokens: int) -> None:
        """Make the K/V buffer larger, and drop the captured steps: they hold the old buffer's address."""
        self._ahead.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a forgotten step ahead may still use what is freed here
        self._flush()
        self.kv.grow(lanes, tokens)
        self._steps.clear()
        self.state.pool = self._new_pool()  # the old pool ends with the last graph that used it

    def _new_pool(self) -> Any:
        """Memory that all captured graphs share: they never run at the same time."""
        return torch.cuda.graph_pool_handle() if self.capture else None

    @on_its_device
    def prepare(self, tokens: int, budget: int) -> None:
        """Capture in advance all steps that one sequence of up to `tokens` tokens and this budget may need.

        Otherwise the first prompt of some length, or the first step of some size, has to wait while it is captured.
        """
        self._ahead.forget()
        self._reserve(1, tokens + bucket(budget))
        slot = self.open()
        try:
            for size in sizes_to(min(tokens, PREFILL_TOKENS)):
                self._prefill(StepInput(slot, [0] * size, chain([0]), SamplingParams(), ()))
                self._length[slot] = 0
            for size in sizes_to(budget):
                continues_alone = size == 1  # so that its step ahead is captured, too
                self.step(
                    [StepInput(slot, (), chain([0] * size), SamplingParams(), (), continues_alone=continues_alone)]
                )
        finally:
            self._ahead.forget()
            self.close(slot)

    # A step.

    @on_its_device
    def launch(self, inputs: Sequence[StepInput]) -> RunningStep:
        """Start a step, unless it runs ahead already; then start the next one ahead, if it is known."""
        running = self._ahead.take(inputs, self._length)
        if running is None:
            running = self._start(inputs)
        self._ahead.start(running, self.kv.capacity)
        return running

    def _start(self, inputs: Sequence[StepInput]) -> RunningStep:
        """Start a step of these inputs."""
        # 1. Run long trails by themselves; hang the trees below short ones.
        items: list[StepInput] = []
        longest, most = 0, 1
        for item in inputs:
            if len(item.trail) > LONGEST_TRAIL or not self._length[item.slot]:
                self._prefill(item)
            if item.trail:
                item = replace(item, tree=below_trail(item.trail, item.tree))
            items.append(item)
            longest, most = max(longest, self._length[item.slot]), max(most, len(item.tree))
        # 2. Choose the captured step, and make room. Entries that pad the batch write to a lane that no slot has.
        batch = padded(len(items))
        count = bucket(most, batch)
        spare_lane = max(self._lane.values()) + 1 if batch > len(items) else 0
        self._reserve(spare_lane + 1, longest + count)
        step = self._captured_step(batch, count, head=True)
        # 3. Fill the packet and go.
        for entry, item in enumerate(items):
            self._fill(step, entry, item)
            self._length[item.slot] += len(item.trail)  # now it is the root's position, where `commit` starts
        for entry in range(len(items), batch):
            self._fill_padding(step, entry, spare_lane)
        step.run()
        lengths = [self._length[item.slot] for item in items]
        return RunningStep(step, items, lengths, 0, stream_of(self.device))

    @on_its_device
    def collect(self, running: RunningStep) -> list[StepOutput]:
        """Wait for a step, and read the targets and top tokens of its needed nodes.

        Later steps overwrite all of the step's memory, so what is handed out are copies.
        """
        running.wait()
        step, outputs = running.step, []
        assert step.top is not None
        results = step.top.arrays[running.turn]
        for entry, item in enumerate(running.inputs):
            start = entry * step.count
            end = start + len(item.tree.needed)
            output = StepOutput(results[start:end, 0].tolist())
            if item.top:
                output.top = step.top.best(results[start:end], item.top)
            if item.logits or not item.sampling.greedy:
                self._read_logits(step, start, end, item, output)
            outputs.append(output)
        self._ahead.collected(running, outputs)
        return outputs

    @torch.inference_mode()
    def _read_logits(self, step: CapturedStep, start: int, end: int, item: StepInput, output: StepOutput) -> None:
        """Draw an input's targets from its rows of the logits [rows, V], or copy those rows, as it asks for."""
        assert step.logits is not None
        if not item.sampling.greedy:
            output.targets = pick(step.logits[start:end], item.sampling, item.uniforms).tolist()
        if item.logits:
            output.logits = step.logits[start:end].clone()

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        return self.collect(self.launch(inputs))

    @on_its_device
    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes. The root's K/V is in place; that of the nodes is moved by the next step."""
        for slot, path in accepted:
            self._pending[slot] = Pending(self._length[slot], list(path))
            self._length[slot] += 1 + len(path)
            if len(path) > LONGEST_PATH:
                self._flush()

    def _captured_step(self, batch: int, count: int, head: bool) -> CapturedStep:
        """The step for `batch` trees of `count` nodes, made when it is first needed."""
        key = (batch, count, head)
        if key not in self._steps:
            with torch.inference_mode():
                self._steps[key] = CapturedStep(self.state, *key)
        return self._steps[key]

    def _fill(self, step: CapturedStep, entry: int, item: StepInput) -> None:
        """Write one input's entry of the packet: its lane, its pending commit and its tree."""
        fields, length, pending = step.packet.fields, self._length[item.slot], self._pending.pop(item.slot, None)
        fields["lanes"][entry] = self._lane[item.slot]
        fields["lengths"][entry] = length
        fields["commit_lengths"][entry] = pending.length if pending else 0
        fields["commit_counts"][entry] = len(pending.path) if pending else 0
        if pending and pending.path:
            fields["commit_paths"][entry, : len(pending.path)] = pending.path
        step.packet.put_tree(entry, item.tree)

    def _fill_padding(self, step: CapturedStep, entry: int, lane: int) -> None:
        """Write an entry that pads the batch: a tree of one node, at the start of a lane that no slot has."""
        fields = step.packet.fields
        fields["lanes"][entry] = lane
        for name in ("lengths", "commit_lengths", "commit_counts"):
            fields[name][entry] = 0
        step.packet.put_tree(entry, chain([0]))

    def _prefill(self, item: StepInput) -> None:
        """Run an input's trail, in passes without a head. Then the input has no trail any more."""
        while item.trail:
            chunk, item.trail = item.trail[:PREFILL_TOKENS], item.trail[PREFILL_TOKENS:]
            self._reserve(1, self._length[item.slot] + bucket(len(chunk)))
            step = self._captured_step(1, bucket(len(chunk)), head=False)
            self._fill(step, 0, StepInput(item.slot, (), chain(chunk), item.sampling, ()))
            step.run()
            self._length[item.slot] += len(chunk)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the device has read the packet, so that the next chunk may be written there

    @torch.inference_mode()
    def _flush(self) -> None:
        """Move the accepted K/V of all pending commits now, without a step."""
        for slot, pending in self._pending.items():
            numbers = [[self._lane[slot]], [pending.length], [len(pending.path)]]
            lanes, lengths, counts = torch.tensor(numbers, dtype=torch.int32, device=self.device)
            paths = torch.tensor([pending.path or [0]], dtype=torch.int32, device=self.device)
            self.state.ops.move_accepted(self.kv.cache, lanes, lengths, paths, counts)
        self._pending.clear()

    # K/V from and for elsewhere.

    @on_its_device
    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Take over a sequence's K/V: per layer, keys and values [Hkv, n, D] of the last n of `length` tokens."""
        if any(offset):
            raise ValueError(f"the graph backend's positions are places, and cannot be moved by {tuple(offset)}")
        self._ahead.forget()  # it has read the slot's old K/V, or uses its lane for padding
        self._reserve(1, length)
        self.kv.write(self._lane[slot], length, layers)
        self._length[slot] = length

    @on_its_device
    def cached(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, length, D]."""
        self._flush()
        return self.kv.read(self._lane[slot], self._length[slot])


def chain(tokens: Sequence[int]) -> TokenTree:
    """A tree that is a single chain of these tokens, none of whose logits are needed."""
    size = len(tokens)
    return TokenTree(list(tokens), list(range(-1, size - 1)), list(range(size)), [])
