"""The toy backend with pages: little room, few rows per pass, and shared beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toys import ToyBackend

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import StepInput
from lookahead.kv.pages import PagePool, PageTable


class PagedToy(ToyBackend):
    """Keeps each page's tokens in place of their K/V. Whoever is given a page with other tokens gets other text.

    `passes` has, for every pass, per input: its slot, its chunk's length and its tree's size.
    """

    def __init__(self, pages: int = 64, page_size: int = 4, most_rows: int = 32, pads: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, pads=pads)
        self.pool = PagePool(pages, page_size)
        self.most_rows = most_rows
        self.memory = [[-1] * page_size for _ in range(pages)]
        self.tables: dict[int, PageTable] = {}
        self.passes: list[list[tuple[int, int, int]]] = []

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = super().open()
        table = self.tables[slot] = self.pool.open(tokens, salt)
        size = self.pool.page_size
        shared = [token for page in table.pages for token in self.memory[page]]
        assert shared == list(tokens[: table.cached]), "a shared page holds other tokens"
        assert len(shared) == len(table.pages) * size
        self.slots[slot] = shared
        return slot

    def close(self, slot: int) -> None:
        super().close(slot)
        self.pool.close(self.tables.pop(slot))

    def reserve(self, slot: int, tokens: int) -> bool:
        """Room for exactly so many tokens: what an earlier, larger tree had is given back."""
        assert tokens >= len(self.slots[slot])
        self.pool.shrink(self.tables[slot], tokens)
        return self.pool.reserve(self.tables[slot], tokens)

    def holds(self) -> int | None:
        return self.pool.pages * self.pool.page_size

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        assert list(tokens) == self.slots[slot], "only cached tokens can be remembered"
        self.pool.remember(self.tables[slot], tokens)

    def launch(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        assert len({item.slot for item in inputs}) == len(inputs)
        rows = [(item.slot, len(item.chunk), len(item.tree)) for item in inputs]
        total = sum(chunk + tree for _, chunk, tree in rows)
        assert inputs
        assert total <= self.most_rows, f"{total} rows"
        for slot, chunk, tree in rows:
            room = len(self.tables[slot].pages) * self.pool.page_size
            assert len(self.slots[slot]) + chunk + tree <= room, "no room was reserved"
        self.passes.append(rows)
        for item in inputs:  # what is cached is read from the pages
            assert self._text(item.slot) == self.slots[item.slot], "a page was overwritten"
        outputs = super().launch([item for item in inputs if len(item.tree)])
        for item in inputs:
            if not len(item.tree):
                self._write(item.slot, item.chunk)
                outputs.insert(inputs.index(item), StepOutput([]))
        return outputs

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        before = {slot: len(self.slots[slot]) for slot, _ in accepted}
        super().commit(accepted)
        for slot, length in before.items():
            new = self.slots[slot][length:]
            del self.slots[slot][length:]
            self._write(slot, new)

    def _write(self, slot: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            page, place = divmod(len(self.slots[slot]), self.pool.page_size)
            self.memory[self.tables[slot].pages[page]][place] = token
            self.slots[slot].append(token)

    def _text(self, slot: int) -> list[int]:
        text = [token for page in self.tables[slot].pages for token in self.memory[page]]
        return text[: len(self.slots[slot])]
