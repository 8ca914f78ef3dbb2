"""The open sequences of the graph backend: their pages, and the accepted K/V that have yet to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.backends.base import StepInput
from lookahead.backends.graph.kv import PagedKV
from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.pages import PagePool, PageTable
from lookahead.backends.graph.sizes import PAGE


@dataclass(slots=True)
class Slot:
    """A sequence: its `line` in the device's tables, its pages, and how many of its tokens are cached.

    `told` pages are in the device's table. `rules_line` is its line in the tables of `adjusting`, or -1; the first
    `counted` tokens of its text are counted there.
    """

    line: int
    table: PageTable
    length: int
    told: int = 0
    rules_line: int = -1
    counted: int = 0

    def place(self, position: int) -> int:
        """Where a token stands in all pages. The pool's page 0 is the device's page 1."""
        return (self.table.pages[position // PAGE] + 1) * PAGE + position % PAGE


class Slots:
    """All open slots (`by_number`), and the pages of `kv` that they share.

    `lines` are those of the device's tables that no slot has. `pending` are the commits whose K/V have not moved yet:
    per sequence, from where to where.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.kv, self.pool = kv, PagePool(kv.pages, PAGE)
        self.lines = list(range(MOST_ENTRIES - 1, -1, -1))
        self.pending: list[list[int]] = []
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
        number, table = self._next, self.pool.open(tokens, salt)
        self._next += 1
        self.by_number[number] = Slot(self.lines.pop(), table, table.cached)
        return number

    def close(self, number: int) -> Slot:
        """Give a slot's line and pages back. What the pool remembers stays while there is room."""
        closed = self.by_number.pop(number)
        self.lines.append(closed.line)
        self.pool.close(closed.table)
        return closed

    # Pages.

    def replace_pages(self, kv: PagedKV) -> None:
        """Take other pages. No slot is open."""
        self.kv, self.pool = kv, PagePool(kv.pages, PAGE)

    def has_pages(self, slot: Slot, tokens: int) -> bool:
        """Whether the sequence has pages for so many tokens; if need be, it gets some."""
        if len(slot.table.pages) * PAGE >= tokens and self.pool.free:
            return True
        if not self.pool.free:  # give back what a larger tree needed before
            self.pool.shrink(slot.table, tokens)
            slot.told = min(slot.told, len(slot.table.pages))
        return tokens <= self.kv.longest * PAGE and self.pool.reserve(slot.table, tokens)

    def need_pages(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """Take pages for so many tokens of each sequence, or raise MemoryError."""
        free = self.pool.free
        for slot, count in zip(slots, tokens, strict=True):
            if free and len(slot.table.pages) * PAGE >= count:
                continue  # as `has_pages` would say, in a third of the time
            if not self.has_pages(slot, count):
                raise MemoryError(
                    f"no pages for a sequence of {count} tokens: {self.pool.used} of {self.kv.pages} pages are in use, "
                    f"and a sequence may have {self.kv.longest} of them"
                )
            free = self.pool.free

    def tell_pages(self, slot: Slot) -> None:
        """Tell the device which pages the sequence has got since it was told last."""
        pages = slot.table.pages
        if slot.told < len(pages):
            self.kv.set_table(slot.line, [page + 1 for page in pages], slot.told)
            slot.told = len(pages)

    def tell_all_pages(self, slots: Sequence[Slot]) -> None:
        """Tell the device of all pages that these sequences have."""
        for slot in slots:
            if slot.told < len(slot.table.pages):
                self.tell_pages(slot)

    def take_pages_ahead(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """Take the pages that sequences of so many tokens may need next, if there are plenty.

        It takes long to tell the device of a page, so it is told while it runs a step, not between two of them.
        """
        for slot, count in zip(slots, tokens, strict=True):
            enough = len(slot.table.pages) * PAGE >= count + PAGE // 2
            if not enough and self.pool.free > len(self) and self.has_pages(slot, count + PAGE // 2):
                self.tell_pages(slot)

    def forget_pages(self, slot: Slot) -> None:
        """Give all pages of a sequence back, if others may share some of them: new ones are its own."""
        if slot.table.digests:
            self.pool.shrink(slot.table, 0)
            slot.told = 0

    # Commits.

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the root and these nodes of each slot. The root's K/V is in place; that of the nodes is pending."""
        for number, path in accepted:
            slot = self.by_number[number]
            if path and path[-1] != len(path):  # some nodes do not stand right behind the root
                # They are noted as places in the pages, because the sequence may give some of its pages back, or end,
                # before they move. That is no harm: a step moves them before it writes anything.
                moves: list[int] = []
                for target, node in enumerate(path, start=1):
                    moves += slot.place(slot.length + node), slot.place(slot.length + target)
                self.pending.append(moves)
            slot.length += 1 + len(path)

    def pending_fit(self, most: int, most_moves: int) -> bool:
        """Whether a packet with room for so many commits and moves can carry all that is pending."""
        return len(self.pending) <= most and sum(map(len, self.pending)) <= 2 * most_moves

    def take_pending(self) -> tuple[list[int], list[int]]:
        """The pending commits and their moves, flat, as the packet has them. They then count as done."""
        pending, self.pending = self.pending, []
        commits: list[int] = []
        moves: list[int] = []
        for own in pending:
            commits += len(moves) // 2, len(own) // 2
            moves += own
        return commits, moves
