"""The graph backend's K/V: pages that all sequences share, their tables on the device, and the rotary tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.graph.weights import Weights


class PagedKV:
    """Keys and values of all layers: `cache` [layers, 2, pages + 1, Hkv, PAGE, D], index 0 keys and index 1 values.

    Page 0 belongs to nobody: rows that pad a step write there. A *place* is where a token stands in all pages: its page
    times PAGE, plus its place in the page. `tables` [MOST_ENTRIES, longest] int32 are the sequences' pages in the order
    of their tokens. `cosine` and `sine` [positions, D / 2] are the rotary tables.
    """

    def __init__(self, weights: Weights, pages: int, positions: int) -> None:
        w, device = weights, weights.embedding.device
        self.pages = pages
        self.cache = torch.zeros(
            len(w.layers), 2, pages + 1, w.kv_heads, PAGE, w.dim, dtype=w.embedding.dtype, device=device
        )
        longest = -(-positions // PAGE)
        self.tables = torch.zeros(MOST_ENTRIES, longest, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(MOST_ENTRIES, longest, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.cosine, self.sine = w.tables(longest * PAGE)

    @torch.inference_mode()
    def set_table(self, line: int, pages: Sequence[int], first: int = 0) -> None:
        """Tell the device a sequence's pages from number `first` on. It is told before the next step runs."""
        end = len(pages)
        self._host_tables[line, first:end] = torch.tensor(pages[first:], dtype=torch.int32)
        self.tables[line, first:end].copy_(self._host_tables[line, first:end], non_blocking=True)

    def write(self, pages: Sequence[int], length: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put each layer's keys and values [Hkv, n, D] of the last n of `length` tokens into pages."""
        index = torch.tensor(pages, dtype=torch.long, device=self.cache.device)
        for number, pair in enumerate(layers):
            for i, part in enumerate(pair):
                first = length - part.shape[1]
                place = torch.arange(length, device=self.cache.device)
                if first > 0:  # out of a sliding window's sight, but they must be numbers
                    self.cache[number, i, index[place[:first] // PAGE], :, place[:first] % PAGE] = 0
                place = place[first:]
                self.cache[number, i, index[place // PAGE], :, place % PAGE] = part.transpose(0, 1).to(self.cache.dtype)

    def read(self, pages: Sequence[int], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of a sequence's first `length` tokens: per layer, keys and values [Hkv, length, D]."""
        index = torch.tensor(pages[: -(-length // PAGE)], dtype=torch.long, device=self.cache.device)
        read = []
        for layer in self.cache:
            pair = [part[index].transpose(0, 1).flatten(1, 2)[:, :length].contiguous() for part in layer]
            read.append((pair[0], pair[1]))
        return read


def bytes_per_page(weights: Weights) -> int:
    """The K/V memory of one page."""
    w = weights
    return 2 * len(w.layers) * w.kv_heads * PAGE * w.dim * w.embedding.element_size()
