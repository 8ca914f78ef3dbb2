"""How codes lie in bytes: two to a byte, and in the order in which matrix instructions take them."""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCK = 128
"""Columns that are packed together, two to a byte."""


INTERLEAVED_ROWS, INTERLEAVED_BYTES = 8, 128
"""Rows of a matrix that are interleaved together, and the bytes of a row that are padded to a multiple of this."""


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Nibbles [out, in], two per byte: [out, in / 2] uint8.

    In every block of 128 columns byte j holds column j in its low nibble and column j + 64 in its high one, so that the
    low nibbles of 64 bytes are columns in a row, and the high ones the next. A shorter last block is halved likewise.
    """

    def halves(block: torch.Tensor) -> torch.Tensor:
        low, high = block.unflatten(1, (-1, 2, block.shape[1] // 2 if block.shape[1] < BLOCK else BLOCK // 2)).unbind(2)
        return (low | high << 4).flatten(1)

    return torch.cat([halves(block) for block in _blocks(nibbles.to(torch.uint8), BLOCK)], 1)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`: nibbles [out, in] uint8."""

    def nibbles(block: torch.Tensor) -> torch.Tensor:
        bytes = block.unflatten(1, (-1, min(block.shape[1], BLOCK // 2)))
        return torch.stack([bytes & 15, bytes >> 4], 2).flatten(1)

    return torch.cat([nibbles(block) for block in _blocks(codes, BLOCK // 2)], 1)


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, bytes] of 8 n rows of 64 m bytes, in the order in which the threads of matrix instructions take them.

    Of the columns of a row, such an instruction wants 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of every 16 from thread q of
    four. In 64 bytes these are next to one another, thread by thread, so that each reads 16 bytes at once; and the 64
    bytes of 8 rows are, whose 32 threads so read 512 bytes in a row.
    """
    split = codes.unflatten(1, (-1, 4, 2, 4, 2)).unflatten(
        0, (-1, INTERLEAVED_ROWS)
    )  # groups, rows; 64 bytes: 16s, 8s, thread, byte
    return split.permute(0, 2, 1, 5, 3, 4, 6).reshape(codes.shape)


def in_order(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleaved`."""
    split = codes.reshape(-1, codes.shape[1] // 64, INTERLEAVED_ROWS, 4, 4, 2, 2)
    return split.permute(0, 2, 1, 4, 5, 3, 6).reshape(codes.shape)


def padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [out, bytes] with zeros as further columns, up to a multiple of INTERLEAVED_BYTES."""
    missing = -codes.shape[1] % INTERLEAVED_BYTES
    if not missing or bits == 8:
        return F.pad(codes, (0, missing))
    whole = codes.shape[1] // (BLOCK // 2) * (BLOCK // 2)
    last = F.pad(unpacked(codes[:, whole:]) if whole < codes.shape[1] else codes[:, whole:], (0, 2 * missing))
    return torch.cat([codes[:, :whole], packed(last)], 1)


def without_padding(codes: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The inverse of `padded`: the codes of the first `width` columns."""
    size = width * bits // 8
    if size == codes.shape[1] or bits == 8:
        return codes[:, :size]
    whole = size // (BLOCK // 2) * (BLOCK // 2)
    if whole == size:
        return codes[:, :size]
    return torch.cat([codes[:, :whole], packed(unpacked(codes[:, whole:])[:, : width - 2 * whole])], 1)


def _blocks(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    """All whole blocks of columns as one tensor, and the columns after them, without what is empty."""
    whole = tensor.shape[1] // block * block
    return [part for part in (tensor[:, :whole], tensor[:, whole:]) if part.shape[1]]


def in_words(scales: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of two bytes and zero points uint8 [out, groups] as views of words int32 [groups, out]: in each a scale in
    the upper half, and its zero point in the lowest byte. What lies so already is returned as it is.

    A kernel loads the two at once, and ahead of time, which GPUs do with no fewer than four bytes; and the words of its
    rows lie next to one another.
    """
    if words_of(scales, zeros) is not None:
        return scales, zeros
    words = (scales.view(torch.int16).to(torch.int32) << 16 | zeros.to(torch.int32)).T.contiguous()
    return words.view(scales.dtype)[:, 1::2].T, words.view(torch.uint8)[:, ::4].T


def words_of(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor | None:
    """The words int32 [out, groups], next to one another along the first axis, that `in_words` made these views of, or
    rows of them; None if they are none."""
    out = zeros.stride(1) // 4
    if scales.itemsize != 2 or scales.stride() != (2, 2 * out) or zeros.stride() != (4, 4 * out):
        return None
    if scales.data_ptr() != zeros.data_ptr() + 2:
        return None
    words = torch.empty(0, dtype=torch.int32, device=zeros.device)
    return words.set_(zeros.untyped_storage(), zeros.storage_offset() // 4, tuple(zeros.shape), (1, out))
