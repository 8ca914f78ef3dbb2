"""The router of a step of few rows in one launch: its product, and the choice of experts by its last program.

It gives the bits of `grouped.multiply` and `experts.choose_experts`, which larger steps run one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.choice import best_experts, choice_options
from lookahead.backends.graph.kernels.experts import ExpertRows
from lookahead.backends.graph.kernels.grouped import BLOCK_K, Launch, sum_of_columns
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.models.feed_forward import Router


@triton.jit
def _route(
    x, matrix, bias, choice_bias, expert_scale, gates, sequence_of, chosen, weights, shared, tiles, numbers,
    partials, arrived, K, x_stride, stride, gate_stride, scale, jitter, sum_eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, TOP_WIDTH: tl.constexpr, SCORING: tl.constexpr,
    NORMALISED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, LOG: tl.constexpr,
    TOP_LOG: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of experts x splits). A program's part of the logits is [BLOCK_N, BLOCK_M], of which ROWS are rows
    of x."""
    # 1. One split of the product, for one tile of experts.
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    known, inside = m < ROWS, (n < EXPERTS)[:, None]
    blocks = tl.cdiv(K, BLOCK_K)
    per = tl.cdiv(blocks, SPLITS)
    part = sum_of_columns(
        x + m.to(tl.int64)[None, :] * x_stride, matrix + n.to(tl.int64)[:, None] * stride, inside, known,
        split * per, tl.minimum((split + 1) * per, blocks), K, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    tl.store(partials + (split * ROWS + m)[None, :] * EXPERTS + n[:, None], part, mask=inside & known[None, :])
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        # 2. The last program has all logits, and chooses.
        row, number, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, TOP_WIDTH)[None, :]
        own = tl.zeros([ROWS, WIDTH], tl.float32)
        for other in tl.static_range(SPLITS):
            cell = partials + (other * ROWS + row) * EXPERTS + number
            own += tl.load(cell, mask=(number < EXPERTS) & (row < ROWS), other=0.0, cache_modifier=".cg")
        experts, found, taken = best_experts(
            own, bias, choice_bias, expert_scale, scale, jitter, sum_eps,
            ROWS, EXPERTS, TOP, WIDTH, TOP_WIDTH, SCORING, NORMALISED, GROUPS, KEPT, BEST, LOG, TOP_LOG,
        )  # fmt: skip
        used = tl.load(sequence_of + row) >= 0
        tl.store(chosen + row * TOP + rank, tl.where(used, experts, -1), mask=rank < TOP)
        tl.store(weights + row * TOP + rank, found, mask=rank < TOP)
        if gates is not None:
            tl.store(shared + row, 1 / (1 + tl.exp(-tl.load(gates + row * gate_stride))))
        # 3. The experts of all rows, each once.
        read = tl.max((taken & used).to(tl.int32), 0)
        count = tl.sum(read, 0)
        tl.store(numbers, tl.maximum(count, 1))
        tl.store(numbers + 2, tl.load(numbers + 2) + count)
        if ROWS > 1:
            if count == 0:
                tl.store(tiles, -1)
            expert = tl.arange(0, WIDTH)
            tl.store(tiles + 2 * (tl.cumsum(read, 0) - read), expert, mask=read > 0)


def choose_for_few(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    gates: torch.Tensor | None,
    router: Router,
    sequence_of: torch.Tensor,
    out: ExpertRows,
    launch: Launch,
    splits: int,
    memory: SplitMemory,
) -> None:
    """Fill `out` for the kernel of `few_experts` from x [at least R, hidden] and the router's matrix [E, hidden] and
    bias [E], for as many rows R as sequence_of [R], a power of two of at most `launch.block_m`.

    gates fp32 [R, 1]: the logits of the shared expert's gate. Padding rows, whose sequence is -1, have experts -1. Of
    `out.tiles` the first column is filled, with each of the step's experts once, of which there are `out.numbers[0]`:
    with a single row nothing, whose experts are those in `out.chosen`. Without any there is one expert -1.
    """
    rows, (experts, width) = len(sequence_of), matrix.shape
    _route[(triton.cdiv(experts, launch.block_n) * splits,)](
        x, matrix, bias, router.choice_bias, router.expert_scale, gates, sequence_of, out.chosen, out.weights,
        out.shared, out.tiles, out.numbers, memory.partials, memory.arrived, width, x.stride(0), matrix.stride(0),
        0 if gates is None else gates.stride(0), router.scale, router.jitter, router.sum_eps,
        **choice_options(router), ROWS=rows, SPLITS=splits, EVEN=width % BLOCK_K == 0, BLOCK_N=launch.block_n,
        BLOCK_M=launch.block_m, BLOCK_K=BLOCK_K, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
