"""The cutoff of a row with top-k or top-p: the logit of the last token that stays, searched among the candidates that
`filters.collect_candidates` has copied.

Weights are exp((logit - maximum) / temperature) in float64, and each sum is taken in a fixed order within a row, so a
row's result is the same in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.filters import filters_of, is_candidate, key_of, scale_of, weigh
from lookahead.backends.graph.kernels.records import MIN_P, draw_setting

TILE = 2048
"""Candidates that a program processes at a time: 8 per thread."""


@triton.jit
def load_candidates(candidates, start, count, TILE: tl.constexpr):
    """A row's candidates start to start + TILE as float32; -inf after the last."""
    index = start + tl.arange(0, TILE)
    return tl.load(candidates + index, mask=index < count, other=float("-inf")).to(tl.float32)


@triton.jit
def token_at(logits, counts, limits, row, index, stride, vocabulary, pieces, P: tl.constexpr, BLOCK: tl.constexpr):
    """The token id of a row's candidate number `index`."""
    piece = tl.arange(0, P)
    count = tl.load(counts + row * pieces + piece, mask=piece < pieces, other=0)
    ends = tl.cumsum(count, 0)
    chosen = tl.minimum(tl.sum((ends <= index).to(tl.int32), 0), pieces - 1)
    rank = index - tl.sum(tl.where(piece < chosen, count, 0), 0)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    here = is_candidate(x, tl.load(limits + row * 2 + 1))
    hit = here & (tl.cumsum(here.to(tl.int32), 0) - 1 == rank)
    return tl.min(tl.where(hit, column, vocabulary - 1), 0)


@triton.jit
def _mass_above(candidates, count, a, b, c, top, scale, TILE: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr):
    """The mass of the candidates whose keys are above each of three keys; without MASS, their number."""
    over_a = tl.full((), 0.0, tl.float64)
    over_b = tl.full((), 0.0, tl.float64)
    over_c = tl.full((), 0.0, tl.float64)
    for start in range(0, count, TILE):
        x = load_candidates(candidates, start, count, TILE)
        key = key_of(x, SHIFT)
        weight = weigh(x, top, scale) if MASS else (x > float("-inf")).to(tl.float64)
        over_a += tl.sum(tl.where(key > a.to(tl.int32), weight, 0.0), 0)
        over_b += tl.sum(tl.where(key > b.to(tl.int32), weight, 0.0), 0)
        over_c += tl.sum(tl.where(key > c.to(tl.int32), weight, 0.0), 0)
    return over_a, over_b, over_c


@triton.jit
def _search(
    candidates, count, low, high, limit, top, scale, TILE: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr
):  # fmt: skip
    """The smallest key from low to high above which the mass (or number) of candidates is less than `limit`.

    Each pass quarters the range. The mass above a key never grows with the key, not even after rounding.
    """
    while low < high:
        width = high - low
        a, b, c = low + width // 4, low + width // 2, low + 3 * width // 4
        over_a, over_b, over_c = _mass_above(candidates, count, a, b, c, top, scale, TILE, SHIFT, MASS)
        below = tl.where(over_b < limit, a + 1, tl.where(over_c < limit, b + 1, c + 1))
        above = tl.where(over_b < limit, b, tl.where(over_c < limit, c, high))
        low = tl.where(over_a < limit, low, below)
        high = tl.where(over_a < limit, a, above)
    return low


@triton.jit
def find_cutoff(
    candidates, count, masses, limits, settings, row, vocabulary, pieces,
    P: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """For a row with top-k or top-p and `count` candidates: the key of the last token that stays, and its ties.

    Tokens with larger keys stay, and `quota` of the `ties` tokens with this key. Also returned: the weight of a tied
    token, and the mass of the larger keys that min-p leaves.
    """
    top = tl.load(limits + row * 2)
    scale = scale_of(settings, row)
    k, has_k, p, has_p = filters_of(settings, row, vocabulary)
    low = key_of(tl.load(limits + row * 2 + 1), SHIFT).to(tl.int64)
    high = key_of(top, SHIFT).to(tl.int64)
    # 1. Top-k: the kth token's key. All tokens tied with it stay.
    if has_k:
        low = _search(candidates, count, low, high, k, top, scale, TILE, SHIFT, False)
    # 2. Top-p: a token stays if the mass before it is less than `limit`, the share p of what top-k left.
    limit = tl.full((), 0.0, tl.float64)
    if has_p:
        if has_k:
            under = low - 1
            total, _b, _c = _mass_above(candidates, count, under, under, under, top, scale, TILE, SHIFT, True)
        else:
            piece = tl.arange(0, P)
            total = tl.sum(tl.load(masses + row * pieces + piece, mask=piece < pieces, other=0.0), 0)
        limit = p * total
        low = _search(candidates, count, low, high, limit, top, scale, TILE, SHIFT, True)
    # 3. The mass above the cutoff, and the ties at it.
    cutoff = low.to(tl.int32)
    least = draw_setting(settings, row, MIN_P)
    above = tl.full((), 0.0, tl.float64)
    likely = tl.full((), 0.0, tl.float64)
    tied = tl.full((), 0.0, tl.float64)
    ties = tl.full((), 0, tl.int32)
    for start in range(0, count, TILE):
        x = load_candidates(candidates, start, count, TILE)
        key = key_of(x, SHIFT)
        weight = weigh(x, top, scale)
        larger = tl.where(key > cutoff, weight, 0.0)
        same = (key == cutoff) & (x > float("-inf"))
        above += tl.sum(larger, 0)
        likely += tl.sum(tl.where(weight >= least, larger, 0.0), 0)
        ties += tl.sum(same.to(tl.int32), 0)
        tied = tl.maximum(tied, tl.max(tl.where(same, weight, 0.0), 0))
    quota = ties
    if has_p & (tied > 0.0):
        fitting = tl.ceil((limit - above) / tied)
        quota = tl.minimum(tl.maximum(fitting, 1.0), ties.to(tl.float64)).to(tl.int32)
    return cutoff, quota, ties, tied, likely
