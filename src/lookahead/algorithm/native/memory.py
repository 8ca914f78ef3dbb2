"""What a sequence remembers in C: `NativeTable`, its successors, and `NativeText`, its text.

Between two steps of a GPU every call counts. So what the last step showed is only noted here, and the next draft takes
it along in the one call that searches all sequences' guesses (see `NativeDrafter`). Whoever asks before that finds it
taken in, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_int32
from struct import Struct, pack
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.successors import KEPT_TOKENS, Key, Successors
from lookahead.algorithm.tree import TokenTree

INT32 = np.dtype(np.int32)
NO_TOKEN = -(1 << 31)
"""Fills up keys of fewer than three tokens: in C a key always has three."""

Numbers = Any
"""32-bit integers in one piece of memory: bytes, an array, or a contiguous numpy array."""

NO_TEXT: tuple[int, int] = (0, 0)
NO_STEP: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
"""What a step's numbers are where there is nothing to take in."""

_COMPUTED = Struct("6i")
"""C's `Computed`: nodes, needed_count, count, before[2], only."""


class NativeTable:
    """A `SuccessorTable` in C. Its memory is freed with this object.

    `waiting` is a step that alone is to be kept, and is not yet: what `keep` was given.
    """

    def __init__(self, library: Any) -> None:
        self._c = library
        self.handle: int = library.table_new() or 0
        self.waiting: tuple[TokenTree, tuple[int, int], npt.NDArray[np.int32]] | None = None
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.table_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a table in C cannot be copied: two objects would own the same memory")

    def keep(self, tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32], only: bool = False) -> None:
        """Keep what a step computed. With `only` this waits for the next draft, or for whoever asks."""
        if only:
            self.waiting = tree, before, top
        else:
            self._take_waiting()
            self._keep(tree, before, top, only)

    def _take_waiting(self) -> None:
        if self.waiting is not None:
            step, self.waiting = self.waiting, None
            self._keep(*step, True)

    def _keep(self, tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32], only: bool) -> None:
        computed, (numbers, top) = computed_step(tree, before, top, only)
        # A copy, because numpy takes ten times as long to tell an array's address.
        check(self._c.table_keep(self.handle, _COMPUTED.pack(*computed), numbers, bytes(top)))

    def get(self, key: Key) -> Successors | None:
        self._take_waiting()
        numbers = (c_int32 * (2 * KEPT_TOKENS))()
        count = self._c.table_get(self.handle, _c_key(key), numbers)
        return None if count < 0 else tuple(numbers[: 2 * count])

    def put(self, key: Key, successors: Successors) -> None:
        self._take_waiting()
        numbers = (c_int32 * len(successors))(*successors)
        check(self._c.table_put(self.handle, _c_key(key), numbers, successor_count(len(successors))))

    def items(self) -> Iterator[tuple[Key, Successors]]:
        self._take_waiting()
        c_key, place, keys = (c_int32 * 3)(), 0, list[Key]()
        while (place := self._c.table_next(self.handle, place, c_key)) >= 0:
            keys.append(tuple(token for token in c_key if token != NO_TOKEN))
        return ((key, self.get(key) or ()) for key in keys)

    def forget(self, limit: int) -> None:
        self._take_waiting()
        self._c.table_forget(self.handle, limit)

    def clear(self) -> None:
        self.waiting = None
        self._c.table_clear(self.handle)

    def __len__(self) -> int:
        self._take_waiting()
        return int(self._c.table_length(self.handle))


class NativeText:
    """A text in C, with what its sources know of it (see `sources.text`). Its memory is freed with this object.

    The settings are those of C's `Settings`, in their order; the first is N. `waiting` is what the text takes next: how
    many tokens and n-grams, and all of their tokens.
    """

    def __init__(self, library: Any, *settings: int) -> None:
        self._c, self._ngram = library, settings[0]
        self.handle: int = library.text_new(pack(f"{len(settings)}i", *settings)) or 0
        self.waiting: tuple[tuple[int, int], Sequence[int]] | None = None
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.text_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a text in C cannot be copied: two objects would own the same memory")

    def take(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """The text goes on with these tokens, and the window has made these n-grams."""
        self.take_later(tokens, ngrams)
        self._take_waiting()

    def take_later(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """The same as `take`, but it waits for the next draft."""
        if self.waiting is not None:
            self._take_waiting()
        numbers = tokens
        if ngrams:
            made = [token for ngram in ngrams for token in ngram]
            if len(made) != len(ngrams) * self._ngram:
                raise ValueError(f"n-grams of {[len(ngram) for ngram in ngrams]} tokens; they need {self._ngram}")
            numbers = [*tokens, *made]
        self.waiting = (len(tokens), len(ngrams)), numbers

    def _take_waiting(self) -> None:
        if self.waiting is not None:
            ((tokens, ngrams), given), self.waiting = self.waiting, None
            numbers = pack(f"{len(given)}i", *given)
            check(self._c.text_take(self.handle, numbers, tokens, numbers[4 * tokens :], ngrams))


def computed_step(
    tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32], only: bool
) -> tuple[tuple[int, ...], tuple[Numbers, ...]]:
    """C's `Computed` of a step that is kept, and the numbers of its tree and its top tokens."""
    nodes, needed, (given, numbers) = len(tree.tokens), len(tree.needed), top.shape
    if given != needed:
        raise ValueError(f"top tokens of {given} nodes, and {needed} nodes are needed")
    if len(tree.parents) != nodes:
        raise ValueError(f"a tree of {nodes} tokens with {len(tree.parents)} parents")
    if not top.flags.c_contiguous or top.dtype is not INT32:
        top = np.ascontiguousarray(top, dtype=np.int32)
    computed = nodes, needed, successor_count(numbers), before[0], before[1], only
    return computed, (tree.packed(), top)


def _c_key(key: Key) -> Any:
    return (c_int32 * 3)(*[NO_TOKEN] * (3 - len(key)), *key)


def successor_count(numbers: int) -> int:
    """How many successors these numbers make: each is a token and a level."""
    if numbers % 2 or numbers > 2 * KEPT_TOKENS:
        raise ValueError(f"{numbers} numbers are not up to {KEPT_TOKENS} successors with a level for each")
    return numbers // 2


def check(result: int) -> int:
    """Return C's result, or raise the exception that a negative one stands for."""
    if result == -2:
        raise IndexError("a node, a parent or an origin that does not exist")
    if result < 0:
        raise MemoryError
    return result
