"""The sizes that steps are captured in: a step is padded to the next size, so that few graphs serve every tree."""

from __future__ import annotations

from bisect import bisect_left

STEP_SIZES = (1, 16, 32, 64, 128, 256, 512)
"""Captured tree sizes K of a single sequence. Padding costs little: a GPU waits for the weights to be read anyway."""
BATCH_SIZES = (1, 4, 8, *STEP_SIZES[1:])
"""Captured tree sizes K in a batch. Every tree of a batch is padded to K, so small ones are worth having: 16 trees of
8 nodes are 128 rows, 16 trees of 16 nodes are 256."""
INVARIANT_ROWS = 128
"""In half precision, a step of at most this many rows (all trees together) gives each row bits that depend neither on K
nor on the other rows."""


def bucket(size: int, batch: int = 1) -> int:
    """The captured size K for a tree of `size` nodes; in a batch, for the largest of its trees."""
    sizes = STEP_SIZES if batch == 1 else BATCH_SIZES
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else -(-size // 512) * 512


def sizes_to(most: int) -> list[int]:
    """All captured sizes that a single sequence needs for trees of up to `most` nodes."""
    last = bucket(most)
    return [*(size for size in STEP_SIZES if size < last), last]
