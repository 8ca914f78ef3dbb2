"""The forward pass of one kind of step: from the packet to the logits of the needed rows, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.graph.kernels.rows import new_rows
from lookahead.backends.graph.kernels.tiles import queries_per_tile
from lookahead.backends.graph.kinds import ForwardKind
from lookahead.backends.graph.layers.attention import plan_group
from lookahead.backends.graph.layers.recurrent import plan_states, plan_states_ahead
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.records import SequenceRecord, Tile
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.state import Captured, DeviceState, most_tiles


class CapturedForward(Captured):
    """All forward passes of one kind: their packet and their CUDA graph.

    `_run` is a pass on the device. `_run_ahead` is a pass of one token per sequence that needs nothing from the host;
    it is captured when first needed. `queries`: for each head shape, the queries of a row per K/V head, and the queries
    of a tile.
    """

    packet: Packet

    def __init__(self, state: DeviceState, kind: ForwardKind) -> None:
        super().__init__(state)
        self.kind = kind
        model, kv, buffers, device = state.model, state.kv, state.buffers, state.device
        # 1. The tiling of attention, for each head shape.
        shapes = list(zip(model.shapes, kind.tilings, strict=True))
        tiles = [state.ops.tiles(kind.rows, shape, tiling, invariant=kind.invariant) for shape, tiling in shapes]
        self.queries = [(shape.group, queries_per_tile(shape.dim, tiling.size)) for shape, tiling in shapes]
        most = [most_tiles(kind.rows, *queries) for queries in self.queries]
        # Without a loop over tiles, a tile beyond the number of programs would have no program.
        most = [min(n, own.programs) if own and not own.unsplit else n for n, own in zip(most, tiles, strict=True)]
        # 2. The packet on the host, and its copy on the device.
        has_states = state.states is not None
        self.packet = Packet(kind.rows, kind.needed, most, len(model.groups), device.type == "cuda", states=has_states)
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views, self.host_views = self.packet.views(self.memory), self.packet.views(self.packet.host)
        # 3. The work of every layer.
        numbers = [model.shapes.index(group.shape) for group in model.groups]
        rows = [
            new_rows(self.views, shape, kv.tables[group], min(kind.rows, MOST_NEEDED), kv.shifts, kv.positions - 1)
            for group, shape in enumerate(numbers)
        ]
        states = None if state.states is None else state.states.of_step(self.views)
        step = StepContext(
            kind, buffers, kv, self.views, rows, [tiles[shape] for shape in numbers], buffers.work, states
        )
        planned = [plan_group(group, number, step, state.ops) for number, group in enumerate(model.groups)]
        self.replay_roots: Run | None = None
        if states is not None:
            planned.append(plan_states(step, model.recurrent, state.ops))
            self.replay_roots = plan_states_ahead(step, model.recurrent, state.ops)
        self.commits, self.locates = zip(*planned, strict=True)
        self.embed = model.embedding.plan(step)
        with state.times.timing("search"):
            self.blocks = [block.plan(step) for block in model.blocks]
            self.head = model.head.plan(step, buffers.logits)

    def run_ahead(self) -> None:
        """Run the one-token pass after the last step of this kind.

        The first run is captured only afterwards: replaying it would advance one token further.
        """
        if self.graph_ahead is not None:
            self.graph_ahead.replay()
            return
        self._run_ahead()
        if self.state.capture:
            self.graph_ahead = self.state.captured_ahead(self._run_ahead)

    def _run(self) -> None:
        """Run a pass, on the device."""
        self._run_blocks(self.blocks)

    def launch_kernels(self) -> None:
        """Of blocks of the same kind only two are launched: the others have the same
        kernels, and the first of all adds nothing to the residual stream. A kernel that is missed here is compiled when
        it is first launched."""
        alike: dict[tuple[Any, ...], list[list[Run]]] = {}
        for block, planned in zip(self.state.model.blocks, self.blocks, strict=True):
            alike.setdefault(block.kind, []).append(planned)
        self._run_blocks([planned for blocks in alike.values() for planned in blocks[:2]])

    @torch.inference_mode()
    def _run_blocks(self, blocks: Sequence[list[Run]]) -> None:
        # 1. Copy the packet to the device, and update the page tables.
        host = self.host_views
        self.state.ops.copy_packet(
            self.packet.host, self.memory, host["changed"], host["changes"], self.state.kv.tables
        )
        # 2. Commit the previous step: move the K/V of its accepted nodes next to their prefix, and replay its accepted
        # tokens into the recurrent states.
        for commit in self.commits:
            commit()
        # 3. The layers.
        self._layers(blocks)

    @torch.inference_mode()
    def _run_ahead(self) -> None:
        """Advance every sequence by one token: the tokens are the last targets. No accepted K/V has to move; recurrent
        states are updated by the last tokens."""
        if self.replay_roots is not None:
            self.replay_roots()
        views, last = self.views, len(self.state.model.embedding.table) - 1
        count = min(self.kind.rows, self.kind.needed)
        # Padding rows take part, and their targets may be outside the vocabulary: hence the clamp.
        torch.clamp(self.state.buffers.results[:count, 0], min=0, max=last, out=views["tokens"][:count])
        views["sequences"][:, SequenceRecord.LENGTH].add_(1)  # cached tokens, repeated in the tiles
        for shape in range(len(self.queries)):
            views[f"tiles_{shape}"][:, Tile.END].add_(1)
        self._layers(self.blocks)

    def _layers(self, blocks: Sequence[list[Run]]) -> None:
        """From the packet's device copy to the logits of the needed rows.

        The residual stream, a layer's output (`delta`) and its normed input (`normed`) are buffers. A norm first adds
        the previous layer's delta to the stream. In a parallel block, where both halves read the same stream, the
        feed-forward has buffers of its own.
        """
        for locate in self.locates:
            locate()
        self.embed()
        for block in blocks:
            for run in block:
                run()
        self.head()
