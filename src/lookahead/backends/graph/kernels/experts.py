"""Which experts the rows of a step have: chosen from the router's logits, and sorted by expert, without the host.

A row and one of its experts are a *pair*, number row * top_k + rank. Padding rows have no experts, so that a step reads
only experts that its own rows have chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.choice import best_experts, choice_options
from lookahead.models.feed_forward import Router


@dataclass(slots=True)
class ExpertRows:
    """The pairs of a step of R rows, on the device, with memory for E experts and rows of the largest step.

    chosen int32 [pairs]: the expert of a pair. weights fp32 [pairs]. shared fp32 [R]: the weight of the expert that
    all rows share. table int32 [E, R]: the pairs of an expert. counts int32 [E]: how many it has; zero between layers.
    tiles int32 [T, 2]: the expert of each tile of pairs, and the first of its pairs in the table. numbers int32 [3]:
    of tiles; of programs that have arrived; of experts that all passes so far have read, each layer's counted.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor
    tiles: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def new(cls, experts: int, top_k: int, rows: int, device: torch.device) -> ExpertRows:
        """For steps of up to `rows` rows that choose `top_k` of `experts`."""

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(size: int) -> torch.Tensor:
            return torch.zeros(size, device=device)

        return cls(
            integers(rows * top_k), floats(rows * top_k), floats(rows), integers(experts, rows), integers(experts),
            integers(rows * top_k, 2), integers(3),
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """The most pairs of an expert."""
        return self.table.shape[1]


def most_tiles(rows: int, top_k: int, experts: int, block: int) -> int:
    """The most tiles of `block` pairs that `rows` rows can need: none of an expert's has less than one pair."""
    return min(rows * top_k, min(experts, rows * top_k) + rows * top_k // block)


@triton.jit
def _choose(
    logits, bias, choice_bias, expert_scale, sequence_of, chosen, weights, shared, table, counts, tiles, numbers,
    stride, rows, capacity, scale, jitter, sum_eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, TOP_WIDTH: tl.constexpr, SCORING: tl.constexpr,
    NORMALISED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, LOG: tl.constexpr,
    TOP_LOG: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). The last program to arrive lists the tiles."""
    row = tl.program_id(0)
    number, rank = tl.arange(0, WIDTH), tl.arange(0, TOP_WIDTH)[None, :]
    own = tl.load(logits + row * stride + number[None, :], mask=number[None, :] < EXPERTS, other=0.0)
    experts, found, _ = best_experts(
        own, bias, choice_bias, expert_scale, scale, jitter, sum_eps,
        1, EXPERTS, TOP, WIDTH, TOP_WIDTH, SCORING, NORMALISED, GROUPS, KEPT, BEST, LOG, TOP_LOG,
    )  # fmt: skip
    inside = rank < TOP
    if GATED:
        tl.store(shared + row, 1 / (1 + tl.exp(-tl.load(logits + row * stride + EXPERTS))))
    used = rank < tl.where(tl.load(sequence_of + row) >= 0, TOP, 0)
    tl.store(chosen + row * TOP + rank, experts, mask=inside)
    tl.store(weights + row * TOP + rank, found, mask=inside)
    slot = tl.atomic_add(counts + experts, 1, mask=used)
    tl.store(table + experts * capacity + slot, row * TOP + rank, mask=used)
    tl.debug_barrier()
    if tl.atomic_add(numbers + 1, 1, sem="acq_rel") == rows - 1:
        tl.store(numbers + 1, 0)
        count = tl.load(counts + number, mask=number < EXPERTS, other=0, cache_modifier=".cg")
        own_tiles = tl.cdiv(count, BLOCK_M)
        first = tl.cumsum(own_tiles, 0) - own_tiles
        tl.store(numbers, tl.sum(own_tiles, 0))
        tl.store(numbers + 2, tl.load(numbers + 2) + tl.sum((count > 0).to(tl.int32), 0))
        for i in range(tl.max(own_tiles, 0)):
            has = i < own_tiles
            tl.store(tiles + 2 * (first + i), number, mask=has)
            tl.store(tiles + 2 * (first + i) + 1, number * 0 + i * BLOCK_M, mask=has)


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    router: Router,
    sequence_of: torch.Tensor,
    out: ExpertRows,
    block: int,
    *,
    gated: bool = False,
) -> None:
    """Fill `out` from logits [R, E] in fp32, which `bias` [E] is added to; `counts` must be zero.

    sequence_of int32 [R] is -1 for padding rows. `block`: the pairs of a tile. `gated`: column E of the logits is that
    of the shared expert's gate, whose sigmoid is the shared expert's weight.
    """
    rows = len(sequence_of)
    _choose[(rows,)](
        logits, bias, router.choice_bias, router.expert_scale, sequence_of, out.chosen, out.weights, out.shared,
        out.table, out.counts, out.tiles, out.numbers, logits.stride(0), rows, out.capacity, router.scale,
        router.jitter, router.sum_eps, **choice_options(router), GATED=gated, BLOCK_M=block, num_warps=1,
    )  # fmt: skip


@triton.jit
def pairs_of_tile(number, tiles, counts, table, capacity, BLOCK_M: tl.constexpr):
    """A tile's expert, its pairs [BLOCK_M], and which of them it has."""
    expert = tl.load(tiles + 2 * number)
    at = tl.load(tiles + 2 * number + 1) + tl.arange(0, BLOCK_M)
    known = at < tl.load(counts + expert)
    return expert, tl.load(table + expert * capacity + at, mask=known, other=0), known


@triton.jit
def with_shared(total, shared, bias, weights, row, column, inside, width):
    """The sum over a row's experts, plus the shared expert's output of these columns and its bias, times its weight.

    Which product is rounded before an addition is not left to the compiler: the bits would depend on the kernel.
    """
    own = tl.load(shared + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if weights is not None:
        total = tl.fma(own, tl.broadcast_to(tl.load(weights + row), own.shape), total)
    else:
        total += own
    return total


@triton.jit
def _combine(
    parts, weights, shared, shared_bias, shared_weights, sequence_of, out, counts, experts, width,
    TOP: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < tl.where(tl.load(sequence_of + row) >= 0, width, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP):
        pair = (row * TOP + rank).to(tl.int64)
        part = tl.load(parts + pair * width + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(part, tl.broadcast_to(tl.load(weights + pair), [BLOCK]), total)
    if shared is not None:
        total = with_shared(total, shared, shared_bias, shared_weights, row, column, inside, width)
    total = tl.where(inside, total, 0.0)
    tl.store(out + row.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)
    if (row == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, COUNTS)
        tl.store(counts + number, number * 0, mask=number < experts)


def combine(
    parts: torch.Tensor,
    rows: ExpertRows,
    sequence_of: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> None:
    """out [R, width] = the sum over a row's pairs, the best first, of weight * parts [pairs, width], plus `shared`
    [R, width] and its bias, times its weight if `gated`. Zero for padding rows. Makes `rows.counts` zero again."""
    count, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _combine[(count, triton.cdiv(width, block))](
        parts, rows.weights, shared, shared_bias, rows.shared if gated else None, sequence_of, out, rows.counts,
        len(rows.counts), width, TOP=len(parts) // count, BLOCK=block,
        COUNTS=triton.next_power_of_2(len(rows.counts)), num_warps=4,
    )  # fmt: skip
