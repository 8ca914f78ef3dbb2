"""The forward pass of one kind of step: from the packet to the logits of the needed rows, as one CUDA graph."""

from __future__ import annotations

import torch

from lookahead.backends.graph.kernels.rows import new_rows
from lookahead.backends.graph.kernels.tiles import queries_per_tile
from lookahead.backends.graph.kinds import ForwardKind
from lookahead.backends.graph.layers.attention import plan_beginning
from lookahead.backends.graph.layers.step import StepContext
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.records import Entry, Tile
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.state import Captured, DeviceState, most_tiles


class CapturedForward(Captured):
    """All forward passes of one kind: their packet and, once captured, their graph.

    `_run` is what the device does in a pass. `_run_ahead` is a pass of one token per sequence that needs nothing from
    the host. It is captured when it is first asked for. `queries`: for each head shape, how many queries a row has per
    K/V head, and how many a tile has.
    """

    packet: Packet

    def __init__(self, state: DeviceState, kind: ForwardKind) -> None:
        super().__init__(state)
        self.kind = kind
        model, kv, buffers, device = state.model, state.kv, state.buffers, state.device
        # 1. How attention is cut, for each head shape.
        shapes = list(zip(model.shapes, kind.cuts, strict=True))
        cuts = [state.ops.tiles(kind.rows, shape, cut, invariant=kind.invariant) for shape, cut in shapes]
        self.queries = [(shape.group, queries_per_tile(shape.dim, cut.size)) for shape, cut in shapes]
        most = [most_tiles(kind.rows, *queries) for queries in self.queries]
        # Unless a program does several tiles, one more would have no program.
        most = [min(n, cut.programs) if cut and not cut.alone else n for n, cut in zip(most, cuts, strict=True)]
        # 2. The packet on the host, and its copy on the device.
        self.packet = Packet(kind.rows, kind.needed, most, len(model.groups), device.type == "cuda")
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views, self.host_views = self.packet.views(self.memory), self.packet.views(self.packet.host)
        # 3. What every layer does.
        numbers = [model.shapes.index(group.shape) for group in model.groups]
        rows = [
            new_rows(self.views, shape, kv.tables[group], min(kind.rows, MOST_NEEDED))
            for group, shape in enumerate(numbers)
        ]
        step = StepContext(kind, buffers, kv, self.views, rows, [cuts[shape] for shape in numbers], buffers.work)
        begin = [plan_beginning(group, number, step, state.ops) for number, group in enumerate(model.groups)]
        self.commits, self.places = zip(*begin, strict=True)
        self.embed = model.embedding.plan(step)
        self.blocks = [block.plan(step, first=number == 0) for number, block in enumerate(model.blocks)]
        self.head = model.head.plan(step, buffers.logits)
        self.get_ready()

    def run_ahead(self) -> None:
        """Run the one-token pass that follows the last step of this kind.

        The first run is captured afterwards and not repeated, since a replay would go one token further.
        """
        if self.graph_ahead is not None:
            self.graph_ahead.replay()
            return
        self._run_ahead()
        if self.state.capture:
            self.graph_ahead = self.state.captured_ahead(self._run_ahead)

    @torch.inference_mode()
    def _run(self) -> None:
        """A whole pass, on the device."""
        # 1. Copy the packet to the device, and write the pages that sequences have got to their tables.
        host = self.host_views
        self.state.ops.copy_packet(
            self.packet.host, self.memory, host["changed"], host["changes"], self.state.kv.tables
        )
        # 2. Commit the previous step: move the K/V of its accepted nodes next to their prefix.
        for commit in self.commits:
            commit()
        # 3. The layers.
        self._layers()

    @torch.inference_mode()
    def _run_ahead(self) -> None:
        """One token further in every sequence: the tokens are the last targets, and no accepted K/V has to move."""
        views, last = self.views, len(self.state.model.embedding.table) - 1
        count = min(self.kind.rows, self.kind.needed)
        # Rows that pad the step take part. Their targets may be outside of the vocabulary: hence the clamp.
        torch.clamp(self.state.buffers.results[:count, 0], min=0, max=last, out=views["tokens"][:count])
        views["entries"][:, Entry.LENGTH].add_(1)  # the cached tokens, which the tiles repeat
        for shape in range(len(self.queries)):
            views[f"tiles_{shape}"][:, Tile.END].add_(1)
        self._layers()

    def _layers(self) -> None:
        """From the packet's copy on the device to the logits of the needed rows there.

        The residual stream, what a layer adds to it (`delta`) and its norm (`normed`) are buffers. A norm adds the
        delta of the layer before it to the stream.
        """
        for place in self.places:
            place()
        self.embed()
        for block in self.blocks:
            block.attention_norm()
            block.attention()
            block.feed_forward_norm()
            block.feed_forward()
        self.head()
