"""Which rows of past steps the device keeps for recurrent states, and which of them were accepted.

A recurrent state cannot step back, so a step does not store what its draft tokens made of it. It keeps each node's
inputs instead, in a ring of rows. The host then commits the accepted nodes, and the device *replays* them into the
stored states before its next step. A state therefore never contains a token that was not accepted.

A step ahead of the host cannot wait for that commit. The step before it had one node per sequence, a token that was
accepted earlier: the step ahead replays these, and the commit, when it comes, has nothing left to replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class KeptRows:
    """The ring of kept rows, and the replays that the device has not made yet.

    The nodes of a step take consecutive rows. `capacity` must hold the nodes of all steps that are launched before the
    first of them is committed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken = 0
        self._pending: dict[int, tuple[bool, list[int]]] = {}  # by table index: is its first token first in the text?
        self._replayed: dict[int, int] = {}  # by table index: the row that a step ahead has replayed already

    def take(self, nodes: int) -> int:
        """Take rows for the nodes of a step. Returns the number of the first; row n of the ring is n % capacity."""
        first = self._taken
        self._taken += nodes
        return first

    def commit(self, table_index: int, first: int, path: Sequence[int], *, begins: bool) -> None:
        """Replay a sequence's root, whose row is `first`, and these nodes of its tree, unless a step ahead has done it.
        `begins`: the root is the first token of its text."""
        if self._replayed.pop(table_index, None) == first:
            return
        if self._taken - first > self.capacity:
            raise RuntimeError(
                f"{self._taken - first} rows were kept since this step; there is room for {self.capacity}"
            )
        _, rows = self._pending.setdefault(table_index, (begins, []))
        rows += [number % self.capacity for number in (first, *[first + node for node in path])]

    def follow(self, roots: Mapping[int, int]) -> int:
        """A step ahead of one node per sequence follows the last step, and replays the roots of that before it is
        committed: by table index, their rows. Returns the first row that the step ahead takes."""
        self._replayed.update(roots)
        return self.take(len(roots))

    def check_committed(self, table_index: int, last: int) -> None:
        """Raise RuntimeError if a step ahead has replayed the root in row `last`, a sequence's last one, and the
        sequence goes on without it: its state cannot step back."""
        if self._replayed.get(table_index) == last:
            raise RuntimeError("a step that continues alone was not committed, and its sequence did not end")

    def drop(self, table_index: int) -> None:
        """Forget the replays of a sequence that ends."""
        self._pending.pop(table_index, None)
        self._replayed.pop(table_index, None)

    def take_pending(self) -> tuple[list[int], list[int]]:
        """The walks of all replays (see `records.Walk`) and the rows of the ring that they go through, both flat. They
        then count as done."""
        walks, rows = list[int](), list[int]()
        for table_index, (begins, own) in self._pending.items():
            walks += table_index, int(begins), len(rows), len(own), len(own)
            rows += own
        self._pending.clear()
        return walks, rows


class Snapshots:
    """Copies of states after full pages of a text, for later sequences that begin with the same text.

    A snapshot is known by the hash of the last page before it (see `pages.PagePool`), once that page is remembered.
    Snapshots have the `count` places from `first` on in the states' memory. The least recently used one is replaced.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[int, list[tuple[int, int]]] = {}  # by slot: pages before it, and its place

    def take(self, number: int, pages: int) -> int | None:
        """A place for the state of this slot after its first `pages` pages; None if there is none."""
        if not self._free and self._known:
            self._free.append(self._known.popitem(last=False)[1])
        if not self._free:
            return None
        place = self._free.pop()
        self._pending.setdefault(number, []).append((pages, place))
        return place

    def remember(self, number: int, digests: Sequence[bytes]) -> None:
        """Let others use the snapshots of this slot, whose remembered pages have these hashes."""
        for pages, place in self._pending.pop(number, ()):
            if pages > len(digests) or digests[pages - 1] in self._known:
                self._free.append(place)
            else:
                self._known[digests[pages - 1]] = place

    def drop(self, number: int) -> None:
        """Forget the snapshots of a slot that ends and was not remembered."""
        self.remember(number, ())

    def forget(self) -> None:
        """Forget all snapshots that others may use."""
        self._free += self._known.values()
        self._known.clear()

    def __contains__(self, digest: object) -> bool:
        return digest in self._known

    def use(self, digest: bytes) -> int:
        """The place of a known snapshot, which counts as used now."""
        self._known.move_to_end(digest)
        return self._known[digest]
