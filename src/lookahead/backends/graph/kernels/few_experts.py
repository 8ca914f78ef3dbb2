"""The products of a step of few rows with its experts, each with what follows it: the activation, or the sum over a
row's experts.

A program multiplies all rows that have chosen an expert by some rows of that expert's matrix, over one split of K, and
keeps the sums. The last to arrive, of those programs whose sums belong together, adds splits and experts in their order
and writes the result. So a row has the bits that it has in larger steps, whose kernels (`grouped`, `quantised`,
`activations`, `experts`) run one after the other: every sum is the same matrix instructions in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.activations import activated
from lookahead.backends.graph.kernels.experts import ExpertRows, with_shared
from lookahead.backends.graph.kernels.finish import Finish
from lookahead.backends.graph.kernels.grouped import BLOCK_K, Launch, sum_of_columns
from lookahead.backends.graph.kernels.quantised import KINDS
from lookahead.backends.graph.kernels.quantised_sums import group_scales, sum_interleaved, sum_plain
from lookahead.backends.graph.kernels.quantised_tiles import QuantisedWeights, Tile
from lookahead.backends.graph.kernels.splits import SplitMemory

BLOCK_M = 16
"""The rows of a tile, of which a step has some: row m of the step is row m of every tile. Tiles of 16 pairs are those
of `grouped` and `quantised` for few rows, too."""


@triton.jit
def _pairs_of(
    expert, chosen, pair, COUNT: tl.constexpr, ROWS: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr
):  # fmt: skip
    """For each of COUNT rows its pair with this expert, and whether it has one. Of a single row it is `pair`."""
    m = tl.arange(0, COUNT)
    if ROWS == 1:
        pairs, known = m * 0 + pair, tl.where(m == 0, expert, -1) >= 0
    else:
        rank = tl.arange(0, TOP_WIDTH)[None, :]
        number = m[:, None] * TOP + rank
        others = tl.load(chosen + number, mask=(m < ROWS)[:, None] & (rank < TOP), other=-1)
        found = tl.max(tl.where((others == expert) & (others >= 0), number, -1), 1)
        pairs, known = tl.maximum(found, 0), found >= 0
    return pairs, known


@triton.jit
def _finished(
    partials, bias, scales, pair, expert, n, mask, N, scale_row, scale_group,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, AFTER: tl.constexpr, SCALE_ROWS: tl.constexpr, E8M0: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A pair's products with rows n of its expert, with bias, rounded: n [columns, 1], pair and expert [1, rows]."""
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for split in tl.static_range(SPLITS):
        cell = partials + (split * PAIRS + pair).to(tl.int64) * N + n
        total += tl.load(cell, mask=mask, other=0.0, cache_modifier=".cg")
    if AFTER:
        row = expert * N + n
        total *= group_scales(scales, row, row * 0, mask, 1, scale_row, scale_group, SCALE_ROWS, 0, E8M0)
    if bias is not None:
        total += tl.load(bias + expert * N + n, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE)


