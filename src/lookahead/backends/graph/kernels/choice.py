"""The choice of experts from a router's logits, for the kernels that list rows by expert.

A row's weights have the same bits in all of these: what is summed over experts is added in one order, two neighbours at
a time, however a kernel lays a row out.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lookahead.models.feed_forward import Router, Scoring

NO_KEY = tl.constexpr(-(1 << 63))
"""The key of what may not be chosen."""
SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.CHOSEN: 2, Scoring.SPARSE_MIXER: 3}


@triton.jit
def _sums(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr):
    """The sums of rows [ROWS, WIDTH], WIDTH = 2^LOG, as a column."""
    for step in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2]), 2)
    return x


@triton.jit
def _keys(values, number, WIDTH: tl.constexpr):
    """64-bit integers in the order of values fp32 [ROWS, WIDTH], of equal ones the first largest: one maximum finds
    both."""
    values = tl.where(values == 0, 0.0, values)  # -0 is not less than 0
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (WIDTH - 1 - number).to(tl.int64)


@triton.jit
def _best(keys, number, WIDTH: tl.constexpr):
    """In each row the index of the largest key and its value, as columns, and the keys without it."""
    best = tl.max(keys, 1)[:, None]
    at = WIDTH - 1 - (best & (WIDTH - 1)).to(tl.int32)
    ordered = (best >> 32).to(tl.int32)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return at, value, tl.where(number == at, NO_KEY, keys)


@triton.jit
def _of_kept_groups(
    keys, number, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The keys without those of groups that are not kept."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for own in tl.static_range(GROUPS):
        left = tl.where(number // SIZE == own, keys, NO_KEY)
        total = tl.zeros([ROWS, 1], tl.float32)
        for _ in tl.static_range(BEST):
            at, value, left = _best(left, number, WIDTH)
            total += value
        sums = tl.where(number == own, total, sums)
    groups = tl.where(number < GROUPS, _keys(sums, number, WIDTH), NO_KEY)
    kept = tl.zeros([ROWS, WIDTH], tl.int1)
    for _ in tl.static_range(KEPT):
        at, value, groups = _best(groups, number, WIDTH)
        kept = kept | (number // SIZE == at)
    return tl.where(kept, keys, NO_KEY)


@triton.jit
def best_experts(
    own, bias, choice_bias, expert_scale, scale, jitter, sum_eps,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr, TOP_WIDTH: tl.constexpr,
    SCORING: tl.constexpr, NORMALISED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr,
    LOG: tl.constexpr, TOP_LOG: tl.constexpr,
):  # fmt: skip
    """The experts int32 and weights fp32 [ROWS, TOP_WIDTH] of rows with logits own [ROWS, WIDTH], before the bias, and
    which experts a row has [ROWS, WIDTH]; see `models.feed_forward.Router`. Columns beyond EXPERTS or TOP are padding.
    """
    number, rank = tl.arange(0, WIDTH)[None, :], tl.arange(0, TOP_WIDTH)[None, :]
    outside = number >= EXPERTS
    if bias is not None:
        own += tl.load(bias + number, mask=number < EXPERTS, other=0.0).to(tl.float32)
    own = tl.where(outside, float("-inf"), own)
    if SCORING == 0:
        scores = tl.exp(own - tl.max(own, 1)[:, None])
        scores = scores / _sums(scores, ROWS, WIDTH, LOG)
    elif SCORING == 1:
        scores = 1 / (1 + tl.exp(-own))
    else:
        scores = own
    selection = scores
    if choice_bias is not None:
        selection += tl.load(choice_bias + number, mask=number < EXPERTS, other=0.0).to(tl.float32)
    # A row with a NaN chooses some experts, too, and each of them once.
    selection = tl.where(selection == selection, selection, float("-inf"))
    keys = tl.where(outside, NO_KEY, _keys(selection, number, WIDTH))
    if GROUPS > 1:
        keys = _of_kept_groups(keys, number, EXPERTS, GROUPS, KEPT, BEST, ROWS, WIDTH)
    experts = tl.zeros([ROWS, TOP_WIDTH], tl.int32)
    found = tl.zeros([ROWS, TOP_WIDTH], tl.float32)
    taken = tl.zeros([ROWS, WIDTH], tl.int1)
    for j in tl.static_range(TOP):
        before = keys
        at, score, keys = _best(keys, number, WIDTH)
        taken = taken | (number == at)
        if SCORING == 3:
            size = tl.maximum(tl.abs(own), score)
            near = (score - own <= 2 * jitter * size) & (before != NO_KEY)
            score = 1 / _sums(tl.where(near, tl.exp(own - score), 0.0), ROWS, WIDTH, LOG)
        elif choice_bias is not None:
            score = tl.sum(tl.where(number == at, scores, 0.0), 1)[:, None]
        experts = tl.where(rank == j, at, experts)
        found = tl.where(rank == j, score, found)
    inside = rank < TOP
    if SCORING == 2:
        most = tl.max(tl.where(inside, found, float("-inf")), 1)[:, None]
        found = tl.where(inside, tl.exp(found - most), 0.0)
        found = found / _sums(found, ROWS, TOP_WIDTH, TOP_LOG)
    if NORMALISED:
        total = _sums(tl.where(inside, found, 0.0), ROWS, TOP_WIDTH, TOP_LOG)
        found = found / tl.maximum(total + sum_eps, 1e-20)
    found = found * scale
    if expert_scale is not None:
        found *= tl.load(expert_scale + experts, mask=inside, other=0.0).to(tl.float32)
    return experts, found, taken


def choice_options(router: Router) -> dict[str, Any]:
    """What kernels are compiled with for `best_experts`."""
    experts = router.logits.shape[0]
    width, top_width = triton.next_power_of_2(experts), triton.next_power_of_2(router.top_k)
    return {
        "EXPERTS": experts, "TOP": router.top_k, "WIDTH": width, "TOP_WIDTH": top_width,
        "SCORING": SCORINGS[router.scoring], "NORMALISED": router.normalised, "GROUPS": router.groups,
        "KEPT": router.kept_groups, "BEST": router.group_best, "LOG": width.bit_length() - 1,
        "TOP_LOG": top_width.bit_length() - 1,
    }  # fmt: skip
