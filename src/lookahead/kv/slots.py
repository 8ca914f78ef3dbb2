"""The open sequences of a paged backend: their page tables and lengths, and the changes to send to the device.

The device has a copy of all page tables, and the K/V themselves. Two changes are made on the host first and sent with
the next step's packet: new pages of a sequence, and the moves of accepted tokens' K/V next to their prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.kv.pages import PagePools, PageTable
from lookahead.kv.states import KeptRows, Snapshots


@dataclass(slots=True)
class Slot:
    """A sequence: its `table_index` in the device's page tables, a page table per attention group, and its length.

    `room` is how many tokens its pages hold, in all groups. Of each group, the first `sent` pages are in the device's
    table; they hold `sent_room` tokens. A token's position is its index plus `shift`. With recurrent states, `kept` is
    the first row of its last tree (see `KeptRows`), and `snapshot` the place of the snapshot that it began from, or -1.
    """

    table_index: int
    tables: list[PageTable]
    length: int
    room: int
    sent: list[int]
    sent_room: int = 0
    shift: int = 0
    kept: int = 0
    snapshot: int = -1


class NoSlotError(RuntimeError):
    """All slots are open."""


class Slots:
    """All open slots (`by_number`), and the pages that they share.

    The device's page tables are int32 [groups, tables, longest]: `longest` is the most pages of a sequence. At most
    `most_slots` are open, which have the first tables. `free_indices` are the table indices that no slot has. With
    `kept`, sequences have recurrent states, one for each table index. They share pages up to one of `snapshots`.

    `pending_commits` are those whose K/V have not moved yet: the first move and the number of moves of each;
    `pending_moves` are these moves in each attention group, source and target cell of each. A *cell* is one token's K/V
    in all pages of a group: the page times the page size, plus the offset in the page. The device counts pages from 1,
    because its page 0 belongs to no sequence.
    """

    def __init__(
        self,
        pool: PagePools,
        longest: int,
        tables: int,
        most_slots: int | None = None,
        kept: KeptRows | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.tables, self.kept, self.snapshots = tables, kept, snapshots
        self.most_slots = most_slots = tables if most_slots is None else min(tables, most_slots)
        self.free_indices = list(range(most_slots - 1, -1, -1))
        self.by_number: dict[int, Slot] = {}
        self._next = 0
        self._unsent: dict[int, Slot] = {}  # by table index: some of their pages are not in the device's tables
        self.replace_pages(pool, longest)

    def __getitem__(self, number: int) -> Slot:
        return self.by_number[number]

    def __contains__(self, number: object) -> bool:
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.by_number)

    def open(self, tokens: Sequence[int], salt: str) -> int:
        """Open a slot for a new sequence. It shares the cached pages of its longest known prefix. K/V alone do not
        continue a recurrent state, so with such states the prefix ends at a snapshot, whose place the slot gets."""
        if not self.free_indices:
            raise NoSlotError(f"{self.most_slots} sequences are open; close one before you open another")
        number, tables = self._next, self.pool.open(tokens, salt, self.snapshots)
        self._next += 1
        slot = self.by_number[number] = Slot(self.free_indices.pop(), tables, tables[0].cached, 0, [0] * len(tables))
        if self.snapshots is not None and slot.length:
            slot.snapshot = self.snapshots.use(tables[0].digests[-1])
        self._note_pages(slot)
        return number

    def close(self, number: int) -> None:
        """Free a slot and its pages. Cached pages stay until they are evicted."""
        closed = self.by_number.pop(number)
        self.free_indices.append(closed.table_index)
        self._unsent.pop(closed.table_index, None)
        if self.kept is not None:
            self.kept.drop(closed.table_index)
        if self.snapshots is not None:
            self.snapshots.drop(number)
        self.pool.close(closed.tables)

    def forget(self, pool: PagePools) -> None:
        """Forget all cached pages and snapshots. `pool` has the same pages, all free. No slot may be open."""
        self.replace_pages(pool, self.longest)
        if self.snapshots is not None:
            self.snapshots.forget()

    # Pages.

    def replace_pages(self, pool: PagePools, longest: int) -> None:
        """Replace the pools. No slot may be open."""
        self.pool, self.longest, self.page_size = pool, longest, pool.page_size
        self.pending_commits: list[int] = []
        self.pending_moves: list[list[int]] = [[] for _ in pool.pools]

    @property
    def most_tokens(self) -> int:
        """The most tokens that a sequence may have."""
        return self.longest * self.page_size

    def reserve_pages(self, slot: Slot, tokens: int) -> bool:
        """Reserve pages for this many tokens of the sequence. False if there are too few. For a long prompt, a group
        with a window gets only the pages that the next pass reads or writes. Pages behind a window are freed first."""
        if slot.room >= tokens and self.pool.available:
            return True
        self.pool.drop_behind(slot.tables, slot.length)
        if not self.pool.available:  # free what a larger tree needed before
            self.pool.shrink(slot.tables, tokens)
            self._note_pages(slot)
        found = tokens <= self.most_tokens and self._reserve(slot, tokens)
        self._note_pages(slot)
        return found

    def _reserve(self, slot: Slot, tokens: int) -> bool:
        """Grow the tables. Before that fails, the pages behind the windows of all sequences are freed."""
        if self.pool.reserve(slot.tables, tokens, slot.length):
            return True
        if not self.pool.windowed:
            return False
        for other in self.by_number.values():
            self.pool.drop_behind(other.tables, other.length)
        return self.pool.reserve(slot.tables, tokens, slot.length)

    def require_pages(self, slots: Sequence[Slot], tokens: Sequence[int], ahead: int = 0) -> None:
        """Reserve pages for this many tokens of each sequence, or raise MemoryError. If enough are free, reserve pages
        for `ahead` further tokens, too."""
        available = self.pool.available
        may_grow: list[tuple[Slot, int]] = []
        for slot, count in zip(slots, tokens, strict=True):
            if available and slot.room >= count + ahead:
                continue  # the usual case: `reserve_pages` would take three times as long
            if not self.reserve_pages(slot, count):
                raise MemoryError(
                    f"no pages for a sequence of {count} tokens: {self.pool.used} of {self.pool.pages} pages are in "
                    f"use, and a sequence may have {self.longest} of them"
                )
            may_grow.append((slot, count + ahead))
            available = self.pool.available
        for slot, count in may_grow:  # only now, when all have what they need
            if self.pool.free > len(self):
                self.reserve_pages(slot, count)

    def forget_pages(self, slot: Slot, length: int) -> None:
        """Free all pages of a sequence if others may share some of them, so that its K/V can be overwritten. Its next
        pages are not shared, and hold those of its first `length` tokens that its layers still read."""
        if any(table.digests or table.dropped for table in slot.tables):
            self.pool.shrink(slot.tables, 0)
            self._note_pages(slot)
        self.pool.skip_behind(slot.tables, length)
        self._note_pages(slot)

    def _note_pages(self, slot: Slot) -> None:
        """Update a slot after its tables have grown or shrunk."""
        counts = [len(table.pages) for table in slot.tables]
        slot.sent = list(map(min, slot.sent, counts))
        slot.room, slot.sent_room = min(counts) * self.page_size, min(slot.sent) * self.page_size
        if slot.sent != counts:
            self._unsent[slot.table_index] = slot

    def take_changes(self) -> list[int]:
        """The changes to the device's page tables as pairs: an index into all tables, laid out flat, and its new page.
        They then count as sent.

        Pages behind a window stay in the device's tables: their numbers are still valid, and their keys are not read.
        """
        changes: list[int] = []
        if not self._unsent:
            return changes
        for slot in self._unsent.values():
            for group, table in enumerate(slot.tables):
                first = (group * self.tables + slot.table_index) * self.longest
                for index in range(slot.sent[group], len(table.pages)):
                    changes += first + index, table.pages[index] + 1
                slot.sent[group] = len(table.pages)
            slot.sent_room = slot.room
        self._unsent.clear()
        return changes

    def device_pages(self, slot: Slot) -> list[list[int]]:
        """For each attention group, the sequence's pages as the device counts them: from 1, and 0 for a dropped one."""
        return [[page + 1 for page in table.pages] for table in slot.tables]

    # Commits.

    def cell(self, slot: Slot, group: int, position: int) -> int:
        """The cell of a token of the sequence."""
        size = self.page_size
        return (slot.tables[group].pages[position // size] + 1) * size + position % size

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes of each slot. The root's K/V is in its cell; those of the nodes are pending."""
        by_number, kept = self.by_number, self.kept
        for number, path in accepted:
            slot = by_number[number]
            if path and path[-1] != len(path):  # some nodes are not right after the root
                self._add_moves(slot, path)
            if kept is not None:
                kept.commit(slot.table_index, slot.kept, path, begins=slot.length == 0)
            slot.length += 1 + len(path)

    def _add_moves(self, slot: Slot, path: Sequence[int]) -> None:
        """Move the K/V of these nodes next to the root before the next step. Moves are stored as cells, because the
        sequence may free some of its pages, or end, before they run. That is safe: a step runs its moves before it
        writes anything."""
        self.pending_commits += len(self.pending_moves[0]) // 2, len(path)
        size, root = self.page_size, slot.length
        for table, moves in zip(slot.tables, self.pending_moves, strict=True):
            pages, target = table.pages, root
            for node in path:
                source, target = root + node, target + 1
                moves += (
                    (pages[source // size] + 1) * size + source % size,
                    (pages[target // size] + 1) * size + target % size,
                )

    def take_pending(self) -> tuple[list[int], list[list[int]]]:
        """The pending commits and their moves. They then count as done."""
        pending = self.pending_commits, self.pending_moves
        if self.pending_commits:
            self.pending_commits, self.pending_moves = [], [[] for _ in self.pool.pools]
        return pending
