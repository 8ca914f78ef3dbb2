"""`NativeDrafter`: the drafter of `drafter.c` behind the interface of `draft.Drafter`."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_int32
from functools import lru_cache
from struct import Struct, pack
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.counts import Costs
from lookahead.algorithm.draft import MOST_GUESSES, TAUGHT, Draft, Limits
from lookahead.algorithm.successors import KEPT_TOKENS, Key, Successors, SuccessorTable
from lookahead.algorithm.tree import NO_GUESSES, Guesses, TokenTree

NO_TOKEN = -(1 << 31)
"""Fills up keys of fewer than three tokens: in C a key always has three."""


_COMPUTED = Struct("6i")
"""C's `Computed`: nodes, needed_count, count, before[2], only."""

_DRAFT = Struct("3P P P 2P d 3i")
"""C's `Draft`: last, own, shared; text; rates; guesses, scores; taught; rate_count, first_origin, capacity."""

_STEP = Struct("P d 4i 2i 3i")
"""C's `Step`: cost; floor; cost_count, room, max_depth, branch; chain_token_count, chain_count; text_end[3]. A `Struct`
is packed in a third of the time that a `ctypes.Structure` takes, and lists of integers in a tenth of the time that an
`array` of them takes."""

_SHARING = Struct("5P 5i")
"""C's `Sharing`: weights, bonuses, lengths, kept, taken; sequences, scores, rows, most, cost_count."""


class NativeTable:
    """A `SuccessorTable` in C. Its memory is freed with this object."""

    def __init__(self, library: Any) -> None:
        self._c = library
        self.handle: int = library.table_new() or 0
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.table_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a table in C cannot be copied: two objects would own the same memory")

    def keep(self, tree: TokenTree, before: tuple[int, int], top: npt.NDArray[np.int32], only: bool = False) -> None:
        nodes, needed = len(tree.tokens), len(tree.needed)
        if len(top) != needed:
            raise ValueError(f"top tokens of {len(top)} nodes, and {needed} nodes are needed")
        if len(tree.parents) != nodes:
            raise ValueError(f"a tree of {nodes} tokens with {len(tree.parents)} parents")
        computed = _COMPUTED.pack(nodes, needed, _count(top.shape[1]), *before, only)
        # Copies, because numpy takes ten times as long to tell an array's address.
        arrays = b"".join((tree.tokens, tree.parents, tree.needed))
        numbers = np.ascontiguousarray(top, dtype=np.int32).tobytes()
        _check(self._c.table_keep(self.handle, computed, arrays, numbers))

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


class NativeText:
    """A text in C, with what its sources know of it (see `sources.text`). Its memory is freed with this object.

    The settings are those of C's `Settings`, in their order; the first is N.
    """

    def __init__(self, library: Any, *settings: int) -> None:
        self._c, self._ngram = library, settings[0]
        self.handle: int = library.text_new(pack(f"{len(settings)}i", *settings)) or 0
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, library.text_free, self.handle)

    def __reduce__(self) -> str:
        raise TypeError("a text in C cannot be copied: two objects would own the same memory")

    def take(self, tokens: Sequence[int], ngrams: Sequence[tuple[int, ...]] = ()) -> None:
        """The text goes on with these tokens, and the window has made these n-grams."""
        new, made = _integers(len(tokens)).pack(*tokens), None
        if ngrams:
            numbers = [token for ngram in ngrams for token in ngram]
            if len(numbers) != len(ngrams) * self._ngram:
                raise ValueError(f"n-grams of {[len(ngram) for ngram in ngrams]} tokens; they need {self._ngram}")
            made = _integers(len(numbers)).pack(*numbers)
        _check(self._c.text_take(self.handle, new, len(tokens), made, len(ngrams)))


