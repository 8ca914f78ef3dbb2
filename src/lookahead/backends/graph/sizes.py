"""The sizes that steps are captured in: a step is padded to the next size, so that few graphs serve every step."""

from __future__ import annotations

from bisect import bisect_left

PAGE = 64
"""Tokens per page of the K/V. Attention reads keys in blocks of 64, so that a block lies in one page."""
ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Captured numbers of rows, of all sequences together. Padding costs little up to about 128 rows, because a GPU waits
for the weights to be read anyway; beyond that every row costs."""
MOST_NEEDED = 512
"""The most needed rows of a step: logits are computed for so many at most."""
FEW_NEEDED = 64
"""A larger step that needs no more rows than this computes no more logits: it is mostly a prompt."""
INVARIANT_ROWS = 128
"""The number of rows whose matrix products give the bits that all other sizes must give (see `products`). An invariant
step's trees have at most so many nodes each."""


def bucket(rows: int) -> int:
    """The captured size of a step of so many rows."""
    place = bisect_left(ROW_SIZES, rows)
    if place == len(ROW_SIZES):
        raise ValueError(f"a step of {rows} rows; at most {ROW_SIZES[-1]} are captured")
    return ROW_SIZES[place]


def needed_bucket(rows: int, needed: int) -> int:
    """For how many rows a captured step of `rows` rows computes logits, if `needed` are needed."""
    if needed > MOST_NEEDED:
        raise ValueError(f"a step that needs {needed} rows of logits; at most {MOST_NEEDED} are computed")
    return min(rows, FEW_NEEDED if needed <= FEW_NEEDED else MOST_NEEDED)


def sizes_to(most: int) -> list[int]:
    """All captured sizes that are needed for steps of up to `most` rows."""
    last = bucket(min(most, ROW_SIZES[-1]))
    return [size for size in ROW_SIZES if size <= last]
