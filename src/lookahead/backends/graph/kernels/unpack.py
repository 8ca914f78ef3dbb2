"""Codes of quantised weights as numbers of the model's dtype, which all of them are exactly.

Each conversion is written twice: readable, for any device, and as PTX for bf16 on NVIDIA GPUs, where a code takes one
to two instructions. There a code's bits become the exponent and mantissa of a bf16 number, and a constant is added to
it or multiplied with it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibbles(raw, E2M1: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes -> the numbers of their low and of their high nibbles: nibble - 8, or FP4 numbers."""
    if PTX:
        if E2M1:
            # In 16 bits: the sign to bit 15, the others to bits 8 to 6, times 2^126.
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 h, v, s, t, p, q;
                mov.b32 p, 0x7E807E80;  mov.b32 q, 0x80008000;
                shr.u32 h, $4, 4;
                prmt.b32 v, $4, 0, 0x4140;  shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
                shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $0, t, p, q;
                prmt.b32 v, $4, 0, 0x4342;  shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
                shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $1, t, p, q;
                prmt.b32 v, h, 0, 0x4140;  shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
                shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $2, t, p, q;
                prmt.b32 v, h, 0, 0x4342;  shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
                shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $3, t, p, q;
                }""",
                "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            # 0x4300 | nibble is 128 + nibble.
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 l, h, p, q;
                mov.b32 p, 0x3F803F80;  mov.b32 q, 0xC308C308;
                and.b32 l, $4, 0x0F0F0F0F;
                shr.u32 h, $4, 4;  and.b32 h, h, 0x0F0F0F0F;
                prmt.b32 $0, l, 0x43434343, 0x4140;  fma.rn.bf16x2 $0, $0, p, q;
                prmt.b32 $1, l, 0x43434343, 0x4342;  fma.rn.bf16x2 $1, $1, p, q;
                prmt.b32 $2, h, 0x43434343, 0x4140;  fma.rn.bf16x2 $2, $2, p, q;
                prmt.b32 $3, h, 0x43434343, 0x4342;  fma.rn.bf16x2 $3, $3, p, q;
                }""",
                "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        low, high = _nibble(raw & 15, E2M1).to(DTYPE), _nibble(raw >> 4, E2M1).to(DTYPE)
    return low, high


@triton.jit
def scaled_nibbles(raw, word, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes [pieces, 16] of interleaved codes -> the FP4 numbers of their low and high nibbles, times their scales.

    word int32 [pieces, 1]: the four scales of 128 columns, as exponents plus 127. With PTX none may be above 128.
    """
    second = tl.arange(0, 16)[None, :] // 8  # of the two groups of 32 columns in 64
    first, last = (word >> second * 8) & 255, (word >> second * 8 + 16) & 255
    if PTX:
        # As in `nibbles`, with the scale in the factor 2^126.
        low_scale = ((first + 126) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high_scale = ((last + 126) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 v, s, t, q;
            mov.b32 q, 0x80008000;
            prmt.b32 v, $4, 0, 0x4140;
            shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
            shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $0, t, $5, q;
            shl.b32 s, v, 8;  and.b32 s, s, 0x80008000;
            shl.b32 t, v, 2;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $2, t, $7, q;
            prmt.b32 v, $4, 0, 0x4342;
            shl.b32 s, v, 12;  and.b32 s, s, 0x80008000;
            shl.b32 t, v, 6;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $1, t, $6, q;
            shl.b32 s, v, 8;  and.b32 s, s, 0x80008000;
            shl.b32 t, v, 2;  lop3.b32 t, t, 0x01C001C0, s, 0xEA;  fma.rn.bf16x2 $3, t, $8, q;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [raw, low_scale, high_scale], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (_nibble(raw & 15, True) * power_of_two(first)).to(DTYPE)
        high = (_nibble(raw >> 4, True) * power_of_two(last)).to(DTYPE)
    return low, high


@triton.jit
def power_of_two(code):
    """2^(code - 127), in fp32, for codes from 0 to 254."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.int32) << 23)  # 2^-127 has no normal number
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nibble(code, E2M1: tl.constexpr):
    """The number of a nibble, in fp32."""
    if E2M1:
        exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
        # 0 and 0.5 without an exponent; else (1 + mantissa / 2) 2^(exponent - 1)
        power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
        size = tl.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * power)
        number = size * tl.where((code & 8) != 0, -1.0, 1.0)  # `-size` may be 0 - size, which has no -0
    else:
        number = code.to(tl.float32) - 8.0
    return number


@triton.jit
def bytes_to_numbers(raw, E4M3: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes -> their FP8 numbers, or as signed integers."""
    if PTX:
        if E4M3:
            # In 16 bits: the sign to bit 15, the others to bits 10 to 4, times 2^120.
            numbers = tl.inline_asm_elementwise(
                """{
                .reg .b32 v, s, p, q;
                mov.b32 p, 0x7B807B80;  mov.b32 q, 0x80008000;
                prmt.b32 v, $2, 0, 0x1404;  shr.u32 s, v, 4;  and.b32 s, s, 0x07F007F0;
                lop3.b32 s, v, 0x80008000, s, 0xEA;  fma.rn.bf16x2 $0, s, p, q;
                prmt.b32 v, $2, 0, 0x3424;  shr.u32 s, v, 4;  and.b32 s, s, 0x07F007F0;
                lop3.b32 s, v, 0x80008000, s, 0xEA;  fma.rn.bf16x2 $1, s, p, q;
                }""",
                "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            # 0x4300 | the lower seven bits is 128 more than they are; 0x4300 | the highest bit is 128 or 256.
            numbers = tl.inline_asm_elementwise(
                """{
                .reg .b32 l, h, a, p;
                mov.b32 p, 0xBF80BF80;
                and.b32 l, $2, 0x7F7F7F7F;  and.b32 h, $2, 0x80808080;
                prmt.b32 a, h, 0x43434343, 0x4140;  prmt.b32 $0, l, 0x43434343, 0x4140;
                fma.rn.bf16x2 $0, a, p, $0;
                prmt.b32 a, h, 0x43434343, 0x4342;  prmt.b32 $1, l, 0x43434343, 0x4342;
                fma.rn.bf16x2 $1, a, p, $1;
                }""",
                "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
    elif E4M3:
        # As fp16, whose exponent is 8 more; any device has it, FP8 few. The codes of NaN are 480: no weight has them.
        wide = raw.to(tl.uint16)
        numbers = (((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    else:
        numbers = raw.to(tl.int8, bitcast=True).to(DTYPE)
    return numbers
