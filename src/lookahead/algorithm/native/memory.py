"""A sequence's memory in C: `NativeTable`, its successors, and `NativeText`, its text."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_int32
from struct import pack
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import TextSettings
from lookahead.algorithm.native.build import check_result
from lookahead.algorithm.native.layout import STEP_SUCCESSORS, TEXT_SETTINGS
from lookahead.algorithm.successors import MAX_SUCCESSORS, Key, Successors
from lookahead.algorithm.tree import TokenTree

INT32 = np.dtype(np.int32)
KEY_PADDING = -(1 << 31)
"""Pads keys of fewer than three tokens: in C a key always has three."""

Numbers = Any
"""Contiguous 32-bit integers: bytes, an array, or a numpy array."""


class NativeTable:
    """A `SuccessorTable` in C. Its memory is freed with this object."""

    learns_early = True

    def __init__(self, library: Any) -> None:
        self._c = library
        self.handle: int = library.table_new() or 0
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.table_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a table in C cannot be copied: two objects would own the same memory")

    def store_step(
        self, tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32], replace: bool = False
    ) -> None:
        nodes, needed, (given, numbers) = tree.size, len(tree.needed), top.shape
        if given != needed:
            raise ValueError(f"top tokens of {given} nodes, and {needed} nodes are needed")
        if len(tree.parents) != nodes:
            raise ValueError(f"a tree of {nodes} tokens with {len(tree.parents)} parents")
        if top.dtype is not INT32:
            top = top.astype(np.int32)
        computed = STEP_SUCCESSORS.pack(nodes, needed, successor_count(numbers), before[0], before[1], replace, numbers)
        # `tobytes`, because getting the address of a numpy array takes ten times as long.
        check_result(self._c.table_store_step(self.handle, computed, tree.packed(), top.tobytes()))

    def get(self, key: Key) -> Successors | None:
        numbers = (c_int32 * (2 * MAX_SUCCESSORS))()
        count = self._c.table_get(self.handle, _c_key(key), numbers)
        return None if count < 0 else tuple(numbers[: 2 * count])

    def put(self, key: Key, successors: Successors) -> None:
        numbers = (c_int32 * len(successors))(*successors)
        check_result(self._c.table_put(self.handle, _c_key(key), numbers, successor_count(len(successors))))

    def put_tokens(self, top: npt.NDArray[np.int32]) -> None:
        count, numbers = top.shape
        packed = np.ascontiguousarray(top, dtype=np.int32).tobytes()
        check_result(self._c.table_put_tokens(self.handle, packed, count, successor_count(numbers)))

    def items(self) -> Iterator[tuple[Key, Successors]]:
        c_key, index, keys = (c_int32 * 3)(), 0, list[Key]()
        while (index := self._c.table_next(self.handle, index, c_key)) >= 0:
            keys.append(tuple(token for token in c_key if token != KEY_PADDING))
        return ((key, self.get(key) or ()) for key in keys)

    def evict(self, limit: int) -> None:
        self._c.table_evict(self.handle, limit)

    def clear(self) -> None:
        self._c.table_clear(self.handle)

    def __len__(self) -> int:
        return int(self._c.table_length(self.handle))


class NativeText:
    """A `DraftText` in C, with the indexes of its sources. Its memory is freed with this object."""

    def __init__(self, library: Any, settings: TextSettings) -> None:
        self._c, self._ngram = library, settings.ngram
        self.handle: int = library.text_new(TEXT_SETTINGS.pack(*settings[:-1])) or 0
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.text_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a text in C cannot be copied: two objects would own the same memory")

    def extend(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """Append tokens to the text, and add the window's n-grams."""
        flat = [token for ngram in ngrams for token in ngram]
        if len(flat) != len(ngrams) * self._ngram:
            raise ValueError(f"n-grams of {[len(ngram) for ngram in ngrams]} tokens; they need {self._ngram}")
        packed_tokens, packed_ngrams = pack(f"{len(tokens)}i", *tokens), pack(f"{len(flat)}i", *flat)
        check_result(self._c.text_extend(self.handle, packed_tokens, len(tokens), packed_ngrams, len(ngrams)))


def _c_key(key: Key) -> Any:
    return (c_int32 * 3)(*[KEY_PADDING] * (3 - len(key)), *key)


def successor_count(numbers: int) -> int:
    """The number of successors in this many numbers: each has a token and a level."""
    if numbers % 2 or numbers > 2 * MAX_SUCCESSORS:
        raise ValueError(f"{numbers} numbers are not up to {MAX_SUCCESSORS} successors with a level for each")
    return numbers // 2
