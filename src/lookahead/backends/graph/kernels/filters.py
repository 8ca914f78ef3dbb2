"""Top-k and top-p on the device: which tokens of a row may be drawn, found without sorting the row.

A filter needs one number per row: the value of the last token that stays. Logits are compared by their *keys*, integers
in the order of the logits, so the search for that value halves and halves again a range of integers. Two steps make the
search cheap:

1. `_bounds` finds a floor: a value that the last token that stays is certainly not below. For top-k, the likeliest
   tokens that `top.top_tokens` left in its `TopWork` tell it; for top-p, a token whose probability is so small that all
   of its kind together do not fill the tail.
2. `_collect` copies each row's logits from the floor upward, its candidates, next to each other, piece by piece of the
   vocabulary and in the order of the vocabulary.

`cut` then searches among the candidates. Weights are exp((logit - maximum) / temperature) in float64, and each sum is
taken in a fixed order within a row, so a row's result is the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.top import PIECE, TopWork

SETTINGS = 5
"""Columns of `settings`: temperature (0: greedy), top_k (0: all), top_p, min_p, and uniform (-1: take the argmax)."""

TILE = 2048
"""Candidates that `cut` looks at together: 8 per thread."""


class DrawWork:
    """Memory for what the launches of `draw_targets` and `race_targets` tell each other, for at most `rows` rows.

    `dtype` is that of the logits, or a wider one. Per row and piece of the vocabulary: the candidates (`found`), how
    many they are, the mass of all tokens (float64), the number of tied tokens in earlier pieces, and the best ratio of
    a race with its token. Per row: its maximum and its floor (`limits`), and its cut as [key, tied tokens to skip].
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.pieces = triton.cdiv(vocabulary, PIECE)
        shape = (rows, self.pieces)
        self.limits = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self.found = torch.zeros(*shape, PIECE, dtype=dtype, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.masses = torch.zeros(shape, dtype=torch.float64, device=device)
        self.cuts = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.before = torch.zeros(shape, dtype=torch.int32, device=device)
        self.ratios = torch.zeros(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)


def shift_of(dtype: torch.dtype) -> int:
    """How many low bits of a key are the same for all logits of this dtype."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order. -0.0 and 0.0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def is_drawn(settings, depths, row, RACE: tl.constexpr):
    """Whether a row's target is drawn: it has a temperature, and a uniform or, in a race, a depth."""
    chosen = tl.load(settings + row * 5) > 0.0
    if RACE:
        chosen = chosen & (tl.load(depths + row) >= 0)
    else:
        chosen = chosen & (tl.load(settings + row * 5 + 4) >= 0.0)
    return chosen


@triton.jit
def scale_of(settings, row):
    """1 / temperature in float64, and still finite for the smallest temperatures."""
    return tl.minimum(1.0 / tl.load(settings + row * 5), 1e300)


@triton.jit
def weigh(x, top, scale):
    """float32 logits -> float64 weights; the maximum's is 1."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) * scale)


@triton.jit
def filters_of(settings, row, vocabulary):
    """A row's k, whether top-k removes anything, its p, and whether top-p removes anything."""
    k = tl.load(settings + row * 5 + 1)
    p = tl.load(settings + row * 5 + 2)
    return k, (k > 0.0) & (k < vocabulary), p, p < 1.0


@triton.jit
def _bounds(
    values, sums, settings, depths, limits, pieces, vocabulary,
    TOP: tl.constexpr, P: tl.constexpr, B: tl.constexpr, SHIFT: tl.constexpr, RACE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). limits [R, 2]: each drawn row's maximum, and its floor.

    values [R, pieces, TOP] and sums [R, pieces, 2] are those of `TopWork`.
    """
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(settings, depths, row, RACE):
        piece = tl.arange(0, P)
        tops = tl.load(sums + (row * pieces + piece) * 2, mask=piece < pieces, other=float("-inf"))
        top = tl.max(tops, 0)
        k, has_k, p, has_p = filters_of(settings, row, vocabulary)
        slot = tl.arange(0, B)
        known = tl.load(values + row * pieces * TOP + slot, mask=slot < pieces * TOP, other=float("-inf"))
        floor = tl.min(tl.where(slot == 0, float("-inf"), 0.0), 0)
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
            value = top.to(tl.float64) + score * tl.load(settings + row * 5)
            floor = (value - tl.abs(value) * 1e-6 - 1e-30).to(tl.float32)
        tl.store(limits + row * 2, top)
        tl.store(limits + row * 2 + 1, floor)


@triton.jit
def _collect(
    logits, settings, depths, limits, found, counts, masses, vocabulary, pieces,
    BLOCK: tl.constexpr, RACE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, pieces). Each piece's candidates, found [R, pieces, BLOCK] and counts [R, pieces], and its mass.

    masses [R, pieces] are only written without top-k, which asks for the mass of the k best alone. With top-p they are
    of all tokens, else of those that min-p leaves.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(settings, depths, row, RACE):
        k, has_k, p, has_p = filters_of(settings, row, vocabulary)
        column = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=float("-inf"))
        wide = x.to(tl.float32)
        at = row * pieces + piece
        if has_k == 0:
            if has_p | (RACE == 0):
                weight = weigh(wide, tl.load(limits + row * 2), scale_of(settings, row))
                least = tl.where(has_p, 0.0, tl.load(settings + row * 5 + 3))
                tl.store(masses + at, tl.sum(tl.where(weight >= least, weight, 0.0), 0))
        if has_k | has_p:
            stays = (wide >= tl.load(limits + row * 2 + 1)) & (wide > float("-inf"))
            place = tl.cumsum(stays.to(tl.int32), 0) - 1
            tl.store(found + at * BLOCK + place, x.to(found.dtype.element_ty), mask=stays)
            tl.store(counts + at, tl.sum(stays.to(tl.int32), 0))


@triton.jit
def _tile(found, base, count, start, C: tl.constexpr):
    """Columns start to start + C of all pieces' candidates, float32 [P, C]; -inf where a piece has fewer."""
    column = start + tl.arange(0, C)
    inside = column[None, :] < count[:, None]
    at = found + base[:, None] + column[None, :]
    return tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _mass_above(
    found, base, count, most, a, b, c, top, scale,
    P: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The mass of the candidates whose keys are above each of three keys; without MASS, their number."""
    over_a, over_b, over_c = tl.zeros((P,), tl.float64), tl.zeros((P,), tl.float64), tl.zeros((P,), tl.float64)
    for start in range(0, most, C):
        x = _tile(found, base, count, start, C)
        key = key_of(x, SHIFT)
        if MASS:
            weight = weigh(x, top, scale)
        else:
            weight = (x > float("-inf")).to(tl.float64)
        over_a += tl.sum(tl.where(key > a.to(tl.int32), weight, 0.0), 1)
        over_b += tl.sum(tl.where(key > b.to(tl.int32), weight, 0.0), 1)
        over_c += tl.sum(tl.where(key > c.to(tl.int32), weight, 0.0), 1)
    return tl.sum(over_a, 0), tl.sum(over_b, 0), tl.sum(over_c, 0)


@triton.jit
def _search(
    found, base, count, most, low, high, limit, top, scale,
    P: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The smallest key from low to high above which the candidates weigh (or are) less than `limit`.

    Each pass quarters the range. The mass above a key never grows with the key, also as rounded.
    """
    while low < high:
        width = high - low
        a, b, c = low + width // 4, low + width // 2, low + 3 * width // 4
        over_a, over_b, over_c = _mass_above(found, base, count, most, a, b, c, top, scale, P, C, SHIFT, MASS)
        low = tl.where(
            over_a < limit, low, tl.where(over_b < limit, a + 1, tl.where(over_c < limit, b + 1, c + 1))
        )
        high = tl.where(over_a < limit, a, tl.where(over_b < limit, b, tl.where(over_c < limit, c, high)))
    return low


@triton.jit
def cut(
    found, counts, masses, limits, settings, row, vocabulary, pieces,
    P: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """For a row with top-k or top-p: the key at which it is cut, and what stays.

    Tokens with larger keys stay, and of those with this key, the tied ones, `quota` many. Also returned: a tied token's
    weight; and for each piece, [P], how many tied tokens it has, and the mass of its larger keys that min-p leaves.
    """
    piece = tl.arange(0, P)
    count = tl.load(counts + row * pieces + piece, mask=piece < pieces, other=0)
    most = tl.max(count, 0)
    base = (row * pieces + piece) * BLOCK
    top = tl.load(limits + row * 2)
    scale = scale_of(settings, row)
    k, has_k, p, has_p = filters_of(settings, row, vocabulary)
    low = key_of(tl.load(limits + row * 2 + 1), SHIFT).to(tl.int64)
    high = key_of(top, SHIFT).to(tl.int64)
    # 1. Top-k: the kth token's key. All tokens that are tied with it stay.
    if has_k:
        low = _search(found, base, count, most, low, high, k, top, scale, P, C, SHIFT, False)
    # 2. Top-p: a token stays if those before it weigh less than `limit`, a share p of what top-k left.
    limit = p * 0.0
    if has_p:
        mass = tl.load(masses + row * pieces + piece, mask=piece < pieces, other=0.0)
        total = tl.sum(mass, 0)
        if has_k:
            under = low - 1
            total, _b, _c = _mass_above(
                found, base, count, most, under, under, under, top, scale, P, C, SHIFT, True
            )  # fmt: skip
        limit = p * total
        low = _search(found, base, count, most, low, high, limit, top, scale, P, C, SHIFT, True)
    # 3. What lies above the cut and at it, piece by piece.
    key_cut = low.to(tl.int32)
    least = tl.load(settings + row * 5 + 3)
    above, likely, tied = tl.zeros((P,), tl.float64), tl.zeros((P,), tl.float64), tl.zeros((P,), tl.float64)
    ties = tl.zeros((P,), tl.int32)
    for start in range(0, most, C):
        x = _tile(found, base, count, start, C)
        key = key_of(x, SHIFT)
        weight = weigh(x, top, scale)
        larger = tl.where(key > key_cut, weight, 0.0)
        above += tl.sum(larger, 1)
        likely += tl.sum(tl.where(weight >= least, larger, 0.0), 1)
        same = (key == key_cut) & (x > float("-inf"))
        ties += tl.sum(same.to(tl.int32), 1)
        tied = tl.maximum(tied, tl.max(tl.where(same, weight, 0.0), 1))
    weight_tied = tl.max(tied, 0)
    quota = tl.sum(ties, 0)
    if has_p & (weight_tied > 0.0):
        fitting = tl.ceil((limit - tl.sum(above, 0)) / weight_tied)
        quota = tl.minimum(tl.maximum(fitting, 1.0), quota.to(tl.float64)).to(tl.int32)
    return key_cut, quota, weight_tied, ties, likely


def collect(
    logits: torch.Tensor, settings: torch.Tensor, depths: torch.Tensor | None, tops: TopWork, work: DrawWork
) -> None:
    """Fill `work` with the rows' limits, candidates and masses, in two launches. See `draw.draw_targets`."""
    rows, vocabulary = logits.shape
    top = tops.values.shape[2]
    race, chosen = depths is not None, settings if depths is None else depths
    _bounds[(rows,)](
        tops.values, tops.sums, settings, chosen, work.limits, work.pieces, vocabulary,
        TOP=top, P=triton.next_power_of_2(work.pieces), B=triton.next_power_of_2(work.pieces * top),
        SHIFT=shift_of(logits.dtype), RACE=race, num_warps=4,
    )  # fmt: skip
    _collect[(rows, work.pieces)](
        logits, settings, chosen, work.limits, work.found, work.counts, work.masses, vocabulary, work.pieces,
        BLOCK=PIECE, RACE=race, num_warps=1,
    )  # fmt: skip


def tile_sizes(pieces: int) -> tuple[int, int]:
    """`cut`'s tile: pieces, rounded up to a power of two, and candidates of each piece."""
    rounded = triton.next_power_of_2(pieces)
    return rounded, min(PIECE, max(8, TILE // rounded))
