"""Codes as numbers: all of them, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ptx import run_ptx
from rounding import DTYPES

from lookahead.backends.graph.kernels.unpack import (
    E2M1_PTX,
    E4M3_PTX,
    INT4_PTX,
    INT8_PTX,
    bytes_to_numbers,
    nibbles,
)
from lookahead.models.number_formats import Codes, values_of

BYTES = torch.arange(256, dtype=torch.uint8)
PTX = pytest.param(
    True, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")], id="ptx"
)


@triton.jit
def _unpack_bytes(codes, out, E4M3: tl.constexpr, PTX: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, bytes_to_numbers(tl.load(codes + at), E4M3, PTX, out.dtype.element_ty))


@triton.jit
def _unpack_nibbles(codes, low, high, E2M1: tl.constexpr, PTX: tl.constexpr):
    at = tl.arange(0, 256)
    first, second = nibbles(tl.load(codes + at), None, None, E2M1, PTX, low.dtype.element_ty)
    tl.store(low + at, first)
    tl.store(high + at, second)


@pytest.mark.parametrize("ptx", [pytest.param(False, id="any device"), PTX])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", Codes)
def test_every_code_is_its_value(device: torch.device, kind: Codes, dtype: torch.dtype, ptx: bool) -> None:
    """Bit for bit, so -0 as well. FP8's two codes of NaN, which no weight has, are 480 here. PTX is for bf16."""
    ptx = ptx and dtype is torch.bfloat16
    codes = BYTES.to(device)
    low, high = (torch.full((256,), float("nan"), dtype=dtype, device=device) for _ in range(2))
    if kind.bits == 8:
        _unpack_bytes[(1,)](codes, low, E4M3=kind is Codes.E4M3, PTX=ptx)
        found, expected = [low], [values_of(BYTES[None], kind)[0]]
        expected[0][expected[0].isnan()] = torch.tensor([480.0, -480.0])[: int(expected[0].isnan().sum())]
    else:
        _unpack_nibbles[(1,)](codes, low, high, E2M1=kind is Codes.E2M1, PTX=ptx)
        # A pair of bytes is a block of four columns: low nibbles, then high ones.
        blocks = values_of(BYTES[:, None], kind)
        found, expected = [low, high], [blocks[:, 0], blocks[:, 1]]
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().float(), wanted)
        assert torch.equal(ours.cpu().signbit(), wanted.signbit())


WORDS = BYTES.numpy().view(np.uint32)
"""All bytes, four to a word."""


def halves(*words: np.ndarray) -> torch.Tensor:
    """The bf16 numbers in words [n] each, those of the first word of each first."""
    numbers = np.stack([np.stack([one, one >> 16], 1) for one in words], 1).astype(np.uint16)
    return torch.from_numpy(numbers).view(torch.bfloat16).flatten().float()


def twice(number: float) -> np.ndarray:
    """Words with the same bf16 number in both halves."""
    bits = int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF
    return np.full(len(WORDS), bits * 0x10001, np.uint32)


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("kind", [Codes.E4M3, Codes.INT8])
def test_ptx_of_bytes(kind: Codes) -> None:
    """The instructions themselves, without a GPU."""
    text = E4M3_PTX if kind is Codes.E4M3 else INT8_PTX
    found = run_ptx(text.value, {2: WORDS})
    expected = values_of(BYTES[None], kind)[0]
    expected[expected.isnan()] = torch.tensor([480.0, -480.0])[: int(expected.isnan().sum())]
    check_bits(halves(found[0], found[1]), expected)


@pytest.mark.parametrize("zeros", [(8, 8, 8, 8), (0, 15, 7, 3)], ids=str)
def test_ptx_of_nibbles_less_zero_points(zeros: tuple[int, ...]) -> None:
    """Zero points of the low nibbles of bytes 0 and 1, of 2 and 3, and of the high ones."""
    added = [twice(-128.0 - zero) for zero in zeros for _ in range(2)]
    found = run_ptx(INT4_PTX.value, {4: WORDS, **{5 + number: words for number, words in enumerate(added)}})
    nibble = torch.cat([(BYTES & 15).view(-1, 2, 2), (BYTES >> 4).view(-1, 2, 2)], 1).float()
    less = torch.tensor(zeros).view(1, 4, 1)
    check_bits(halves(found[0], found[1], found[2], found[3]), (nibble - less).flatten())


@pytest.mark.parametrize("exponents", [(127, 127, 127, 127), (120, 128, 0, 1)], ids=str)
def test_ptx_of_scaled_fp4(exponents: tuple[int, ...]) -> None:
    """The smallest scale, 2^-127, times 0.5 has no normal number."""
    scales = [np.full(len(WORDS), (one + 126) * 0x800080, np.uint32) for one in exponents for _ in range(2)]
    found = run_ptx(E2M1_PTX.value, {4: WORDS, **{5 + number: words for number, words in enumerate(scales)}})
    values = values_of(BYTES[:, None], Codes.E2M1)  # low nibbles, then high ones
    pairs = torch.cat([values[:, 0].view(-1, 2, 2), values[:, 1].view(-1, 2, 2)], 1).double()
    scale = 2.0 ** (torch.tensor(exponents, dtype=torch.float64) - 127).view(1, 4, 1)
    check_bits(halves(found[0], found[1], found[2], found[3]), (pairs * scale).flatten().float())
