"""Sums over a split of K of a product with a quantised matrix: codes are expanded within the loop, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.unpack import (
    bytes_to_numbers,
    nibbles,
    nibbles_of_words,
    numbers_of_words,
    power_of_two,
    scaled_nibbles,
)


@triton.jit
def _groups(values, row, column, mask, K, row_stride, group_stride, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Scales, zero points or offsets as they are stored; those of columns beyond K are of the last group."""
    group = tl.minimum(column, K - 1) // GROUP if GROUP else column * 0
    return tl.load(values + (row // ROWS) * row_stride + group * group_stride, mask=mask, other=0)


@triton.jit
def group_scales(
    scales, row, column, mask, K, row_stride, group_stride, ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr
):  # fmt: skip
    """The scales of weights, fp32."""
    value = _groups(scales, row, column, mask, K, row_stride, group_stride, ROWS, GROUP)
    return power_of_two(value) if E8M0 else value.to(tl.float32)


@triton.jit
def _weights(numbers, scale, offset, E8M0: tl.constexpr):
    """Numbers of codes times scales, plus offsets."""
    if E8M0 and offset is None and numbers.dtype != tl.float16:
        numbers = numbers * scale.to(numbers.dtype)  # exact
    else:
        weight = numbers.to(tl.float32) * scale
        if offset is not None:
            weight += offset
        numbers = weight.to(numbers.dtype)
    return numbers


@triton.jit
def interleaved_row(i, WARPS: tl.constexpr):
    """The matrix row whose codes `_operand` takes at index i: that which the threads of a matrix instruction have."""
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def _operand(numbers, second, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Numbers [ROWS x 4, 16] of interleaved codes as the rows and 64 columns of a matrix instruction's operand; with
    the `second` ones of the same shape, which are those of the next 64 columns, 128.

    Every thread keeps the numbers that it has: this only names them. See `interleaved_row`, and `interleaved` in
    `models.packing`.
    """
    if second is None:
        numbers = tl.reshape(numbers, [ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
        found = tl.reshape(tl.permute(numbers, [0, 2, 1, 3, 5, 6, 4, 7]), [ROWS, 64])
    else:
        numbers = tl.reshape(tl.join(numbers, second), [ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2, 2])
        found = tl.reshape(tl.permute(numbers, [0, 2, 1, 3, 8, 5, 6, 4, 7]), [ROWS, 128])
    return found


@triton.jit
def _scales_in_words(words, HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """The scales in words [BLOCK_N x 4, 1] (see `QuantisedWeights`), for the sums [BLOCK_N, BLOCK_M] of `_operand`'s
    rows. A thread has sums of the rows whose words it has, so that no number moves."""
    if HALF:
        scale = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = (words & -65536).to(tl.float32, bitcast=True)
    scale = tl.permute(tl.reshape(scale, [BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4]), [0, 2, 1, 3, 4])
    scale = tl.reshape(scale, [BLOCK_N, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(scale, [BLOCK_N, BLOCK_M // 8, 4, 2]), [BLOCK_N, BLOCK_M])


@triton.jit
def _per_number(
    values, row, start, N, K, row_stride, group_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales or offsets of 64 columns from `start` on, fp32, for the numbers [BLOCK_N x 4, 16] of `_operand`.

    GROUP: 8, 16 or 32, or a multiple of 64.
    """
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= 64 else 64 // GROUP
    column = start + tl.arange(0, GROUPS)[None, :] * (64 // GROUPS)
    rows, mask = row[:, None], (row < N)[:, None]
    found = group_scales(values, rows, column, mask, K, row_stride, group_stride, ROWS, GROUP, E8M0)
    wide = tl.broadcast_to(found[:, None, :, None], [BLOCK_N, 4, GROUPS, 16 // GROUPS])
    return tl.reshape(wide, [BLOCK_N * 4, 16])


@triton.jit
def _zero_points(
    zeros, row, start, N, K, row_stride, group_stride, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The same of zero points, int32 [BLOCK_N x 4, 4], for each word of codes: of its first two bytes, and of the
    other two, which are 8 columns further."""
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= 64 else (2 if GROUP == 32 else 4)
    column = start + tl.arange(0, GROUPS)[None, :] * (64 // GROUPS)
    rows, mask = row[:, None], (row < N)[:, None]
    first = _groups(zeros, rows, column, mask, K, row_stride, group_stride, ROWS, GROUP).to(tl.int32)
    second = first
    if GROUP == 8:
        second = _groups(zeros, rows, column + 8, mask, K, row_stride, group_stride, ROWS, GROUP).to(tl.int32)
    shape: tl.constexpr = [BLOCK_N, 4, GROUPS, 4 // GROUPS]
    first, second = tl.broadcast_to(first[:, None, :, None], shape), tl.broadcast_to(second[:, None, :, None], shape)
    return tl.reshape(first, [BLOCK_N * 4, 4]), tl.reshape(second, [BLOCK_N * 4, 4])


@triton.jit
def _dot(
    numbers, second, at, start, order, known, row, acc, N, K, scales, offsets, scale_row, scale_group,
    ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """acc + the products of 64 columns from `start` on, or of 128 with `second`: one wait for the matrix instructions
    instead of two, which are the same in the same order. With AFTER the caller multiplies by the scale. PADDED: codes
    have columns beyond K."""
    columns = start + tl.arange(0, 64 if second is None else 128)
    if not AFTER:
        offset = None
        if offsets is not None:
            offset = _per_number(
                offsets, row, start, N, K, scale_row, scale_group, ROWS, GROUP, False, BLOCK_N
            )  # fmt: skip
        scale = _per_number(scales, row, start, N, K, scale_row, scale_group, ROWS, GROUP, E8M0, BLOCK_N)
        numbers = _weights(numbers, scale, offset, E8M0)
    if order is not None:
        columns = tl.load(order + columns)
    if PADDED:
        known = known & (columns < K)[:, None]
    given = tl.load(at + columns[:, None], mask=known, other=0)
    return tl.dot(_operand(numbers, second, BLOCK_N, WARPS), given, acc, input_precision="ieee")


@triton.jit
def _word_of(words, column, inside, K, group_stride, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """The words of the group of a column; beyond K they are those of the last group."""
    last = tl.minimum(column, K - 1) if PADDED else column
    return tl.load(words + last // GROUP * group_stride, mask=inside, other=0)


@triton.jit
def sum_interleaved(
    at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row, scale_group,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, AFTER: tl.constexpr, E8M0: tl.constexpr,
    HALF: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The sum over pieces first to last of 128 bytes of a matrix row, whose codes are interleaved.

    64 bytes after the other, CHUNKS of them in a turn of the loop, which changes nothing. Words are loaded in turns
    before theirs, as codes are; what has fewer than four bytes is waited for.
    """
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tile * BLOCK_N + interleaved_row(tl.arange(0, BLOCK_N), WARPS)
    # 8 rows of 64 bytes are next to one another, and each thread reads 16 of them.
    piece = tl.arange(0, BLOCK_N * 4)
    from_row = tile * BLOCK_N + interleaved_row(piece // 4, WARPS)
    words = scales + from_row[:, None] * scale_row  # with WORDS
    own = codes + (from_row // 8).to(tl.int64) * 8 * codes_stride + from_row % 8 * 16 + piece % 4 * 4
    own = own[:, None] + tl.arange(0, 4)[None, :]
    inside = (from_row < N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    HALVES: tl.constexpr = 2 if KIND >= 2 else 1
    GROUPED: tl.constexpr = AFTER and GROUP != 0
    # The bf16 numbers of larger tiles would need more registers than there are. Matrix instructions do not see a
    # difference; the interpreter's products of 64 and of 128 columns do, so there all tiles have the same.
    FEW: tl.constexpr = BLOCK_M <= 32 or not PTX
    JOINED: tl.constexpr = HALVES == 2 and FEW and (AFTER or WORDS) and not (GROUPED and GROUP == 64)
    for turn in range(first * 2 // CHUNKS, last * 2 // CHUNKS):
        for chunk in tl.static_range(CHUNKS):
            block = turn * CHUNKS + chunk
            start = block * 64 * HALVES
            raw = tl.load(own + block * 128, mask=inside, other=0)
            if WORDS and KIND == 3:
                word = tl.load(words + block * scale_group, mask=inside, other=0)
                low, high = scaled_nibbles(raw, word, PTX, at.dtype.element_ty)
            elif HALVES == 2:
                low_zeros, high_zeros = None, None
                if WORDS:
                    word = _word_of(words, start, inside, K, scale_group, GROUP, PADDED)
                    high_word = word
                    if GROUP == 64:
                        high_word = _word_of(words, start + 64, inside, K, scale_group, GROUP, PADDED)
                    low_zeros, high_zeros = (word & 255, word & 255), (high_word & 255, high_word & 255)
                elif zeros is not None:
                    low_zeros = _zero_points(zeros, row, start, N, K, scale_row, scale_group, ROWS, GROUP, BLOCK_N)
                    high_zeros = _zero_points(
                        zeros, row, start + 64, N, K, scale_row, scale_group, ROWS, GROUP, BLOCK_N
                    )  # fmt: skip
                low, high = nibbles_of_words(raw, low_zeros, high_zeros, KIND == 3, PTX, at.dtype.element_ty)
            else:
                low = numbers_of_words(raw, KIND == 0, PTX, at.dtype.element_ty)
                high = low
            for half in tl.static_range(1 if JOINED else HALVES):
                numbers, second = low if half == 0 else high, high if JOINED else None
                column = start + half * 64
                if GROUPED:
                    if half == 0 or GROUP == 64:
                        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    part = _dot(
                        numbers, second, at, column, order, known, row, part, N, K, scales, offsets, scale_row,
                        scale_group, ROWS, GROUP, AFTER, E8M0, PADDED, BLOCK_N, WARPS,
                    )  # fmt: skip
                    if JOINED or half == HALVES - 1 or GROUP == 64:
                        if WORDS:
                            acc += part * _scales_in_words(
                                word if half == 0 else high_word, HALF, BLOCK_N, BLOCK_M, WARPS
                            )  # fmt: skip
                        else:
                            scale = group_scales(
                                scales, n, column + n * 0, n < N, K, scale_row, scale_group, ROWS, GROUP, E8M0
                            )  # fmt: skip
                            acc += part * scale[:, None]
                else:
                    acc = _dot(
                        numbers, second, at, column, order, known, row, acc, N, K, scales, offsets, scale_row,
                        scale_group, ROWS, GROUP, AFTER or WORDS, E8M0, PADDED, BLOCK_N, WARPS,
                    )  # fmt: skip
    return acc


@triton.jit
def sum_plain(
    at, codes, scales, zeros, offsets, order, tile, known, first, last, N, K, codes_stride, scale_row, scale_group,
    KIND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same for any number of columns, with codes in their order: slower."""
    HALVES: tl.constexpr = 2 if KIND >= 2 else 1
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    byte = tl.arange(0, 64)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first * 2, tl.minimum(last * 2, tl.cdiv(K, 64 * HALVES))):
        start = block * 64 * HALVES
        half = tl.minimum(64 * HALVES, K - start) // HALVES  # the last block may be shorter
        inside = (n < N) & (byte < half)[None, :]
        raw = tl.load(codes + n.to(tl.int64) * codes_stride + block * 64 + byte[None, :], mask=inside, other=0)
        if HALVES == 2:
            low, high = nibbles(raw, KIND == 3, PTX, at.dtype.element_ty)
        else:
            low = bytes_to_numbers(raw, KIND == 0, PTX, at.dtype.element_ty)
            high = low
        for part in tl.static_range(HALVES):
            own = start + part * half + byte
            column = own[None, :]
            numbers = low if part == 0 else high
            if zeros is not None:
                zero = _groups(zeros, n, column, inside, K, scale_row, scale_group, ROWS, GROUP).to(tl.float32)
                numbers = (numbers.to(tl.float32) + 8.0 - zero).to(numbers.dtype)
            offset = None
            if offsets is not None:
                offset = group_scales(offsets, n, column, inside, K, scale_row, scale_group, ROWS, GROUP, False)
            scale = group_scales(scales, n, column, inside, K, scale_row, scale_group, ROWS, GROUP, E8M0)
            numbers = _weights(numbers, scale, offset, E8M0)
            given_column = own
            if order is not None:
                given_column = tl.load(order + own, mask=own < K, other=0)
            given = tl.load(at + given_column[:, None], mask=known & (byte < half)[:, None], other=0)
            acc = tl.dot(numbers, given, acc, input_precision="ieee")
    return acc
