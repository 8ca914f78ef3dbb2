"""The device half of the graph backend: runs the steps that packets describe.

It owns the weights, the K/V, the page tables and all captured steps, but no record of sequences. Everything a step
needs comes with its packet: tokens, the rows and cached length of each sequence and its index in the page tables,
page-table updates, moves of accepted K/V, uniforms, penalties and masks. Results come back in pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.base import Layers
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.kinds import DeviceTraits, ForwardKind, Sampler, StepKind, TargetsKind
from lookahead.backends.graph.kv import PagedKV, default_tokens, group_pages, longest_text, new_kv
from lookahead.backends.graph.layers.recurrent import replay
from lookahead.backends.graph.matrices.products import products_of
from lookahead.backends.graph.memory import with_room
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.preparing import (
    every_forward_kind,
    every_targets_kind,
    forward_kinds_ahead,
    usual_fallbacks,
)
from lookahead.backends.graph.records import Walk
from lookahead.backends.graph.running import RunningStep, stream_of
from lookahead.backends.graph.sizes import INVARIANT_NODES, INVARIANT_ROWS, MOST_NEEDED, PAGE
from lookahead.backends.graph.state import Buffers, DeviceState
from lookahead.backends.graph.states import new_states, shares_states
from lookahead.backends.graph.steps import CapturedSteps
from lookahead.backends.graph.targets_packet import StepPacket
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Decoder


class Runner:
    """Runs the steps of one described model. A step is captured when its packet is first requested.

    `context` is the model's context length, None for no limit; the other settings are the backend's.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        context: int | None,
        invariant: bool,
        capture: bool,
        kv_tokens: int | None,
        most_rows: int,
        drop_pages: bool,
    ) -> None:
        like = decoder.embedding
        self.device, self._context, self._drop_pages = like.device, context, drop_pages
        self._ops, self._products = Ops(self.device), products_of(self.device, like.dtype, invariant)
        model = GraphModel(decoder, self._ops, self._products, drop_pages=drop_pages)
        self._pass_rows = max(most_rows, INVARIANT_NODES)  # rows that may follow a sequence's cached tokens
        buffers = Buffers(model, self._ops, most_rows)
        states = new_states(model.state_groups, most_rows, like, share=shares_states(decoder))
        if kv_tokens is None:
            kv_tokens = default_tokens(model.groups, longest_text(context), self._pass_rows, like)
        pages = group_pages(model.groups, kv_tokens, self._pass_rows)
        self.state = DeviceState(
            model=model,
            ops=self._ops,
            kv=new_kv(model.groups, pages, kv_tokens, longest_text(context), self._pass_rows, like),
            states=states,
            buffers=buffers,
            capture=capture,
            pool=new_graph_pool(capture),
            stream=torch.cuda.Stream(self.device) if self.device.type == "cuda" else None,
            most_rows=most_rows,
        )
        self.steps = CapturedSteps(self.state)
        self._prepared: set[Sampler] = set()
        exact = invariant and like.dtype in (torch.float16, torch.bfloat16)
        self.traits = DeviceTraits(model.shapes, self._ops.processors, exact)

    @property
    def kv(self) -> PagedKV:
        return self.state.kv

    def reads_weights_of(self, decoder: Decoder, model: torch.nn.Module) -> bool:
        """Whether captured steps read the weights of this description of `model`. Matrices that were replaced are fused
        again, and tensors that the reader computed are updated."""
        now = GraphModel(decoder, self._ops, self._products, drop_pages=self._drop_pages)
        return self.state.model.can_follow(now, model)

    # Packets.

    def packet(self, kind: StepKind) -> StepPacket:
        """The packet of steps of this kind. The first call captures the step."""
        return self.steps.get(kind).packet

    def has_captured(self, kind: ForwardKind) -> bool:
        """Whether a forward pass of this kind is captured."""
        return kind in self.steps.forwards

    def reserve_table_slots(self, count: int, slot: int | None = None) -> int:
        """Make sure that the tables of `adjusting` have at least `count` slots, and return their number. Raises
        DeviceMemoryError, for the sequence in `slot` or for all, if there is too little memory."""
        what, buffers = "a table of penalties and biases", self.state.buffers
        adjusting = with_room(lambda: buffers.adjusting, self.steps.drop_unused, what, self.device, slot)
        if adjusting.slots < count:  # captured steps read the old tables
            self.steps.drop_adjusted()
            with_room(lambda: adjusting.grow(count), self.steps.drop_unused, what, self.device, slot)
        return adjusting.slots

    # Steps.

    def run(self, kind: StepKind, packet: StepPacket) -> RunningStep:
        """Start the step that a packet of this kind describes. The packet may be rewritten once the step is done."""
        step, overflow = self.steps.pairs[kind], packet.forward.overflow
        if overflow.commits:
            self.move(overflow.commits, overflow.moves)
        if overflow.changes:
            self.kv.write_tables(overflow.changes)
        if overflow.replays:
            self.replay(overflow.replays, overflow.replayed)
        if kind.targets.adjusted and (packet.targets.table_rows or packet.targets.masks is not None):
            self.state.buffers.adjusting.receive(packet.targets)
        step.run()
        return RunningStep(step, 0, stream_of(self.device))

    def run_ahead(self, before: RunningStep, changes: Sequence[int]) -> RunningStep:
        """Start the one-token step after `before`, the last step started. It has no packet; page-table updates
        (`changes`) are all it may need."""
        if before.stream is not None:
            before.done = before.stream.record_event()
        if changes:
            self.kv.write_tables(changes)
        before.step.run_ahead(1 - before.turn)
        return RunningStep(before.step, 1 - before.turn, stream_of(self.device))

    def order_after(self, running: RunningStep) -> None:
        """Order work launched from now on, on any stream, after this step."""
        here = stream_of(self.device)
        if here is not None and running.stream is not None and here != running.stream:
            here.wait_stream(running.stream)

    # Capturing in advance.

    @property
    def most_prepared(self) -> int:
        """Maximum rows of a pass: no more than the pages hold."""
        return min(self.state.most_rows, min(self.kv.pages) * PAGE, self.kv.longest * PAGE)

    def prepare(self, tokens: int, budget: int, sequences: int) -> None:
        """Capture all steps of up to `sequences` sequences of up to `tokens` tokens, with trees of up to `budget`
        nodes, and the one-token steps that run ahead."""
        forwards, targets = self._kinds(tokens, budget, sequences)
        self.steps.compile_kernels([*forwards, *targets])
        for forward in forwards:
            self.steps.forward_for(forward)
        for one in targets:
            self.steps.targets_for(one)
        for kind in forward_kinds_ahead(self.traits, sequences) if self.state.capture else ():
            for sampler in (Sampler.GREEDY, Sampler.INVERSE_CDF):
                self.steps.get(StepKind(kind, TargetsKind(kind.needed, sampler))).capture_ahead()

    def _kinds(self, tokens: int, budget: int, sequences: int) -> tuple[list[ForwardKind], list[TargetsKind]]:
        """The kinds of all forward passes and targets graphs of these steps, the largest first."""
        most = self.most_prepared
        forwards = list(
            every_forward_kind(self.traits, sequences, min(tokens, most), min(budget, MOST_NEEDED, most), most)
        )
        needed = sorted({kind.needed for kind in forwards}, reverse=True)
        return forwards, [kind for rows in needed for kind in every_targets_kind(rows)]

    def prepare_fallbacks(self, sampler: Sampler) -> None:
        """Capture, once, the fallback steps with this sampler."""
        if sampler not in self._prepared:
            self._prepared.add(sampler)
            kinds = self._fallback_kinds(sampler)
            self.steps.compile_kernels([part for kind in kinds for part in kind])
            for kind in kinds:
                self.steps.get(kind)

    def _fallback_kinds(self, sampler: Sampler) -> list[StepKind]:
        kinds = usual_fallbacks(self.traits, self.most_prepared)
        return [StepKind(kind, TargetsKind(kind.needed, sampler)) for kind in kinds]

    def compile_kernels(self, *, fallbacks: bool) -> None:
        """Compile the kernels of the steps of one sequence with the default budget, or only those of its greedy
        fallback steps, without capturing anything."""
        if fallbacks:
            self.steps.compile_kernels([part for kind in self._fallback_kinds(Sampler.GREEDY) for part in kind])
            return
        forwards, targets = self._kinds(self._context or self.most_prepared, INVARIANT_ROWS, 1)
        self.steps.compile_kernels([*forwards, *targets])

    # K/V.

    @torch.inference_mode()
    def move(self, commits: Sequence[int], moves: Sequence[Sequence[int]]) -> None:
        """Move accepted K/V now, without a step. The numbers have the layout of a packet's fields."""
        numbers = torch.tensor(commits, dtype=torch.int32, device=self.device).view(-1, 2)
        counts = torch.tensor([0, len(numbers)], dtype=torch.int32, device=self.device)
        for cache, own in zip(self.kv.caches, moves, strict=True):
            cells = torch.tensor(own, dtype=torch.int32, device=self.device).view(-1, 2)
            self._ops.move_accepted(cache, counts, numbers, cells)

    @torch.inference_mode()
    def replay(self, walks: Sequence[int], rows: Sequence[int]) -> None:
        """Replay accepted tokens into the recurrent states now, without a step. The numbers have the layout of a
        packet's fields."""
        assert self.state.states is not None
        replays = torch.tensor(walks, dtype=torch.int32, device=self.device).view(-1, len(Walk))
        count = torch.tensor([len(replays)], dtype=torch.int32, device=self.device)
        replayed = torch.tensor(rows, dtype=torch.int32, device=self.device)
        replay(self.state.states, self.state.model.recurrent, self._ops, replays, count, replayed)

    def copy_states(self, source: int, target: int) -> None:
        """Copy the states of one slot, or snapshot, to another, after the work that was started before."""
        assert self.state.states is not None
        self.state.states.copy(source, target)

    def missing_pages(self, sequences: int, tokens: int) -> list[int]:
        """The pages that each group needs for `sequences` sequences of `tokens` tokens at once. Empty if there are
        enough."""
        longest = tokens + INVARIANT_NODES
        needs = [sequences * group.most_pages(longest, self._pass_rows) for group in self.kv.groups]
        enough = all(map(int.__le__, needs, self.kv.pages)) and longest <= self.kv.longest * PAGE
        return [] if enough else needs

    def enlarge(self, pages: Sequence[int], sequences: int, tokens: int) -> None:
        """Reallocate the K/V with at least this many pages in each group, for `sequences` texts of `tokens` tokens. All
        cached K/V is lost. Raises UnsupportedModelError or DeviceMemoryError if there is too little memory, and then
        restores the old size."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # an unused step ahead may still read what is freed here
        self.steps.clear()
        self._prepared.clear()
        state, groups, like = self.state, self.kv.groups, self.state.model.like
        state.pool = new_graph_pool(state.capture)
        before, positions = self.kv.pages, self.kv.longest * PAGE
        state.kv = PagedKV(groups, [1] * len(groups), PAGE, like)  # free the old pages first
        larger, longest = list(map(max, pages, before)), max(longest_text(self._context), tokens)
        what = f"room for {sequences} sequences of {tokens} tokens"
        try:
            state.kv = with_room(
                lambda: new_kv(groups, larger, max(larger) * PAGE, longest, self._pass_rows, like),
                self.steps.clear,
                what,
                self.device,
            )
        except (UnsupportedModelError, DeviceMemoryError):
            state.kv = PagedKV(groups, before, positions, like)
            raise

    def write_kv(self, tables: Sequence[Sequence[int]], length: int, layers: Layers) -> None:
        """See `PagedKV.write`."""
        self.kv.write(tables, length, layers)

    def read_kv(self, tables: Sequence[Sequence[int]], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `PagedKV.read`."""
        return self.kv.read(tables, length)


def new_graph_pool(capture: bool) -> Any:
    """The memory pool of all captured graphs. It is freed with the last graph that uses it."""
    return torch.cuda.graph_pool_handle() if capture else None
