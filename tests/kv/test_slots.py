"""Slots: what the device learns of pages, and of accepted tokens that move."""

from __future__ import annotations

import random

import pytest

from lookahead.kv.pages import DROPPED, PagePool, PagePools
from lookahead.kv.slots import Slot, Slots

SIZE, LONGEST, MOST = 4, 12, 5


def slots_of(pages: int = 40, window: int | None = None) -> Slots:
    """Slots of two attention groups, the second with a window."""
    return Slots(PagePools([PagePool(pages, SIZE), PagePool(pages, SIZE, window, 8)]), LONGEST, MOST)


def device_tables(slots: Slots, device: list[int], slot: Slot) -> list[list[int]]:
    """A slot's part of the device's flat page tables."""
    firsts = [(group * MOST + slot.table_index) * LONGEST for group in range(2)]
    return [device[first : first + len(table.pages)] for first, table in zip(firsts, slot.tables, strict=True)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_device_has_every_page_after_the_changes(window: int | None, seed: int) -> None:
    """Whatever sequences open, grow, share, shrink and close between two packets, in any order."""
    rng, slots, device = random.Random(seed), slots_of(20, window), [0] * (2 * MOST * LONGEST)
    numbers, sent = list[int](), 0
    for _ in range(300):
        action = rng.choice(["open", "close", "grow", "grow", "grow", "remember", "forget", "send"])
        if action == "open" and len(numbers) < MOST:
            numbers.append(slots.open([1] * rng.choice([0, 9, 17]), ""))
        elif action == "send":
            changes = slots.take_changes()
            assert len(set(changes[::2])) == len(changes) // 2, "an index occurs twice"
            for index, page in zip(changes[::2], changes[1::2], strict=True):
                device[index] = page
            sent += bool(changes)
            assert slots.take_changes() == []
            for slot in slots.by_number.values():
                for known, table in zip(device_tables(slots, device, slot), slot.tables, strict=True):
                    pairs = [(a, b + 1) for a, b in zip(known, table.pages, strict=True) if b != DROPPED]
                    assert all(a == b for a, b in pairs)
                assert slot.sent_room == slot.room == SIZE * min(len(table.pages) for table in slot.tables)
        elif numbers:
            number = rng.choice(numbers)
            slot = slots[number]
            if action == "close":
                slots.close(number)
                numbers.remove(number)
            elif action == "grow" and slots.reserve_pages(slot, slot.length + rng.randrange(1, 9)):
                slot.length = min(slot.length + rng.randrange(3), slot.room - 1)
            elif action == "remember":
                slots.pool.remember(slot.tables, [1] * slot.length)
            elif action == "forget":
                slots.forget_pages(slot, slot.length)
                slot.length = min(slot.length, slot.room)
            assert slots[number].sent_room <= slots[number].room if number in slots else True
    assert sent > 10


def test_pages_ahead_only_where_there_are_plenty() -> None:
    slots = slots_of(4)
    first, second = (slots[slots.open([], "")] for _ in range(2))
    slots.require_pages([first], [3], ahead=2)
    assert first.room == 8
    slots.require_pages([second], [3], ahead=2)
    assert second.room == 4, "one page is left, and there are two sequences"
    slots.require_pages([second], [5], ahead=9)
    with pytest.raises(MemoryError, match="no pages for a sequence of 9 tokens"):
        slots.require_pages([second], [9])


def test_accepted_nodes_move_behind_their_prefix() -> None:
    """As cells, which the page table gives at the time of the commit."""
    slots = slots_of()
    number = slots.open([], "")
    slot = slots[number]
    slots.require_pages([slot], [10])
    slot.length = 3
    slots.commit([(number, [2, 4])])
    assert slot.length == 6
    cells = [[slots.cell(slot, group, position) for position in range(10)] for group in range(2)]
    assert [cell // SIZE for cell in cells[0]] == [page + 1 for page in slot.tables[0].pages for _ in range(SIZE)][:10]
    slots.commit([(number, [1])])  # stands behind the root already
    slots.close(number)
    commits, moves = slots.take_pending()
    assert commits == [0, 2]
    assert moves == [[own[5], own[4], own[7], own[5]] for own in cells]
    assert slots.take_pending() == ([], [[], []])


def test_the_last_slot() -> None:
    slots = slots_of()
    numbers = [slots.open([], "") for _ in range(MOST)]
    with pytest.raises(RuntimeError, match="5 sequences are open"):
        slots.open([], "")
    slots.close(numbers[2])
    assert slots[slots.open([], "")].table_index == 2


def test_pages_ahead_are_taken_when_all_sequences_have_what_they_need() -> None:
    slots = slots_of(10)
    first, second = (slots[slots.open([], "")] for _ in range(2))
    slots.require_pages([first, second], [SIZE, 9 * SIZE], ahead=1)
    assert (first.room, second.room) == (SIZE, 9 * SIZE)
    slots = slots_of(14)
    first, second = (slots[slots.open([], "")] for _ in range(2))
    slots.require_pages([first, second], [SIZE, 9 * SIZE], ahead=1)
    assert (first.room, second.room) == (2 * SIZE, 10 * SIZE)


def test_pages_reserved_ahead_stay_while_cached_ones_can_be_evicted() -> None:
    """In a server that has run for a while every page has content. Growing must then cost nothing in most steps."""
    slots = Slots(PagePools([PagePool(8, SIZE)]), LONGEST, MOST)
    slot, done = slots[slots.open([], "")], slots.open([], "")
    slots.require_pages([slot], [SIZE], ahead=SIZE)
    assert slots.reserve_pages(slots[done], 6 * SIZE)
    slots[done].length = 6 * SIZE
    slots.pool.remember(slots[done].tables, list(range(6 * SIZE)))
    slots.close(done)
    assert (slots.pool.free, slots.pool.evictable, slot.room) == (0, 6, 2 * SIZE)
    slots.require_pages([slot], [SIZE], ahead=SIZE)
    assert slot.room == 2 * SIZE  # not given back, to be reserved again in the next step
    other = slots[slots.open([], "")]
    slots.require_pages([other], [6 * SIZE])
    assert (slots.pool.free, slots.pool.evictable) == (0, 0)
    slots.require_pages([slot], [SIZE])
    assert (slots.pool.free, slot.room) == (1, SIZE)  # nothing can be evicted: what a larger tree needed is given back
