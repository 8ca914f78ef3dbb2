"""The graph backend's K/V: pages that all sequences share, their tables on the device, and the rotary tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.graph.packet import MOST_ENTRIES
from lookahead.backends.graph.sizes import INVARIANT_ROWS, PAGE
from lookahead.backends.graph.weights import Weights
from lookahead.models.facts import UnsupportedModelError

KV_SEQUENCES, KV_SHARE = 16, 0.5
"""Without a `kv_tokens` the pages hold this many sequences of the whole context, if these take no more than this share
of the free memory."""
CPU_TOKENS = 1 << 14
"""What the pages hold on a CPU, where the backend is only tested."""
LONGEST_TEXT = 1 << 17
"""The longest text where the model's context has no limit: tables and rotary factors are made for so many positions."""
SPARE_BYTES = 1 << 30
"""What captured steps may need besides the pages."""


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
        self.longest = longest = -(-positions // PAGE)
        self.tables = torch.zeros(MOST_ENTRIES, longest, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(MOST_ENTRIES, longest, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_numbers = self._host_tables.numpy()
        self.cosine, self.sine = w.tables(longest * PAGE)

    @torch.inference_mode()
    def set_table(self, line: int, pages: Sequence[int], first: int = 0) -> None:
        """Tell the device a sequence's pages from number `first` on. It is told before the next step runs."""
        end = len(pages)
        self._host_numbers[line, first:end] = pages[first:]
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


def new_kv(weights: Weights, tokens: int | None, context: int | None, longest: int, most_rows: int) -> PagedKV:
    """Pages for so many tokens, or as many as are useful and leave enough memory.

    A sequence may have `longest` tokens, or as many as the `context`, and the rows of a pass behind them.
    """
    context = min(context or LONGEST_TEXT, LONGEST_TEXT)
    each, free = bytes_per_page(weights), free_bytes(weights.embedding.device)
    if tokens is None:
        useful = KV_SEQUENCES * -(-(context + INVARIANT_ROWS) // PAGE)
        pages = CPU_TOKENS // PAGE if free is None else min(useful, int(KV_SHARE * free) // each)
    else:
        pages = -(-tokens // PAGE)
    least = -(-INVARIANT_ROWS // PAGE) + 1
    if pages < least or (free is not None and pages * each > free):
        room = "" if free is None else f", and {free / 2**30:.2f} GiB are free"
        raise UnsupportedModelError(
            f"the graph backend's K/V pages for {tokens if tokens is not None else least * PAGE} tokens need "
            f"{max(pages, least) * each / 2**30:.2f} GiB{room}; give it another number of kv_tokens (at least "
            f"{least * PAGE}), or free some memory"
        )
    return PagedKV(weights, pages, min(max(context, longest) + most_rows, pages * PAGE))


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU, what torch keeps for itself included; None on a CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(torch.cuda.mem_get_info(device)[0]) + int(kept) - SPARE_BYTES)
