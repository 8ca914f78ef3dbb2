"""The allocation of K/V pages to sequences, and the prefix cache. It handles page numbers only:
the K/V themselves are on the device.

A page holds the K/V of `page_size` tokens. A sequence has a `PageTable` in the pool of every attention group. Full
pages are cached under a hash of all tokens up to their end, so that a sequence with the same prefix shares them. A
cached page outlives its sequences until it is evicted. Where layers have a window, a sequence frees the pages behind it
as it grows.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

PAGE_SIZE = 64
DROPPED = -1
"""In a table, instead of a page that the sequence has freed because it lies behind the window."""


@dataclass(eq=False, slots=True)
class PageTable:
    """One sequence's pages, in the order of its tokens. `cached` is how many tokens it shared when it was opened.

    The first `dropped` pages lie behind the window, and are `DROPPED`. `digests` are the hashes of its first pages that
    were shared or remembered. Such a page may be a second copy of the one that is cached under the same hash.
    """

    root: bytes
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    dropped: int = 0


class PagePool:
    """A fixed number of pages. Each is free, in use by one or more tables, or cached without a user (evictable).

    A page is cached under a 128-bit BLAKE2b hash of the previous page's hash, at first the salt's, and its own tokens.
    The tokens themselves are not compared: among 2^32 pages, two different texts share a hash with a chance of 2^-65.
    With a `window`, no row sees further back than that, and `most_rows` is the most rows of a pass.
    """

    def __init__(self, pages: int, page_size: int = PAGE_SIZE, window: int | None = None, most_rows: int = 1) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {pages} pages of {page_size} tokens holds nothing")
        self.pages, self.page_size, self.window = pages, page_size, window
        self.queries = self.query_tokens = self.hit_tokens = 0
        self._most_pages = pages_in_window(window, most_rows, page_size) if window is not None else 0
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._known: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}  # the reverse of `_known`
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached pages without users; the first is evicted first

    @property
    def free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Cached pages that no sequence uses. They are evicted when no page is free."""
        return len(self._evictable)

    @property
    def used(self) -> int:
        """Pages that sequences use."""
        return self.pages - self.free - self.evictable

    @property
    def usage(self) -> float:
        """The fraction of the pages in use."""
        return self.used / self.pages

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> PageTable:
        """A table for a sequence that begins with these tokens; see `open_together`."""
        return open_together([self], tokens, salt)[0]

    def first_page(self, tokens: int) -> int:
        """The first page that a sequence with this many cached tokens keeps: the first that a row after its last full
        page reads, so that another sequence can begin there."""
        if self.window is None:
            return 0
        return max(0, tokens // self.page_size * self.page_size - self.window + 1) // self.page_size

    def can_begin(self, digests: Sequence[bytes]) -> list[bool]:
        """For n = 0, 1, ...: whether a sequence can begin with n cached pages: all those that it reads are cached."""
        run, found = 0, [True]
        for count, digest in enumerate(digests, start=1):
            run = run + 1 if digest in self._known else 0
            found.append(run >= count - self.first_page(count * self.page_size))
        return found

    def begin(self, root: bytes, digests: Sequence[bytes]) -> PageTable:
        """A table that begins with the cached pages of these hashes, without those behind the window."""
        first = self.first_page(len(digests) * self.page_size)
        shared = [self._known[digest] for digest in digests[first:]]
        for page in shared:
            self._use(page)
        return PageTable(root, len(digests) * self.page_size, [DROPPED] * first + shared, list(digests), first)

    def lacks(self, table: PageTable, tokens: int, cached: int) -> int:
        """How many pages the table needs to hold this many tokens. `cached` of them are cached before the next pass:
        with a window, only the pages that the pass can read or write are needed."""
        end = self._pages_of(tokens)
        if self.window is not None:
            end = min(end, self.first_page(cached) + self._most_pages)
        return end - len(table.pages)

    def reserve(self, table: PageTable, tokens: int, cached: int = 0) -> bool:
        """Grow the table to hold `tokens` tokens. If there are too few pages, nothing changes."""
        lacking = self.lacks(table, tokens, cached)
        if lacking > self.free + self.evictable:
            return False
        for _ in range(lacking):
            page = self._free.pop() if self._free else self._evict()
            self._use(page)
            table.pages.append(page)
        return True

    def drop_behind(self, table: PageTable, cached: int) -> None:
        """Free the pages that a sequence with this many cached tokens no longer reads."""
        end = min(self.first_page(cached), len(table.pages))
        for index in range(table.dropped, end):
            self._free_page(table.pages[index])
            table.pages[index] = DROPPED
        table.dropped = max(table.dropped, end)

    def skip_behind(self, table: PageTable, cached: int) -> None:
        """Let an empty table begin after the pages that a sequence with this many cached tokens does not read."""
        if not table.pages:
            table.dropped = self.first_page(cached)
            table.pages = [DROPPED] * table.dropped

    def shrink(self, table: PageTable, tokens: int) -> None:
        """Free the pages beyond `tokens` tokens."""
        if self._pages_of(tokens) < len(table.pages):
            self._release(table, self._pages_of(tokens))

    def remember(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Cache the full pages of these tokens, which extend those remembered before.

        If another page is cached for the same tokens, that one stays in the cache.
        """
        full_pages = min(len(tokens) // self.page_size, len(table.pages))
        for digest in hashes(table.digests[-1] if table.digests else table.root, tokens, self.page_size,
                             len(table.digests), full_pages):  # fmt: skip
            self._publish(digest, table.pages[len(table.digests)])
            table.digests.append(digest)

    def close(self, table: PageTable) -> None:
        """Free the table's pages. Remembered ones stay cached for later sequences."""
        self._release(table, 0)
        table.cached = 0

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _publish(self, digest: bytes, page: int) -> None:
        if digest not in self._known and page != DROPPED:
            self._known[digest], self._digest[page] = page, digest

    def _use(self, page: int) -> None:
        self._users[page] += 1
        self._evictable.pop(page, None)

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        del self._known[self._digest.pop(page)]
        return page

    def _free_page(self, page: int) -> None:
        """Remove a user of the page. Without users a cached page becomes evictable, any other one free."""
        self._users[page] -= 1
        if not self._users[page]:
            if page in self._digest:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def _release(self, table: PageTable, count: int) -> None:
        """Remove all but the first `count` pages from the table.

        The last page is released first, so that it is evicted before the pages without which it cannot be found. For
        the same reason, the cached copies of its pages become as recent as its own, and its own replace evicted ones.
        """
        for digest, page in zip(table.digests, table.pages, strict=False):
            self._publish(digest, page)
        for index in range(len(table.pages) - 1, -1, -1):
            page = table.pages[index]
            if index >= count and page != DROPPED:
                self._free_page(page)
            if index < len(table.digests):
                known = self._known.get(table.digests[index])
                if known is not None and known in self._evictable:
                    self._evictable.move_to_end(known)
        del table.pages[count:], table.digests[count:]
        table.dropped = min(table.dropped, count)


class PagePools:
    """The pools of all attention groups. A sequence has a table in each."""

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self.pools = list(pools)

    @property
    def page_size(self) -> int:
        return self.pools[0].page_size

    @property
    def windowed(self) -> bool:
        """Whether sequences free pages while they run."""
        return any(pool.window is not None for pool in self.pools)

    @property
    def pages(self) -> int:
        return sum(pool.pages for pool in self.pools)

    @property
    def free(self) -> int:
        """Pages without content, in the pool that has the fewest."""
        return min([pool.free for pool in self.pools])

    @property
    def evictable(self) -> int:
        return sum(pool.evictable for pool in self.pools)

    @property
    def available(self) -> bool:
        """Whether a sequence can get a page, free or evictable, from every pool."""
        for pool in self.pools:  # noqa: SIM110 - asked for every sequence of a step; `all` takes three times as long
            if not (pool._free or pool._evictable):
                return False
        return True

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def usage(self) -> float:
        """The fraction of the pages in use, of the fullest pool."""
        return max(pool.usage for pool in self.pools)

    @property
    def query_tokens(self) -> int:
        return self.pools[0].query_tokens

    @property
    def hit_tokens(self) -> int:
        return self.pools[0].hit_tokens

    def open(self, tokens: Sequence[int] = (), salt: str = "", ends: Container[bytes] | None = None) -> list[PageTable]:
        return open_together(self.pools, tokens, salt, ends)

    def reserve(self, tables: Sequence[PageTable], tokens: int, cached: int) -> bool:
        """See `PagePool.reserve`: in all pools, or in none."""
        pairs = list(zip(self.pools, tables, strict=True))
        if len(pairs) > 1 and any(
            pool.lacks(table, tokens, cached) > pool.free + pool.evictable for pool, table in pairs
        ):
            return False
        return all(pool.reserve(table, tokens, cached) for pool, table in pairs)

    def drop_behind(self, tables: Sequence[PageTable], cached: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            if pool.window is not None:
                pool.drop_behind(table, cached)

    def skip_behind(self, tables: Sequence[PageTable], cached: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.skip_behind(table, cached)

    def shrink(self, tables: Sequence[PageTable], tokens: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.shrink(table, tokens)

    def remember(self, tables: Sequence[PageTable], tokens: Sequence[int]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.remember(table, tokens)

    def close(self, tables: Sequence[PageTable]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.close(table)


def open_together(
    pools: Sequence[PagePool], tokens: Sequence[int], salt: str, ends: Container[bytes] | None = None
) -> list[PageTable]:
    """The tables of a sequence that begins with these tokens, one in each pool.

    They share the longest prefix of full pages whose needed pages are cached in every pool, at most len(tokens) - 1
    tokens: the last token always has to run. With `ends`, the hash of the prefix's last page is one of these.
    """
    root, size = blake2b(salt.encode(), digest_size=16).digest(), pools[0].page_size
    unwindowed = next((pool for pool in pools if pool.window is None), None)
    digests: list[bytes] = []
    for digest in hashes(root, tokens, size, 0, max(0, len(tokens) - 1) // size):
        if unwindowed is not None and digest not in unwindowed._known:
            break  # layers without a window read everything before
        digests.append(digest)
    possible = map(all, zip(*(pool.can_begin(digests) for pool in pools), strict=True))
    count = max(n for n, known in enumerate(possible) if known and (not n or ends is None or digests[n - 1] in ends))
    tables = [pool.begin(root, digests[:count]) for pool in pools]
    for pool in pools if tokens else ():
        pool.queries += 1
        pool.query_tokens += len(tokens)
        pool.hit_tokens += count * size
    return tables


def hashes(before: bytes, tokens: Sequence[int], size: int, first: int, end: int) -> Iterator[bytes]:
    """The hashes of the pages `first` to `end`; `before` is the hash of the previous page, or of the salt."""
    for page in range(first, end):
        text = array("q", tokens[page * size : (page + 1) * size]).tobytes()
        before = blake2b(before + text, digest_size=16).digest()
        yield before


def pages_in_window(window: int, most_rows: int, page_size: int) -> int:
    """The most pages that a sequence keeps for a pass: those of the window before its last full page, and those of the
    rows after that page. Neither need begin at a page boundary."""
    return -(-(window + most_rows) // page_size) + 2
