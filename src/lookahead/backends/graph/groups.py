"""Attention groups: layers with the same heads and the same sliding window, which share page tables.

Every group has its own page pool. A layer with a window reads no token before it, so a sequence's pages before the
window can be freed in its group, while layers without a window keep theirs. Attention in chunks keeps the pages of a
window as long as a chunk. A layer that reads the keys and values of an earlier one is in its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.sizes import PAGE
from lookahead.kv.pages import pages_in_window
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Attention, Decoder


@dataclass(frozen=True)
class AttentionGroup:
    """`layers` are indices of the model's layers that have keys and values of their own. They need the pages of a
    sequence's last `window` tokens, or of all tokens if it is None."""

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


WITHOUT_ATTENTION = AttentionGroup(HeadShape(1, 1, 16), None, ())
"""The group of a model without attention. Its pages take no memory, but rows are located and tokens counted by it."""


def groups_of(decoder: Decoder, *, drop_pages: bool = True) -> tuple[AttentionGroup, ...]:
    """The model's attention groups, in the order of their first layers.

    Without `drop_pages`, sequences keep the pages before their windows, so windows do not matter here. Raises
    UnsupportedModelError if a layer reads the keys and values of one with other heads or another window.
    """
    layers: dict[tuple[HeadShape, int | None], list[int]] = {}
    attentions = [block.attention for block in decoder.blocks]
    for number, spec in enumerate(attentions):
        if spec is None:
            continue
        if spec.kv_layer is None:
            shape, window = _group_key(spec)
            layers.setdefault((shape, window if drop_pages else None), []).append(number)
        elif (source := attentions[spec.kv_layer]) is None or _group_key(spec) != _group_key(source):
            raise UnsupportedModelError(
                f"layer {number} reads the keys and values of layer {spec.kv_layer}, which has other heads or another "
                "window"
            )
    if not layers:
        return (WITHOUT_ATTENTION,)
    return tuple(AttentionGroup(shape, window, tuple(numbers)) for (shape, window), numbers in layers.items())


def _group_key(spec: Attention) -> tuple[HeadShape, int | None]:
    """The heads of a layer, and the last tokens that it reads."""
    reads = [tokens for tokens in (spec.window, spec.chunk) if tokens is not None]
    return HeadShape(spec.heads, spec.kv_heads, spec.head_dim), min(reads, default=None)


def group_and_index(decoder: Decoder, groups: Sequence[AttentionGroup]) -> dict[int, tuple[int, int]]:
    """For each layer with attention, the number of its group, and the index in that group of the layer whose K/V it
    reads."""
    owners = {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}
    attentions = ((layer, block.attention) for layer, block in enumerate(decoder.blocks))
    return {
        layer: owners[layer if spec.kv_layer is None else spec.kv_layer]
        for layer, spec in attentions
        if spec is not None
    }
