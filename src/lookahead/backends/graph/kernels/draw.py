"""Sampling of targets on the device, as `sampling.pick` or `torch.multinomial` does, and log-probabilities.

`top.top_tokens` must have run on the same logits: it leaves the argmax in column 0 of `out`, which only sampled rows
overwrite. Launches and memory do not depend on the sampling parameters, so a step can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.cutoff import TILE, find_cutoff, load_candidates, token_at
from lookahead.backends.graph.kernels.filters import (
    DrawWork,
    collect_candidates,
    is_drawn,
    is_filtered,
    key_of,
    scale_of,
    shift_of,
    weigh,
)
from lookahead.backends.graph.kernels.records import MIN_P, TEMPERATURE, UNIFORM, draw_setting
from lookahead.backends.graph.kernels.top import PIECE, TopWork


@triton.jit
def _draw_all(logits, settings, limits, masses, row, stride, vocabulary, pieces, P: tl.constexpr, BLOCK: tl.constexpr):
    """Sample a row without top-k and top-p, by the masses of its pieces."""
    # 1. The first piece at whose end the CDF is past the threshold. If rounding leaves none, the last with a mass.
    piece = tl.arange(0, P)
    mass = tl.load(masses + row * pieces + piece, mask=piece < pieces, other=0.0)
    ends = tl.cumsum(mass, 0)
    threshold = draw_setting(settings, row, UNIFORM) * tl.max(ends, 0)
    chosen = tl.min(tl.where((ends > threshold) & (mass > 0.0), piece, P), 0)
    chosen = tl.where(chosen < P, chosen, tl.max(tl.where(mass > 0.0, piece, 0), 0))
    begin = tl.sum(tl.where(piece == chosen - 1, ends, 0.0), 0)
    # 2. The same among the piece's tokens.
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    weight = weigh(x, tl.load(limits + row * 2), scale_of(settings, row))
    weight = tl.where(weight >= draw_setting(settings, row, MIN_P), weight, 0.0)
    passed = (begin + tl.cumsum(weight, 0) > threshold) & (weight > 0.0)
    token = tl.min(tl.where(passed, column, 2147483647), 0)
    return tl.where(token < vocabulary, token, tl.max(tl.where(weight > 0.0, column, 0), 0))


@triton.jit
def _draw_filtered(
    logits, settings, work, row, stride, vocabulary, pieces,
    P: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Sample a row with top-k or top-p, from its candidates. `work`: limits, candidates, counts and masses."""
    limits, candidates, counts, masses = work
    piece = tl.arange(0, P)
    count = tl.sum(tl.load(counts + row * pieces + piece, mask=piece < pieces, other=0), 0)
    candidates += row * pieces * BLOCK
    cutoff, quota, _ties, tied, likely = find_cutoff(
        candidates, count, masses, limits, settings, row, vocabulary, pieces, P, TILE, SHIFT
    )
    top, scale, least = tl.load(limits + row * 2), scale_of(settings, row), draw_setting(settings, row, MIN_P)
    total = likely + quota.to(tl.float64) * tl.where(tied >= least, tied, 0.0)
    threshold = draw_setting(settings, row, UNIFORM) * total
    # Walk along the CDF until it passes the threshold. If rounding prevents that, take the last token with a mass.
    begin = tl.full((), 0.0, tl.float64)
    ties_before = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    index = tl.full((), 2147483647, tl.int32)
    last = tl.full((), 0, tl.int32)
    while (start < count) & (index == 2147483647):
        x = load_candidates(candidates, start, count, TILE)
        key = key_of(x, SHIFT)
        same = key == cutoff
        rank = ties_before + tl.cumsum(same.to(tl.int32), 0) - 1
        weight = weigh(x, top, scale)
        weight = tl.where(((key > cutoff) | (same & (rank < quota))) & (weight >= least), weight, 0.0)
        number = start + tl.arange(0, TILE)
        passed = (begin + tl.cumsum(weight, 0) > threshold) & (weight > 0.0)
        index = tl.min(tl.where(passed, number, 2147483647), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, number, 0), 0))
        begin += tl.sum(weight, 0)
        ties_before += tl.sum(same.to(tl.int32), 0)
        start += TILE
    index = tl.where(index == 2147483647, last, index)
    return token_at(logits, counts, limits, row, index, stride, vocabulary, pieces, P, BLOCK)


