"""Attention groups: the layers of a model that have the same heads and the same window, and so share pages.

Every group has page pools of its own. A layer with a window reads no token before it, so a sequence's pages behind the
window can be freed in its group, while the layers without a window keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.sizes import PAGE
from lookahead.kv.pages import pages_in_window
from lookahead.models.spec import Decoder


@dataclass(frozen=True)
class AttentionGroup:
    """`layers` are the numbers of its layers in the model. They need the pages of a sequence's last `window` tokens, or
    of all its tokens if it is None."""

    shape: HeadShape
    window: int | None
    layers: tuple[int, ...]

    def most_pages(self, tokens: int, most_rows: int) -> int:
        """The most pages that a sequence of this many tokens has at a time, where a pass has at most `most_rows` rows.

        With a window these are the pages that some row of a pass reads or writes.
        """
        pages = -(-tokens // PAGE)
        return pages if self.window is None else min(pages, pages_in_window(self.window, most_rows, PAGE))

    def page_bytes(self, element_size: int) -> int:
        """The K/V memory of one page, of all its layers."""
        return 2 * len(self.layers) * self.shape.kv_heads * PAGE * self.shape.dim * element_size


def groups_of(decoder: Decoder, *, drop_pages: bool = True) -> tuple[AttentionGroup, ...]:
    """The model's attention groups, in the order of their first layers.

    Without `drop_pages`, a sequence keeps its pages behind windows as well, so windows make no groups.
    """
    layers: dict[tuple[HeadShape, int | None], list[int]] = {}
    for number, block in enumerate(decoder.blocks):
        spec = block.attention
        window = spec.window if drop_pages else None
        layers.setdefault((HeadShape(spec.heads, spec.kv_heads, spec.head_dim), window), []).append(number)
    return tuple(AttentionGroup(shape, window, tuple(numbers)) for (shape, window), numbers in layers.items())
