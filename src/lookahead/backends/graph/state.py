"""State shared by all CUDA graphs of a backend: layers, K/V, buffers, and the capture itself.

Capturing lets CUDA record what a function launches, so that one call replays all of it. On a CPU nothing is captured,
and the same functions run directly.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.backends.failures import DeviceMemoryError, memory_error, named_kernels, out_of_memory
from lookahead.backends.graph.adjusting import Adjusting
from lookahead.backends.graph.kernels.tiles import Grid, HeadShape, TileSize, Tiling
from lookahead.backends.graph.kv import PagedKV
from lookahead.backends.graph.memory import room_for_a_capture
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.ops import Drawing, ExpertReads, Ops, new_top_work
from lookahead.backends.graph.packet import MOST_SEQUENCES
from lookahead.backends.graph.sizes import FEW_NEEDED, INVARIANT_ROWS, MOST_NEEDED, sizes_to
from lookahead.backends.graph.states import RecurrentStates

logger = logging.getLogger("lookahead")

NOISE_ROWS = 32
"""Rows of the noise buffer, one per output position: more than the depth of a tree."""


@dataclass(slots=True)
class PrepareTimes:
    """Seconds spent before steps could run: searching for the fastest matrix products, compiling kernels in advance,
    and capturing, which includes one run of the step, and compiling what was not compiled in advance."""

    search: float = 0.0
    compile: float = 0.0
    capture: float = 0.0

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time of the context to the field of this name."""
        begin = perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + perf_counter() - begin)


