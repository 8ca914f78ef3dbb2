"""Codes of quantised weights as numbers of the model's dtype, which all of them are exactly.

Each conversion is written twice: readable, for any device, and as PTX for bf16 on NVIDIA GPUs, where a code takes one
to two instructions. There a code's bits become the exponent and mantissa of a bf16 number, and a constant is added to
it or multiplied with it. `prmt` takes a byte into each half of a word, whose upper byte it fills with the code's sign:
shifted, both are in their bits of bf16.

Four bytes that are converted together have to be in one register. Of a tensor of bytes which they are is the compiler's
choice (Triton 3.6 takes two of one row and two of another, and moves bytes for it), so kernels load words of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT4_PTX = tl.constexpr(
    """{
    .reg .b32 l, h, p;
    mov.b32 p, 0x3F803F80;
    and.b32 l, $4, 0x0F0F0F0F;
    shr.u32 h, $4, 4;  and.b32 h, h, 0x0F0F0F0F;
    prmt.b32 $0, l, 0x43434343, 0x4140;  fma.rn.bf16x2 $0, $0, p, $5;
    prmt.b32 $1, l, 0x43434343, 0x4342;  fma.rn.bf16x2 $1, $1, p, $6;
    prmt.b32 $2, h, 0x43434343, 0x4140;  fma.rn.bf16x2 $2, $2, p, $7;
    prmt.b32 $3, h, 0x43434343, 0x4342;  fma.rn.bf16x2 $3, $3, p, $8;
    }"""
)
"""0x4300 | nibble is 128 + nibble. What is added is a bf16 number for each nibble, two to a word: $5 and $6 for low
ones, $7 and $8 for high ones."""

E2M1_PTX = tl.constexpr(
    """{
    .reg .b32 h, v, q;
    mov.b32 q, 0x80008000;
    shl.b32 h, $4, 4;
    prmt.b32 v, h, 0, 0x9180;   shl.b32 v, v, 2;  and.b32 v, v, 0x81C081C0;  fma.rn.bf16x2 $0, v, $5, q;
    prmt.b32 v, h, 0, 0xB3A2;   shl.b32 v, v, 2;  and.b32 v, v, 0x81C081C0;  fma.rn.bf16x2 $1, v, $6, q;
    prmt.b32 v, $4, 0, 0x9180;  shl.b32 v, v, 2;  and.b32 v, v, 0x81C081C0;  fma.rn.bf16x2 $2, v, $7, q;
    prmt.b32 v, $4, 0, 0xB3A2;  shl.b32 v, v, 2;  and.b32 v, v, 0x81C081C0;  fma.rn.bf16x2 $3, v, $8, q;
    }"""
)
"""The sign to bit 15, the other bits of a high nibble to bits 8 to 6, times what is in the same words as above: 2^126
times the scale."""

E4M3_PTX = tl.constexpr(
    """{
    .reg .b32 v, p, q;
    mov.b32 p, 0x7B807B80;  mov.b32 q, 0x80008000;
    prmt.b32 v, $2, 0, 0x9180;  shl.b32 v, v, 4;  and.b32 v, v, 0x87F087F0;  fma.rn.bf16x2 $0, v, p, q;
    prmt.b32 v, $2, 0, 0xB3A2;  shl.b32 v, v, 4;  and.b32 v, v, 0x87F087F0;  fma.rn.bf16x2 $1, v, p, q;
    }"""
)
"""The sign to bit 15, the other bits to bits 10 to 4, times 2^120."""

INT8_PTX = tl.constexpr(
    """{
    .reg .b32 l, h, a, p;
    mov.b32 p, 0xBF80BF80;
    and.b32 l, $2, 0x7F7F7F7F;  and.b32 h, $2, 0x80808080;
    prmt.b32 a, h, 0x43434343, 0x4140;  prmt.b32 $0, l, 0x43434343, 0x4140;  fma.rn.bf16x2 $0, a, p, $0;
    prmt.b32 a, h, 0x43434343, 0x4342;  prmt.b32 $1, l, 0x43434343, 0x4342;  fma.rn.bf16x2 $1, a, p, $1;
    }"""
)
"""0x4300 | the lower seven bits is 128 more than they are; 0x4300 | the highest bit is 128 or 256."""


SPLIT_PTX = tl.constexpr("mov.b32 {$0, $1}, $2;")
"""The halves of a word."""


@triton.jit
def nibbles(raw, E2M1: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes -> the numbers of their low and of their high nibbles: FP4 numbers, or a nibble less 8."""
    if PTX:
        # 2^126, or -128 - 8
        constant = tl.full(raw.shape, 0x7E80 if E2M1 else 0xC308, tl.uint16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            E2M1_PTX if E2M1 else INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [raw, constant, constant],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = _nibble(raw & 15, None, E2M1).to(DTYPE), _nibble(raw >> 4, None, E2M1).to(DTYPE)
    return low, high


@triton.jit
def nibbles_of_words(word, low_zeros, high_zeros, E2M1: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """The same for the bytes of words int32 [pieces, n]: [pieces, 4 n] each. The bytes of a word are in one register
    whatever layout a compiler chooses.

    Zero points are integers from 0 to 127 that broadcast to `word`, in pairs: of the first two bytes of a word, and of
    the other two. Without them (None, both) they are 8. FP4 has none.
    """
    if PTX:
        constant = 0x7E80 if E2M1 else 0xC308
        if low_zeros is None:
            low, high = _converted(word, (constant, constant), (constant, constant), E2M1)
        else:
            low, high = _converted(
                word, (low_zeros[0] | 0xC300, low_zeros[1] | 0xC300), (high_zeros[0] | 0xC300, high_zeros[1] | 0xC300),
                E2M1,
            )  # fmt: skip
    elif low_zeros is None:
        low = _numbers(word, 0, (None, None), E2M1, DTYPE)
        high = _numbers(word, 4, (None, None), E2M1, DTYPE)
    else:
        low, high = _numbers(word, 0, low_zeros, E2M1, DTYPE), _numbers(word, 4, high_zeros, E2M1, DTYPE)
    return low, high


@triton.jit
def scaled_nibbles(word, powers, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Words int32 [pieces, 4] of interleaved codes -> the FP4 numbers of their low and high nibbles [pieces, 16], times
    their scales.

    powers int32 [pieces, 1]: the four scales of 128 columns, as exponents plus 127. With PTX none may be above 128.
    """
    second = tl.arange(0, 4)[None, :] // 2  # of the two groups of 32 columns in 64
    first, last = (powers >> second * 8) & 255, (powers >> second * 8 + 16) & 255
    if PTX:
        low_scale, high_scale = (first + 126) << 7, (last + 126) << 7
        low, high = _converted(word, (low_scale, low_scale), (high_scale, high_scale), True)
    else:
        low_scale = power_of_two(_of_bytes(first, first, first, first))
        high_scale = power_of_two(_of_bytes(last, last, last, last))
        low = (_numbers(word, 0, (None, None), True, tl.float32) * low_scale).to(DTYPE)
        high = (_numbers(word, 4, (None, None), True, tl.float32) * high_scale).to(DTYPE)
    return low, high


@triton.jit
def _converted(word, low, high, E2M1: tl.constexpr):
    """With PTX: the numbers of the nibbles of words. low and high: the bits of the bf16 numbers that are added or
    multiplied with, for the first two bytes of a word and for the other two."""
    a, b, c, d = tl.inline_asm_elementwise(
        E2M1_PTX if E2M1 else INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [word, _twice(low[0]), _twice(low[1]), _twice(high[0]), _twice(high[1])],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _of_pairs(a, b), _of_pairs(c, d)


@triton.jit
def _twice(half):
    """16 bits in both halves of words."""
    return half * 0x10001


@triton.jit
def _of_pairs(first, second):
    """The bf16 numbers [pieces, 4 n] of which words int32 [pieces, n] have two each."""
    a, b = tl.inline_asm_elementwise(
        SPLIT_PTX, "=h,=h,r", [first], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )  # fmt: skip
    c, d = tl.inline_asm_elementwise(
        SPLIT_PTX, "=h,=h,r", [second], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )  # fmt: skip
    return _of_bytes(a, b, c, d)


@triton.jit
def _of_bytes(a, b, c, d):
    """What belongs to the four bytes of words [pieces, n] -> [pieces, 4 n], in the order of the bytes."""
    joined = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(joined, [a.shape[0], a.shape[1] * 4])


@triton.jit
def _numbers(word, shift: tl.constexpr, zeros, E2M1: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of the nibbles of words that begin at bit `shift` of each byte."""
    return _of_bytes(
        _nibble(word >> shift & 15, zeros[0], E2M1).to(DTYPE),
        _nibble(word >> shift + 8 & 15, zeros[0], E2M1).to(DTYPE),
        _nibble(word >> shift + 16 & 15, zeros[1], E2M1).to(DTYPE),
        _nibble(word >> shift + 24 & 15, zeros[1], E2M1).to(DTYPE),
    )  # fmt: skip


@triton.jit
def power_of_two(code):
    """2^(code - 127), in fp32, for codes from 0 to 254."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.int32) << 23)  # 2^-127 has no normal number
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nibble(code, zero, E2M1: tl.constexpr):
    """The number of a nibble, in fp32."""
    if E2M1:
        exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
        # 0 and 0.5 without an exponent; else (1 + mantissa / 2) 2^(exponent - 1)
        power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
        size = tl.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * power)
        number = size * tl.where((code & 8) != 0, -1.0, 1.0)  # `-size` may be 0 - size, which has no -0
    elif zero is None:
        number = code.to(tl.float32) - 8.0
    else:
        number = code.to(tl.float32) - zero.to(tl.float32)
    return number


@triton.jit
def bytes_to_numbers(raw, E4M3: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes -> their FP8 numbers, or as signed integers."""
    if PTX:
        numbers = tl.inline_asm_elementwise(
            E4M3_PTX if E4M3 else INT8_PTX, "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif E4M3:
        # As fp16, whose exponent is 8 more; any device has it, FP8 few. The codes of NaN are 480: no weight has them.
        wide = raw.to(tl.uint16)
        numbers = (((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        numbers = raw.to(tl.int8, bitcast=True).to(DTYPE)
    return numbers


@triton.jit
def numbers_of_words(word, E4M3: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """The same for the bytes of words int32 [pieces, n]: [pieces, 4 n]."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            E4M3_PTX if E4M3 else INT8_PTX, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )  # fmt: skip
        numbers = _of_pairs(first, second)
    else:
        bytes = _of_bytes(word & 255, word >> 8 & 255, word >> 16 & 255, word >> 24 & 255).to(tl.uint8)
        numbers = bytes_to_numbers(bytes, E4M3, False, DTYPE)
    return numbers