class NativeDrafter:
    """`PythonDrafter` in C: the same guesses, bit for bit."""

    def __init__(self, library: Any) -> None:
        self._c = library
        self._cost: tuple[Sequence[float], array[float]] = (), array("d")

    def new_table(self) -> NativeTable:
        return NativeTable(self._c)

    def new_text(self, *settings: int) -> NativeText:
        return NativeText(self._c, *settings)

    def grow(self, draft: Draft, limits: Limits) -> Guesses:
        room = min(limits.most, MOST_GUESSES)
        if min(room, limits.max_depth) < 1:
            return NO_GUESSES
        kept: DraftInC | None = draft.in_c
        if kept is None or room > kept.capacity or not kept.serves(draft):
            kept = draft.in_c = DraftInC(draft, room)
        cost = None if limits.cost is None else self._times(limits.cost)
        # The chains' tokens, origins and lengths, one after the other.
        tokens, lengths, chains = draft.chain_tokens, draft.chain_lengths, b""
        if lengths:
            chains = pack(f"{2 * len(tokens) + len(lengths)}i", *tokens, *draft.chain_origins, *lengths)
        step = _STEP.pack(
            0 if cost is None else _address(cost), limits.floor,
            0 if cost is None else len(cost), room, min(limits.max_depth, room), limits.branch,
            len(tokens), len(lengths), *draft.text_end,
        )  # fmt: skip
        return kept.first(_check(self._c.draft_grow(kept.packed, step, chains)))

    def best_counts(
        self,
        scores: Sequence[array[float]],
        weights: Sequence[float],
        bonuses: Sequence[float],
        kept: Sequence[bool],
        rows: int,
        most: int,
        cost: Costs | None,
    ) -> tuple[list[int], float | None]:
        joined, refused = b"".join(scores), array("d", [0.0])
        worth, more = array("d", weights), array("d", bonuses)
        lengths, own = array("i", [len(one) for one in scores]), array("i", kept)
        taken = array("i", bytes(4 * len(scores)))
        if not len(lengths) == len(worth) == len(more) == len(own) or rows < 1:
            raise ValueError(f"{len(scores)} sequences in {rows} rows with {len(weights)} weights")
        sharing = _SHARING.pack(
            _address(worth), _address(more), _address(lengths), _address(own), _address(taken),
            len(scores), len(joined) // 8, rows, min(most, len(joined)), -1 if cost is None else len(cost),
        )  # fmt: skip
        times = None if cost is None else np.asarray(cost, dtype=np.float64).tobytes()
        some = _check(self._c.best_counts(sharing, joined, times, _address(refused)))
        return taken.tolist(), refused[0] if some else None

    def _times(self, cost: Sequence[float]) -> array[float]:
        """The table as C reads it. That of the last step is kept, because all sequences have the same."""
        given, times = self._cost
        if given is not cost:
            times = array("d", cost)
            self._cost = cost, times
        return times


class DraftInC:
    """C's `Draft` of a draft and what it points at: the same for all steps of a sequence."""

    def __init__(self, draft: Draft, capacity: int) -> None:
        self.tables, self.text, self.rates, self.capacity = draft.tables, draft.text, draft.rates, capacity
        # Tokens, parents, depths and origins of the guesses, one after the other; and their scores.
        self.numbers, self.scores = array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity))
        tables = draft.tables
        self.packed = _DRAFT.pack(
            *((0, 0, 0) if tables is None else (_handle(tables.last), _handle(tables.own), _handle(tables.shared))),
            0 if draft.text is None else draft.text.handle,
            _address(draft.rates), _address(self.numbers), _address(self.scores), 0.0 if tables is None else TAUGHT,
            len(draft.rates), 0 if tables is None else tables.first_origin, capacity,
        )  # fmt: skip

    def serves(self, draft: Draft) -> bool:
        """True when the draft still points at the same."""
        return self.tables is draft.tables and self.text is draft.text and self.rates is draft.rates

    def first(self, n: int) -> Guesses:
        """A copy of the first n guesses."""
        numbers, second, third, fourth = self.numbers, self.capacity, 2 * self.capacity, 3 * self.capacity
        return Guesses(
            numbers[:n], numbers[second : second + n], numbers[third : third + n], numbers[fourth : fourth + n],
            self.scores[:n],
        )  # fmt: skip


@lru_cache(maxsize=256)
def _integers(count: int) -> Struct:
    return Struct(f"{count}i")


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _handle(table: SuccessorTable | None) -> int:
    if table is None:
        return 0
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
