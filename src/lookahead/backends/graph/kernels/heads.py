"""From a layer's projections to attention: bias, clamp, norms, rotary positions, and the K/V write.

`rotate_write` does all of it in one launch if the norms are RMSNorms of single heads. For other norms `norm_heads` runs
first, and writes the normed heads to a buffer. A row's result depends on that row only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.projections import Projections
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.sizes import PAGE
from lookahead.models.norm import Norm

NORM, CENTERED, ROUNDS_FIRST, OWN_WEIGHTS, WHOLE = (tl.constexpr(1 << bit) for bit in range(5))
"""The kind of a norm, as bits; 0 for none. OWN_WEIGHTS: each head has its own. WHOLE: all heads are one vector."""


@triton.jit
def _clamp(x, clip):
    return tl.minimum(tl.maximum(x.to(tl.float32), -clip), clip).to(x.dtype)


@triton.jit
def _words(pointer):
    """A pointer to numbers as one to words of two adjacent numbers."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        return pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _load_pairs(pointer, at, inside):
    """The numbers 2 at and 2 at + 1 after the pointer. On an H200 16 rows of GLM-4's heads took 9.5 us when they were
    loaded and stored one by one, where halves of a head take 2.2 us."""
    words = tl.load(_words(pointer) + at, mask=inside, other=0)
    if words.dtype == tl.int64:
        first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
    else:
        first, second = words.to(tl.int16), (words >> 16).to(tl.int16)
    dtype = pointer.dtype.element_ty
    return first.to(dtype, bitcast=True), second.to(dtype, bitcast=True)


