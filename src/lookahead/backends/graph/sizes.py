"""The sizes of captured steps: a step is padded to the next size, so that few graphs serve every tree."""

from __future__ import annotations

from bisect import bisect_left

SIZES = (1, 16, 32, 64, 128, 256, 512)
"""Buckets of K. A step is padded to the next one: on a GPU that waits for its weights the padding is nearly free."""
SMALL = (4, 8)
"""Further ones for a batch, where every sequence is padded: 16 times 8 tokens are a whole tile, 16 times 16 are two."""
TILE = 128
"""Steps of at most so many tokens, all rows together, give a row the same bits whatever K and the other rows are."""


def bucket(size: int, batch: int = 1) -> int:
    """The captured size for a step of this many tokens, or of a batch whose longest tree has so many."""
    sizes = SIZES if batch == 1 else (SIZES[0], *SMALL, *SIZES[1:])
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else -(-size // 512) * 512


def sizes_to(most: int) -> list[int]:
    """The captured sizes of steps of at most so many tokens."""
    last = bucket(most)
    return [*(size for size in SIZES if size < last), last]
