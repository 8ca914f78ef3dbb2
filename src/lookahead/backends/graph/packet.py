"""The packet: all numbers that the host sends the device for one step, in one piece of memory that is copied once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import add, mul
from struct import pack, pack_into
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.tree import TokenTree, forest_of
from lookahead.backends.graph.records import Entry, Tile
from lookahead.backends.graph.sizes import PAGE

MOST_ENTRIES = 256
"""The most sequences of a step."""
SPARE_MOVES = 64
"""A packet has room for this many moves of accepted K/V more than the step has rows. If the step before accepted more
tokens, they are moved by a launch of their own."""
SPARE_CHANGES = 64
"""A packet has room for this many changes of the page tables more than it has sequences and pages of rows, in every
attention group. If there are more, because a long prompt has come, they are written by a launch of their own."""
ENTRY, TILE = len(Entry), len(Tile)
"""Numbers per entry and per tile. (Asked of an enum in every step, its length takes microseconds.)"""

Numbers = Any
"""32-bit integers in one piece of memory: bytes or an array."""


class Fields:
    """Named fields of numbers in one piece of memory on the host, which is copied to the device at once.

    `fields` are NumPy views of the host's memory, `views` gives the same views of a copy on the device.
    """

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool) -> None:
        """`parts` are the fields' shapes and types. Those of 64 bits come first, so that they are aligned."""
        self._places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        start = 0
        for name, (shape, dtype) in parts.items():
            end = start + dtype.itemsize // 4 * int(np.prod(shape))
            self._places[name] = start, end, shape, dtype
            start = end
        self.host = torch.zeros(start, dtype=torch.int32, pin_memory=pinned)
        self.fields: dict[str, np.ndarray[Any, Any]] = {
            name: view.numpy() for name, view in self.views(self.host).items()
        }

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(dtype).view(shape) for name, (a, b, shape, dtype) in self._places.items()}


@dataclass(frozen=True)
class Overflow:
    """What a packet's fields have no room for, flat as in the fields. It is sent by launches before the step."""

    commits: Sequence[int] = ()
    moves: Sequence[Sequence[int]] = ()
    changes: Sequence[int] = ()


NO_OVERFLOW = Overflow()


