"""The page pool under random operations: nothing leaks, nothing is shared that differs, nothing in use is evicted."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from marks import examples

from lookahead.kv.pages import DROPPED, PagePool, PagePools, PageTable, pages_in_window

PAGES, SIZE = 7, 2
TEXTS = st.lists(st.integers(0, 1), max_size=12)
SALTS = st.sampled_from(["", "a"])


class Sequence:
    """A table, its text, how many tokens of it are cached, and what is written in its pages is in `Pool.memory`."""

    def __init__(self, table: PageTable, salt: str, text: list[int]) -> None:
        self.table, self.salt, self.text, self.cached = table, salt, text, table.cached


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.live: list[Sequence] = []
        self.memory: dict[int, tuple[str, list[int]]] = {}  # page -> salt, and the text up to its end

    @rule(text=TEXTS, salt=SALTS)
    def open(self, text: list[int], salt: str) -> None:
        before = self.pool.used, self.pool.hit_tokens
        table = self.pool.open(text, salt)
        assert table.cached % SIZE == 0
        assert table.cached <= max(0, len(text) - 1)
        assert len(table.pages) * SIZE == table.cached
        for place, page in enumerate(table.pages):
            assert self.memory[page] == (salt, text[: (place + 1) * SIZE])
        assert self.pool.hit_tokens == before[1] + table.cached
        assert self.pool.used >= before[0]
        self.live.append(Sequence(table, salt, text))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(0, 8))
    def reserve_and_run(self, data: st.DataObject, more: int) -> None:
        """Grow, and cache tokens there; a page that others see is never written."""
        sequence = data.draw(st.sampled_from(self.live))
        wanted = min(sequence.cached + more, len(sequence.text))
        old, room = list(sequence.table.pages), self.pool.free + self.pool.evictable
        others = [list(other.table.pages) for other in self.live]
        grown = self.pool.reserve(sequence.table, wanted)
        lacking = -(-wanted // SIZE) - len(old)
        assert grown == (lacking <= room)
        assert sequence.table.pages[: len(old)] == old
        assert len(sequence.table.pages) == len(old) + (max(0, lacking) if grown else 0)
        for other, pages in zip(self.live, others, strict=True):
            assert other is sequence or other.table.pages == pages
        if grown:
            for place in range(sequence.cached, wanted):
                page = sequence.table.pages[place // SIZE]
                assert sum(page in other.table.pages for other in self.live) == 1
                self.memory[page] = sequence.salt, sequence.text[: place + 1]
            sequence.cached = max(sequence.cached, wanted)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        pages = list(sequence.table.pages)
        self.pool.remember(sequence.table, sequence.text[: sequence.cached])
        assert sequence.table.pages == pages
        whole = sequence.cached // SIZE * SIZE
        found = self.pool.open([*sequence.text[:whole], 0], sequence.salt)
        assert found.cached >= min(whole, SIZE * self.run_of_known(sequence))
        self.pool.close(found)

    def run_of_known(self, sequence: Sequence) -> int:
        """How many of its pages are still known; a copy that was known before may have been evicted."""
        count = 0
        for digest in sequence.table.digests:
            if digest not in self.pool._known:
                break
            count += 1
        return count

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 12))
    def shrink(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        pages = list(sequence.table.pages)
        self.pool.shrink(sequence.table, tokens)
        assert sequence.table.pages == pages[: -(-tokens // SIZE)]
        sequence.cached = min(sequence.cached, len(sequence.table.pages) * SIZE)
        if sequence.cached < sequence.table.cached or tokens < sequence.cached:
            self.close_one(sequence)  # what was cut must not be written again while others share it

    @precondition(lambda self: self.live)
    @rule(data=st.data(), known=st.booleans())
    def close(self, data: st.DataObject, known: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if known:
            self.pool.remember(sequence.table, sequence.text[: sequence.cached])
        self.close_one(sequence)

    def close_one(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.pool.close(sequence.table)
        assert sequence.table.pages == []

    @invariant()
    def pages_are_accounted_for(self) -> None:
        pool = self.pool
        users = Counter(page for sequence in self.live for page in sequence.table.pages)
        assert [users[page] for page in range(PAGES)] == pool._users
        free, kept = set(pool._free), set(pool._evictable)
        assert len(free) == len(pool._free)
        assert free.isdisjoint(kept)
        assert (free | kept).isdisjoint(users)
        assert free | kept | set(users) == set(range(PAGES))
        assert (pool.free, pool.evictable, pool.used) == (len(free), len(kept), len(users))
        assert {page: digest for digest, page in pool._known.items()} == pool._digest
        assert kept <= set(pool._digest)
        assert free.isdisjoint(pool._digest)

    @invariant()
    def shared_pages_hold_the_text_of_all(self) -> None:
        for sequence in self.live:
            for place, page in enumerate(sequence.table.pages[: sequence.cached // SIZE]):
                assert self.memory[page] == (sequence.salt, sequence.text[: (place + 1) * SIZE])

    @invariant()
    def a_prefix_is_evicted_last(self) -> None:
        by_text = {(self.memory[page][0], tuple(self.memory[page][1])): page for page in self.pool._digest}
        order = list(self.pool._evictable)
        for page in order:
            salt, text = self.memory[page]
            if len(text) > SIZE:
                parent = by_text[salt, tuple(text[:-SIZE])]
                assert parent not in order or order.index(parent) > order.index(page)


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=examples(80), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def filled(pool: PagePool, text: list[int], salt: str = "") -> PageTable:
    table = pool.open(text, salt)
    assert pool.reserve(table, len(text))
    pool.remember(table, text)
    return table


def test_a_prefix_is_shared_page_by_page() -> None:
    pool = PagePool(10, 4)
    first = filled(pool, list(range(11)))
    second = pool.open([*range(8), 99, 98, 97])
    assert second.cached == 8
    assert second.pages == first.pages[:2]
    assert pool.open(list(range(8))).cached == 4  # the last token always has to run
    assert pool.open(list(range(11)), "other").cached == 0
    assert pool.open([1, *range(10)]).cached == 0
    assert (pool.queries, pool.hit_tokens) == (5, 12)


def test_the_oldest_text_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = PagePool(4, 2)
    old, new = [1, 1, 2, 2], [3, 3, 4, 4]
    for text in (old, new):
        pool.close(filled(pool, text))
    assert (pool.free, pool.evictable) == (0, 4)
    assert pool.reserve(pool.open(), 2)
    assert pool.open([*old, 0]).cached == 2
    assert pool.open([*new, 0]).cached == 4


def test_only_new_pages_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.kv import pages

    pool, text = PagePool(100, 2), list(range(100))
    table = filled(pool, text)
    hashed: list[bytes] = []
    hash_of = pages.blake2b
    monkeypatch.setattr(
        pages, "blake2b", lambda data, digest_size: hashed.append(data) or hash_of(data, digest_size=16)
    )
    for token in range(100, 105):
        text.append(token)
        assert pool.reserve(table, len(text))
        pool.remember(table, text)
    assert len(hashed) == 2


def test_a_pool_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 0 pages of 64 tokens"):
        PagePool(0)


WINDOWS = (None, 3, 7)
"""Those of the pools below: layers with a window of 3 tokens read at most two pages before a pass."""
ROWS = 5


class Pools(RuleBasedStateMachine):
    """Sequences in pools with and without windows. Whatever a pass reads is there, and holds the text."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = PagePools([PagePool(12, SIZE, window, ROWS) for window in WINDOWS])
        self.live: list[list[PageTable]] = []
        self.texts: dict[int, tuple[str, list[int], int]] = {}  # of a sequence: salt, text, cached tokens
        self.memory: list[dict[int, tuple[str, list[int]]]] = [{} for _ in WINDOWS]

    def reads(self, tables: list[PageTable]) -> None:
        """What the next row sees is in pages that the sequence holds, with its text in them."""
        salt, text, cached = self.texts[id(tables)]
        for window, table, memory in zip(WINDOWS, tables, self.memory, strict=True):
            first = 0 if window is None else max(0, cached - window + 1)
            for place in range(first // SIZE, -(-cached // SIZE)):
                assert table.pages[place] != DROPPED, "a page that is read was given back"
                assert memory[table.pages[place]] == (salt, text[: min(cached, (place + 1) * SIZE)])

    @rule(text=TEXTS, salt=SALTS)
    def open(self, text: list[int], salt: str) -> None:
        tables = self.pools.open(text, salt)
        assert len({table.cached for table in tables}) == 1
        self.live.append(tables)
        self.texts[id(tables)] = salt, text, tables[0].cached
        self.reads(tables)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=st.integers(1, ROWS), known=st.booleans())
    def run(self, data: st.DataObject, rows: int, known: bool) -> None:
        """A pass of some rows, behind which the text may be remembered."""
        tables = data.draw(st.sampled_from(self.live))
        salt, text, cached = self.texts[id(tables)]
        end = min(len(text), cached + rows)
        self.pools.drop_behind(tables, cached)
        before = [list(table.pages) for table in tables]
        if not self.pools.reserve(tables, len(text), cached):
            assert [table.pages for table in tables] == before, "half of a reservation was made"
            return
        self.reads(tables)
        for table, memory, pool in zip(tables, self.memory, self.pools.pools, strict=True):
            for place in range(cached, end):
                page = table.pages[place // SIZE]
                assert pool._users[page] == 1
                memory[page] = salt, text[: place + 1]
        self.texts[id(tables)] = salt, text, end
        if known:
            self.pools.remember(tables, text[:end])
        self.reads(tables)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        tables = data.draw(st.sampled_from(self.live))
        self.live.remove(tables)
        self.pools.close(tables)
        assert [table.pages for table in tables] == [[], [], []]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        for number, (pool, window) in enumerate(zip(self.pools.pools, WINDOWS, strict=True)):
            tables = [tables[number] for tables in self.live]
            users = Counter(page for table in tables for page in table.pages if page != DROPPED)
            assert [users[page] for page in range(pool.pages)] == pool._users
            assert set(pool._free) | set(pool._evictable) | set(users) == set(range(pool.pages))
            assert pool.free + pool.evictable + len(users) == pool.pages
            for table in tables if window is not None else ():
                assert len(table.pages) - table.dropped <= pages_in_window(window, ROWS, SIZE)


TestPools = Pools.TestCase
TestPools.settings = settings(
    max_examples=examples(80), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_beginning_that_a_windowed_pool_has_evicted() -> None:
    """All pools must know what a sequence reads: here the longest beginning is the one that the third pool knows."""
    pools = PagePools([PagePool(20, 2), PagePool(20, 2, 3, 14), PagePool(20, 2, 5, 14)])
    text = list(range(14))
    tables = pools.open(text)
    assert pools.reserve(tables, 14, 0)
    pools.remember(tables, text)
    pools.close(tables)
    again = pools.open([*text, 99])
    assert again[0].cached == 14
    assert [table.pages.count(DROPPED) for table in again] == [0, 6, 5]
    digests = list(again[0].digests)
    pools.close(again)
    third = pools.pools[2]
    del third._digest[third._known.pop(digests[5])]  # its page of tokens 10 and 11
    assert [pools.open([*text[:size], 99])[0].cached for size in (14, 12, 10)] == [10, 10, 10]
    del third._digest[third._known.pop(digests[1])]
    # Behind 10 tokens it reads tokens 6 to 9, behind 6 tokens 2 to 5.
    assert [pools.open([*text[:size], 99])[0].cached for size in (14, 10, 8, 6, 4)] == [10, 10, 8, 2, 2]
