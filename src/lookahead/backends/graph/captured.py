"""A step of one size: its packet, and all of its device work as one CUDA graph.

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
from functools import cached_property
from itertools import product
from threading import Lock
from typing import Any

import torch

from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.backends.graph.adjusting import Adjusting
from lookahead.backends.graph.kernels.rows import new_rows
from lookahead.backends.graph.kernels.tiles import SMALL
from lookahead.backends.graph.kinds import StepKind
from lookahead.backends.graph.kv import PagedKV
from lookahead.backends.graph.ops import Drawing, LogProbs, Ops, TopTokens
from lookahead.backends.graph.packet import MOST_ENTRIES, Packet
from lookahead.backends.graph.products import Product, Products
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, MOST_NEEDED, sizes_to
from lookahead.backends.graph.weights import Weights
from lookahead.config import MOST_LOGPROBS

NOISE_LINES = 32
"""Output positions whose noise is kept at once: more than a tree is deep."""


@dataclass(slots=True)
class DeviceState:
    """What all captured steps of a backend share.

    `capture` is false where steps run uncaptured. `pool` is the graphs' memory, which they may share because they never
    run at the same time, and `stream` the one they are recorded on.
    """

    weights: Weights
    ops: Ops
    products: Products
    kv: PagedKV
    buffers: Buffers
    capture: bool
    pool: Any
    stream: torch.cuda.Stream | None

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device


class Buffers:
    """The activations of a step, [rows, width] each, for the largest step. Smaller steps use their first rows.

    All captured steps share them, because they never run at the same time.
    """

    def __init__(self, weights: Weights, ops: Ops, most_rows: int) -> None:
        w, like = weights, weights.embedding
        rows = -(-most_rows // INVARIANT_ROWS) * INVARIANT_ROWS  # a product may be given so many
        hidden, inner = like.shape[1], w.layers[0].down.shape[1]

        def new(width: int, count: int = rows) -> torch.Tensor:
            return like.new_zeros(count, width)

        self.residual, self.normed, self.delta = new(hidden), new(hidden), new(hidden)
        self.qkv = new((w.heads + 2 * w.kv_heads) * w.dim)
        self.q, self.mixed = new(w.heads * w.dim), new(w.heads * w.dim)
        self.gate_up, self.active = new(2 * inner), new(inner)
        self.logits = new(len(w.head), min(rows, MOST_NEEDED))
        self._compiled = ops.compiled
        self._scores: dict[int, tuple[torch.Tensor, Drawing]] = {}
        self.work = ops.workspace()
        group = w.heads // w.kv_heads
        for size in sizes_to(most_rows) if self.work is not None else ():
            for small, alone, one, invariant in product((False, True), repeat=4):
                tiles = ops.tiles(
                    size, w.heads, w.kv_heads, w.dim, small=small, alone=alone, one=one, invariant=invariant
                )
                count = most_tiles(size, group, tiles.block_m)
                self.work.reserve(size, count, tiles, w.heads, w.kv_heads, w.dim)

    @cached_property
    def drawing(self) -> Drawing:
        """What draws targets, made when the first step does."""
        rows, vocabulary = self.logits.shape
        return Drawing(rows, vocabulary, self.logits.device, self.logits.dtype)

    @cached_property
    def adjusting(self) -> Adjusting:
        """What adjusts logits, made when the first step does."""
        return Adjusting(self.logits.shape[1], self.logits.device, self._compiled)

    def scores(self, rows: int) -> tuple[torch.Tensor, Drawing]:
        """Memory for the adjusted logits [rows, V] of a step, in float32, and what draws from them.

        There are two sizes: most steps have few needed rows, and a large vocabulary's scores take much memory.
        """
        most, size = self.logits.shape[0], self.logits.shape[1]
        count = min(most, FEW_NEEDED if rows <= FEW_NEEDED else most)
        if count not in self._scores:
            scores = torch.zeros(count, size, dtype=torch.float32, device=self.logits.device)
            self._scores[count] = scores, Drawing(count, size, self.logits.device, torch.float32)
        scores, drawing = self._scores[count]
        return scores[:rows], drawing

    @cached_property
    def noise(self) -> torch.Tensor:
        """See `GraphBackend.noise`."""
        return torch.ones(NOISE_LINES, self.logits.shape[1], dtype=torch.float32, device=self.logits.device)


def most_tiles(rows: int, group: int, block: int) -> int:
    """The most tiles that a step of so many rows can have."""
    return min(rows, 2 * MOST_ENTRIES) + -(-rows * group // block)


class CapturedStep:
    """All steps of one kind: their packet and, once captured, their graph."""

    def __init__(self, state: DeviceState, kind: StepKind) -> None:
        self.state, self.kind = state, kind
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
        self.packet = Packet(
            kind.rows, kind.needed, tiles, device.type == "cuda", drawn=kind.drawn, adjusted=kind.adjusted
        )
        self.memory = torch.zeros_like(self.packet.host, device=device)
        self.views = self.packet.views(self.memory)
        self.rows = new_rows(self.views, state.kv.tables, min(kind.rows, MOST_NEEDED))
        self.top = TopTokens(kind.needed, len(w.head), min(KEPT_TOKENS, len(w.head)), device)
        self.ahead = torch.zeros(1, dtype=torch.int64, device=device)  # steps ahead since the last packet
        # What some kinds need is made here, because nothing may be made in a capture.
        self.logprobs: LogProbs | None = None
        if kind.drawn:
            state.buffers.drawing, state.buffers.noise  # noqa: B018
        if kind.adjusted:
            state.buffers.adjusting, state.buffers.scores(kind.needed)
        if kind.logprobs:
            self.logprobs = LogProbs(kind.needed, len(w.head), min(MOST_LOGPROBS, len(w.head)), device)
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
        # not move the accepted K/V a second time: the places it would read have new contents. Nor must it count the
        # accepted tokens a second time.
        self.graph = self._capture(self._step)
        self.packet.fields["counts"][1] = 0
        if self.kind.adjusted:
            self.packet.fields["counted"][0] = -1
        self.graph.replay()

    @torch.inference_mode()
    def run_ahead(self, turn: int) -> None:
        """Run the one-token step that follows the last one run here, and send its results to host copy `turn`.

        The first run is captured afterwards and not repeated, since a replay would go one token further. The copy to
        the host is not part of the graph, for two reasons: it can go to either host copy, and torch then keeps the
        pinned memory alive until the copy is done, even if the backend is deleted while nobody waits for this step.
        """
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
        ops.move_accepted(self.state.kv.cache, views["counts"], views["commits"], views["moves"])
        if self.kind.adjusted:
            self.state.buffers.adjusting.count(views)
        # 3. The forward pass.
        self._forward()
        if self.kind.drawn:
            self.ahead.zero_()
        # 4. Copy targets and top tokens to the host.
        ops.copy_pinned(self.top.out, self.top.host_copies[0])
        if self.logprobs is not None:
            self.logprobs.send(ops.copy_pinned)

    def _step_ahead(self) -> None:
        """One token further in every sequence: the tokens are the last targets, and no accepted K/V has to move."""
        views, last = self.views, len(self.state.weights.embedding) - 1
        count = min(self.kind.rows, self.kind.needed)
        # Rows that pad the step take part. Their targets may be outside of the vocabulary: hence the clamp.
        torch.clamp(self.top.out[:count, 0], min=0, max=last, out=views["tokens"][:count])
        views["entries"][:, 1].add_(1)  # the cached tokens, which the tiles repeat
        views["tiles"][:, 1].add_(1)
        if self.kind.drawn:
            views["draws"][:, 4] = views["next_uniforms"].index_select(1, self.ahead)[:, 0]
            self.ahead.add_(1)
        self._forward()

    def _forward(self) -> None:
        """The forward pass: from the packet's copy on the device to targets and top tokens there."""
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
        # 5. Of the needed rows alone: logits, targets and top tokens.
        needed = self.kind.needed
        ops.add_norm(residual, delta, w.norm, buffers.normed[:needed], w.eps, views["needed"])
        products["head"](buffers.normed, w.head, buffers.logits)
        logits = scores = buffers.logits[:needed]
        if self.kind.adjusted:
            scores, drawing = buffers.scores(needed)
            buffers.adjusting.adjust(logits, scores, rows, views)
        self.top.fill(scores)
        if self.kind.drawn:
            draws, out, tops = views["draws"], self.top.out, self.top.work
            if not self.kind.adjusted:
                drawing = buffers.drawing
            if self.kind.raced:
                drawing.race(scores, draws, buffers.noise, views["noise"], out, tops)
            else:
                drawing.draw(scores, draws, out, tops)
        if self.logprobs is not None:
            self.logprobs.fill(logits, self.top.out[:, 0])


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
