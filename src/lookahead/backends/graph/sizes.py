"""Sizes of captured steps: a step is padded to the next size, so that a few graphs serve all steps."""

from __future__ import annotations

from bisect import bisect_left

PAGE = 64
"""Tokens per K/V page. Attention reads keys in blocks of 64, so that a block never crosses a page."""
ROW_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Captured numbers of rows, summed over all sequences. Padding is cheap up to about 128 rows, where reading the weights
takes the time anyway; beyond that every row costs."""
MOST_NEEDED = 512
"""Maximum number of needed rows of a step, whose logits are computed."""
FEW_NEEDED = 64
"""Larger steps that need at most this many rows compute only this many rows of logits: they are mostly prompt."""
INVARIANT_ROWS = 128
"""The number of rows whose matrix products define the bits of all other sizes (see `products`)."""
INVARIANT_NODES = 256
"""Maximum number of nodes of a tree in an invariant step."""

MOST_STATE_NODES = 256
"""Maximum nodes of all trees of a step of a model with recurrent states. The inputs of each node are kept in every such
layer until they are accepted or dropped, and take about as much memory as K/V."""


def bucket(rows: int) -> int:
    """The captured size of a step of this many rows."""
    index = bisect_left(ROW_SIZES, rows)
    if index == len(ROW_SIZES):
        raise ValueError(f"a step of {rows} rows; at most {ROW_SIZES[-1]} are captured")
    return ROW_SIZES[index]


def needed_bucket(rows: int, needed: int) -> int:
    """The number of rows whose logits a captured step of `rows` rows computes, if `needed` are needed."""
    if needed > MOST_NEEDED:
        raise ValueError(f"a step that needs {needed} rows of logits; at most {MOST_NEEDED} are computed")
    return min(rows, FEW_NEEDED if needed <= FEW_NEEDED else MOST_NEEDED)


def sizes_to(most: int) -> list[int]:
    """All captured sizes for steps of up to `most` rows."""
    last = bucket(min(most, ROW_SIZES[-1]))
    return [size for size in ROW_SIZES if size <= last]
