"""What Python hands to the C functions and takes back: ints and doubles, packed into bytes."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from struct import Struct, pack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.native import build as native

Key = int | tuple[int, int] | tuple[int, int, int]
"""The last token of a text, or the last two or three."""

Row = tuple[int, ...]
"""Likely successors, best first, and then the probability level of each."""

TOP = 8
"""The most successors of a row."""

Grown = tuple["array[int]", "array[int]", "array[int]", "array[int]", "array[float]"]
"""Tokens, parents, depths, origins and scores of guesses."""


class Tree(Protocol):
    """What is asked of a `tree.TokenTree`."""

    branch: int
    sizes: tuple[int, int]

    def packed(self) -> array[int]: ...


_NONE = -(1 << 31)
_KEY = Struct("3i")


class NativeMemory(MutableMapping[Key, Row]):
    """Rows by key, oldest key first, as `sources.recycle.DictMemory` keeps them; in C, and freed with this object."""

    def __init__(self, items: Sequence[tuple[Key, Row]] = ()) -> None:
        self._c = native.library()
        self.handle: int | None = self._c.memory_new()
        if self.handle is None:
            raise MemoryError
        weakref.finalize(self, self._c.memory_free, self.handle)
        self.update(items)

    # The step's verbs.

    def keep(
        self,
        tree: Tree,
        before: tuple[int, int],
        top: Sequence[Row] | npt.NDArray[np.int32],
    ) -> None:
        table, needed = np.asarray(top, dtype=np.int32), tree.sizes[1]
        if len(table) != needed:
            raise ValueError(f"{len(table)} top rows for {needed} needed rows")
        if not needed:
            return
        numbers, count = tree.packed().buffer_info()[0], _count(table.shape[1])
        _check(self._c.memory_keep(self.handle, numbers, *tree.sizes, *before, table.tobytes(), count))

    def forget(self, limit: int) -> None:
        self._c.memory_forget(self.handle, limit)

    # The mapping's.

    def __getitem__(self, key: Key) -> Row:
        row = (c_int32 * (2 * TOP))()
        count = self._c.memory_get(self.handle, _packed(key), row)
        if count < 0:
            raise KeyError(key)
        return tuple(row[: 2 * count])

    def __setitem__(self, key: Key, row: Row) -> None:
        _check(self._c.memory_set(self.handle, _packed(key), pack(f"{len(row)}i", *row), _count(len(row))))

    def __delitem__(self, key: Key) -> None:
        if self._c.memory_remove(self.handle, _packed(key)) < 0:
            raise KeyError(key)

    def __iter__(self) -> Iterator[Key]:
        key, place, keys = (c_int32 * 3)(), 0, list[Key]()
        while (place := self._c.memory_next(self.handle, place, key)) >= 0:
            known: Any = tuple(token for token in key if token != _NONE)
            keys.append(known if len(known) > 1 else known[0])
        return iter(keys)

    def __len__(self) -> int:
        return self._c.memory_length(self.handle)

    def clear(self) -> None:
        self._c.memory_clear(self.handle)

    def __reduce__(self) -> tuple[type[NativeMemory], tuple[list[tuple[Key, Row]]]]:
        return NativeMemory, (list(self.items()),)


class NativeText:
    """A text and what it suggests, as `sources.suffix` and `sources.pool` find it; in C, and freed with this object.

    The settings are those of C's `Settings`, in their order.
    """

    def __init__(self, *settings: int) -> None:
        self._c = native.library()
        self._ngram = settings[0]
        self.handle: int | None = self._c.text_new(pack(f"{len(settings)}i", *settings))
        if self.handle is None:
            raise MemoryError
        weakref.finalize(self, self._c.text_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a text in C cannot be copied: two would own the same memory")

    def take(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]]) -> None:
        """The text goes on with these tokens, and the window has made these n-grams."""
        new, made = array("i", tokens), array("i", [token for ngram in ngrams for token in ngram])
        if len(made) != len(ngrams) * self._ngram:
            raise ValueError(f"n-grams of {[len(ngram) for ngram in ngrams]} tokens; they need {self._ngram}")
        _check(self._c.text_take(self.handle, new.buffer_info()[0], len(new), made.buffer_info()[0], len(ngrams)))


Memories = tuple[NativeMemory | None, NativeMemory | None, NativeMemory | None, int]
"""The rows of the last step, the request's own, the shared ones, and the first of their origins."""


def _packed(key: Key) -> bytes:
    if isinstance(key, tuple):
        return _KEY.pack(*[_NONE] * (3 - len(key)), *key)
    return _KEY.pack(_NONE, _NONE, key)


def _count(numbers: int) -> int:
    """Successors in a row of this many numbers."""
    if numbers % 2 or numbers > 2 * TOP:
        raise ValueError(f"a row of {numbers} numbers; it needs up to {TOP} tokens and a level for each")
    return numbers // 2


def _check(code: int) -> None:
    if code == -2:
        raise IndexError("a node, a parent or an origin that does not exist")
    if code < 0:
        raise MemoryError


@dataclass(slots=True)
class Drawn:
    """What a draft is made from, in C.

    `text`: its last three tokens. `chains`: their tokens and origins, one chain after the other, and their lengths.
    `whole`: a text, for more.
    """

    memories: Memories | None
    whole: NativeText | None
    rates: Sequence[float]
    text: tuple[int, int, int]
    chains: tuple[list[int], list[int], list[int]]
    room: int
    max_depth: int
    cost: Sequence[float] | None
    base: int
    taught: float

    def grow(self) -> Grown:
        """`Draft._grow`."""
        size = self.room + 1
        out, scores = array("i", bytes(16 * size)), array("d", bytes(8 * size))
        taken = self._call(native.library().draft_grow, (), out.buffer_info()[0], scores.buffer_info()[0])
        parts = [out[start + 1 : start + 1 + taken] for start in range(0, 4 * size, size)]
        return parts[0], parts[2], parts[1], parts[3], scores[1 : 1 + taken]

    def tree(self, branch: Sequence[int], layout: array[int]) -> tuple[array[int], int]:
        """The tree's numbers, which may have room left at their end, and how many guesses it has.

        `branch`: the tokens before the guesses. `layout`: their depths, their parents and their needed rows.
        """
        if len(branch) != self.base:
            raise ValueError(f"a branch of {len(branch)} tokens for a layout of {self.base}")
        first = len(layout) - 2 * self.base
        out = array("i", bytes(4 * (len(layout) + self.base + 5 * self.room)))
        to = layout.buffer_info()[0], first, out.buffer_info()[0]
        return out, self._call(native.library().draft_tree, branch, *to)

    def _call(self, function: Callable[..., int], branch: Sequence[int], *to: int) -> int:
        *rows, origin = self.memories or (None, None, None, 0)
        tokens, origins, lengths = self.chains
        handles = [None if memory is None else memory.handle for memory in rows]
        rates, cost, whole = self.rates, self.cost, self.whole
        doubles = rates if isinstance(rates, array) else array("d", rates)
        numbers = array("i", [*self.text, *tokens, *origins, *lengths, *branch])
        taken = function(
            *handles, origin, None if whole is None else whole.handle, doubles.buffer_info()[0], len(doubles),
            numbers.buffer_info()[0], len(tokens), len(lengths), self.room, self.max_depth,
            None if cost is None else pack(f"{len(cost)}d", *cost), len(cost or ()), self.base, self.taught, *to,
        )  # fmt: skip
        _check(taken)
        return taken


def learn(
    rates: array[float],
    trials: array[int],
    floor: float,
    tree: Tree,
    path: Sequence[int],
    accepted: Sequence[int],
) -> None:
    """`Calibration.learn_step`, in C."""
    if len(path) + 1 != len(accepted):
        raise ValueError(f"a path of {len(path)} nodes with {len(accepted)} tokens")
    numbers, steps = tree.packed(), array("i", [0, *path, *accepted])
    code = native.library().calibration_learn(
        rates.buffer_info()[0], trials.buffer_info()[0], len(rates), floor,
        numbers.buffer_info()[0], len(numbers), *tree.sizes, tree.branch, steps.buffer_info()[0], len(accepted),
    )  # fmt: skip
    _check(code)


def write_tree(tree: Tree, sizes: tuple[int, int, int, int], addresses: Sequence[int]) -> None:
    """`Packet.put_tree` in C. `sizes`: tokens and words per row, the prefix's length, what to add to needed rows."""
    _check(native.library().tree_write(tree.packed().buffer_info()[0], *tree.sizes, *sizes, *addresses))
