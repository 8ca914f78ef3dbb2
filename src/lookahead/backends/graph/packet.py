"""The packet: all numbers that the host sends to the device for one step, in one buffer that is copied once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, mul
from struct import pack, pack_into
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.native.build import library
from lookahead.algorithm.tree import TokenTree, forest_of
from lookahead.backends.graph.native_rows import NativeRows
from lookahead.backends.graph.records import SequenceRecord, Tile, Walk
from lookahead.backends.graph.sizes import PAGE

MOST_SEQUENCES = 256
"""Maximum number of sequences in a step."""
SPARE_MOVES = 64
"""Moves of accepted K/V that fit into a packet beyond one per row. If the previous step accepted more tokens, a
separate launch moves them."""
SPARE_CHANGES = 64
"""Page-table updates that fit into a packet, per attention group, beyond one per sequence and per page of rows. If a
long prompt needs more, a separate launch writes them."""
SEQUENCE_FIELDS, TILE_FIELDS, WALK_FIELDS = len(SequenceRecord), len(Tile), len(Walk)
"""Numbers per sequence, per tile and per walk. (The `len` of an enum takes microseconds, too long for every step.)"""

Numbers = Any
"""A buffer of 32-bit integers: bytes or an array."""


class Fields:
    """Named fields of numbers in one host buffer, which is copied to the device at once.

    `fields` are NumPy views of the host buffer; `views` gives the same views of a copy on the device.
    """

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool) -> None:
        """`parts` are the fields' shapes and dtypes, with 64-bit fields first for alignment."""
        self._spans: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        start = 0
        for name, (shape, dtype) in parts.items():
            end = start + dtype.itemsize // 4 * int(np.prod(shape))
            self._spans[name] = start, end, shape, dtype
            start = end
        self.host = torch.zeros(start, dtype=torch.int32, pin_memory=pinned)
        self.fields: dict[str, np.ndarray[Any, Any]] = {
            name: view.numpy() for name, view in self.views(self.host).items()
        }

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(dtype).view(shape) for name, (a, b, shape, dtype) in self._spans.items()}


@dataclass(frozen=True)
class Overflow:
    """What does not fit into a packet's fields, in the same flat layout. Separate launches send it before the step."""

    commits: Sequence[int] = ()
    moves: Sequence[Sequence[int]] = ()
    changes: Sequence[int] = ()
    replays: Sequence[int] = ()
    replayed: Sequence[int] = ()


NO_OVERFLOW = Overflow()


