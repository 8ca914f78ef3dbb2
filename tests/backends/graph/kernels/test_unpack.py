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
    nibbles_of_words,
    numbers_of_words,
    scaled_nibbles,
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
    first, second = nibbles(tl.load(codes + at), E2M1, PTX, low.dtype.element_ty)
    tl.store(low + at, first)
    tl.store(high + at, second)


@triton.jit
def _unpack_words(codes, low, high, given, KIND: tl.constexpr, PTX: tl.constexpr):
    """codes int32 [16, 4]; given int32 [16, 4]: zero points of a row's low and high nibbles, of the first two bytes of
    each word and of the others, or in one word four scales."""
    row, DTYPE = tl.arange(0, 16)[:, None], low.dtype.element_ty
    word = tl.load(codes + row * 4 + tl.arange(0, 4)[None, :])
    if KIND == "zeros":
        first = (tl.load(given + row * 4), tl.load(given + row * 4 + 1))
        second = (tl.load(given + row * 4 + 2), tl.load(given + row * 4 + 3))
        numbers, others = nibbles_of_words(word, first, second, False, PTX, DTYPE)
    elif KIND == "scales":
        numbers, others = scaled_nibbles(word, tl.load(given + row * 4), PTX, DTYPE)
    elif KIND == "int4" or KIND == "e2m1":
        numbers, others = nibbles_of_words(word, None, None, KIND == "e2m1", PTX, DTYPE)
    else:
        numbers = numbers_of_words(word, KIND == "e4m3", PTX, DTYPE)
        others = numbers
    at = row * 16 + tl.arange(0, 16)[None, :]
    tl.store(low + at, numbers)
    tl.store(high + at, others)


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


@pytest.mark.parametrize("ptx", [pytest.param(False, id="any device"), PTX])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8", "e4m3", "zeros", "scales"])
def test_words_of_codes_are_the_values_of_their_bytes(
    device: torch.device, kind: str, dtype: torch.dtype, ptx: bool
) -> None:
    """In the order of the bytes, each row with zero points or scales of its own. A row has 16 bytes."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(0, 128, (16, 4), generator=generator, dtype=torch.int32)
    low, high = (torch.full((16, 16), float("nan"), dtype=dtype, device=device) for _ in range(2))
    # Scales are four bytes in a word, exponents plus 127 that fp16 has.
    powers = torch.randint(118, 128, (16, 4), generator=generator, dtype=torch.uint8)
    sent = given if kind == "zeros" else powers.view(torch.int32).expand(16, 4).contiguous()
    shuffled = BYTES[torch.randperm(256, generator=generator)]
    codes = shuffled.view(torch.int32)
    _unpack_words[(1,)](
        codes.to(device), low, high, sent.to(device), KIND=kind, PTX=ptx and dtype is torch.bfloat16
    )  # fmt: skip
    if kind in ("int8", "e4m3"):
        values = values_of(shuffled[None], Codes(kind))[0]
        values[values.isnan()] = torch.where(shuffled[values.isnan()] < 128, 480.0, -480.0)
        expected = [values.view(16, 16)] * 2
    else:
        values = values_of(shuffled[:, None], Codes.INT4 if kind == "zeros" else Codes(kind.replace("scales", "e2m1")))
        expected = [values[:, half].reshape(16, 16) for half in range(2)]
    if kind == "zeros":
        pairs = given.view(16, 2, 1, 2, 1).expand(16, 2, 4, 2, 2).reshape(16, 2, 16)
        expected = [expected[half] + 8 - pairs[:, half] for half in range(2)]
    elif kind == "scales":
        groups = 2.0 ** (powers.view(16, 2, 2, 1).expand(16, 2, 2, 8).reshape(16, 2, 16).double() - 127)
        expected = [expected[half] * groups[:, half] for half in range(2)]
    for ours, wanted in zip((low, high), expected, strict=True):
        assert torch.equal(ours.cpu().float(), wanted.float())
        assert torch.equal(ours.cpu().signbit(), wanted.signbit())


WORDS = BYTES.numpy().view(np.uint32)
"""All bytes, four to a word."""


def halves(*words: np.ndarray) -> torch.Tensor:
    """The bf16 numbers in words [n] each, those of the first word of each first."""
    numbers = np.stack([np.stack([one, one >> 16], 1) for one in words], 1).astype(np.uint16)
    return torch.from_numpy(numbers).view(torch.bfloat16).flatten().float()


def pairs_of(numbers: torch.Tensor) -> dict[int, np.ndarray]:
    """The operands from the fifth on, for eight bf16 numbers: those of the low nibbles of four bytes, then of the high
    ones, two to a word."""
    first, second = (numbers.bfloat16().view(torch.int16).numpy().astype(np.uint32) & 0xFFFF).reshape(4, 2).T
    return {5 + number: np.full(len(WORDS), word, np.uint32) for number, word in enumerate(first | second << 16)}


def nibbles_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What belongs to the low and to the high nibble of each byte [256], as instructions give it: [words, 8]."""
    return torch.cat([low.view(-1, 4), high.view(-1, 4)], 1)


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


@pytest.mark.parametrize("zeros", [(8,) * 8, (0, 15, 7, 3, 12, 1, 127, 9)], ids=str)
def test_ptx_of_nibbles_less_zero_points(zeros: tuple[int, ...]) -> None:
    """Each nibble has a zero point of its own."""
    less = torch.tensor(zeros)
    found = run_ptx(INT4_PTX.value, {4: WORDS, **pairs_of(-128.0 - less)})
    nibble = nibbles_of(BYTES & 15, BYTES >> 4).float()
    check_bits(halves(found[0], found[1], found[2], found[3]), (nibble - less).flatten())


@pytest.mark.parametrize("exponents", [(127,) * 8, (120, 128, 0, 1, 126, 64, 2, 127)], ids=str)
def test_ptx_of_scaled_fp4(exponents: tuple[int, ...]) -> None:
    """The smallest scale, 2^-127, times 0.5 has no normal number."""
    powers = 2.0 ** (torch.tensor(exponents, dtype=torch.float64) - 127)
    found = run_ptx(E2M1_PTX.value, {4: WORDS, **pairs_of(powers * 2.0**126)})
    values = values_of(BYTES[:, None], Codes.E2M1)  # low nibbles, then high ones
    numbers = nibbles_of(values[:, 0], values[:, 1]).double()
    check_bits(halves(found[0], found[1], found[2], found[3]), (numbers * powers).flatten().float())