@triton.jit
def _sum_experts(
    partials, bias, scales, chosen, row_weights, shared, shared_bias, shared_weights, out, n, N,
    scale_row, scale_group, out_stride,
    ROWS: tl.constexpr, TOP: tl.constexpr, SPLITS: tl.constexpr, AFTER: tl.constexpr, SCALE_ROWS: tl.constexpr,
    E8M0: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns n [BLOCK_N] of all rows: as `experts.combine`."""
    row, column = tl.arange(0, ROWS)[None, :], n[:, None]
    used = (column < N) & (tl.load(chosen + row * TOP) >= 0)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for rank in tl.static_range(TOP):
        pair = row * TOP + rank
        done = _finished(
            partials, bias, scales, pair, tl.load(chosen + pair), column, used, N, scale_row, scale_group,
            ROWS * TOP, SPLITS, AFTER, SCALE_ROWS, E8M0, BLOCK_N, ROWS, out.dtype.element_ty,
        ).to(tl.float32)  # fmt: skip
        total = tl.fma(done, tl.broadcast_to(tl.load(row_weights + pair), [BLOCK_N, ROWS]), total)
    if shared is not None:
        total = with_shared(total, shared, shared_bias, shared_weights, row, column, used, N)
    total = tl.where(used, total, 0.0)
    target = out + row.to(tl.int64) * out_stride + column
    tl.store(target, total.to(out.dtype.element_ty), mask=(column < N) & (row < ROWS))


@triton.jit
def _activate_pairs(
    partials, bias, scales, chosen, out, expert, index, tile, N, scale_row, scale_group, out_stride, a, b, c, d,
    ROWS: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr, SPLITS: tl.constexpr, AFTER: tl.constexpr,
    SCALE_ROWS: tl.constexpr, E8M0: tl.constexpr, GATED: tl.constexpr, ALTERNATE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of columns of an expert's pairs: as `activations.activate`."""
    pairs, known = _pairs_of(expert, chosen, index, ROWS, ROWS, TOP, TOP_WIDTH)
    own, pair = tl.maximum(expert, 0), pairs[None, :]
    INNER: tl.constexpr = BLOCK_N // 2 if ALTERNATE else BLOCK_N
    width = N // 2 if GATED else N
    column = (tile * INNER + tl.arange(0, INNER))[:, None]
    inside = (column < width) & known[None, :]
    first = 2 * column if ALTERNATE else column
    inner = _finished(
        partials, bias, scales, pair, own, first, inside, N, scale_row, scale_group,
        ROWS * TOP, SPLITS, AFTER, SCALE_ROWS, E8M0, INNER, ROWS, out.dtype.element_ty,
    )  # fmt: skip
    up = inner
    if GATED:
        second = first + 1 if ALTERNATE else width + column
        up = _finished(
            partials, bias, scales, pair, own, second, inside, N, scale_row, scale_group,
            ROWS * TOP, SPLITS, AFTER, SCALE_ROWS, E8M0, INNER, ROWS, out.dtype.element_ty,
        )  # fmt: skip
    active = activated(inner, up, a, b, c, d, GATED, ACTIVATION)
    tl.store(out + pair.to(tl.int64) * out_stride + column, active, mask=inside)


@triton.jit
def _multiply_few(
    x, weights, scales, zeros, offsets, order, bias, out, chosen, tiles, numbers, row_weights,
    shared, shared_bias, shared_weights, partials, arrived,
    N, K, x_stride, stride, scale_row, scale_group, out_stride, a, b, c, d,
    KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr,
    HALF: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr, PTX: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, COMBINES: tl.constexpr, GATED: tl.constexpr, ALTERNATE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of N x splits, experts). KIND is -1 for plain numbers. `x` are rows; if COMBINES, they are pairs."""
    # 1. The expert, and its pairs. What is read here is read at once: a short program waits for its addresses.
    tile, split, index = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    groups = tl.num_programs(0) // SPLITS
    if ROWS == 1:
        expert, count = tl.load(chosen + index), TOP
    else:
        expert, count = tl.load(tiles + 2 * index), tl.load(numbers)
        if index >= count:
            return
    pairs, known = _pairs_of(expert, chosen, index, BLOCK_M, ROWS, TOP, TOP_WIDTH)
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    source = pairs if COMBINES else m
    at = x + source.to(tl.int64)[None, :] * x_stride
    own = tl.maximum(expert, 0)  # -1 where all rows are padding: there is nothing to multiply
    weights += own.to(tl.int64) * N * stride
    # 2. The sum over one split of K.
    COLUMNS: tl.constexpr = BLOCK_K if KIND < 0 else (256 if KIND >= 2 else 128)
    blocks = tl.cdiv(K, COLUMNS)
    per = tl.cdiv(blocks, SPLITS)
    first = split * per
    last = tl.where(expert < 0, first, tl.minimum(first + per, blocks))
    if KIND < 0:
        part = sum_of_columns(
            at, weights + n.to(tl.int64)[:, None] * stride, (n < N)[:, None], known, first, last, K, EVEN,
            BLOCK_N, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    else:
        first_scale = own.to(tl.int64) * (N // SCALE_ROWS) * scale_row
        own_scales = scales + first_scale
        if zeros is not None:
            zeros += first_scale
        if offsets is not None:
            offsets += first_scale
        if INTERLEAVED:
            part = sum_interleaved(
                at, weights, own_scales, zeros, offsets, order, tile, known[None, :], first, last, N, K, stride,
                scale_row, scale_group, KIND, SCALE_ROWS, GROUP, AFTER, E8M0, HALF, WORDS, PADDED, PTX, BLOCK_N,
                BLOCK_M, WARPS, CHUNKS,
            )  # fmt: skip
        else:
            part = sum_plain(
                at, weights, own_scales, zeros, offsets, order, tile, known[None, :], first, last, N, K, stride,
                scale_row, scale_group, KIND, SCALE_ROWS, GROUP, E8M0, PTX, BLOCK_N, BLOCK_M,
            )  # fmt: skip
    cell = partials + (split * ROWS * TOP + pairs).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(cell, part, mask=known[None, :] & (n < N)[:, None])
    # 3. The last program whose sums belong together finishes: of a tile, or the tiles of gate and up, of one expert; or
    # of a tile of all experts.
    HALVES: tl.constexpr = GATED and not ALTERNATE and not COMBINES
    if COMBINES:
        number, expected = tile, count * SPLITS
    elif HALVES:
        groups = groups // 2
        number, expected = index * groups + tile % groups, 2 * SPLITS
    else:
        number, expected = index * groups + tile, SPLITS
    tl.debug_barrier()
    if tl.atomic_add(arrived + number, 1, sem="acq_rel") == expected - 1:
        tl.store(arrived + number, 0)
        SCALED: tl.constexpr = KIND >= 0 and AFTER and GROUP == 0
        if COMBINES:
            _sum_experts(
                partials, bias, scales, chosen, row_weights, shared, shared_bias, shared_weights, out, n, N,
                scale_row, scale_group, out_stride, ROWS, TOP, SPLITS, SCALED, SCALE_ROWS, E8M0, BLOCK_N,
            )  # fmt: skip
        else:
            _activate_pairs(
                partials, bias, scales, chosen, out, expert, index, number % groups, N, scale_row, scale_group,
                out_stride, a, b, c, d, ROWS, TOP, TOP_WIDTH, SPLITS, SCALED, SCALE_ROWS, E8M0, GATED, ALTERNATE,
                ACTIVATION, BLOCK_N,
            )  # fmt: skip


def can_activate(out: int, finish: Finish, block_n: int) -> bool:
    """Whether a product with `out` columns has whole tiles of gate, and of up. `block_n`: the columns of a tile."""
    return not finish.gated or out % (block_n if finish.alternate else 2 * block_n) == 0


def multiply_few(
    x: torch.Tensor,
    weights: torch.Tensor | QuantisedWeights,
    out: torch.Tensor,
    launch: Launch | Tile,
    splits: int,
    memory: SplitMemory,
    finish: Finish,
    *,
    rows: int,
    top_k: int,
    experts: ExpertRows,
    bias: torch.Tensor | None = None,
    ptx: bool | None = None,
) -> None:
    """The product of R `rows` with their `top_k` experts that `few_router.choose_for_few` has chosen, and its finish.

    An activation: x [at least R, K] -> out [R x top_k, columns of the activation]. A sum: x [R x top_k, K] -> out [R,
    N], zero for padding rows. weights and bias [E, N] as in `grouped.multiply` and `quantised.multiply`.
    """
    options: dict[str, Any]
    given: tuple[torch.Tensor | None, ...] = (None,) * 4
    scale_strides: tuple[int, ...] = (0, 0)
    if isinstance(weights, QuantisedWeights):
        assert isinstance(launch, Tile)
        wide, width, matrix = weights.out, weights.width, weights.read_codes
        scales = weights.scales if weights.words is None else weights.words
        given, scale_strides = (scales, weights.zeros, weights.offsets, weights.order), scales.stride()
        if ptx is None:
            ptx = x.is_cuda and torch.version.hip is None and x.dtype is torch.bfloat16
        options = {
            "KIND": KINDS[weights.format.codes], "SCALE_ROWS": weights.format.rows, "GROUP": weights.format.group,
            "AFTER": weights.scales_after, "E8M0": weights.scales.dtype is torch.uint8,
            "HALF": weights.scales.dtype is torch.float16, "WORDS": weights.words is not None,
            "PADDED": weights.is_padded, "INTERLEAVED": weights.interleaved,
            "PTX": ptx, "CHUNKS": launch.chunks, "EVEN": False,
        }  # fmt: skip
    else:
        (_, wide, width), matrix = weights.shape, weights
        options = dict.fromkeys(("AFTER", "E8M0", "HALF", "WORDS", "PADDED", "INTERLEAVED", "PTX"), False)
        options |= {"KIND": -1, "SCALE_ROWS": 1, "GROUP": 0, "CHUNKS": 1, "EVEN": width % BLOCK_K == 0}
    combines = finish.activation is None
    a, b, c, d = (*finish.constants, *[0.0] * (4 - len(finish.constants)))
    weighed = experts.shared if combines and finish.gated else None
    _multiply_few[(triton.cdiv(wide, launch.block_n) * splits, min(rows * top_k, len(experts.counts)))](
        x, matrix, *given, bias, out, experts.chosen, experts.tiles, experts.numbers, experts.weights,
        finish.shared, finish.shared_bias, weighed, memory.partials, memory.arrived,
        wide, width, x.stride(0), matrix.stride(-2), *scale_strides, out.stride(0), a, b, c, d,
        **options, ROWS=rows, TOP=top_k, TOP_WIDTH=triton.next_power_of_2(top_k), SPLITS=splits, COMBINES=combines,
        GATED=finish.gated and not combines, ALTERNATE=finish.alternate,
        ACTIVATION=None if finish.activation is None else finish.activation.value,
        BLOCK_N=launch.block_n, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, WARPS=launch.warps, num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip
