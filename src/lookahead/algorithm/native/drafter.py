"""`NativeDrafter`: the drafter of `drafter.c` behind the interface of `draft.Drafter`."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator
from ctypes import Structure, addressof, c_double, c_int32, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import MOST_GUESSES, TAUGHT, Draft, Limits
from lookahead.algorithm.successors import KEPT_TOKENS, Key, Successors, SuccessorTable
from lookahead.algorithm.tree import NO_GUESSES, Guesses, TokenTree

NO_TOKEN = -(1 << 31)
"""Fills up keys of fewer than three tokens: in C a key always has three."""


class _Computed(Structure):
    """C's `Computed`."""

    _fields_ = (
        *[(name, c_void_p) for name in ("tokens", "parents", "needed", "top")],
        *[(name, c_int32) for name in ("nodes", "needed_count", "count")],
        ("before", c_int32 * 2),
    )


class _Draft(Structure):
    """C's `Draft`."""

    _fields_ = (
        *[(name, c_void_p) for name in ("last", "own", "shared", "rates", "cost")],
        *[(name, c_void_p) for name in ("chain_tokens", "chain_origins", "chain_lengths")],
        *[(name, c_void_p) for name in ("tokens", "parents", "depths", "origins", "scores")],
        *[(name, c_int32) for name in ("rate_count", "cost_count", "chain_token_count", "chain_count")],
        *[(name, c_int32) for name in ("first_origin", "room", "max_depth", "branch")],
        ("text_end", c_int32 * 3),
        *[(name, c_double) for name in ("taught", "floor")],
    )


class NativeTable:
    """A `SuccessorTable` in C. Its memory is freed with this object."""

    def __init__(self, library: Any) -> None:
        self._c = library
        self.handle: int | None = library.table_new()
        if self.handle is None:
            raise MemoryError
        weakref.finalize(self, library.table_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a table in C cannot be copied: two objects would own the same memory")

    def keep(self, tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32]) -> None:
        if len(top) != len(tree.needed):
            raise ValueError(f"top tokens of {len(top)} nodes, and {len(tree.needed)} nodes are needed")
        if len(tree.parents) != len(tree.tokens):
            raise ValueError(f"a tree of {len(tree.tokens)} tokens with {len(tree.parents)} parents")
        numbers = np.ascontiguousarray(top, dtype=np.int32)
        computed = _Computed(
            _address(tree.tokens), _address(tree.parents), _address(tree.needed),
            numbers.__array_interface__["data"][0],  # `ctypes.data` takes 18 us
            len(tree.tokens), len(tree.needed), _count(numbers.shape[1]), before,
        )  # fmt: skip
        _check(self._c.table_keep(self.handle, addressof(computed)))

    def get(self, key: Key) -> Successors | None:
        numbers = (c_int32 * (2 * KEPT_TOKENS))()
        count = self._c.table_get(self.handle, _c_key(key), numbers)
        return None if count < 0 else tuple(numbers[: 2 * count])

    def put(self, key: Key, successors: Successors) -> None:
        numbers = (c_int32 * len(successors))(*successors)
        _check(self._c.table_put(self.handle, _c_key(key), numbers, _count(len(successors))))

    def items(self) -> Iterator[tuple[Key, Successors]]:
        c_key, place, keys = (c_int32 * 3)(), 0, list[Key]()
        while (place := self._c.table_next(self.handle, place, c_key)) >= 0:
            keys.append(tuple(token for token in c_key if token != NO_TOKEN))
        return ((key, self.get(key) or ()) for key in keys)

    def forget(self, limit: int) -> None:
        self._c.table_forget(self.handle, limit)

    def clear(self) -> None:
        self._c.table_clear(self.handle)

    def __len__(self) -> int:
        return int(self._c.table_length(self.handle))


class NativeDrafter:
    """`PythonDrafter` in C: the same guesses, bit for bit."""

    def __init__(self, library: Any) -> None:
        self._c = library

    def new_table(self) -> NativeTable:
        return NativeTable(self._c)

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        room = min(limits.most, MOST_GUESSES)
        if min(room, limits.max_depth) < 1:
            return NO_GUESSES
        tables, cost = draft.tables, limits.cost
        times = None if cost is None else array("d", cost)
        # Tokens, parents, depths and origins of `room` guesses, one after the other; and their scores.
        numbers, scores = array("i", bytes(16 * room)), array("d", bytes(8 * room))
        starts = range(0, 4 * room, room)
        first = _address(numbers)
        c_draft = _Draft(
            *((None, None, None) if tables is None else map(_handle, (tables.last, tables.own, tables.shared))),
            _address(draft.rates), None if times is None else _address(times),
            _address(draft.chain_tokens), _address(draft.chain_origins), _address(draft.chain_lengths),
            *[first + 4 * start for start in starts], _address(scores),
            len(draft.rates), 0 if times is None else len(times), len(draft.chain_tokens), len(draft.chain_lengths),
            0 if tables is None else tables.first_origin, room, min(limits.max_depth, room), limits.branch,
            draft.text_end, 0.0 if tables is None else TAUGHT, limits.floor,
        )  # fmt: skip
        count = _check(self._c.draft_grow(addressof(c_draft)))
        tokens, parents, depths, origins = (numbers[start : start + count] for start in starts)
        return Guesses(tokens, parents, depths, origins, scores[:count])


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _handle(table: SuccessorTable | None) -> int | None:
    if table is None:
        return None
    if not isinstance(table, NativeTable):
        raise TypeError(f"the C drafter cannot read a {type(table).__name__}; make tables with its new_table()")
    return table.handle


def _c_key(key: Key) -> Any:
    return (c_int32 * 3)(*[NO_TOKEN] * (3 - len(key)), *key)


def _count(numbers: int) -> int:
    """How many successors these numbers make: each is a token and a level."""
    if numbers % 2 or numbers > 2 * KEPT_TOKENS:
        raise ValueError(f"{numbers} numbers are not up to {KEPT_TOKENS} successors with a level for each")
    return numbers // 2


def _check(result: int) -> int:
    """Return C's result, or raise the exception that a negative one stands for."""
    if result == -2:
        raise IndexError("a node, a parent or an origin that does not exist")
    if result < 0:
        raise MemoryError
    return result