class Packet(Fields):
    """The numbers of one step of R rows, as named fields, int32.

    An *entry* is one sequence's part of the step. Its rows are its prompt chunk (tokens to cache, in order) and
    then the nodes of its tree. A *tile* is a block of queries of one entry, all of its chunk or all of its tree, which
    one program of attention works on. How targets are chosen is sent apart: see `targets_packet`.

    counts [S, 2]      for each of the S head shapes of the model's layers, how many tiles and commits there are
    tokens [R]         the rows' tokens
    entry_of [R]       the rows' entries, -1 for a row that pads the step
    parents [R]        the rows' parents as nodes of their tree, -1 for a root and in a chunk
    entries [E, 5]     see `records.Entry`
    tiles_s [T, 6]     for head shape s, see `records.Tile`
    commits [E, 2]     for each sequence whose accepted K/V move: its first move, and how many it has
    moves [G, M, 2]    for each of the G attention groups: from which cell to which (see `kv.slots`)
    changed [1]        how many changes of page tables there are
    changes [C, 2]     each one's index in all page tables, laid out flat, and the page that is written there
    needed [N]         the rows whose logits are needed
    """

    def __init__(self, rows: int, needed: int, tiles: Sequence[int], groups: int, pinned: bool) -> None:
        """`tiles`: for each head shape, the most tiles there are."""
        entries, moves, whole = min(rows, MOST_ENTRIES), rows + SPARE_MOVES, torch.int32
        self.changes_room = groups * (entries + rows // PAGE + SPARE_CHANGES)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "counts": ((len(tiles), 2), whole),
            "tokens": ((rows,), whole),
            "entry_of": ((rows,), whole),
            "parents": ((rows,), whole),
            "entries": ((entries, ENTRY), whole),
            **{f"tiles_{shape}": ((count, TILE), whole) for shape, count in enumerate(tiles)},
            "commits": ((entries, 2), whole),
            "moves": ((groups, moves, 2), whole),
            "changed": ((1,), whole),
            "changes": ((self.changes_room, 2), whole),
            "needed": ((needed,), whole),
        }
        super().__init__(parts, pinned)
        # A step is written for all entries at once, in bytes and arrays: one entry after the other takes three times as
        # long, and NumPy takes a microsecond for each of its calls.
        self._memory = memoryview(self.host.numpy()).cast("B")  # type: ignore[arg-type]
        self._zeros, self._minus_ones = bytes(4 * rows), b"\xff" * (4 * rows)
        self._counting = array("i", range(rows)).tobytes()
        self._numbers = [array("i", (entry,)).tobytes() for entry in range(entries)]
        self._changed, self.overflow = False, NO_OVERFLOW
        self.entries_room, self.moves_room, self.tiles_room = entries, moves, list(tiles)
        self.begin()

    def begin(self) -> None:
        """Start a new step: no entries yet."""
        self.needed, self._tiles = 0, [0] * len(self.tiles_room)

    def put_nothing(self) -> None:
        """Write a step in which every row is padding."""
        self.begin()
        for name, rest in (("tokens", self._zeros), ("parents", self._minus_ones), ("entry_of", self._minus_ones)):
            self._write(name, b"", rest)
        self._write("needed", b"", self._zeros)
        self.end((), [()] * self.fields["moves"].shape[0])

    def put(
        self,
        lines: Sequence[int],
        lengths: Sequence[int],
        chunks: Sequence[Sequence[int]],
        trees: Sequence[TokenTree],
        queries: Sequence[tuple[int, int]],
    ) -> list[int]:
        """Write the entries. Returns where the needed rows of each begin.

        `lines` are the sequences' lines in the page tables, `lengths` their cached tokens. `queries` are, for each head
        shape, how many queries a row has per K/V head, and how many a tile has.
        """
        # 1. The rows: of each entry its chunk, then its tree.
        chunk_rows, nodes = [len(chunk) for chunk in chunks], [tree.size for tree in trees]
        rows, ends, any_chunk = nodes, lengths, any(chunk_rows)
        forest = None if any_chunk else forest_of(trees)
        tokens: list[Numbers] = [tree.tokens for tree in trees] if forest is None else [forest.tokens]
        parents: list[Numbers] = [tree.parents for tree in trees] if forest is None else [forest.parents]
        if any_chunk:
            none = [self._minus_ones[: 4 * count] for count in chunk_rows]
            tokens = list(chain.from_iterable(zip([array("i", chunk) for chunk in chunks], tokens, strict=True)))
            parents = list(chain.from_iterable(zip(none, parents, strict=True)))
            rows, ends = list(map(add, chunk_rows, nodes)), list(map(add, chunk_rows, lengths))
        self._write("tokens", b"".join(tokens), self._zeros)
        self._write("parents", b"".join(parents), self._minus_ones)
        self._write("entry_of", b"".join(map(mul, self._numbers, rows)), self._minus_ones)
        # 2. Which of them are needed.
        *firsts, count = accumulate(rows, initial=0)
        roots = list(map(add, firsts, chunk_rows)) if any_chunk else firsts
        wanted = [len(tree.needed) for tree in trees]
        if wanted == rows:  # all of them
            self._write("needed", self._counting[: 4 * count], self._zeros)
        elif roots == [0]:
            self._write("needed", trees[0].needed.tobytes(), self._zeros)
        else:
            needed = [root + node for root, tree in zip(roots, trees, strict=True) for node in tree.needed]
            self._write("needed", pack(f"{len(needed)}i", *needed), self._zeros)
        # 3. The entries and their tiles.
        entries = [0] * (ENTRY * len(lines))
        for place, field in enumerate((lines, lengths, firsts, chunk_rows, nodes)):  # in the order of `Entry`
            entries[place::ENTRY] = field
        self._write_first("entries", entries)
        for shape, (group, block) in enumerate(queries):
            tiles: list[int] = []
            for line, end, first, chunk, root, size in zip(lines, ends, firsts, chunk_rows, roots, nodes, strict=True):
                for number in range(-(-chunk * group // block)):
                    tiles += line, end, first, chunk, number, 0
                for number in range(-(-size * group // block)):
                    tiles += line, end, root, size, number, 1
            count = self._tiles[shape] = len(tiles) // TILE
            if count > self.tiles_room[shape]:
                raise ValueError(f"{count} tiles of attention in a step that has room for {self.tiles_room[shape]}")
            self._write_first(f"tiles_{shape}", tiles)
        *starts, self.needed = accumulate(wanted, initial=0)
        return starts

    def _write(self, name: str, numbers: bytes, rest: bytes) -> None:
        """Write the numbers into a field, and the `rest` behind them, up to the field's end."""
        start, end, *_ = self._places[name]
        start, end, middle = 4 * start, 4 * end, 4 * start + len(numbers)
        self._memory[start:middle] = numbers
        self._memory[middle:end] = rest[: end - middle]

    def _write_first(self, name: str, numbers: Sequence[int], skip: int = 0) -> None:
        """Write the first numbers of a field, or those behind the `skip` first ones."""
        pack_into(f"{len(numbers)}i", self._memory, 4 * (self._places[name][0] + skip), *numbers)

    def end(self, commits: Sequence[int], moves: Sequence[Sequence[int]], changes: Sequence[int] = ()) -> None:
        """Write the commits, every group's moves of accepted K/V and the changes of page tables, flat as in the fields,
        and how many tiles, commits and changes there are. What has no room becomes the `overflow`."""
        self.overflow = NO_OVERFLOW
        if len(commits) > 2 * self.entries_room or (commits and len(moves[0]) > 2 * self.moves_room):
            self.overflow, commits, moves = Overflow(commits, moves), (), ()
        if len(changes) > 2 * self.changes_room:
            self.overflow, changes = replace(self.overflow, changes=changes), ()
        if changes or self._changed:
            self._changed = bool(changes)
            self._write_first("changed", (len(changes) // 2, *changes))  # the two fields stand side by side
        self._write_first("commits", commits)
        for group, own in enumerate(moves):
            self._write_first("moves", own, 2 * self.moves_room * group)
        self._write_first("counts", [number for tiles in self._tiles for number in (tiles, len(commits) // 2)])
