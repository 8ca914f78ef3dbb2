"""Which page of the K/V memory belongs to whom. Only numbers live here: the memory itself is the device's.

A page holds the K/V of `page_size` tokens. A sequence has a `PageTable`. Full pages can be remembered under a hash of
all the text up to their end, so that a sequence that begins the same shares them. Such a page outlives its sequences,
until its room is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

PAGE_SIZE = 64


@dataclass(eq=False, slots=True)
class PageTable:
    """One sequence's pages, in the order of its tokens. `cached` tokens were there when it was opened.

    `digests` are the hashes of its first pages, as far as they were found or remembered. Its own page may be a second
    copy of the one that is known under the same hash.
    """

    root: bytes
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class PagePool:
    """A fixed number of pages. Each is free, in use by one or more tables, or kept for a later sequence.

    A page is known by a 128-bit BLAKE2b hash over the hash before it and its own tokens; the first one hashes the salt.
    The tokens themselves are not compared: among 2^32 pages, two different texts share a hash with a chance of 2^-65.
    """

    def __init__(self, pages: int, page_size: int = PAGE_SIZE) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {pages} pages of {page_size} tokens holds nothing")
        self.pages, self.page_size = pages, page_size
        self.queries = self.query_tokens = self.hit_tokens = 0
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._known: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}  # the reverse of `_known`
        self._kept: OrderedDict[int, None] = OrderedDict()  # known pages without users; the first is evicted first

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Pages that nobody uses, kept for a later sequence. They are evicted when there are no free ones."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Pages that sequences use."""
        return self.pages - self.free - self.kept

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> PageTable:
        """A table for a sequence that begins with these tokens.

        It has the longest known run of full pages, at most len(tokens) - 1 tokens: the last token always has to run.
        """
        table = PageTable(blake2b(salt.encode(), digest_size=16).digest())
        for digest in self._hashes(table, tokens, max(0, len(tokens) - 1) // self.page_size):
            page = self._known.get(digest)
            if page is None:
                break
            self._use(page)
            table.pages.append(page)
            table.digests.append(digest)
        table.cached = len(table.pages) * self.page_size
        if tokens:
            self.queries += 1
            self.query_tokens += len(tokens)
            self.hit_tokens += table.cached
        return table

    def reserve(self, table: PageTable, tokens: int) -> bool:
        """Let the table grow until it holds so many tokens. If there is no room for all of them, nothing changes."""
        lacking = self._pages_of(tokens) - len(table.pages)
        if lacking > self.free + self.kept:
            return False
        for _ in range(lacking):
            page = self._free.pop() if self._free else self._evict()
            self._use(page)
            table.pages.append(page)
        return True

    def shrink(self, table: PageTable, tokens: int) -> None:
        """Give the pages beyond so many tokens back."""
        if self._pages_of(tokens) < len(table.pages):
            self._release(table, self._pages_of(tokens))

    def remember(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Make the full pages of these tokens known; `tokens` continue those that were remembered before.

        Where another page is known for the same text, that one stays the known one.
        """
        whole = min(len(tokens) // self.page_size, len(table.pages))
        for digest in self._hashes(table, tokens, whole):
            self._publish(digest, table.pages[len(table.digests)])
            table.digests.append(digest)

    def close(self, table: PageTable) -> None:
        """Free the table's pages. Remembered ones are kept for later sequences."""
        self._release(table, 0)
        table.cached = 0

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _hashes(self, table: PageTable, tokens: Sequence[int], whole: int) -> Iterator[bytes]:
        """The hashes of the text's first `whole` pages, without those that the table has already."""
        digest, size = table.digests[-1] if table.digests else table.root, self.page_size
        for page in range(len(table.digests), whole):
            text = array("q", tokens[page * size : (page + 1) * size]).tobytes()
            digest = blake2b(digest + text, digest_size=16).digest()
            yield digest

    def _publish(self, digest: bytes, page: int) -> None:
        if digest not in self._known:
            self._known[digest], self._digest[page] = page, digest

    def _use(self, page: int) -> None:
        self._users[page] += 1
        self._kept.pop(page, None)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._known[self._digest.pop(page)]
        return page

    def _release(self, table: PageTable, count: int) -> None:
        """Take all but the first `count` pages from the table.

        The last page is released first, so that it is evicted before the pages without which it cannot be found. For
        the same reason, the known copies of its pages become as recent as its own, and take the place of evicted ones.
        """
        for digest, page in zip(table.digests, table.pages, strict=False):
            self._publish(digest, page)
        for place in range(len(table.pages) - 1, -1, -1):
            page = table.pages[place]
            if place >= count:
                self._users[page] -= 1
                if not self._users[page]:
                    if page in self._digest:
                        self._kept[page] = None
                    else:
                        self._free.append(page)
            if place < len(table.digests):
                known = self._known[table.digests[place]]
                if known in self._kept:
                    self._kept.move_to_end(known)
        del table.pages[count:], table.digests[count:]
