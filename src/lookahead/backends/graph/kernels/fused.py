"""The operations between the matrix products, one launch each: embedding, norm, rotary embedding with K/V write, gate.
And those at the start and end of a step: copies from and to pinned memory, moves of accepted K/V, locating rows.

Each rounds where transformers' modules round, so that half-precision results stay close to theirs. A row's result
depends on that row only: not on K, not on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import load_sequence
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.sizes import PAGE


@triton.jit
def _copy_pinned(source, target, size, BLOCK: tl.constexpr):
    """Grid: (blocks of numbers)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a few integers [n] from or to pinned memory, with a kernel.

    In a captured step the GPU's copy engine takes several microseconds to start and stop, a kernel one or two.
    """
    _copy_pinned[(triton.cdiv(source.numel(), 512),)](source, target, source.numel(), BLOCK=512)


@triton.jit
def _copy_packet(source, target, size, changed, changes, tables, BLOCK: tl.constexpr):
    """Grid: (blocks of numbers, and one program for the page-table updates)."""
    block = tl.program_id(0)
    if block < tl.num_programs(0) - 1:
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
    else:
        count = tl.load(changed)
        for first in range(0, count, BLOCK):
            change = first + tl.arange(0, BLOCK)
            index = tl.load(changes + 2 * change, mask=change < count, other=0)
            page = tl.load(changes + 2 * change + 1, mask=change < count, other=0)
            tl.store(tables + index, page, mask=change < count)


def copy_packet(
    source: torch.Tensor,
    target: torch.Tensor,
    changed: torch.Tensor,
    changes: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Copy a packet [n] from pinned memory, as `copy_pinned` does, and apply its page-table updates.

    `changed` [1] and `changes` [C, 2] are fields of `source`: the number of updates, and each one's index into the
    flattened `tables` and its page. All are int32. Programs do not wait for each other, so the updates are read from
    `source`. No index occurs twice.
    """
    _copy_packet[(triton.cdiv(source.numel(), 512) + 1,)](
        source, target, source.numel(), changed, changes, tables, BLOCK=512
    )  # fmt: skip


