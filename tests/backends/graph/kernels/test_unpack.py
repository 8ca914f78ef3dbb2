"""Codes as numbers: all of them, exactly."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from rounding import DTYPES

from lookahead.backends.graph.kernels.unpack import bytes_to_numbers, nibbles
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
