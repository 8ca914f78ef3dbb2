"""One shape of step of the graph backend, (batch, K): its packet, its activations, and the whole step as a CUDA graph.

`CapturedStep._step` is what the device does in a step, from the packet in to the packet out;
`CapturedStep._step_ahead` is a step of one token that takes nothing from the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import torch

from lookahead.backends.graph.ops import TopOut
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.sizes import INVARIANT_ROWS

if TYPE_CHECKING:
    from lookahead.backends.graph.backend import GraphBackend

TOP_TOKENS = 8
_capturing = Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: another model's graph that ended while this one is captured would end the process.

    One capture at a time, in all threads: who comes second must not take the first one's state for its own.
    """
    with _capturing:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


class CapturedStep:
    """One step shape: its packet, its activations and, once captured, its graph."""

    def __init__(self, backend: GraphBackend, batch: int, count: int, head: bool) -> None:
        self.backend, self.batch, self.count, self.head = backend, batch, count, head
        w, device, dtype = backend.weights, backend.device, backend.dtype
        size, layer = batch * count, w.layers[0]
        # A product takes as many rows as the step has, or more if only so it is invariant.
        matrices = {name: [getattr(one, name) for one in w.layers] for name in ("qkv", "out", "gate_up", "down")}
        if head:
            matrices["head"] = [w.head]
        self.products = {name: backend.products.plan(weights, size) for name, weights in matrices.items()}
        rows = max(product.rows for product in self.products.values())
        # A pass without a head is part of a prompt: the same for every method.
        half = dtype in (torch.float16, torch.bfloat16)
        invariant = backend.invariant and head and half and size <= INVARIANT_ROWS
        self.tiles = backend.ops.tiles(batch, count, w.heads, w.kv_heads, w.dim, invariant=invariant)
        self.order = backend.ops.new_order(batch, count, self.tiles, w.heads // w.kv_heads) if invariant else None
        self.packet = Packet(batch, count, device.type == "cuda")
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views = self.packet.views(self.memory)

        def new(width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        hidden = w.embedding.shape[1]
        self.residual, self.normed, self.delta = new(hidden), new(hidden), new(hidden)
        self.qkv = new((w.heads + 2 * w.kv_heads) * w.dim)
        self.q, self.mixed = new(w.heads * w.dim), new(w.heads * w.dim)
        inner = layer.down.shape[1]
        self.gate_up, self.active = new(2 * inner), new(inner)
        self.logits = new(len(w.head)) if head else None
        self.top = TopOut(rows, len(w.head), min(TOP_TOKENS, len(w.head)), device) if head else None
        self.work = backend.ops.workspace()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_ahead: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Replay the step, or run it for the first time and capture it."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()

    @torch.inference_mode()
    def _run(self) -> None:
        if not self.backend.capture:
            self._step()
        else:
            self._step()  # compiles the kernels; its K/V writes are repeated by the replay
            self.graph = self._capture(self._step)
            # The first run has moved the accepted K/V already, and moving it again would take the wrong rows.
            self.packet.fields["commit_counts"][:] = 0
            self.graph.replay()

    @torch.inference_mode()
    def run_ahead(self, turn: int) -> None:
        """Run the step of one token that follows the last one here, and send its results to the host's `turn`.

        The first run is captured afterwards and not repeated: a replay would go one token further. The copy to the
        host is no part of the graph: so its turn is free, and pinned memory that it writes to is not given away under
        it, if the backend goes while nobody waits for the step.
        """
        assert self.count == 1
        assert self.top is not None
        if self.graph_ahead is not None:
            self.graph_ahead.replay()
        else:
            self._step_ahead()
        self.top.send(turn)
        if self.backend.capture and self.graph_ahead is None:
            self.graph_ahead = self._capture(self._step_ahead)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph, where = torch.cuda.CUDAGraph(), (self.backend.pool, self.backend.capture_stream)
        # What other threads do on the GPU meanwhile is their own affair.
        with _no_collection(), torch.cuda.graph(graph, *where, capture_error_mode="thread_local"):
            step()
        return graph

    def _step(self) -> None:
        b, views = self.backend, self.views
        # 1. The packet in, and the accepted K/V of the step before next to its prefix.
        b.ops.copy_pinned(self.packet.host, self.memory)
        commits = views["commit_lengths"], views["commit_paths"], views["commit_counts"]
        b.ops.move_accepted(b.cache, views["lanes"], *commits)
        # 2. The forward pass, and the packet out.
        self._forward()
        if self.top is not None:
            b.ops.copy_pinned(self.top.out, self.top.hosts[0])

    def _step_ahead(self) -> None:
        """One token further in every row: the last targets are the tokens, and no accepted K/V has to move."""
        assert self.top is not None
        views, last = self.views, len(self.backend.weights.embedding) - 1
        # Rows of padding go along. Nobody looks at their logits, which may have no best token: hence the limit.
        torch.clamp(self.top.out[: self.batch, :1], max=last, out=views["tokens"])
        views["lengths"].add_(1)
        views["positions"].add_(1)
        self._forward()

    def _forward(self) -> None:
        """From the packet on the device to targets and top-8 there."""
        b, w, ops, views = self.backend, self.backend.weights, self.backend.ops, self.views
        size = self.batch * self.count
        # 1. The embeddings.
        if self.order is not None:
            group = w.heads // w.kv_heads
            ops.order_by_depth(views["positions"], views["lengths"], views["bits"], self.order, self.tiles, group)
        ops.embed(w.embedding, views["tokens"].view(-1), self.residual[:size])
        # 2. The layers.
        q = self.q[:size].view(self.batch, self.count, w.heads, w.dim)
        mixed = self.mixed[:size].view_as(q)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(w.layers):
            keys, values = b.cache[number]
            ops.add_norm(self.residual[:size], delta, layer.before, self.normed[:size], w.eps)
            self.products["qkv"](self.normed, layer.qkv, self.qkv)
            ops.rotate_write(
                self.qkv, layer.bias, layer.norms, b.cosine, b.sine, views["lanes"], views["lengths"],
                views["positions"], q, keys, values, w.eps,
            )  # fmt: skip
            ops.attend(
                q, keys, values, views["lanes"], views["lengths"], views["positions"], views["bits"], mixed, self.work,
                scale=w.scale, window=layer.window, tiles=self.tiles, order=self.order,
            )  # fmt: skip
            self.products["out"](self.mixed, layer.out, self.delta)
            delta = self.delta[:size]
            ops.add_norm(self.residual[:size], delta, layer.after, self.normed[:size], w.eps)
            self.products["gate_up"](self.normed, layer.gate_up, self.gate_up)
            ops.gate(self.gate_up, self.active[:size])
            self.products["down"](self.active, layer.down, self.delta)
        # 3. The head for the needed rows, their targets and top-8.
        if self.logits is not None and self.top is not None:
            needed = views["needed"].view(-1)
            ops.add_norm(self.residual[:size], delta, w.norm, self.normed[:size], w.eps, needed)
            self.products["head"](self.normed, w.head, self.logits)
            self.top.fill(self.logits)
