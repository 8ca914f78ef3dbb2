"""A step of one size (batch, K): its packet, its activations, and all of its device work as one CUDA graph.

`CapturedStep._step` is what the device does in a step, from the packet in to the results out. `_step_ahead` is a step
of one token per sequence that needs nothing from the host. Both run `_forward`, the forward pass.

Capturing means: run the work once and let CUDA record it, so that later one call replays all of it. On a CPU nothing is
captured, and the same functions run directly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from lookahead.backends.graph.lanes import KVLanes
from lookahead.backends.graph.ops import Ops, TopTokens
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.products import Products
from lookahead.backends.graph.sizes import INVARIANT_ROWS
from lookahead.backends.graph.weights import Weights

TOP_TOKENS = 8
"""How many likely next tokens a step returns for each needed node: as many as the `recycle` source keeps."""


@dataclass(slots=True)
class DeviceState:
    """What all captured steps of a backend share.

    `invariant`: see `GraphBackend`. `capture` is false where steps run uncaptured. `pool` is the graphs' memory, which
    they may share because they never run at the same time, and `stream` the one they are recorded on. When the K/V
    buffer grows, its tensors and `pool` are replaced, and the backend drops its captured steps.
    """

    weights: Weights
    ops: Ops
    products: Products
    kv: KVLanes
    invariant: bool
    capture: bool
    pool: Any
    stream: torch.cuda.Stream | None

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype


class CapturedStep:
    """The step for `batch` trees of `count` nodes each: its packet, its activations and, once captured, its graph.

    With `head` it computes logits, targets and top tokens of the needed nodes. A pass over a prompt has no head.
    The step's rows are the nodes of all trees, one tree after the other.
    """

    def __init__(self, state: DeviceState, batch: int, count: int, head: bool) -> None:
        self.state, self.batch, self.count, self.head = state, batch, count, head
        w, device = state.weights, state.device
        size = batch * count
        # Plan the matrix products. Some need more rows than the step has to be invariant.
        matrices = {name: [getattr(layer, name) for layer in w.layers] for name in ("qkv", "out", "gate_up", "down")}
        if head:
            matrices["head"] = [w.head]
        self.products = {name: state.products.plan(weights, size) for name, weights in matrices.items()}
        rows = max(product.rows for product in self.products.values())
        # Plan attention. A prompt's passes need no invariance: they are the same for every decoding method.
        half = state.dtype in (torch.float16, torch.bfloat16)
        invariant = state.invariant and head and half and size <= INVARIANT_ROWS
        self.tiles = state.ops.tiles(batch, count, w.heads, w.kv_heads, w.dim, invariant=invariant)
        self.order = state.ops.new_order(batch, count, self.tiles, w.heads // w.kv_heads) if invariant else None
        self.work = state.ops.workspace()
        # The packet on the host, and its copy on the device.
        self.packet = Packet(batch, count, device.type == "cuda")
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views = self.packet.views(self.memory)
        # Where the nodes of the trees stand, and whom they see: `Ops.place_nodes` finds it from their parents.
        self.positions = torch.zeros(batch, count, dtype=torch.int32, device=device)
        self.bits = torch.zeros(batch, count, (count + 31) // 32, dtype=torch.int32, device=device)

        def new(width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=state.dtype, device=device)

        # The activations, [rows, width] each.
        hidden, inner = w.embedding.shape[1], w.layers[0].down.shape[1]
        self.residual, self.normed, self.delta = new(hidden), new(hidden), new(hidden)
        self.qkv = new((w.heads + 2 * w.kv_heads) * w.dim)
        self.q, self.mixed = new(w.heads * w.dim), new(w.heads * w.dim)
        self.gate_up, self.active = new(2 * inner), new(inner)
        self.logits = new(len(w.head)) if head else None
        self.top = TopTokens(rows, len(w.head), min(TOP_TOKENS, len(w.head)), device) if head else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_ahead: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Run the step that the packet describes: replay its graph, or capture it the first time."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()

    @torch.inference_mode()
    def _run(self) -> None:
        self._step()
        if not self.state.capture:
            return
        # That run compiled the kernels, which cannot be done while capturing. A capture runs nothing, so the graph is
        # replayed once, to leave its results where later replays leave them. The replay repeats the K/V writes. It must
        # not move the accepted K/V a second time: the places it would read have new contents.
        self.graph = self._capture(self._step)
        self.packet.fields["commit_counts"][:] = 0
        self.graph.replay()

    @torch.inference_mode()
    def run_ahead(self, turn: int) -> None:
        """Run the one-token step that follows the last one run here, and send its results to host copy `turn`.

        The first run is captured afterwards and not repeated, since a replay would go one token further. The copy to
        the host is not part of the graph, for two reasons: it can go to either host copy, and torch then keeps the
        pinned memory alive until the copy is done, even if the backend is deleted while nobody waits for this step.
        """
        assert self.count == 1
        assert self.top is not None
        if self.graph_ahead is not None:
            self.graph_ahead.replay()
        else:
            self._step_ahead()
        self.top.send(turn)
        if self.state.capture and self.graph_ahead is None:
            self.graph_ahead = self._capture(self._step_ahead)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what `step` launches, without running it."""
        torch.cuda.synchronize()
        graph, where = torch.cuda.CUDAGraph(), (self.state.pool, self.state.stream)
        # `thread_local`: other threads may go on using the GPU while this one captures.
        with _no_collection(), torch.cuda.graph(graph, *where, capture_error_mode="thread_local"):
            step()
        return graph

    def _step(self) -> None:
        """A whole step, on the device."""
        ops, views = self.state.ops, self.views
        # 1. Copy the packet to the device.
        ops.copy_pinned(self.packet.host, self.memory)
        # 2. Commit the previous step: move the K/V of its accepted nodes next to their prefix.
        commits = views["commit_lengths"], views["commit_paths"], views["commit_counts"]
        ops.move_accepted(self.state.kv.cache, views["lanes"], *commits)
        # 3. The attention mask of the trees, as bits, and the forward pass.
        ops.place_nodes(views["parents"], views["lengths"], self.positions, self.bits)
        self._forward()
        # 4. Copy targets and top tokens to the host.
        if self.top is not None:
            ops.copy_pinned(self.top.out, self.top.host_copies[0])

    def _step_ahead(self) -> None:
        """One token further in every lane: the tokens are the last targets, and no accepted K/V has to move."""
        assert self.top is not None
        views, last = self.views, len(self.state.weights.embedding) - 1
        # A batch's padding takes part. Its logits may be NaN and its target outside of the vocabulary: hence the clamp.
        torch.clamp(self.top.out[: self.batch, :1], max=last, out=views["tokens"])
        views["lengths"].add_(1)
        self.positions.add_(1)
        self._forward()

    def _forward(self) -> None:
        """The forward pass: from the packet's copy on the device to targets and top tokens there."""
        w, ops, kv, views, products = self.state.weights, self.state.ops, self.state.kv, self.views, self.products
        lanes, lengths, positions, bits = views["lanes"], views["lengths"], self.positions, self.bits
        size = self.batch * self.count
        residual, normed = self.residual[:size], self.normed[:size]
        q = self.q[:size].view(self.batch, self.count, w.heads, w.dim)
        mixed = self.mixed[:size].view_as(q)
        # 1. An invariant step's attention adds the nodes of a tree by depth: sort them, once for all layers.
        if self.order is not None:
            ops.order_by_depth(positions, lengths, bits, self.order, self.tiles, w.heads // w.kv_heads)
        # 2. Embeddings. `delta` is the last block's output; the next `add_norm` adds it to the residual stream.
        ops.embed(w.embedding, views["tokens"].view(-1), residual)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(w.layers):
            keys, values = kv.cache[number]
            # 3. Attention: write the step's K/V behind each prefix, then attend to prefix and tree.
            ops.add_norm(residual, delta, layer.before, normed, w.eps)
            products["qkv"](self.normed, layer.qkv, self.qkv)
            ops.rotate_write(
                self.qkv, layer.bias, layer.norms, kv.cosine, kv.sine, lanes, lengths, positions, q, keys, values, w.eps
            )
            ops.attend(
                q, keys, values, lanes, lengths, positions, bits, mixed, self.work,
                scale=w.scale, window=layer.window, tiles=self.tiles, order=self.order,
            )  # fmt: skip
            products["out"](self.mixed, layer.out, self.delta)
            delta = self.delta[:size]
            # 4. The MLP.
            ops.add_norm(residual, delta, layer.after, normed, w.eps)
            products["gate_up"](self.normed, layer.gate_up, self.gate_up)
            ops.gate(self.gate_up, self.active[:size])
            products["down"](self.active, layer.down, self.delta)
        # 5. Of the needed nodes alone: logits, targets and top tokens.
        if self.logits is not None and self.top is not None:
            ops.add_norm(residual, delta, w.norm, normed, w.eps, views["needed"].view(-1))
            products["head"](self.normed, w.head, self.logits)
            self.top.fill(self.logits)


_capturing = Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off: collecting some other model's graph during a capture would end the process.

    Only one thread captures at a time. A second one would find collection switched off already, and leave it off.
    """
    with _capturing:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
