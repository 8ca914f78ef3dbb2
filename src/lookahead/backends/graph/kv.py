"""The graph backend's K/V: the pages of every attention group, their tables on the device, and tables of positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from lookahead.backends.graph.groups import AttentionGroup
from lookahead.backends.graph.packet import MOST_SEQUENCES
from lookahead.backends.graph.sizes import INVARIANT_NODES, INVARIANT_ROWS, PAGE
from lookahead.kv.pages import PagePool, PagePools
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Rope

KV_SEQUENCES, KV_SHARE = 16, 0.5
"""By default, the pages hold this many sequences of full context length, within this share of free memory."""
WINDOW_SEQUENCES = 64
"""In models that mix both, layers with a sliding window have pages for this many sequences longer than the window.
Shorter sequences have the same number of pages in all layers."""
CPU_TOKENS = 1 << 14
"""Capacity on a CPU, where the backend is only tested."""
FEW_CHANGES = 8
"""Up to this many page-table updates are launched one by one."""
LONGEST_TEXT = 1 << 17
"""Maximum length where the model's context has no limit: the size of page tables and rotary tables."""
SPARE_BYTES = 1 << 30
"""Memory left free for captured steps."""
MOST_SHIFT = 1 << 12
"""The most that a sequence may add to its positions. It may subtract any number. Images have fewer positions than
tokens; more are found where a model counts the padding of a batch."""

QueryScale = Callable[[torch.Tensor], torch.Tensor]
"""See `Attention.query_scale`."""


