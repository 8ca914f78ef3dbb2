"""Which node of a tree sees which: a token sees the prefix, its ancestors and itself (see `tree`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def visibility(parents: Sequence[int]) -> list[int]:
    """The nodes that each node sees, as the bits of an int: its parent's bits and its own."""
    seen: list[int] = []
    bit = 1
    for parent in parents:
        seen.append(seen[parent] | bit if parent >= 0 else bit)
        bit <<= 1
    return seen


def packed_visibility(parents: Sequence[int]) -> npt.NDArray[np.uint32]:
    """[K, words]: bit j % 32 of word [i, j // 32] says whether node i sees node j."""
    words = (len(parents) + 31) // 32
    raw = b"".join([bits.to_bytes(4 * words, "little") for bits in visibility(parents)])
    return np.frombuffer(raw, dtype="<u4").reshape(len(parents), words)


def dense_visibility(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[K, K] booleans: entry (i, j) says whether node i sees node j."""
    size = len(parents)
    packed = packed_visibility(parents).view(np.uint8)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :size].astype(np.bool_)
