"""`NativeRows`: the rows of a packet, written in one call to C (`packet.c`)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any

from lookahead.algorithm.native.build import check_result
from lookahead.algorithm.native.layout import PACKET_FIELDS, TILE_FIELD
from lookahead.algorithm.tree import Forest


class NativeRows:
    """`Packet.write_rows` in C, for a step without prompt chunks whose trees are one forest."""

    def __init__(
        self,
        c: Any,
        memory: int,
        firsts: Mapping[str, int],
        room: tuple[int, int, int],
        tiles: Sequence[int],
        queries: Sequence[tuple[int, int]],
    ) -> None:
        """`memory` is the packet's address, and `firsts` are the indices of its fields' first numbers. `room` is the
        most rows, rows whose logits are computed, and sequences; `tiles` the most tiles of each head shape; `queries`
        are as in `Packet.write_rows`."""
        names = ("tokens", "sequence_of", "parents", "sequences", "needed")
        self._c, self.queries = c, queries
        self._fields = PACKET_FIELDS.pack(memory, *room, len(tiles), *(firsts[name] for name in names))
        self._shapes = b"".join(
            TILE_FIELD.pack(firsts[f"tiles_{shape}"], count, *queries[shape]) for shape, count in enumerate(tiles)
        )
        self._counts = array("i", tiles)

    def write(
        self, slots: Sequence[int], lengths: Sequence[int], nodes: Sequence[int], needed: Sequence[int], forest: Forest
    ) -> list[int]:
        """Write the rows of all sequences. Returns the number of tiles of each head shape."""
        count = len(slots)
        sequences = pack(f"{4 * count}i", *slots, *lengths, *nodes, *needed)
        trees, counts = forest.numbers.buffer_info()[0], self._counts.buffer_info()[0]
        check_result(self._c.packet_write_rows(self._fields, self._shapes, sequences, count, trees, counts))
        return self._counts.tolist()
