"""The graph backend's K/V: the pages of every attention group, their tables on the device, and the rotary tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.graph.groups import AttentionGroup
from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.sizes import INVARIANT_ROWS, PAGE
from lookahead.kv.pages import PagePool, PagePools
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Rope

KV_SEQUENCES, KV_SHARE = 16, 0.5
"""Without a `kv_tokens` the pages hold this many sequences of the whole context, if these take no more than this share
of the free memory."""
WINDOW_SEQUENCES = 64
"""Layers with a window, beside layers without one, have pages for this many sequences that are longer than the window.
Sequences that are shorter have the same number of pages in all layers."""
CPU_TOKENS = 1 << 14
"""What the pages hold on a CPU, where the backend is only tested."""
LONGEST_TEXT = 1 << 17
"""The longest text where the model's context has no limit: tables and rotary factors have this many positions."""
SPARE_BYTES = 1 << 30
"""What captured steps may need besides the pages."""


class PagedKV:
    """Keys and values of all layers, in pages.

    For each attention group, `caches` has a tensor [layers, 2, pages + 1, Hkv, PAGE, D], index 0 keys and index 1
    values, and `pages` their number. Page 0 belongs to nobody: rows that pad a step write there. A *cell* is one
    token's K/V in all pages of a group: its page times PAGE, plus its offset in the page. `tables` [groups,
    MOST_ENTRIES, longest] int32 are the sequences' pages in the order of their tokens.
    """

    def __init__(
        self, groups: Sequence[AttentionGroup], pages: Sequence[int], positions: int, like: torch.Tensor
    ) -> None:
        """`like`: a tensor of the model's dtype on its device."""
        self.groups, self.pages, self._device = tuple(groups), tuple(pages), like.device
        self.caches = [
            like.new_zeros(len(group.layers), 2, count + 1, group.shape.kv_heads, PAGE, group.shape.dim)
            for group, count in zip(groups, pages, strict=True)
        ]
        self.longest = longest = -(-positions // PAGE)
        self.tables = torch.zeros(len(self.groups), MOST_ENTRIES, longest, dtype=torch.int32, device=like.device)
        self._rotary: dict[tuple[Rope | None, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rotary(self, rope: Rope | None, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines [positions, dim / 2] of all positions. Without a rope nothing is turned."""
        if (rope, dim) not in self._rotary:
            positions = self.longest * PAGE
            if rope is not None:
                self._rotary[rope, dim] = rope.tables(positions, self._device)
            else:
                ones = torch.ones(positions, dim // 2, dtype=torch.float32, device=self._device)
                self._rotary[rope, dim] = ones, torch.zeros_like(ones)
        return self._rotary[rope, dim]

    @torch.inference_mode()
    def write_tables(self, changes: Sequence[int]) -> None:
        """Write pages into the tables before the next step runs: pairs of an index into all tables, laid out flat, and
        a page. The host does not wait for the device."""
        numbers = torch.tensor(changes, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        index, pages = numbers.to(self._device, non_blocking=True).view(-1, 2).unbind(1)
        self.tables.view(-1).scatter_(0, index, pages.to(torch.int32))

    def write(
        self, tables: Sequence[Sequence[int]], length: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Put each layer's keys and values [Hkv, n, D] of the last n of `length` tokens into pages.

        `tables`: for each group, the sequence's pages; 0 for those behind the window, which nobody reads.
        """
        for cache, group, pages in zip(self.caches, self.groups, tables, strict=True):
            index = torch.tensor(pages, dtype=torch.long, device=self._device)
            for number, layer in enumerate(group.layers):
                for i, part in enumerate(layers[layer]):
                    first = length - part.shape[1]
                    place = torch.arange(length, device=self._device)
                    if first > 0:  # out of a sliding window's sight, but they must be numbers
                        cache[number, i, index[place[:first] // PAGE], :, place[:first] % PAGE] = 0
                    place = place[first:]
                    cache[number, i, index[place // PAGE], :, place % PAGE] = part.transpose(0, 1).to(cache.dtype)

    def read(self, tables: Sequence[Sequence[int]], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, n, D] of the last n of its `length` tokens.

        These are all of them, or with a window those of the pages that the sequence still has. `tables` as in `write`.
        """
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for cache, group, pages in zip(self.caches, self.groups, tables, strict=True):
            held = pages[: -(-length // PAGE)]
            dropped = next((number for number, page in enumerate(held) if page), len(held))
            index = torch.tensor(held[dropped:], dtype=torch.long, device=self._device)
            count = length - dropped * PAGE
            for number, layer in enumerate(group.layers):
                pair = [part[index].transpose(0, 1).flatten(1, 2)[:, :count].contiguous() for part in cache[number]]
                read[layer] = pair[0], pair[1]
        return [read[layer] for layer in sorted(read)]


def new_pools(kv: PagedKV, most_rows: int) -> PagePools:
    """Pools of all pages of `kv`, none of them in use, for passes of at most `most_rows` rows."""
    pairs = zip(kv.groups, kv.pages, strict=True)
    return PagePools([PagePool(pages, PAGE, group.window, most_rows) for group, pages in pairs])


def group_pages(groups: Sequence[AttentionGroup], tokens: int, most_rows: int) -> list[int]:
    """How many pages each group has, where a group without a window holds this many tokens.

    If all groups have a window, all hold this many tokens: that is more sequences, the longer these are.
    """
    pages, counts = -(-tokens // PAGE), []
    all_windows = all(group.window is not None for group in groups)
    for group in groups:
        counts.append(pages if all_windows else min(pages, WINDOW_SEQUENCES * group.most_pages(tokens, most_rows)))
    return counts


def default_tokens(groups: Sequence[AttentionGroup], context: int, most_rows: int, like: torch.Tensor) -> int:
    """For how many tokens there are pages, if nobody says so: see KV_SEQUENCES."""
    free = free_bytes(like.device)
    if free is None:
        return CPU_TOKENS
    tokens = context + INVARIANT_ROWS
    useful = max(
        min(KV_SEQUENCES * -(-tokens // PAGE), WINDOW_SEQUENCES * group.most_pages(tokens, most_rows))
        for group in groups
    )
    each = kv_bytes(groups, group_pages(groups, useful * PAGE, most_rows), like) / useful
    return min(useful, int(KV_SHARE * free / each)) * PAGE


def new_kv(
    groups: Sequence[AttentionGroup],
    pages: Sequence[int],
    tokens: int,
    longest: int,
    most_rows: int,
    like: torch.Tensor,
) -> PagedKV:
    """K/V with this number of pages in each group, which are for `tokens` tokens. Raises UnsupportedModelError if there
    is no room for them.

    A sequence may have `longest` tokens, and the rows of a pass behind them.
    """
    free, least = free_bytes(like.device), -(-INVARIANT_ROWS // PAGE) + 1
    needs = kv_bytes(groups, [max(count, least) for count in pages], like)
    if min(pages) < least or (free is not None and needs > free):
        room = "" if free is None else f", and {free / 2**30:.2f} GiB are free"
        raise UnsupportedModelError(
            f"the graph backend's K/V pages for {tokens} tokens need {needs / 2**30:.2f} GiB{room}; give it "
            f"another number of kv_tokens (at least {least * PAGE}), or free some memory"
        )
    return PagedKV(groups, pages, _positions(groups, pages, longest + most_rows, most_rows), like)


def longest_text(context: int | None) -> int:
    """How many tokens a text may have."""
    return min(context or LONGEST_TEXT, LONGEST_TEXT)


def kv_bytes(groups: Sequence[AttentionGroup], pages: Sequence[int], like: torch.Tensor) -> int:
    """The memory of this number of pages in each group."""
    return sum(count * group.page_bytes(like.element_size()) for group, count in zip(groups, pages, strict=True))


def _positions(groups: Sequence[AttentionGroup], pages: Sequence[int], most: int, most_rows: int) -> int:
    """How many positions a sequence can have: at most `most`, and no more than its pages hold in every group."""
    for group, count in zip(groups, pages, strict=True):
        if group.most_pages(most, most_rows) > count:
            most = count * PAGE
    return most


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU, what torch keeps for itself included; None on a CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(torch.cuda.mem_get_info(device)[0]) + int(kept) - SPARE_BYTES)
