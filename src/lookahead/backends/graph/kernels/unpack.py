"""Codes of quantised weights as numbers of the model's dtype, which all of them are exactly.

Each conversion is written twice: readable, for any device, and as PTX for bf16 on NVIDIA GPUs, where a code takes one
to two instructions. There a code's bits become the exponent and mantissa of a bf16 number, and a constant is added to
it or multiplied with it. `prmt` takes a byte into each half of a word, whose upper byte it fills with the code's sign:
shifted, both are in their bits of bf16.
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
ones, $7 and $8 for high ones. Which bytes a word has is the compiler's choice: they may be of several rows."""

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


@triton.jit
def nibbles(raw, low_zero, high_zero, E2M1: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes -> the numbers of their low and of their high nibbles: FP4 numbers, or a nibble less its zero point.

    Zero points are integers from 0 to 127 that broadcast to `raw`; without them (None, both) they are 8. FP4 has none.
    """
    if PTX:
        if E2M1:
            low, high = _scaled_e2m1(raw, tl.full(raw.shape, 253, tl.int32), tl.full(raw.shape, 253, tl.int32))
        else:
            low, high = tl.inline_asm_elementwise(
                INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r",
                [raw, _less_128_and(low_zero, raw), _less_128_and(high_zero, raw)],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        low, high = _nibble(raw & 15, low_zero, E2M1).to(DTYPE), _nibble(raw >> 4, high_zero, E2M1).to(DTYPE)
    return low, high


@triton.jit
def _less_128_and(zero, raw):
    """The bf16 number -128 - zero, for each byte."""
    zeros = tl.full(raw.shape, 8, tl.int32) if zero is None else tl.broadcast_to(zero.to(tl.int32), raw.shape)
    return (zeros | 0xC300).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scaled_nibbles(raw, word, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes [pieces, 16] of interleaved codes -> the FP4 numbers of their low and high nibbles, times their scales.

    word int32 [pieces, 1]: the four scales of 128 columns, as exponents plus 127. With PTX none may be above 128.
    """
    second = tl.arange(0, 16)[None, :] // 8  # of the two groups of 32 columns in 64
    first, last = (word >> second * 8) & 255, (word >> second * 8 + 16) & 255
    if PTX:
        low, high = _scaled_e2m1(raw, first + 126, last + 126)
    else:
        low = (_nibble(raw & 15, None, True) * power_of_two(first)).to(DTYPE)
        high = (_nibble(raw >> 4, None, True) * power_of_two(last)).to(DTYPE)
    return low, high


@triton.jit
def _scaled_e2m1(raw, low_exponent, high_exponent):
    """With PTX: FP4 numbers times 2^(exponent - 253), exponents of at most 254 and in the shape of `raw`."""
    low_scale = (low_exponent << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high_scale = (high_exponent << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        E2M1_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [raw, low_scale, high_scale], dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=4,
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
