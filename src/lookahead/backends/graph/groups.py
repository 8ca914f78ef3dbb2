"""Attention groups: layers with the same heads and the same sliding window, which share page tables.

Every group has its own page pool. A layer with a window reads no token before it, so a sequence's pages before the
window can be freed in its group, while layers without a window keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.sizes import PAGE
from lookahead.kv.pages import pages_in_window
from lookahead.models.spec import Decoder


@dataclass(frozen=True)
class AttentionGroup:
    """`layers` are indices of the model's layers. They need the pages of a sequence's last `window` tokens, or of all
    tokens if it is None."""

    shape: HeadShape
    window: int | None
    layers: tuple[int, ...]

    def most_pages(self, tokens: int, most_rows: int) -> int:
        """Maximum pages of a sequence with this many tokens, where a pass has at most `most_rows` rows.

        With a window these are the pages that a pass reads or writes.
        """
        pages = -(-tokens // PAGE)
        return pages if self.window is None else min(pages, pages_in_window(self.window, most_rows, PAGE))

    def page_bytes(self, element_size: int) -> int:
        """Bytes of one page, over all layers of the group."""
        return 2 * len(self.layers) * self.shape.kv_heads * PAGE * self.shape.dim * element_size


def groups_of(decoder: Decoder, *, drop_pages: bool = True) -> tuple[AttentionGroup, ...]:
    """The model's attention groups, in the order of their first layers.

    Without `drop_pages`, sequences keep the pages before their windows, so windows do not matter here.
    """
    layers: dict[tuple[HeadShape, int | None], list[int]] = {}
    for number, block in enumerate(decoder.blocks):
        spec = block.attention
        window = spec.window if drop_pages else None
        layers.setdefault((HeadShape(spec.heads, spec.kv_heads, spec.head_dim), window), []).append(number)
    return tuple(AttentionGroup(shape, window, tuple(numbers)) for (shape, window), numbers in layers.items())
