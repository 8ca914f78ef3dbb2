"""The forward pass of one kind of step: from the packet to the logits of the needed rows, as one CUDA graph."""

from __future__ import annotations

import torch

from lookahead.backends.graph.kernels.rows import new_rows
from lookahead.backends.graph.kernels.tiles import SMALL
from lookahead.backends.graph.kinds import ForwardKind
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.products import Product
from lookahead.backends.graph.sizes import MOST_NEEDED
from lookahead.backends.graph.state import Captured, DeviceState, most_tiles


class CapturedForward(Captured):
    """All forward passes of one kind: their packet and, once captured, their graph.

    `_run` is what the device does in a pass. `_run_ahead` is a pass of one token per sequence that needs nothing from
    the host. It is captured when it is first asked for.
    """

    packet: Packet

    def __init__(self, state: DeviceState, kind: ForwardKind) -> None:
        super().__init__(state)
        self.kind = kind
        w, device = state.weights, state.device
        group = w.heads // w.kv_heads
        # Plan the matrix products. Some are given more rows than the step has.
        matrices = {name: [getattr(layer, name) for layer in w.layers] for name in ("qkv", "out", "gate_up", "down")}
        self.products: dict[str, Product] = {
            name: state.products.plan(weights, kind.rows) for name, weights in matrices.items()
        }
        self.products["head"] = state.products.plan([w.head], kind.needed)
        # Plan attention.
        self.tiles = state.ops.tiles(
            kind.rows,
            w.heads,
            w.kv_heads,
            w.dim,
            small=kind.small,
            alone=kind.alone,
            one=kind.one,
            invariant=kind.invariant,
        )
        block = SMALL if self.tiles is None else self.tiles.block_m
        self.queries = group, block
        tiles = most_tiles(kind.rows, group, block)
        if self.tiles is not None and not kind.alone:  # a tile more would have no program
            tiles = min(tiles, self.tiles.programs)
        # The packet on the host, and its copy on the device.
        self.packet = Packet(kind.rows, kind.needed, tiles, device.type == "cuda")
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views = self.packet.views(self.memory)
        self.rows = new_rows(self.views, state.kv.tables, min(kind.rows, MOST_NEEDED))
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
            self.graph_ahead = self.state.captured(self._run_ahead)

    @torch.inference_mode()
    def _run(self) -> None:
        """A whole pass, on the device."""
        ops, views = self.state.ops, self.views
        # 1. Copy the packet to the device.
        ops.copy_pinned(self.packet.host, self.memory)
        # 2. Commit the previous step: move the K/V of its accepted nodes next to their prefix.
        ops.move_accepted(self.state.kv.cache, views["counts"], views["commits"], views["moves"])
        # 3. The layers.
        self._layers()

    @torch.inference_mode()
    def _run_ahead(self) -> None:
        """One token further in every sequence: the tokens are the last targets, and no accepted K/V has to move."""
        views, last = self.views, len(self.state.weights.embedding) - 1
        count = min(self.kind.rows, self.kind.needed)
        # Rows that pad the step take part. Their targets may be outside of the vocabulary: hence the clamp.
        torch.clamp(self.state.buffers.results[:count, 0], min=0, max=last, out=views["tokens"][:count])
        views["entries"][:, 1].add_(1)  # the cached tokens, which the tiles repeat
        views["tiles"][:, 1].add_(1)
        self._layers()

    def _layers(self) -> None:
        """From the packet's copy on the device to the logits of the needed rows there."""
        w, ops, kv, rows = self.state.weights, self.state.ops, self.state.kv, self.rows
        buffers, products, views, size = self.state.buffers, self.products, self.views, self.kind.rows
        residual, normed = buffers.residual[:size], buffers.normed[:size]
        q, mixed = (part[:size].view(size, w.heads, w.dim) for part in (buffers.q, buffers.mixed))
        # 1. Where the rows stand and whom they see. An invariant step's attention adds the nodes of a tree by depth:
        # they are sorted once for all layers.
        ops.place_nodes(rows)
        ops.order_by_depth(rows, buffers.work, self.tiles, w.heads // w.kv_heads)
        # 2. Embeddings. `delta` is the last block's output; the next `add_norm` adds it to the residual stream.
        ops.embed(w.embedding, views["tokens"], residual)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(w.layers):
            keys, values = kv.cache[number]
            # 3. Attention: write the step's K/V to their places, then attend to the text and the tree.
            ops.add_norm(residual, delta, layer.before, normed, w.eps)
            products["qkv"](buffers.normed, layer.qkv, buffers.qkv)
            ops.rotate_write(buffers.qkv, layer.bias, layer.norms, kv.cosine, kv.sine, rows, q, keys, values, w.eps)
            ops.attend(q, keys, values, rows, mixed, buffers.work, self.tiles, scale=w.scale, window=layer.window)
            products["out"](buffers.mixed, layer.out, buffers.delta)
            delta = buffers.delta[:size]
            # 4. The MLP.
            ops.add_norm(residual, delta, layer.after, normed, w.eps)
            products["gate_up"](buffers.normed, layer.gate_up, buffers.gate_up)
            ops.gate(buffers.gate_up, buffers.active[:size])
            products["down"](buffers.active, layer.down, buffers.delta)
        # 5. Of the needed rows alone: logits.
        needed = self.kind.needed
        ops.add_norm(residual, delta, w.norm, buffers.normed[:needed], w.eps, views["needed"])
        products["head"](buffers.normed, w.head, buffers.logits)
