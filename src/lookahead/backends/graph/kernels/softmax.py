"""The building blocks of online softmax for `attention`: load keys, add a block of them, add them one by one, join two
partial sums.

A partial sum of M queries is a tuple of a maximum [M], a sum of weights and a weighted sum of values [M, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e6)
"""Initial maximum: below every score (in powers of two), but finite, in case a row sees no key."""


@triton.jit
def no_keys(M: tl.constexpr, D: tl.constexpr):
    """The empty partial sum for `add`: maximum [M], sum of weights [M, 8] and of values [M, D]."""
    return tl.full([M], LOWEST, tl.float32), tl.zeros([M, 8], tl.float32), tl.zeros([M, D], tl.float32)


@triton.jit
def lowest_key(position, WINDOW: tl.constexpr):
    """The lowest key that some row of a tile sees; `position` [M] are its rows'.

    A page before it may belong to another sequence by now: its values must not be loaded.
    """
    if WINDOW > 0:
        return tl.maximum(tl.min(position, 0) - (WINDOW - 1), 0)
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
def _weigh(q, k, scale, seen, top, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One block of keys: the new maximum [M], the keys' weights [M, N] relative to it, and the factor [M] that scales
    sums over earlier blocks to it.

    q [M, D]; k [N, D]; seen [M, N]; top [M], the maximum so far. `scale` includes log2(e).

    The maximum is rounded up to a power of two (an integer exponent). Which maximum a key meets depends on how keys are
    grouped into blocks; relative to a power of two, its weight has the same digits in every grouping, and is rounded
    the same. With EXACT this holds to the last digit: scores are rounded to multiples of 2 ** -16 (coarser above 64),
    so that subtracting a maximum loses nothing.
    """
    # Between 128 and 256, fp32 numbers are multiples of 2 ** -16.
    lift: tl.constexpr = 192.0 if EXACT else 0.0
    scores = _scores(q, k) * scale + lift
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) - lift))
    p = tl.exp2(scores - (new + lift)[:, None])
    if k.dtype == tl.float16:  # it has few small numbers, so the weights are scaled up
        p *= 32768.0
    return new, p.to(k.dtype), tl.exp2(top - new)


@triton.jit
def add(q, k, v, ones, scale, seen, sums, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One online-softmax step. q [M, D]; k, v [N, D]; seen [M, N]. `sums`: top [M], total [M, 8], all columns equal,
    and acc [M, D].

    The sum of weights is a matrix product with `ones` [N, 8], so that it is added in the same order as the values.
    """
    top, total, acc = sums
    top, p, shrink = _weigh(q, k, scale, seen, top, MASKED, EXACT)
    total = tl.dot(p, ones, total * shrink[:, None], input_precision="ieee")
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def add_singly(q, k, v, scale, seen, sums):
    """As `add`, for 16 keys that are added one after the other. k, v [16, D].

    Matrix units add the products of 16 keys at once. So each key gets its own product, with the other 15 weights zero.
    Then a row's sum depends on its keys and their order, not on their offsets.
    """
    top, total, acc = sums
    top, p, shrink = _weigh(q, k, scale, seen, top, True, True)
    total = total * shrink[:, None]
    acc = acc * shrink[:, None]
    ones = tl.full([16, 8], 1.0, v.dtype)
    for i in tl.static_range(0, 16):
        single = tl.where(tl.arange(0, 16)[None, :] == i, p, 0.0).to(p.dtype)
        total = tl.dot(single, ones, total, input_precision="ieee")
        acc = tl.dot(single, v, acc, input_precision="ieee")
    return top, total, acc


@triton.jit
def join(sums, its):
    """Join two partial sums. Each is a maximum [M], a sum of weights [M] and a weighted sum of values [M, D]."""
    top, mass, acc = sums
    its_top, its_mass, its_acc = its
    new = tl.maximum(top, its_top)
    mine, other = tl.exp2(top - new), tl.exp2(its_top - new)
    return new, mass * mine + its_mass * other, acc * mine[:, None] + its_acc * other[:, None]