class PagedKV:
    """Keys and values of all layers, in pages.

    For each attention group, `caches` has a tensor [layers, 2, pages + 1, Hkv, PAGE, D], index 0 for keys and 1 for
    values; `pages` is the number of pages. Page 0 belongs to no sequence: padding rows write there. A *cell* is the
    index of a token's K/V in the pages of a group: page times PAGE plus offset. `tables` [groups, MOST_SEQUENCES,
    longest] int32 are the page tables: the pages of the sequence in each slot, in the order of its tokens. `shifts`
    [MOST_SEQUENCES] int32: what the sequence in each slot adds to the index of a token to get its position. Only rotary
    positions and the like are shifted: masks, windows and pages count tokens.
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
        self._owners = sorted(layer for group in groups for layer in group.layers)
        self.longest = longest = -(-positions // PAGE)
        self.tables = torch.zeros(len(self.groups), MOST_SEQUENCES, longest, dtype=torch.int32, device=like.device)
        self.shifts = torch.zeros(MOST_SEQUENCES, dtype=torch.int32, device=like.device)
        self._rotary: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._query_scales: dict[QueryScale, torch.Tensor] = {}

    @property
    def positions(self) -> int:
        """Number of positions that tokens may have, including shifts."""
        return self.longest * PAGE + MOST_SHIFT

    def rotary(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines [positions, dim / 2] of all positions."""
        if rope not in self._rotary:
            self._rotary[rope] = rope.tables(self.positions, self._device)
        return self._rotary[rope]

    def query_scale(self, scale: QueryScale) -> torch.Tensor:
        """The factors [positions] fp32 of all positions."""
        if scale not in self._query_scales:
            self._query_scales[scale] = scale(torch.arange(self.positions, device=self._device)).float()
        return self._query_scales[scale]

    @torch.inference_mode()
    def write_tables(self, changes: Sequence[int]) -> None:
        """Update the page tables before the next step: pairs of an index into the flattened tables and a page. The host
        does not wait for the device. A few numbers travel as arguments of kernels, which needs no pinned memory."""
        if len(changes) <= 2 * FEW_CHANGES:
            tables = self.tables.view(-1)
            for index, page in zip(changes[::2], changes[1::2], strict=True):
                tables[index].fill_(page)
            return
        numbers = torch.tensor(changes, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        indices, pages = numbers.to(self._device, non_blocking=True).view(-1, 2).unbind(1)
        self.tables.view(-1).scatter_(0, indices, pages.to(torch.int32))

    def write(
        self, tables: Sequence[Sequence[int]], length: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Write each layer's keys and values [Hkv, n, D] of the last n of `length` tokens to pages.

        `layers` are those with K/V of their own. `tables`: for each group, the sequence's pages; 0 for pages before the
        window, which are never read.
        """
        if len(layers) != len(self._owners):
            raise ValueError(f"keys and values of {len(layers)} layers, where {len(self._owners)} have their own")
        for cache, group, pages in zip(self.caches, self.groups, tables, strict=True):
            index = torch.tensor(pages, dtype=torch.long, device=self._device)
            for number, layer in enumerate(group.layers):
                for i, part in enumerate(layers[self._owners.index(layer)]):
                    first = length - part.shape[1]
                    position = torch.arange(length, device=self._device)
                    if first > 0:  # outside the sliding window, but they must not be NaN
                        cache[number, i, index[position[:first] // PAGE], :, position[:first] % PAGE] = 0
                    position = position[first:]
                    cache[number, i, index[position // PAGE], :, position % PAGE] = part.transpose(0, 1).to(cache.dtype)

    def read(self, tables: Sequence[Sequence[int]], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's K/V: per layer, keys and values [Hkv, n, D] of the last n of its `length` tokens.

        These are all tokens, or with a window those of the pages that the sequence still holds. `tables` and layers as
        in `write`.
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
        return [read[layer] for layer in self._owners]


def new_pools(kv: PagedKV, most_rows: int) -> PagePools:
    """Pools of all pages of `kv`, all free, for passes of at most `most_rows` rows."""
    pairs = zip(kv.groups, kv.pages, strict=True)
    return PagePools([PagePool(pages, PAGE, group.window, most_rows) for group, pages in pairs])


def group_pages(groups: Sequence[AttentionGroup], tokens: int, most_rows: int) -> list[int]:
    """The number of pages of each group, where groups without a window hold this many tokens.

    If all groups have a window, all hold this many tokens, which then serves more long sequences.
    """
    pages, counts = -(-tokens // PAGE), []
    all_windows = all(group.window is not None for group in groups)
    for group in groups:
        counts.append(pages if all_windows else min(pages, WINDOW_SEQUENCES * group.most_pages(tokens, most_rows)))
    return counts


def default_tokens(groups: Sequence[AttentionGroup], context: int, most_rows: int, like: torch.Tensor) -> int:
    """The default capacity in tokens: see KV_SEQUENCES."""
    free = free_bytes(like.device)
    if free is None:
        return CPU_TOKENS
    tokens = context + INVARIANT_NODES
    useful = max(
        min(KV_SEQUENCES * -(-tokens // PAGE), WINDOW_SEQUENCES * group.most_pages(tokens, most_rows))
        for group in groups
    )
    # Pages of windows do not grow with the capacity from some point on, so bytes per token differ: hence the search.
    fits = range(useful + 1)
    most = bisect_right(
        fits, KV_SHARE * free, key=lambda pages: kv_bytes(groups, group_pages(groups, pages * PAGE, most_rows), like)
    )
    return (most - 1) * PAGE


def new_kv(
    groups: Sequence[AttentionGroup],
    pages: Sequence[int],
    tokens: int,
    longest: int,
    most_rows: int,
    like: torch.Tensor,
) -> PagedKV:
    """Allocate K/V with this number of pages in each group, for `tokens` tokens. Raises UnsupportedModelError if they
    do not fit into memory.

    A sequence may have `longest` tokens, plus the rows of a pass.
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
    """Maximum length of a text in tokens."""
    return min(context or LONGEST_TEXT, LONGEST_TEXT)


def kv_bytes(groups: Sequence[AttentionGroup], pages: Sequence[int], like: torch.Tensor) -> int:
    """Bytes of this number of pages in each group."""
    return sum(count * group.page_bytes(like.element_size()) for group, count in zip(groups, pages, strict=True))


def _positions(groups: Sequence[AttentionGroup], pages: Sequence[int], most: int, most_rows: int) -> int:
    """Maximum positions of a sequence: at most `most`, and no more than the pages of every group hold."""
    for group, count in zip(groups, pages, strict=True):
        if group.most_pages(most, most_rows) > count:
            most = count * PAGE
    return most


def free_bytes(device: torch.device) -> int | None:
    """Free GPU memory, including what torch's allocator has cached; None on a CPU."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(torch.cuda.mem_get_info(device)[0]) + int(cached) - SPARE_BYTES)
