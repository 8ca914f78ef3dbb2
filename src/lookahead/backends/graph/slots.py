"""The open sequences of the graph backend: their pages, and the accepted K/V that have yet to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kv import PagedKV
from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.pages import PagePool, PagePools, PageTable
from lookahead.backends.graph.sizes import PAGE


@dataclass(slots=True)
class Slot:
    """A sequence: its `line` in the device's tables, its pages in every attention group, and its cached tokens.

    `room`: how many tokens its pages hold, in all groups. `sent` pages of each group are in the device's table.
    `rules_line` is its line in the tables of `adjusting`, or -1; the first `counted` tokens of its text are counted
    there.
    """

    line: int
    tables: list[PageTable]
    length: int
    room: int
    sent: list[int]
    rules_line: int = -1
    counted: int = 0

    def place(self, group: int, position: int) -> int:
        """Where a token stands in all pages of a group. The pool's page 0 is the device's page 1."""
        return (self.tables[group].pages[position // PAGE] + 1) * PAGE + position % PAGE

    def count_room(self) -> None:
        """Bring `room` up to date with the tables."""
        self.room = min([len(table.pages) for table in self.tables]) * PAGE


class Slots:
    """All open slots (`by_number`), and the pages of `kv` that they share.

    `lines` are those of the device's tables that no slot has. `pending` are the commits whose K/V have not moved yet:
    per sequence and attention group, from where to where. `most_rows` is the most rows of a pass.
    """

    def __init__(self, kv: PagedKV, most_rows: int) -> None:
        self._most_rows = most_rows
        self.replace_pages(kv)
        self.lines = list(range(MOST_ENTRIES - 1, -1, -1))
        self.pending: list[list[list[int]]] = []
        self.by_number: dict[int, Slot] = {}
        self._next = 0

    def __getitem__(self, number: int) -> Slot:
        return self.by_number[number]

    def of(self, inputs: Sequence[StepInput]) -> list[Slot]:
        """The slots of these inputs."""
        slots = self.by_number
        return [slots[item.slot] for item in inputs]

    def __contains__(self, number: object) -> bool:
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.by_number)

    def open(self, tokens: Sequence[int], salt: str) -> int:
        """A slot for a new sequence, with the pages of an earlier one that began the same, if there is one."""
        if not self.lines:
            raise RuntimeError(f"{MOST_ENTRIES} sequences are open; close one before you open another")
        number, tables = self._next, self.pool.open(tokens, salt)
        self._next += 1
        cached = tables[0].cached
        self.by_number[number] = Slot(self.lines.pop(), tables, cached, cached, [0] * len(tables))
        return number

    def close(self, number: int) -> Slot:
        """Give a slot's line and pages back. What the pool remembers stays while there is room."""
        closed = self.by_number.pop(number)
        self.lines.append(closed.line)
        self.pool.close(closed.tables)
        return closed

    # Pages.

    def replace_pages(self, kv: PagedKV) -> None:
        """Take other pages. No slot is open."""
        pairs = zip(kv.groups, kv.pages, strict=True)
        self.kv = kv
        self.pool = PagePools([PagePool(pages, PAGE, group.window, self._most_rows) for group, pages in pairs])

    def has_pages(self, slot: Slot, tokens: int, *, drop: bool = True) -> bool:
        """Whether the sequence has pages for this many tokens; if need be, it gets some. For a longer
        prompt, a group with a window gets only the pages that the next pass reads or writes. `drop`: pages behind a
        window are given back first; what others may share of them has been remembered by then."""
        if slot.room >= tokens and self.pool.free:
            return True
        if drop:
            self.pool.drop_behind(slot.tables, slot.length)
        if not self.pool.free:  # give back what a larger tree needed before
            self.pool.shrink(slot.tables, tokens)
            slot.sent = [min(sent, len(table.pages)) for sent, table in zip(slot.sent, slot.tables, strict=True)]
        found = tokens <= self.kv.longest * PAGE and self._reserve(slot, tokens)
        slot.count_room()
        return found

    def _reserve(self, slot: Slot, tokens: int) -> bool:
        """Let the tables grow. Before it fails, all sequences give their pages behind windows back."""
        if self.pool.reserve(slot.tables, tokens, slot.length):
            return True
        if not self.pool.windowed:
            return False
        for other in self.by_number.values():
            self.pool.drop_behind(other.tables, other.length)
        return self.pool.reserve(slot.tables, tokens, slot.length)

    def need_pages(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """Take pages for this many tokens of each sequence, or raise MemoryError."""
        free = self.pool.free
        for slot, count in zip(slots, tokens, strict=True):
            if free and slot.room >= count:
                continue  # as `has_pages` would say, in a third of the time
            if not self.has_pages(slot, count):
                raise MemoryError(
                    f"no pages for a sequence of {count} tokens: {self.pool.used} of {self.pool.pages} pages are in "
                    f"use, and a sequence may have {self.kv.longest} of them"
                )
            free = self.pool.free

    def send_pages(self, slot: Slot) -> None:
        """Send the device the pages that the sequence has got since the last time. Pages behind a window stay in its
        table: they are numbers of pages still, and their keys are not seen."""
        for group, (table, sent) in enumerate(zip(slot.tables, slot.sent, strict=True)):
            if sent < len(table.pages):
                self.kv.set_table(group, slot.line, [page + 1 for page in table.pages[sent:]], sent)
                slot.sent[group] = len(table.pages)

    def send_all_pages(self, slots: Sequence[Slot]) -> None:
        """Send the device all pages that these sequences have."""
        for slot in slots:
            for table, sent in zip(slot.tables, slot.sent, strict=True):
                if sent < len(table.pages):
                    self.send_pages(slot)
                    break

    def take_pages_ahead(self, slots: Sequence[Slot], tokens: Sequence[int], *, drop: bool) -> None:
        """Take the pages that sequences of this length may need next, if there are plenty; `drop` as in `has_pages`.

        It takes long to send the device a page, so it is sent while the device runs a step, not between two of them.
        """
        for slot, count in zip(slots, tokens, strict=True):
            enough = slot.room >= count + PAGE // 2
            if not enough and self.pool.free > len(self) and self.has_pages(slot, count + PAGE // 2, drop=drop):
                self.send_pages(slot)

    def forget_pages(self, slot: Slot, length: int) -> None:
        """Give all pages of a sequence back, if others may share some of them: new ones are its own, and hold the last
        of `length` tokens that its layers read."""
        if any(table.digests or table.dropped for table in slot.tables):
            self.pool.shrink(slot.tables, 0)
            slot.sent = [0] * len(slot.tables)
        self.pool.skip_behind(slot.tables, length)
        slot.count_room()

    # Commits.

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes of each slot. The root's K/V is in place; that of the nodes is pending."""
        for number, path in accepted:
            slot = self.by_number[number]
            if path and path[-1] != len(path):  # some nodes do not stand right behind the root
                # They are noted as places in the pages, because the sequence may give some of its pages back, or end,
                # before they move. That is no harm: a step moves them before it writes anything.
                moves: list[list[int]] = []
                for group in range(len(slot.tables)):
                    moves.append([])
                    for target, node in enumerate(path, start=1):
                        moves[group] += slot.place(group, slot.length + node), slot.place(group, slot.length + target)
                self.pending.append(moves)
            slot.length += 1 + len(path)

    def pending_fit(self, most: int, most_moves: int) -> bool:
        """Whether a packet with room for this many commits and moves can carry all that is pending."""
        return len(self.pending) <= most and sum([len(moves[0]) for moves in self.pending]) <= 2 * most_moves

    def take_pending(self) -> tuple[list[int], list[list[int]]]:
        """The pending commits, and their moves in each group, flat, as the packet has them. They then count as done."""
        pending, self.pending = self.pending, []
        commits: list[int] = []
        all_moves: list[list[int]] = [[] for _ in self.kv.groups]
        for own in pending:
            commits += len(all_moves[0]) // 2, len(own[0]) // 2
            for moves, group in zip(all_moves, own, strict=True):
                moves += group
        return commits, all_moves