@triton.jit
def _store_pairs(pointer, at, first, second, inside):
    """Store the numbers 2 at and 2 at + 1 after the pointer."""
    if first.dtype.primitive_bitwidth == 32:
        low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        words = low | (second.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    else:
        low = first.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    tl.store(_words(pointer) + at, words, mask=inside)


@triton.jit
def _store_heads(pointer, head, first, second, columns, inside, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store heads [heads] of DIM columns, of which first and second [heads, D / 2] have those of the pairs.

    `columns`: low, high and pair. Interleaved pairs are indexed as they were loaded, by `pair`. Indexed by low // 2
    they would get another layout, and Triton 3.6 returns wrong numbers from that conversion on an H200.
    """
    low, high, pair = columns
    if INTERLEAVED:
        _store_pairs(pointer, (head * (DIM // 2))[:, None] + pair[None, :], first, second, inside)
    else:
        tl.store(pointer + (head * DIM)[:, None] + low[None, :], first, mask=inside)
        tl.store(pointer + (head * DIM)[:, None] + high[None, :], second, mask=inside)


@triton.jit
def _gain(weight, at, inside, offset, KIND: tl.constexpr):
    """Weight + offset in fp32. A norm that rounds first adds them in the weight's dtype."""
    gain = tl.load(weight + at, mask=inside, other=0.0)
    wide = gain.to(tl.float32)
    if offset is not None:
        wide = wide + offset
        if ROUNDS_FIRST & KIND:
            wide = wide.to(gain.dtype).to(tl.float32)
    return wide


@triton.jit
def _set_gains(gains, chosen, weight, offset, columns, real, KIND: tl.constexpr):
    """Replace the gains of the chosen heads by those of a norm. `gains`, `columns`: of the pairs' two columns."""
    first, second = gains
    if weight is not None:
        low, high = columns
        first = tl.where(chosen[:, None], _gain(weight, low, real, offset, KIND)[None, :], first)
        second = tl.where(chosen[:, None], _gain(weight, high, real, offset, KIND)[None, :], second)
    return first, second


@triton.jit
def _norm_pairs(
    first, second, head, columns, real, q_norm, k_norm, v_norm, q_eps, k_eps, v_eps, q_offset, k_offset, v_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """RMSNorms of the heads, whose columns are in pairs: first, second [heads, D / 2] fp32, rounded to DTYPE."""
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    eps = tl.where(is_query, q_eps, tl.where(is_key, k_eps, v_eps))
    scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / DIM + eps)[:, None]
    gains = tl.zeros_like(first) + 1.0, tl.zeros_like(second) + 1.0
    gains = _set_gains(gains, is_query, q_norm, q_offset, columns, real, Q_KIND)
    gains = _set_gains(gains, is_key, k_norm, k_offset, columns, real, K_KIND)
    first_gain, second_gain = _set_gains(gains, is_value, v_norm, v_offset, columns, real, V_KIND)
    a, b = first * scale, second * scale
    if ROUNDS_FIRST & (Q_KIND | K_KIND | V_KIND):
        a, b = a.to(DTYPE).to(tl.float32), b.to(DTYPE).to(tl.float32)
    a, b = (a * first_gain).to(DTYPE).to(tl.float32), (b * second_gain).to(DTYPE).to(tl.float32)
    normed = head < 0
    if Q_KIND > 0:
        normed = normed | is_query
    if K_KIND > 0:
        normed = normed | is_key
    if V_KIND > 0:
        normed = normed | is_value
    return tl.where(normed[:, None], a, first), tl.where(normed[:, None], b, second)


@triton.jit
def _rotate_write(
    qkv, bias, order, q_norm, k_norm, v_norm, cosine, sine, query_scale, positions, cells, q, keys, values,
    clip, q_eps, k_eps, v_eps, q_offset, k_offset, v_offset,
    SOURCES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, NORMS_LAST: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of all heads). See `rotate_write`. PAIRS are rotated, of DIM / 2."""
    # 1. The heads' columns in pairs; those that are not rotated are paired in any way.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < HEADS + 2 * KV_HEADS
    pair = tl.arange(0, HALF)
    half: tl.constexpr = DIM // 2
    real = pair < half
    inside = there[:, None] & real[None, :]
    if INTERLEAVED:
        low, high = 2 * pair, 2 * pair + 1
    elif half == PAIRS or PAIRS == 0:
        low, high = pair, pair + half
    else:
        low, high = tl.where(pair < PAIRS, pair, pair + PAIRS), tl.where(pair < PAIRS, pair + PAIRS, pair + half)
    # 2. The projections, with bias and clamp.
    source = head
    if order is not None:
        source = tl.load(order + head, mask=there, other=0)
    if INTERLEAVED:
        at_pair = source[:, None] * half + pair[None, :]
        a, b = _load_pairs(qkv + token * SOURCES * DIM, at_pair, inside)
        if bias is not None:
            low_bias, high_bias = _load_pairs(bias, at_pair, inside)
            a, b = a + low_bias, b + high_bias
    else:
        at_low, at_high = source[:, None] * DIM + low[None, :], source[:, None] * DIM + high[None, :]
        a = tl.load(qkv + token * SOURCES * DIM + at_low, mask=inside, other=0.0)
        b = tl.load(qkv + token * SOURCES * DIM + at_high, mask=inside, other=0.0)
        if bias is not None:
            a = a + tl.load(bias + at_low, mask=inside, other=0.0)
            b = b + tl.load(bias + at_high, mask=inside, other=0.0)
    if clip is not None:
        a, b = _clamp(a, clip), _clamp(b, clip)
    # 3. Norms and rotation.
    first, second = a.to(tl.float32), b.to(tl.float32)
    rotated = head < HEADS + KV_HEADS
    position = tl.load(positions + token).to(tl.int64)
    normed: tl.constexpr = Q_KIND + K_KIND + V_KIND > 0
    if normed and not NORMS_LAST:
        first, second = _norm_pairs(
            first, second, head, (low, high), real, q_norm, k_norm, v_norm, q_eps, k_eps, v_eps,
            q_offset, k_offset, v_offset, HEADS, KV_HEADS, DIM, Q_KIND, K_KIND, V_KIND, a.dtype,
        )  # fmt: skip
    if cosine is not None:
        cos = tl.load(cosine + position * PAIRS + pair, mask=pair < PAIRS, other=1.0)[None, :]
        sin = tl.load(sine + position * PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
        cos, sin = tl.where(rotated[:, None], cos, 1.0), tl.where(rotated[:, None], sin, 0.0)
        # Which product is rounded before the addition is not left to the compiler: bits would depend on its version.
        first, second = tl.fma(first, cos, -(second * sin)), tl.fma(first, sin, second * cos)
    if normed and NORMS_LAST:
        first, second = first.to(a.dtype).to(tl.float32), second.to(a.dtype).to(tl.float32)
        first, second = _norm_pairs(
            first, second, head, (low, high), real, q_norm, k_norm, v_norm, q_eps, k_eps, v_eps,
            q_offset, k_offset, v_offset, HEADS, KV_HEADS, DIM, Q_KIND, K_KIND, V_KIND, a.dtype,
        )  # fmt: skip
    a, b = first.to(a.dtype), second.to(b.dtype)
    if query_scale is not None:
        factor = tl.load(query_scale + position).to(a.dtype).to(tl.float32)
        is_query = (head < HEADS)[:, None]
        a = tl.where(is_query, (a.to(tl.float32) * factor).to(a.dtype), a)
        b = tl.where(is_query, (b.to(tl.float32) * factor).to(b.dtype), b)
    # 4. Queries keep the order of the rows; keys and values go to their cells.
    cell = tl.load(cells + token).to(tl.int64)
    columns = low, high, pair
    is_q = inside & (head < HEADS)[:, None]
    _store_heads(q, token * HEADS + head, a, b, columns, is_q, DIM, INTERLEAVED)
    if KV_HEADS > 0:
        base = cell // PAGE * KV_HEADS
        is_k = inside & ((head >= HEADS) & rotated)[:, None]
        _store_heads(keys, (base + head - HEADS) * PAGE + cell % PAGE, a, b, columns, is_k, DIM, INTERLEAVED)
        is_v = inside & (head >= HEADS + KV_HEADS)[:, None]
        at = (base + head - HEADS - KV_HEADS) * PAGE + cell % PAGE
        _store_heads(values, at, a, b, columns, is_v, DIM, INTERLEAVED)


def rotate_write(
    qkv: torch.Tensor,
    projections: Projections,
    rows: Rows,
    q: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
) -> None:
    """Norm and rotate the heads; write the queries to q, and keys and values to their cells.

    qkv [M, sources x D], M at least R, is the fused projections' result. q [R, H, D]; keys, values [pages, Hkv, PAGE,
    D], None for a layer without its own. The norms must not need `norm_heads` (`Projections.needs_norm_heads`).
    """
    given = projections
    half = triton.next_power_of_2(given.dim // 2)
    block = min(16, triton.next_power_of_2(given.total), max(1, 2048 // half))
    weights, epsilons, offsets, kinds = zip(*map(_numbers, given.norms), strict=True)
    _rotate_write[(len(q), triton.cdiv(given.total, block))](
        qkv, given.bias, given.order, *weights, given.cosine, given.sine, given.query_scale, rows.rotary, rows.cells,
        q, keys, values, given.clip, *epsilons, *offsets,
        SOURCES=qkv.shape[1] // given.dim, HEADS=given.heads, KV_HEADS=given.kv_heads, DIM=given.dim, HALF=half,
        BLOCK_H=block, PAIRS=0 if given.cosine is None else given.cosine.shape[1], INTERLEAVED=given.interleaved,
        Q_KIND=kinds[0], K_KIND=kinds[1], V_KIND=kinds[2], NORMS_LAST=given.norms_last, PAGE=PAGE, num_warps=4,
    )  # fmt: skip


@triton.jit
def _norm_part(
    qkv, bias, order, weight, shift, out, token, clip, eps, offset, FIRST: tl.constexpr, COUNT: tl.constexpr,
    TOTAL: tl.constexpr, SOURCES: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Heads FIRST to FIRST + COUNT of a row: all queries, all keys or all values. `shift`: the norm's own bias."""
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (head < COUNT)[:, None] & (column < DIM)[None, :]
    source = FIRST + head
    if order is not None:
        source = tl.load(order + FIRST + head, mask=head < COUNT, other=0)
    at = source[:, None] * DIM + column[None, :]
    x = tl.load(qkv + token * SOURCES * DIM + at, mask=inside, other=0.0)
    if bias is not None:
        x = x + tl.load(bias + at, mask=inside, other=0.0)
    if clip is not None:
        x = _clamp(x, clip)
    if KIND > 0:
        wide = x.to(tl.float32)
        if CENTERED & KIND:
            total = tl.sum(wide, 1)
            mean = tl.sum(total, 0) / (COUNT * DIM) + tl.zeros_like(total) if WHOLE & KIND else total / DIM
            wide = tl.where(inside, wide - mean[:, None], 0.0)
        square = tl.sum(wide * wide, 1)
        mean = tl.sum(square, 0) / (COUNT * DIM) + tl.zeros_like(square) if WHOLE & KIND else square / DIM
        wide = wide * tl.rsqrt(mean + eps)[:, None]
        if ROUNDS_FIRST & KIND:
            wide = wide.to(x.dtype).to(tl.float32)
        at = tl.zeros_like(head)[:, None] + column[None, :]
        if OWN_WEIGHTS & KIND:
            at = head[:, None] * DIM + column[None, :]
        if weight is not None:
            wide = wide * _gain(weight, at, inside, offset, KIND)
        if shift is not None:
            if ROUNDS_FIRST & KIND:
                wide = wide.to(x.dtype).to(tl.float32)
            wide = wide + tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
        x = wide.to(x.dtype)
    target = (FIRST + head)[:, None] * DIM + column[None, :]
    tl.store(out + token * TOTAL * DIM + target, x, mask=inside)


@triton.jit
def _norm_heads(
    qkv, bias, order, q_norm, k_norm, v_norm, q_shift, k_shift, v_shift, out,
    clip, q_eps, k_eps, v_eps, q_offset, k_offset, v_offset,
    SOURCES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_KIND: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, 3), for queries, keys and values; (rows, 1) without keys and values. See `norm_heads`."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    if part == 0:
        _norm_part(
            qkv, bias, order, q_norm, q_shift, out, token, clip, q_eps, q_offset,
            0, HEADS, total, SOURCES, DIM, BLOCK_Q, BLOCK_D, Q_KIND,
        )  # fmt: skip
    elif part == 1:
        _norm_part(
            qkv, bias, order, k_norm, k_shift, out, token, clip, k_eps, k_offset,
            HEADS, KV_HEADS, total, SOURCES, DIM, BLOCK_KV, BLOCK_D, K_KIND,
        )  # fmt: skip
    else:
        _norm_part(
            qkv, bias, order, v_norm, v_shift, out, token, clip, v_eps, v_offset,
            HEADS + KV_HEADS, KV_HEADS, total, SOURCES, DIM, BLOCK_KV, BLOCK_D, V_KIND,
        )  # fmt: skip


def norm_heads(qkv: torch.Tensor, projections: Projections, out: torch.Tensor) -> torch.Tensor:
    """Write the heads after bias, clamp and norms to out [R, (H + 2 Hkv) D], all queries first, then keys and values.

    qkv as in `rotate_write`, which then takes `out` and `Projections.after_norm_heads()`.
    """
    given = projections
    whole, (q_norm, k_norm, v_norm) = given.whole_norms, given.norms
    norms = _numbers(q_norm, whole=whole), _numbers(k_norm, whole=whole), _numbers(v_norm)
    weights, epsilons, offsets, kinds = zip(*norms, strict=True)
    shifts = [None if norm is None else norm.bias for norm in given.norms]
    columns = triton.next_power_of_2(given.dim)
    block, kv_block = triton.next_power_of_2(given.heads), triton.next_power_of_2(max(1, given.kv_heads))
    _norm_heads[(len(out), 3 if given.kv_heads else 1)](
        qkv, given.bias, given.order, *weights, *shifts, out, given.clip, *epsilons, *offsets,
        SOURCES=qkv.shape[1] // given.dim, HEADS=given.heads, KV_HEADS=given.kv_heads, DIM=given.dim,
        BLOCK_Q=block, BLOCK_KV=kv_block, BLOCK_D=columns, Q_KIND=kinds[0], K_KIND=kinds[1], V_KIND=kinds[2],
        num_warps=max(1, min(16, block * columns // 512)),
    )  # fmt: skip
    return out


def _numbers(norm: Norm | None, *, whole: bool = False) -> tuple[torch.Tensor | None, float, float | None, int]:
    """A norm's weight, eps, offset (None for 0) and kind."""
    if norm is None:
        return None, 1.0, None, 0
    weight, bias = norm.weight, norm.bias
    own = whole or any(own is not None and own.dim() > 1 for own in (weight, bias))
    rounds_first = norm.rounds_first and (weight is not None or bias is not None)  # else it rounds once in any case
    bits = (NORM, True), (CENTERED, norm.centered), (ROUNDS_FIRST, rounds_first), (OWN_WEIGHTS, own), (WHOLE, whole)
    return weight, norm.eps, norm.offset or None, sum(bit.value for bit, is_set in bits if is_set)