@triton.jit
def _locate_rows(
    sequence_of, parents, sequences, tables, positions, cells, bits, rows, words, longest,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). Every node of a tree climbs to its root and collects its ancestors."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence = tl.load(sequence_of + row, mask=inside, other=-1)
    used = sequence >= 0
    slot, length, chunk, first_row = load_sequence(sequences, tl.maximum(sequence, 0), used)
    root = first_row + chunk
    node = row - root  # below 0 in a chunk
    word = tl.arange(0, WORDS)
    seen = tl.zeros((BLOCK, WORDS), tl.int32)
    depth = tl.zeros((BLOCK,), tl.int32) - 1
    at = tl.where(used & (node >= 0), node, -1)
    while tl.max(at, 0) >= 0:
        climbing = at >= 0
        bit = tl.where(climbing, 1 << (tl.maximum(at, 0) % 32), 0)
        seen |= tl.where((tl.maximum(at, 0) // 32)[:, None] == word[None, :], bit[:, None], 0)
        depth += climbing.to(tl.int32)
        at = tl.load(parents + root + at, mask=climbing, other=-1)
    position = length + chunk + tl.where(node >= 0, depth, node)
    # Padding rows write to page 0, which is never read.
    index = length + chunk + node
    page = tl.load(tables + slot * longest + index // PAGE, mask=used, other=0)
    tl.store(positions + row, tl.where(used, position, 0), mask=inside)
    tl.store(cells + row, tl.where(used, page * PAGE + index % PAGE, row % PAGE), mask=inside)
    tl.store(bits + row[:, None] * words + word[None, :], seen, mask=inside[:, None] & (word < words)[None, :])


def locate_rows(rows: Rows) -> None:
    """Compute the rows' positions, K/V cells and ancestor bits from their sequences and parents; see `Rows`."""
    size, words = rows.bits.shape
    _locate_rows[(triton.cdiv(size, 32),)](
        rows.sequence_of, rows.parents, rows.sequences, rows.tables, rows.positions, rows.cells, rows.bits,
        size, words, rows.tables.shape[1],
        PAGE=PAGE, BLOCK=32, WORDS=triton.next_power_of_2(words), num_warps=1,
    )  # fmt: skip


@triton.jit
def _embed(table, tokens, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (tokens, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(table + token * WIDTH + column, mask=column < WIDTH)
    tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)


def embed(table: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """table [vocabulary, width], tokens [M] -> out [M, width]. (`index_select` takes 14 us for 16 tokens.)"""
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _embed[(len(tokens), triton.cdiv(width, block))](table, tokens, out, WIDTH=width, BLOCK=block)
    return out


@triton.jit
def _add_norm(
    residual, delta, rows, weight, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows of out). residual += delta; out = RMSNorm(residual) * weight. Row i of out is of row rows[i]."""
    target = tl.program_id(0).to(tl.int64)
    source = target
    if HAS_ROWS:
        source = tl.load(rows + target).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0)
    x = tl.load(residual + source * WIDTH + column, mask=inside, other=0.0)
    if HAS_DELTA:
        x = x + tl.load(delta + source * WIDTH + column, mask=inside, other=0.0)
        if not HAS_ROWS:
            tl.store(residual + source * WIDTH + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(x.dtype)
    tl.store(out + target * WIDTH + column, (normed * gain).to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add delta to the residual stream, and write the stream's RMSNorm to out.

    residual, delta [M, width]; weight [width]; out [M, width]. With rows [R] int32, out [R, width] are the norms of
    these rows only, and the residual stream is unchanged: for the last norm, after which it is not read.
    """
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    _add_norm[(out.shape[0],)](
        residual, residual if delta is None else delta, residual if rows is None else rows, weight, out, eps,
        WIDTH=width, BLOCK=block, HAS_DELTA=delta is not None, HAS_ROWS=rows is not None,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_write(
    qkv, bias, q_norm, k_norm, cosine, sine, positions, cells, q, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of all heads). See `rotate_write`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total: tl.constexpr = HEADS + 2 * KV_HEADS
    there = head < total
    column = tl.arange(0, HALF)
    half: tl.constexpr = DIM // 2
    inside = there[:, None] & (column < half)[None, :]
    low = head[:, None] * DIM + column[None, :]
    high = low + half
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cosine + position * half + column, mask=column < half, other=1.0)[None, :]
    sin = tl.load(sine + position * half + column, mask=column < half, other=0.0)[None, :]
    cell = tl.load(cells + token).to(tl.int64)
    base = cell // PAGE * KV_HEADS
    a = tl.load(qkv + token * total * DIM + low, mask=inside, other=0.0)
    b = tl.load(qkv + token * total * DIM + high, mask=inside, other=0.0)
    if HAS_BIAS:
        a = a + tl.load(bias + low, mask=inside, other=0.0)
        b = b + tl.load(bias + high, mask=inside, other=0.0)
    first, second = a.to(tl.float32), b.to(tl.float32)
    rotated = head < HEADS + KV_HEADS
    if HAS_NORM:
        square = tl.sum(first * first + second * second, 1) / DIM
        scale = tl.rsqrt(square + eps)[:, None]
        is_query = (head < HEADS)[:, None]
        q_gain_a = tl.load(q_norm + column, mask=column < half, other=0.0)[None, :]
        q_gain_b = tl.load(q_norm + column + half, mask=column < half, other=0.0)[None, :]
        k_gain_a = tl.load(k_norm + column, mask=column < half, other=0.0)[None, :]
        k_gain_b = tl.load(k_norm + column + half, mask=column < half, other=0.0)[None, :]
        gain_a, gain_b = tl.where(is_query, q_gain_a, k_gain_a), tl.where(is_query, q_gain_b, k_gain_b)
        first = tl.where(rotated[:, None], ((first * scale).to(a.dtype) * gain_a).to(tl.float32), first)
        second = tl.where(rotated[:, None], ((second * scale).to(a.dtype) * gain_b).to(tl.float32), second)
    cos = tl.where(rotated[:, None], cos, 1.0)
    sin = tl.where(rotated[:, None], sin, 0.0)
    a = (first * cos - second * sin).to(a.dtype)
    b = (second * cos + first * sin).to(b.dtype)
    # Queries keep the order of the rows; keys and values go to their cells.
    is_q = inside & (head < HEADS)[:, None]
    at = token * HEADS * DIM + low
    tl.store(q + at, a, mask=is_q)
    tl.store(q + at + half, b, mask=is_q)
    is_k = inside & ((head >= HEADS) & rotated)[:, None]
    at = ((base + head - HEADS) * PAGE + cell % PAGE)[:, None] * DIM + column[None, :]
    tl.store(keys + at, a, mask=is_k)
    tl.store(keys + at + half, b, mask=is_k)
    is_v = inside & (head >= HEADS + KV_HEADS)[:, None]
    at = ((base + head - HEADS - KV_HEADS) * PAGE + cell % PAGE)[:, None] * DIM + column[None, :]
    tl.store(values + at, a, mask=is_v)
    tl.store(values + at + half, b, mask=is_v)


def rotate_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    rows: Rows,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> None:
    """Rotate queries and keys by their positions; write the queries to q, and keys and values to their cells.

    qkv [M, (H + 2 Hkv) D], M at least R, is the fused projections' result. q [R, H, D].
    cosine, sine [positions, D / 2] fp32; keys, values [pages, Hkv, PAGE, D]. bias [(H + 2 Hkv) D] if the projections
    have one; q_norm, k_norm [D], both or neither, are the weights of the queries' and the keys' own RMSNorm (Qwen3).
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given, or neither")
    size, heads, dim = q.shape
    kv_heads = keys.shape[1]
    block = min(16, triton.next_power_of_2(heads + 2 * kv_heads))
    _rotate_write[(size, triton.cdiv(heads + 2 * kv_heads, block))](
        qkv, qkv if bias is None else bias, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        cosine, sine, rows.positions, rows.cells, q, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), BLOCK_H=block,
        HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None, PAGE=PAGE, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * WIDTH + column, (active * up).to(out.dtype.element_ty), mask=inside)


def gate(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x [M, 2 width], whose halves are gate and up -> out [M, width] = silu(gate) * up."""
    width = out.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _gate[(out.shape[0], triton.cdiv(width, block))](x, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _move_accepted(
    cache, counts, commits, moves, pages, width, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (layers x 2, sequences at a time, blocks of heads and columns). A sequence's moves run one after the other:
    each reads a cell that only later moves write."""
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = column // DIM * PAGE * DIM + column % DIM
    base = cache + tl.program_id(0).to(tl.int64) * pages * width * PAGE
    for commit in range(tl.program_id(1), tl.load(counts + 1), tl.num_programs(1)):
        first = tl.load(commits + 2 * commit)
        for i in range(first, first + tl.load(commits + 2 * commit + 1)):
            source = tl.load(moves + 2 * i).to(tl.int64)
            target = tl.load(moves + 2 * i + 1).to(tl.int64)
            value = tl.load(base + source // PAGE * width * PAGE + source % PAGE * DIM + at, mask=inside)
            tl.store(base + target // PAGE * width * PAGE + target % PAGE * DIM + at, value, mask=inside)


def move_accepted(cache: torch.Tensor, counts: torch.Tensor, commits: torch.Tensor, moves: torch.Tensor) -> None:
    """Commit: move the accepted nodes' K/V next to their prefix, in place. The roots are there already.

    cache [layers, 2, pages, Hkv, PAGE, D]. int32: counts [2], whose second number is the number of commits; commits
    [B, 2], each one's first move and number of moves; moves [M, 2], source and target cell.
    """
    layers, two, pages, heads, page, dim = cache.shape
    width = heads * dim
    block = min(2048, triton.next_power_of_2(width))
    _move_accepted[(layers * two, min(8, len(commits)), triton.cdiv(width, block))](
        cache, counts, commits, moves, pages, width, DIM=dim, PAGE=page, BLOCK=block, num_warps=4,
    )  # fmt: skip