@dataclass(slots=True)
class DeviceState:
    """State shared by all CUDA graphs of a backend.

    `capture` is false where steps run uncaptured. `pool` is the graphs' memory, shared because they never run at the
    same time, and `stream` the stream they are captured on. `most_rows` is the maximum number of rows of a step.
    `captures` counts the work compiled so far, captured or not. `full`: memory ran out during a capture, so nothing
    more is captured; the rest runs directly, with the same results in more time.
    """

    model: GraphModel
    ops: Ops
    kv: PagedKV
    states: RecurrentStates | None
    buffers: Buffers
    capture: bool
    pool: Any
    stream: torch.cuda.Stream | None
    most_rows: int
    captures: int = 0
    full: bool = False
    times: PrepareTimes = field(default_factory=PrepareTimes)

    @property
    def device(self) -> torch.device:
        return self.model.like.device

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture what `work` launches, without running it. It must have run once before: kernels cannot be compiled
        during a capture. None where steps run uncaptured."""
        self.captures += 1
        if not self.capture:
            return None
        torch.cuda.synchronize()  # also if nothing is captured: `work` may still read a packet that is written next
        if self.full:
            return None
        with _no_collection(), room_for_a_capture(self.stream):
            graph = torch.cuda.CUDAGraph()
            # `thread_local`: other threads may use the GPU during the capture.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                work()
        return graph

    def captured_ahead(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """As `captured`, for work that already ran in a step: a lack of memory must not fail the step."""
        if self.full:
            return None
        try:
            return self.captured(work)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.stop_capturing(error)
            return None

    def stop_capturing(self, error: RuntimeError) -> None:
        """Capture nothing from now on, because memory is full."""
        self.full = True
        if not isinstance(error, DeviceMemoryError):
            error = memory_error(error, "a captured step", self.device)
        logger.warning("%s; steps that are not captured yet run uncaptured, which is slower", error)


class Buffers:
    """Activation buffers of the largest step, and other memory that captured steps share because they never run at the
    same time.

    Layers request a buffer by name and width; layers of different widths share its memory. `logits` [needed rows, V]
    are of the needed rows only. `results`: every step writes its targets and top tokens there (see `ops.TopTokens`),
    and a step ahead reads its tokens from there. `work`: workspace of the kernels of each attention group.
    """

    def __init__(self, model: GraphModel, ops: Ops, most_rows: int) -> None:
        like, vocabulary = model.like, model.head.head.out
        self._rows = -(-most_rows // INVARIANT_ROWS) * INVARIANT_ROWS  # a product may be padded to this
        wide = {"residual"} if model.residual_fp32 else set()
        self._memory = {
            name: like.new_zeros(self._rows * width, dtype=torch.float32 if name in wide else like.dtype)
            for name, width in model.buffers().items()
        }
        self.logits = model.head.new_logits(min(self._rows, MOST_NEEDED))
        self._compiled = ops.compiled
        self.results = like.new_zeros(len(self.logits), 1 + 2 * min(MAX_SUCCESSORS, vocabulary), dtype=torch.int32)
        self._scores: dict[int, tuple[torch.Tensor, Drawing]] = {}
        self._top_work: dict[int, Any] = {}
        self.expert_reads = ExpertReads(ops.experts.reads) if ops.experts is not None and model.experts else None
        work = new_work(ops, model.shapes, most_rows)
        self.work = [work if work is None else work.with_own_paths() for _ in model.groups]

    def rows(self, name: str, width: int) -> torch.Tensor:
        """The buffer of this name as [rows of the largest step, width]."""
        return self._memory[name][: self._rows * width].view(self._rows, width)

    def top_work(self, top: int) -> Any:
        """Workspace for the `top` best tokens of any step's rows; None on a CPU."""
        if top not in self._top_work:
            rows, vocabulary = self.logits.shape
            self._top_work[top] = new_top_work(rows, vocabulary, top, self.logits.device)
        return self._top_work[top]

    @cached_property
    def drawing(self) -> Drawing:
        """Samples targets; created when first needed."""
        rows, vocabulary = self.logits.shape
        return Drawing(rows, vocabulary, self.logits.device, self.logits.dtype)

    @cached_property
    def adjusting(self) -> Adjusting:
        """Adjusts logits; created when first needed."""
        return Adjusting(self.logits.shape[1], self.logits.device, self._compiled)

    def scores(self, rows: int) -> tuple[torch.Tensor, Drawing]:
        """A float32 buffer for the adjusted logits [rows, V] of a step, and the `Drawing` that samples from it.

        There are two sizes, because most steps have few needed rows, and a large vocabulary takes much memory.
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
        return torch.ones(NOISE_ROWS, self.logits.shape[1], dtype=torch.float32, device=self.logits.device)


def new_work(ops: Ops, shapes: Sequence[HeadShape], most_rows: int) -> Any:
    """Attention workspace for heads of these shapes, in steps of up to `most_rows` rows; None on a CPU."""
    work = ops.workspace()
    for rows in sizes_to(most_rows) if work is not None else ():
        for shape, size, grid, invariant in product(shapes, TileSize, Grid, (False, True)):
            tiles = ops.tiles(rows, shape, Tiling(size, grid), invariant=invariant)
            work.reserve(rows, most_tiles(rows, shape.group, tiles.block_m), tiles, *shape)
    return work


def most_tiles(rows: int, group: int, block: int) -> int:
    """Maximum number of tiles of a step with this number of rows."""
    return min(rows, 2 * MOST_SEQUENCES) + -(-rows * group // block)


class Captured:
    """Device work that reads a packet and is replayed as a CUDA graph, once `compile_and_capture` has been called.

    `_run` is that work. `graph_ahead` is the same for a step ahead, captured when first needed.
    """

    packet: Any  # a `Packet` or a `TargetsPacket`

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_ahead: torch.cuda.CUDAGraph | None = None

    def compile_and_capture(self) -> None:
        """Compile the kernels and capture the work, on a packet that is all padding, so that nothing is changed."""
        with named_kernels(), self.state.times.timing("capture"):
            if self.state.capture:
                self.packet.write_padding()
                self._run()
            self.graph = self.state.captured(self._run)

    def launch_kernels(self) -> None:
        """Launch each kernel of the work at least once, in a context where that only compiles it."""
        self._run()

    def run(self) -> None:
        """Run the work that the packet describes."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()

    def _run(self) -> None:
        raise NotImplementedError


_capturing = Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing another model's graph during a capture would crash the process.

    Only one thread captures at a time. A second one would find collection disabled already, and leave it disabled.
    """
    with _capturing:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
