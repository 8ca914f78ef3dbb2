"""Top-k and top-p on the device, without sorting: the candidates of each row.

A filter needs one number per row: the logit of the last token that stays. Logits are compared by their *keys*, integers
in the order of the logits, so that logit is found by bisecting a range of integers. Two things make the search cheap:

1. `_bounds` finds a floor, a lower bound of that logit. For top-k it follows from the likeliest tokens that
   `top.top_tokens` left in its `TopWork`; for top-p, from a probability so small that all tokens below it together do
   not fill the tail.
2. `_measure` and `_pack` copy each row's logits from the floor upward, its candidates, next to each other, in the order
   of the vocabulary.

`cutoff.find_cutoff` then searches among the candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    draw_setting,
)
from lookahead.backends.graph.kernels.top import PIECE, TopWork


class DrawWork:
    """Workspace that the launches of `draw_targets` and `multinomial_targets` pass on to each other.

    It is for at most `rows` rows. `dtype` is that of the logits, or a wider one.

    - limits [R, 2]: a row's maximum and its floor
    - counts, masses [R, pieces]: the number of candidates and the probability mass of each piece of the vocabulary
    - candidates [R, pieces x PIECE]: the logits of a row's candidates, contiguous
    - cutoffs [R, 2]: the key of the last token that stays, and the first token with this key that stays
    - ratios, tokens [R, pieces]: the best ratio of weight and noise in each piece, and its token
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.pieces = triton.cdiv(vocabulary, PIECE)
        shape = (rows, self.pieces)
        self.limits = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self.candidates = torch.zeros(rows, self.pieces * PIECE, dtype=dtype, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.masses = torch.zeros(shape, dtype=torch.float64, device=device)
        self.cutoffs = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.ratios = torch.zeros(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)


def shift_of(dtype: torch.dtype) -> int:
    """Low bits of a key that are the same for all logits of this dtype."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order. -0.0 and 0.0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def is_drawn(settings, depths, row, MULTINOMIAL: tl.constexpr):
    """Whether a row is sampled: it has a temperature, and a uniform or, with noise, a row of the noise."""
    wanted = tl.load(depths + row) >= 0 if MULTINOMIAL else draw_setting(settings, row, UNIFORM) >= 0.0
    return wanted & (draw_setting(settings, row, TEMPERATURE) > 0.0)


@triton.jit
def scale_of(settings, row):
    """1 / temperature in float64, finite even for the smallest temperatures."""
    return tl.minimum(1.0 / draw_setting(settings, row, TEMPERATURE), 1e300)


@triton.jit
def weigh(x, top, scale):
    """float32 logits -> float64 weights; the maximum's is 1."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) * scale)


@triton.jit
def filters_of(settings, row, vocabulary):
    """A row's k, whether top-k removes anything, its p, and whether top-p removes anything."""
    k = draw_setting(settings, row, TOP_K)
    p = draw_setting(settings, row, TOP_P)
    return k, (k > 0.0) & (k < vocabulary), p, p < 1.0


@triton.jit
def is_filtered(settings, row, vocabulary):
    """Whether top-k or top-p removes anything from a row."""
    _k, has_k, _p, has_p = filters_of(settings, row, vocabulary)
    return has_k | has_p


@triton.jit
def _bounds(
    values, sums, settings, depths, limits, pieces, vocabulary,
    TOP: tl.constexpr, P: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, MULTINOMIAL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). limits [R, 2]: each drawn row's maximum, and its floor.

    values [R, pieces, TOP] and sums [R, pieces, 2] are those of `TopWork`.
    """
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(settings, depths, row, MULTINOMIAL):
        piece = tl.arange(0, P)
        tops = tl.load(sums + (row * pieces + piece) * 2, mask=piece < pieces, other=float("-inf"))
        top = tl.max(tops, 0)
        k, has_k, p, has_p = filters_of(settings, row, vocabulary)
        slot = tl.arange(0, B)
        known = tl.load(values + row * pieces * TOP + slot, mask=slot < pieces * TOP, other=float("-inf"))
        floor = tl.full((), float("-inf"), tl.float32)
        if has_k:
            # The kth of the known tokens is not above the kth of all tokens.
            key = key_of(known, SHIFT)
            low, high = tl.min(key, 0).to(tl.int64), tl.max(key, 0).to(tl.int64)
            while low < high:
                middle = low + (high - low) // 2
                above = tl.sum((key > middle.to(tl.int32)).to(tl.int32), 0)
                fewer = above < k
                low = tl.where(fewer, low, middle + 1)
                high = tl.where(fewer, middle, high)
            kth = tl.min(tl.where(key >= low.to(tl.int32), known, float("inf")), 0)
            floor = tl.where(k <= pieces * TOP, kth, floor)
        elif has_p:
            # All V tokens of a smaller weight than (1 - p) S / V together weigh less than the tail, (1 - p) S. The
            # known tokens' weights are less than S. The margins are for rounding.
            mass = tl.sum(weigh(known, top, scale_of(settings, row)), 0)
            score = tl.log((1.0 - p) * mass / vocabulary) - 1e-6
            value = top.to(tl.float64) + score * draw_setting(settings, row, TEMPERATURE)
            floor = (value - tl.abs(value) * 1e-6 - 1e-30).to(tl.float32)
        tl.store(limits + row * 2, top)
        tl.store(limits + row * 2 + 1, floor)


@triton.jit
def is_candidate(x, floor):
    """Whether a logit is a candidate. Tokens of probability zero are none."""
    return (x >= floor) & (x > float("-inf"))


@triton.jit
def _measure(
    logits, settings, depths, limits, counts, masses, stride, vocabulary, pieces,
    BLOCK: tl.constexpr, MULTINOMIAL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, pieces). The candidates of each piece, counts [R, pieces], and its mass, masses [R, pieces].

    With top-k the mass is not needed. With top-p it is that of all tokens, else of those that min-p leaves.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(settings, depths, row, MULTINOMIAL):
        _k, has_k, _p, has_p = filters_of(settings, row, vocabulary)
        column = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        at = row * pieces + piece
        # Triton has no `not` for a runtime value.
        if (has_k == 0) & (has_p | (MULTINOMIAL == 0)):
            weight = weigh(x, tl.load(limits + row * 2), scale_of(settings, row))
            least = tl.where(has_p, 0.0, draw_setting(settings, row, MIN_P))
            tl.store(masses + at, tl.sum(tl.where(weight >= least, weight, 0.0), 0))
        if has_k | has_p:
            chosen = is_candidate(x, tl.load(limits + row * 2 + 1))
            tl.store(counts + at, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def _pack(
    logits, settings, depths, limits, counts, candidates, stride, vocabulary, pieces,
    P: tl.constexpr, BLOCK: tl.constexpr, MULTINOMIAL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, pieces). Copy the candidates to candidates [R, pieces x BLOCK], after those of earlier pieces."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(settings, depths, row, MULTINOMIAL) & is_filtered(settings, row, vocabulary):
        earlier = tl.arange(0, P)
        before = tl.sum(tl.load(counts + row * pieces + earlier, mask=earlier < piece, other=0), 0)
        column = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf"))
        chosen = is_candidate(x.to(tl.float32), tl.load(limits + row * 2 + 1))
        index = before + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(candidates + row * pieces * BLOCK + index, x.to(candidates.dtype.element_ty), mask=chosen)


def collect_candidates(
    logits: torch.Tensor, settings: torch.Tensor, depths: torch.Tensor | None, tops: TopWork, work: DrawWork
) -> None:
    """Fill `work` with the rows' limits, masses and candidates, in three launches. See `draw.draw_targets`."""
    rows, vocabulary = logits.shape
    top = tops.values.shape[2]
    pieces = triton.next_power_of_2(work.pieces)
    multinomial, chosen = depths is not None, settings if depths is None else depths
    _bounds[(rows,)](
        tops.values, tops.sums, settings, chosen, work.limits, work.pieces, vocabulary,
        TOP=top, P=pieces, B=triton.next_power_of_2(work.pieces * top), SHIFT=shift_of(logits.dtype),
        MULTINOMIAL=multinomial, num_warps=4,
    )  # fmt: skip
    _measure[(rows, work.pieces)](
        logits, settings, chosen, work.limits, work.counts, work.masses, logits.stride(0), vocabulary, work.pieces,
        BLOCK=PIECE, MULTINOMIAL=multinomial, num_warps=1,
    )  # fmt: skip
    _pack[(rows, work.pieces)](
        logits, settings, chosen, work.limits, work.counts, work.candidates, logits.stride(0), vocabulary,
        work.pieces, P=pieces, BLOCK=PIECE, MULTINOMIAL=multinomial, num_warps=1,
    )  # fmt: skip
