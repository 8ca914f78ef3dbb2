"""The building blocks of online softmax for `attention`: load keys, add a block of them, join two partial sums.

A partial sum of M queries is a tuple of a maximum [M], a sum of weights and a weighted sum of values [M, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""Scores are in powers of two: `exp2` is faster than `exp`."""
LOWEST = tl.constexpr(-1e6)
"""Initial maximum: below every score (in powers of two), but finite, in case a row sees no key."""


@triton.jit
def no_keys(M: tl.constexpr, D: tl.constexpr):
    """The empty partial sum for `add`: maximum [M], sum of weights [M, 8] and of values [M, D]."""
    return tl.full([M], LOWEST, tl.float32), tl.zeros([M, 8], tl.float32), tl.zeros([M, D], tl.float32)


@triton.jit
def oldest_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key [M] that a row at `position` [M] sees, in its sliding window or its chunk."""
    if CHUNK > 0:
        oldest = position // CHUNK * CHUNK
    elif WINDOW > 0:
        oldest = tl.maximum(position - (WINDOW - 1), 0)
    else:
        oldest = tl.zeros_like(position)
    return oldest


@triton.jit
def lowest_key(oldest, BOUNDED: tl.constexpr):
    """The lowest key that some row of a tile sees; `oldest` [M] are its rows' first keys, if they are BOUNDED.

    A page before it may belong to another sequence by now: its values must not be loaded.
    """
    if BOUNDED:
        return tl.min(oldest, 0)
    return 0


@triton.jit
def load_keys(keys, values, at, there, HEAD: tl.constexpr):
    """K and V [N, D] from the offsets `at` [N, D]. Where `there` is false, the value is zero and the key undefined.

    The caller must mask the scores of these keys. Their weights are zero then, but zero times what another sequence
    left in memory may be NaN: hence the zero values. Loading keys without a mask saves 1% of attention.
    """
    if at.shape[1] == HEAD:
        return tl.load(keys + at), tl.load(values + at, mask=there[:, None], other=0.0)
    in_head = (tl.arange(0, at.shape[1]) < HEAD)[None, :]
    k = tl.load(keys + at, mask=in_head, other=0.0)
    return k, tl.load(values + at, mask=there[:, None] & in_head, other=0.0)


@triton.jit
def _scores(q, k):
    """q [M, D] times k [N, D] transposed.

    Matrix units add several products at once. In fp32 they are not used, and a sequential sum over D products rounds
    often. So up to four partial sums are added there, each over at least 16 products, Triton's minimum.
    """
    if k.dtype != tl.float32:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    length: tl.constexpr = max(16, q.shape[1] // 4)
    sums: tl.constexpr = q.shape[1] // length
    q_parts = tl.permute(tl.reshape(q, [q.shape[0], sums, length]), [1, 0, 2])
    k_parts = tl.permute(tl.reshape(k, [k.shape[0], sums, length]), [1, 2, 0])
    return tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)


@triton.jit
def tanh(x):
    """The hyperbolic tangent in fp32, with a relative error of about 2e-7, from operations that round the same in every
    kernel: a polynomial near 0, where 1 - exp2(...) would lose digits, and beyond that exp2, which cannot overflow."""
    square = x * x
    near = tl.fma(square, 0.016445627436041832, -0.05267651379108429)
    near = tl.fma(square, near, 0.13320808112621307)
    near = tl.fma(square, near, -0.3333294987678528)
    near = tl.fma(square * x, near, x)
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.55, near, tl.where(x < 0, -far, far))


@triton.jit
def _weigh(q, k, scoring, seen, top, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One block of keys: the new maximum [M], the keys' weights [M, N] relative to it, and the factor [M] that scales
    sums over earlier blocks to it.

    q [M, D]; k [N, D]; seen [M, N]; top [M], the maximum so far. `scoring`: the scale and the soft cap of the scores. A
    score is CAP * tanh(q k * scale), or q k * scale if CAP is 0; what is multiplied last includes log2(e).

    The maximum is rounded up to a power of two (an integer exponent). Which maximum a key meets depends on how keys are
    grouped into blocks; relative to a power of two, its weight has the same digits in every grouping, and is rounded
    the same. With EXACT this holds to the last digit: scores are rounded to multiples of 2 ** -16 (coarser above 64),
    so that subtracting a maximum loses nothing.
    """
    # Between 128 and 256, fp32 numbers are multiples of 2 ** -16.
    lift: tl.constexpr = 192.0 if EXACT else 0.0
    scale, CAP = scoring
    scores = tl.fma(tanh(_scores(q, k) * scale), CAP, lift) if CAP > 0 else _scores(q, k) * scale + lift
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) - lift))
    p = tl.exp2(scores - (new + lift)[:, None])
    return new, _scaled(p, k.dtype).to(k.dtype), tl.exp2(top - new)


@triton.jit
def _scaled(p, dtype: tl.constexpr):
    """Weights `p` as they are summed: fp16 has few small numbers, so they are scaled up."""
    if dtype == tl.float16:
        return p * 32768.0
    return p


@triton.jit
def add(q, k, v, ones, scoring, seen, sums, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One online-softmax step. q [M, D]; k, v [N, D]; seen [M, N]. `sums`: top [M], total [M, 8], all columns equal,
    and acc [M, D].

    The sum of weights is a matrix product with `ones` [N, 8], so that it is added in the same order as the values.
    """
    top, total, acc = sums
    top, p, shrink = _weigh(q, k, scoring, seen, top, MASKED, EXACT)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def join(sums, its):
    """Join two partial sums. Each is a maximum [M], a sum of weights [M] and a weighted sum of values [M, D]."""
    top, mass, acc = sums
    its_top, its_mass, its_acc = its
    new = tl.maximum(top, its_top)
    mine, other = tl.exp2(top - new), tl.exp2(its_top - new)
    return new, mass * mine + its_mass * other, acc * mine[:, None] + its_acc * other[:, None]


@triton.jit
def add_sink(sums, sink, dtype: tl.constexpr):
    """Add a logit without a value to joined sums: a query's attention sink [M], in powers of two. `dtype`: of the keys.

    It is added last and once. The maximum is an integer, so that the sums before it only change their exponents.
    """
    top, mass, acc = sums
    new = tl.maximum(top, tl.ceil(sink))
    shrink = tl.exp2(top - new)
    return new, mass * shrink + _scaled(tl.exp2(sink - new), dtype), acc * shrink[:, None]