@triton.jit
def _draw(
    logits, settings, limits, candidates, counts, masses, out, stride, vocabulary, pieces, width,
    P: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). Inverse CDF in float64, in the order of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(settings, settings, row, False):
        if is_filtered(settings, row, vocabulary):
            work = limits, candidates, counts, masses
            token = _draw_filtered(logits, settings, work, row, stride, vocabulary, pieces, P, BLOCK, TILE, SHIFT)
        else:
            token = _draw_all(logits, settings, limits, masses, row, stride, vocabulary, pieces, P, BLOCK)
        tl.store(out + row * width, tl.minimum(token, vocabulary - 1))


def draw_targets(
    logits: torch.Tensor, settings: torch.Tensor, out: torch.Tensor, tops: TopWork, work: DrawWork
) -> torch.Tensor:
    """Sample each row that has a temperature and a uniform, into column 0 of `out`.

    logits [R, V]; settings float64 [R, 5], see `records.Draw`; out int32 [R, 1 + 2 n], after `top_tokens(logits, out,
    tops)`. The tokens are those of `sampling.pick`.
    """
    rows, vocabulary = logits.shape
    collect_candidates(logits, settings, None, tops, work)
    _draw[(rows,)](
        logits, settings, work.limits, work.candidates, work.counts, work.masses, out, logits.stride(0), vocabulary,
        work.pieces, out.shape[1],
        P=triton.next_power_of_2(work.pieces), BLOCK=PIECE, TILE=TILE, SHIFT=shift_of(logits.dtype), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _multinomial_cutoff(
    logits, settings, depths, limits, candidates, counts, masses, cutoffs, stride, vocabulary, pieces,
    P: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). cutoffs [R, 2]: the cutoff of a sampled row, and the first of the tied tokens that stays."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(settings, depths, row, True):
        cutoff = tl.full((), -2147483648, tl.int32)
        first = tl.full((), 0, tl.int32)
        if is_filtered(settings, row, vocabulary):
            piece = tl.arange(0, P)
            count = tl.sum(tl.load(counts + row * pieces + piece, mask=piece < pieces, other=0), 0)
            packed = candidates + row * pieces * BLOCK
            cutoff, quota, ties, _tied, _likely = find_cutoff(
                packed, count, masses, limits, settings, row, vocabulary, pieces, P, TILE, SHIFT
            )
            if quota < ties:
                ties_before = tl.full((), 0, tl.int32)
                index = tl.full((), 2147483647, tl.int32)
                for start in range(0, count, TILE):
                    same = key_of(load_candidates(packed, start, count, TILE), SHIFT) == cutoff
                    rank = ties_before + tl.cumsum(same.to(tl.int32), 0) - 1
                    stays = same & (rank >= ties - quota)
                    index = tl.minimum(index, tl.min(tl.where(stays, start + tl.arange(0, TILE), 2147483647), 0))
                    ties_before += tl.sum(same.to(tl.int32), 0)
                first = token_at(logits, counts, limits, row, index, stride, vocabulary, pieces, P, BLOCK)
        tl.store(cutoffs + row * 2, cutoff)
        tl.store(cutoffs + row * 2 + 1, first)


@triton.jit
def _multinomial(
    logits, noise, settings, depths, limits, cutoffs, ratios, tokens, stride, vocabulary, pieces,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, pieces). The best ratio of weight and noise in each piece, and its token."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(settings, depths, row, True):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocabulary
        at = row * pieces + piece
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        depth = tl.load(depths + row).to(tl.int64)
        rival = tl.load(noise + depth * vocabulary + column, mask=inside, other=1.0)
        temperature = draw_setting(settings, row, TEMPERATURE).to(tl.float32)
        least = draw_setting(settings, row, MIN_P).to(tl.float32)
        weight = tl.exp(x / temperature - tl.load(limits + row * 2) / temperature)
        key = key_of(x, SHIFT)
        cutoff, first = tl.load(cutoffs + row * 2), tl.load(cutoffs + row * 2 + 1)
        stays = ((key > cutoff) | ((key == cutoff) & (column >= first))) & (weight >= least) & (weight > 0.0)
        ratio = tl.where(stays, weight / rival, -1.0)
        best = tl.max(ratio, 0)
        tl.store(ratios + at, best)
        tl.store(tokens + at, tl.min(tl.where(ratio == best, column, 2147483647), 0))


@triton.jit
def _multinomial_end(settings, depths, ratios, tokens, out, vocabulary, pieces, width, P: tl.constexpr):
    """Grid: (rows). The best of all pieces; of equal ratios, the lowest token."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(settings, depths, row, True):
        piece = tl.arange(0, P)
        ratio = tl.load(ratios + row * pieces + piece, mask=piece < pieces, other=-1.0)
        token = tl.load(tokens + row * pieces + piece, mask=piece < pieces, other=2147483647)
        first = tl.min(tl.where(ratio == tl.max(ratio, 0), token, 2147483647), 0)
        tl.store(out + row * width, tl.minimum(first, vocabulary - 1))


def multinomial_targets(
    logits: torch.Tensor,
    settings: torch.Tensor,
    noise: torch.Tensor,
    depths: torch.Tensor,
    out: torch.Tensor,
    tops: TopWork,
    work: DrawWork,
) -> torch.Tensor:
    """Sample into column 0 of `out` as `torch.multinomial` does from transformers' processed scores.

    It takes the token with the largest probability / noise, where noise is exponentially distributed. logits [R, V];
    settings as in `draw_targets`, without the uniform; noise fp32 [D, V]; depths int32 [R]: a row's row of the noise,
    or -1 for the argmax. Top-k, top-p and min-p keep the same tokens as transformers' warpers: of the tokens tied at
    the cutoff of top-p the higher ids stay, since transformers removes in ascending order.
    """
    rows, vocabulary = logits.shape
    collect_candidates(logits, settings, depths, tops, work)
    pieces, shift = triton.next_power_of_2(work.pieces), shift_of(logits.dtype)
    _multinomial_cutoff[(rows,)](
        logits, settings, depths, work.limits, work.candidates, work.counts, work.masses, work.cutoffs,
        logits.stride(0), vocabulary, work.pieces, P=pieces, BLOCK=PIECE, TILE=TILE, SHIFT=shift, num_warps=8,
    )  # fmt: skip
    _multinomial[(rows, work.pieces)](
        logits, noise, settings, depths, work.limits, work.cutoffs, work.ratios, work.tokens, logits.stride(0),
        vocabulary, work.pieces, BLOCK=PIECE, SHIFT=shift, num_warps=1,
    )  # fmt: skip
    _multinomial_end[(rows,)](
        settings, depths, work.ratios, work.tokens, out, vocabulary, work.pieces, out.shape[1], P=pieces, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _log_probs(
    logits, out, sums, values, stride, vocabulary, pieces, COLUMNS: tl.constexpr, C: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, P)
    tops = tl.load(sums + (row * pieces + piece) * 2, mask=piece < pieces, other=float("-inf"))
    totals = tl.load(sums + (row * pieces + piece) * 2 + 1, mask=piece < pieces, other=0.0)
    top = tl.max(tops, 0)
    log_sum = tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    column = tl.arange(0, C)
    wanted = column < COLUMNS
    token = tl.load(out + row * (2 * COLUMNS - 1) + column, mask=wanted, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    x = tl.load(logits + row * stride + token, mask=wanted, other=0.0).to(tl.float32)
    tl.store(values + row * COLUMNS + column, (x - top) - log_sum, mask=wanted)


def log_probs(logits: torch.Tensor, out: torch.Tensor, tops: TopWork, values: torch.Tensor) -> torch.Tensor:
    """The natural log-probability of each row's target and n top tokens: softmax of all V logits, temperature 1.

    logits [R, V]; out int32 [R, 1 + 2 n], after `top_tokens(logits, out, tops)` and, if any, the draw; values fp32
    [R, 1 + n].
    """
    rows, vocabulary = logits.shape
    columns = values.shape[1]
    _log_probs[(rows,)](
        logits, out, tops.sums, values, logits.stride(0), vocabulary, tops.pieces,
        COLUMNS=columns, C=triton.next_power_of_2(columns), P=triton.next_power_of_2(tops.pieces), num_warps=1,
    )  # fmt: skip
    return values
