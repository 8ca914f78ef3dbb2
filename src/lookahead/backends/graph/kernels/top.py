"""Each row's likeliest tokens with their probability levels, for the `recycle` source, in two launches.

The first launch finds the best tokens of each piece of the vocabulary, the second the best of those, so the logits are
read once. (`torch.topk` is built for any k; here k is eight.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.algorithm.sampling import LEVELS

PIECE = 1024
"""Logits per program of the first launch: as many as one warp can hold, to find their maximum without a barrier."""


@triton.jit
def _pieces(logits, values, ids, sums, stride, vocabulary, pieces, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, pieces). The TOP best logits of each piece and their ids, the lower id first among equals, and the
    piece's maximum and sum of exponentials.

    logits [R, V], whose rows are `stride` apart; values, ids [R, pieces, TOP]; sums [R, pieces, 2].
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = row * pieces + piece
    tl.store(sums + at * 2, top)
    tl.store(sums + at * 2 + 1, tl.sum(tl.exp(x - safe), 0))
    if logits.dtype.element_ty == tl.bfloat16:
        # The 16 bits of a logit, in the order of its value, and the rank of its column below them: one number, whose
        # maximum is found faster than that of two. No two are equal.
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True) >> 16  # zeros of both signs are equal
        key = tl.where(bits < 0, bits ^ 0x7FFF, bits) * BLOCK + (BLOCK - 1 - tl.arange(0, BLOCK))
        for i in tl.static_range(TOP):
            best = tl.max(key, 0)
            rank = best & (BLOCK - 1)
            ordered = (best - rank) // BLOCK
            value = tl.where(ordered < 0, ordered ^ 0x7FFF, ordered) << 16
            tl.store(values + at * TOP + i, value.to(tl.float32, bitcast=True))
            tl.store(ids + at * TOP + i, tl.minimum(piece * BLOCK + BLOCK - 1 - rank, vocabulary - 1))
            key = tl.where(key == best, -2147483648, key)
    else:
        for i in tl.static_range(TOP):
            best = tl.max(x, 0)
            where = tl.min(tl.where(x == best, column, 2147483647), 0)
            tl.store(values + at * TOP + i, best)
            tl.store(ids + at * TOP + i, where)
            x = tl.where(column == where, float("-inf"), x)


@triton.jit
def _join(
    values, ids, sums, out, pieces,
    LEVELS: tl.constexpr, TOP: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). From the results of `_pieces`, out [R, 1 + 2 TOP]: the best token, the TOP best, their levels."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, P)
    tops = tl.load(sums + (row * pieces + piece) * 2, mask=piece < pieces, other=float("-inf"))
    totals = tl.load(sums + (row * pieces + piece) * 2 + 1, mask=piece < pieces, other=0.0)
    top = tl.max(tops, 0)
    log_sum = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    slot = tl.arange(0, B)
    x = tl.load(values + row * pieces * TOP + slot, mask=slot < pieces * TOP, other=float("-inf"))
    token = tl.load(ids + row * pieces * TOP + slot, mask=slot < pieces * TOP, other=2147483647)
    base = out + row * (2 * TOP + 1)
    for i in tl.static_range(TOP):
        best = tl.max(x, 0)
        where = tl.min(tl.where(x == best, token, 2147483647), 0)
        if i == 0:
            tl.store(base, where)
        level = -2 * (best - log_sum) * 1.4426950408889634
        level = tl.minimum(tl.maximum(level, 0.0), LEVELS - 1)
        tl.store(base + 1 + i, where)
        tl.store(base + 1 + TOP + i, level.to(tl.int32))
        x = tl.where(token == where, float("-inf"), x)


class TopWork:
    """Workspace that the first launch passes to the second, for a fixed number of rows."""

    def __init__(self, rows: int, vocabulary: int, top: int, device: torch.device) -> None:
        self.pieces = triton.cdiv(vocabulary, PIECE)
        self.values = torch.empty(rows, self.pieces, top, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, self.pieces, top, dtype=torch.int32, device=device)
        self.sums = torch.empty(rows, self.pieces, 2, dtype=torch.float32, device=device)


def top_tokens(logits: torch.Tensor, out: torch.Tensor, work: TopWork) -> torch.Tensor:
    """logits [R, V] -> out [R, 1 + 2 n] int32: the argmax, the n best tokens, best first, and their levels.

    The levels are those of `sampling.top_tokens`.
    """
    rows, vocabulary = logits.shape
    top = (out.shape[1] - 1) // 2
    _pieces[(rows, work.pieces)](
        logits, work.values, work.ids, work.sums, logits.stride(0), vocabulary, work.pieces,
        TOP=top, BLOCK=PIECE, num_warps=1,
    )  # fmt: skip
    candidates = triton.next_power_of_2(work.pieces * top)
    _join[(rows,)](
        work.values, work.ids, work.sums, out, work.pieces, LEVELS=LEVELS, TOP=top,
        P=triton.next_power_of_2(work.pieces), B=candidates, num_warps=1 if candidates <= 1024 else 4,
    )  # fmt: skip
    return out