class Packet(Fields):
    """The numbers of one step of R rows and B sequences, as named int32 fields.

    A sequence's rows are its prompt chunk (tokens to cache, in order), followed by the nodes of its tree. A *tile* is a
    block of queries of one sequence, all from its chunk or all from its tree, processed by one attention program. The
    sampling parameters are sent separately: see `targets_packet`.

    counts [S, 2]      numbers of tiles and of commits, for each of the S head shapes of the model
    tokens [R]         token ids
    sequence_of [R]    index of the row's sequence, -1 for padding
    parents [R]        index of the row's parent node in its tree, -1 for a root and in a chunk
    sequences [B, 5]   see `records.SequenceRecord`
    tiles_s [T, 6]     for head shape s, see `records.Tile`
    commits [B, 2]     for each sequence whose accepted K/V moves: its first move, and its number of moves
    moves [G, M, 2]    for each of the G attention groups: source and target cell (see `kv.slots`)
    changed [1]        number of page-table updates
    changes [C, 2]     their index into the flattened page tables, and the page to write there
    needed [N]         the rows whose logits are needed

    And for models with recurrent states (see `kernels.state_rows`):

    kept_base [1]      where in the ring of kept rows this step's nodes begin
    replay_count [1]   number of replays
    replays [B, 5]     the walks of the tokens accepted last, see `records.Walk`
    replayed [M]       the kept rows that they go through
    prompts [B]        the number of tokens of each sequence's prompt
    """

    def __init__(
        self, rows: int, needed: int, tiles: Sequence[int], groups: int, pinned: bool, *, states: bool = False
    ) -> None:
        """`tiles`: the maximum number of tiles for each head shape. `states`: the model has recurrent states."""
        sequences, moves, int32 = min(rows, MOST_SEQUENCES), rows + SPARE_MOVES, torch.int32
        self.changes_room = groups * (sequences + rows // PAGE + SPARE_CHANGES)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "counts": ((len(tiles), 2), int32),
            "tokens": ((rows,), int32),
            "sequence_of": ((rows,), int32),
            "parents": ((rows,), int32),
            "sequences": ((sequences, SEQUENCE_FIELDS), int32),
            **{f"tiles_{shape}": ((count, TILE_FIELDS), int32) for shape, count in enumerate(tiles)},
            "commits": ((sequences, 2), int32),
            "moves": ((groups, moves, 2), int32),
            "changed": ((1,), int32),
            "changes": ((self.changes_room, 2), int32),
            "needed": ((needed,), int32),
        }
        if states:
            parts["kept_base"], parts["replay_count"] = ((1,), int32), ((1,), int32)
            parts["replays"], parts["replayed"] = ((sequences, WALK_FIELDS), int32), ((moves,), int32)
            parts["prompts"] = (sequences,), int32
        super().__init__(parts, pinned)
        # All sequences are written at once, as bytes and arrays: one sequence at a time takes three times as long, and
        # every NumPy call takes a microsecond.
        self._memory = memoryview(self.host.numpy()).cast("B")  # type: ignore[arg-type]
        self._zeros, self._minus_ones = bytes(4 * rows), b"\xff" * (4 * rows)
        self._row_numbers = array("i", range(rows)).tobytes()
        self._sequence_numbers = [array("i", (index,)).tobytes() for index in range(sequences)]
        self._changed, self.overflow, self._has_states = False, NO_OVERFLOW, states
        self._in_c: NativeRows | None = None
        self.sequences_room, self.moves_room, self.tiles_room = sequences, moves, list(tiles)
        self.begin()

    def begin(self) -> None:
        """Start a new step without sequences."""
        self.needed, self._tiles = 0, [0] * len(self.tiles_room)

    def write_padding(self) -> None:
        """Write a step in which every row is padding."""
        self.begin()
        for name, filler in (("tokens", self._zeros), ("parents", self._minus_ones), ("sequence_of", self._minus_ones)):
            self._write(name, b"", filler)
        self._write("needed", b"", self._zeros)
        self.write_commits((), [()] * self.fields["moves"].shape[0])
        if self._has_states:
            self.write_states(0, (), (), ())

    def write_rows(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        chunks: Sequence[Sequence[int]],
        trees: Sequence[TokenTree],
        queries: Sequence[tuple[int, int]],
    ) -> list[int]:
        """Write the rows of all sequences. Returns the index of each sequence's first needed row.

        `slots` are the sequences' slots in the page tables, `lengths` their cached tokens. `queries`: for each head
        shape, the queries of a row per K/V head, and the queries of a tile. Where possible, C writes them: in Python it
        takes 85 us for 64 sequences.
        """
        nodes, wanted = [tree.size for tree in trees], [tree.needed_count for tree in trees]
        *starts, self.needed = accumulate(wanted, initial=0)
        forest = None if any(chunks) else forest_of(trees)
        in_c = None if forest is None else self._rows_in_c(queries)
        if forest is None or in_c is None:
            self._tiles = self._write_rows(slots, lengths, chunks, trees, nodes, wanted, queries)
        else:
            self._tiles = in_c.write(slots, lengths, nodes, wanted, forest)
        for count, room in zip(self._tiles, self.tiles_room, strict=True):
            if count > room:
                raise ValueError(f"{count} tiles of attention in a step that has room for {room}")
        return starts

    def _rows_in_c(self, queries: Sequence[tuple[int, int]]) -> NativeRows | None:
        """The writer in C for these queries of each head shape. None without the library in C."""
        c = library()
        if c is not None and (self._in_c is None or self._in_c.queries != queries):
            firsts = {name: start for name, (start, *_) in self._spans.items()}
            room = len(self.fields["tokens"]), len(self.fields["needed"]), self.sequences_room
            self._in_c = NativeRows(c, self.host.data_ptr(), firsts, room, self.tiles_room, queries)
        return self._in_c

    def _write_rows(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        chunks: Sequence[Sequence[int]],
        trees: Sequence[TokenTree],
        nodes: Sequence[int],
        wanted: Sequence[int],
        queries: Sequence[tuple[int, int]],
    ) -> list[int]:
        """Write the rows of all sequences, whose trees have `nodes` nodes, `wanted` of them needed. Returns the number
        of tiles of each head shape."""
        # 1. The rows: each sequence's chunk, then its tree.
        chunk_rows = [len(chunk) for chunk in chunks]
        rows, ends = list(map(add, chunk_rows, nodes)), list(map(add, chunk_rows, lengths))
        tokens, parents = list[Numbers](), list[Numbers]()
        for chunk, tree in zip(chunks, trees, strict=True):
            tokens += array("i", chunk), tree.tokens
            parents += self._minus_ones[: 4 * len(chunk)], tree.parents
        self._write("tokens", b"".join(tokens), self._zeros)
        self._write("parents", b"".join(parents), self._minus_ones)
        self._write("sequence_of", b"".join(map(mul, self._sequence_numbers, rows)), self._minus_ones)
        # 2. The needed rows.
        *firsts, count = accumulate(rows, initial=0)
        roots = list(map(add, firsts, chunk_rows))
        if wanted == rows:  # all of them
            self._write("needed", self._row_numbers[: 4 * count], self._zeros)
        else:
            needed = [root + node for root, tree in zip(roots, trees, strict=True) for node in tree.needed]
            self._write("needed", pack(f"{len(needed)}i", *needed), self._zeros)
        # 3. The sequences and their tiles.
        records = [0] * (SEQUENCE_FIELDS * len(slots))
        for index, field in enumerate((slots, lengths, firsts, chunk_rows, nodes)):  # in the order of `SequenceRecord`
            records[index::SEQUENCE_FIELDS] = field
        self._write_first("sequences", records)
        counts = []
        for shape, (group, block) in enumerate(queries):
            tiles: list[int] = []
            for slot, end, first, chunk, root, size in zip(slots, ends, firsts, chunk_rows, roots, nodes, strict=True):
                for number in range(-(-chunk * group // block)):
                    tiles += slot, end, first, chunk, number, 0
                for number in range(-(-size * group // block)):
                    tiles += slot, end, root, size, number, 1
            counts.append(len(tiles) // TILE_FIELDS)
            self._write_first(f"tiles_{shape}", tiles[: TILE_FIELDS * self.tiles_room[shape]])
        return counts

    def _write(self, name: str, numbers: bytes, filler: bytes) -> None:
        """Write numbers to the start of a field, and `filler` to the rest of it."""
        start, end, *_ = self._spans[name]
        start, end, middle = 4 * start, 4 * end, 4 * start + len(numbers)
        self._memory[start:middle] = numbers
        self._memory[middle:end] = filler[: end - middle]

    def _write_first(self, name: str, numbers: Sequence[int], skip: int = 0) -> None:
        """Write numbers to the start of a field, or after its first `skip` numbers, and leave the rest as it is."""
        pack_into(f"{len(numbers)}i", self._memory, 4 * (self._spans[name][0] + skip), *numbers)

    def write_commits(
        self, commits: Sequence[int], moves: Sequence[Sequence[int]], changes: Sequence[int] = ()
    ) -> None:
        """Write the commits, each group's moves of accepted K/V and the page-table updates, flat as in the fields, and
        the numbers of tiles, commits and updates. What does not fit becomes the `overflow`."""
        self.overflow = NO_OVERFLOW
        if commits and (len(commits) > 2 * self.sequences_room or len(moves[0]) > 2 * self.moves_room):
            self.overflow, commits, moves = Overflow(commits, moves), (), ()
        if len(changes) > 2 * self.changes_room:
            self.overflow, changes = replace(self.overflow, changes=changes), ()
        if changes or self._changed:
            self._changed = bool(changes)
            self._write_first("changed", (len(changes) // 2, *changes))  # the two fields are adjacent
        if commits:
            self._write_first("commits", commits)
            for group, own in enumerate(moves):
                self._write_first("moves", own, 2 * self.moves_room * group)
        self._write_first("counts", [number for tiles in self._tiles for number in (tiles, len(commits) // 2)])

    def write_states(
        self, kept_base: int, replays: Sequence[int], replayed: Sequence[int], prompts: Sequence[int]
    ) -> None:
        """After `write_commits`, write what recurrent states need, flat as in the fields. Replays that do not fit go to
        the `overflow`."""
        if len(replays) > WALK_FIELDS * self.sequences_room or len(replayed) > self.moves_room:
            self.overflow = replace(self.overflow, replays=replays, replayed=replayed)
            replays = replayed = ()
        self._write_first("kept_base", (kept_base, len(replays) // WALK_FIELDS))  # the two fields are adjacent
        self._write_first("replays", replays)
        self._write_first("replayed", replayed)
        self._write_first("prompts", prompts)
