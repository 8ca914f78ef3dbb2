"""The products of a step with its layers' experts, which share memory on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from lookahead.backends.graph.kernels import grouped, quantised
from lookahead.backends.graph.kernels.ends import last_columns
from lookahead.backends.graph.kernels.experts import ExpertRows, choose_experts, combine, most_tiles
from lookahead.backends.graph.kernels.few_experts import BLOCK_M, can_activate, multiply_few
from lookahead.backends.graph.kernels.few_router import choose_for_few
from lookahead.backends.graph.kernels.finish import Finish
from lookahead.backends.graph.kernels.grouped import Launch, launch_of, pairs_per_tile
from lookahead.backends.graph.kernels.quantised_tiles import QuantisedWeights, Tile, splits_of
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.models.feed_forward import Router
from lookahead.models.quantised import QuantisedLinear

Weights = torch.Tensor | QuantisedWeights

FEW_ROWS = BLOCK_M
"""Steps of up to this many rows run a mixture in three launches (`few_router`, `few_experts`), larger ones in six."""
FEW_LOGITS = 512
"""The most logits, padded to powers of two, that one program chooses from: 4 rows of 128 experts. With 2,048 of them
sigmoids take 195 registers of a thread on Hopper GPUs and 8,000 instructions, with 128 they take 38 and 950."""


class ExpertProducts:
    """Plans the work of mixtures of experts on a device. All layers share `rows`, the step's rows by expert.

    `few_rows`: see `FEW_ROWS`. No result depends on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.few_rows = FEW_ROWS
        self._device, self._quantised = device, quantised.QuantisedProducts(device)
        self._memory: SplitMemory = self._quantised.memory
        self.rows = ExpertRows.new(1, 1, 1, device)
        self._logits = torch.zeros(0, device=device)

    def reserve_router(self, weight: torch.Tensor, top_k: int) -> None:
        """Make room for the router's work in any step, before the first one; weight [experts, hidden]."""
        experts, most = len(weight), ROW_SIZES[-1]
        known, pairs = len(self.rows.counts), len(self.rows.chosen)
        if experts > known or most * top_k > pairs:
            known, per = max(experts, known), max(top_k, pairs // most)
            self.rows = ExpertRows.new(known, per, most, self._device)
        if len(self._logits) < most * (experts + 1):
            self._logits = torch.zeros(most * (experts + 1), device=self._device)
        for rows in ROW_SIZES:
            launch, splits = self._router_launch(weight, rows)
            tiles = triton.cdiv(experts, launch.block_n) * triton.cdiv(rows, launch.block_m)
            self._memory.reserve(tiles, splits, launch.block_n, launch.block_m)
        self._memory.reserve(FEW_ROWS, splits, experts, 1)

    @property
    def reads(self) -> torch.Tensor:
        """int32 [1]: how many experts all passes so far have read, which may overflow."""
        return self.rows.numbers[2:]

    def quantised(self, layer: QuantisedLinear, out: int, tensors: Mapping[str, torch.Tensor]) -> QuantisedWeights:
        """What the kernel reads of a quantised layer whose rows are those of experts of `out` rows each."""
        return QuantisedWeights.of(layer, out, tensors)

    def reserve(self, weights: Weights, top_k: int) -> None:
        """Make room for the sums of products of any number of rows."""
        for rows in ROW_SIZES:
            tile, splits, tiles = self._launch(weights, rows, top_k)
            if tile.parallel:
                out = weights.out if isinstance(weights, QuantisedWeights) else weights.shape[1]
                self._memory.reserve(triton.cdiv(out, tile.block_n) * tiles, splits, tile.block_n, tile.block_m)
        tile, splits, out = self._few_launch(weights, top_k)
        self._memory.reserve(FEW_ROWS * top_k * triton.cdiv(out, tile.block_n), splits, tile.block_n, 1)

    def plan(self, weights: Weights, rows: int, top_k: int) -> Callable[..., None]:
        """A function of (x, weights, out [pairs, N], bias [E, N] or None, per): see `grouped.multiply`."""
        tile, splits, tiles = self._launch(weights, rows, top_k)
        kernel: Any = quantised.multiply if isinstance(weights, QuantisedWeights) else grouped.multiply
        memory = self._memory

        def run(x: torch.Tensor, own: Weights, out: torch.Tensor, bias: torch.Tensor | None, per: int) -> None:
            kernel(x, own, out, tile, splits, memory, bias=bias, experts=self.rows, per=per, tiles=tiles)

        return run

    def plan_router(
        self,
        router: Router,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gate: torch.Tensor | None,
        rows: int,
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A function of (x [R, hidden], sequence_of [R]) that fills `rows`. gate [1, hidden]: the shared expert's."""
        experts = len(weight)
        logits = self._logits[: rows * (experts + 1)].view(rows, experts + 1)
        launch, splits = self._router_launch(weight, rows)
        block = pairs_per_tile(rows, router.top_k, experts)
        memory, gated = self._memory, gate is not None

        def run(x: torch.Tensor, sequence_of: torch.Tensor) -> None:
            grouped.multiply(x, weight, logits[:, :experts], launch, splits, memory)
            if gate is not None:
                last_columns(x, gate, logits[:, experts:])
            choose_experts(logits, bias, router, sequence_of, self.rows, block, gated=gated)

        return run

    def takes_few(self, rows: int, router: Router, gate_up: Weights, finish: Finish) -> bool:
        """Whether a step of this many rows has the form for few. `finish`: that of the first product."""
        launch, _, out = self._few_launch(gate_up, router.top_k)
        experts = triton.next_power_of_2(router.logits.shape[0])
        few = rows <= min(self.few_rows, FEW_ROWS) and rows * experts <= FEW_LOGITS and rows & (rows - 1) == 0
        return few and can_activate(out, finish, launch.block_n)

    def plan_few_router(
        self,
        router: Router,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gate: torch.Tensor | None,
        rows: int,
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """As `plan_router`, for few rows."""
        logits = None if gate is None else self._logits[:rows].view(rows, 1)
        (launch, splits), memory = self._router_launch(weight, FEW_ROWS), self._memory

        def run(x: torch.Tensor, sequence_of: torch.Tensor) -> None:
            if gate is not None and logits is not None:
                last_columns(x, gate, logits)
            choose_for_few(x, weight, bias, logits, router, sequence_of, self.rows, launch, splits, memory)

        return run

    def plan_few(self, weights: Weights, rows: int, top_k: int, finish: Finish) -> Callable[..., None]:
        """A function of (x, weights, out, bias [E, N] or None): see `few_experts.multiply_few`."""
        launch, splits, _ = self._few_launch(weights, top_k)
        memory = self._memory

        def run(x: torch.Tensor, own: Weights, out: torch.Tensor, bias: torch.Tensor | None) -> None:
            multiply_few(
                x, own, out, launch, splits, memory, finish, rows=rows, top_k=top_k, experts=self.rows, bias=bias
            )

        return run

    def combine(
        self,
        parts: torch.Tensor,
        sequence_of: torch.Tensor,
        out: torch.Tensor,
        shared: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        gated: bool,
    ) -> None:
        """See `experts.combine`."""
        combine(parts, self.rows, sequence_of, out, shared, bias, gated=gated)

    def _router_launch(self, weight: torch.Tensor, rows: int) -> tuple[Launch, int]:
        splits = grouped.splits_of(*weight.shape)
        return launch_of(min(64, max(16, rows)), splits), splits

    def _few_launch(self, weights: Weights, top_k: int) -> tuple[Tile | Launch, int, int]:
        """The launch of a product of few rows, its splits, and the rows of an expert's matrix."""
        if isinstance(weights, QuantisedWeights):
            splits = splits_of(weights, top_k)
            return self._quantised.tile(weights, FEW_ROWS, splits), splits, weights.out
        _, out, width = weights.shape
        splits = grouped.splits_of(out, width, top_k)
        return launch_of(FEW_ROWS, splits), splits, out

    def _launch(self, weights: Weights, rows: int, top_k: int) -> tuple[Tile | Launch, int, int]:
        """The launch of a product with experts, its splits, and its most tiles of pairs."""
        if isinstance(weights, QuantisedWeights):
            experts = weights.codes.shape[0] // weights.out
            block, splits = pairs_per_tile(rows, top_k, experts), splits_of(weights, top_k)
            tile: Tile | Launch = self._quantised.tile(weights, block, splits)
            assert tile.block_m == block
        else:
            experts, out, width = weights.shape
            block, splits = pairs_per_tile(rows, top_k, experts), grouped.splits_of(out, width, top_k)
            tile = launch_of(block, splits)
        return tile, splits, most_tiles(rows, top_k, experts, block)
