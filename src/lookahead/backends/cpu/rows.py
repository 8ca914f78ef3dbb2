"""The small inputs of a step: which rows it has, where their K/V go, and what each row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.algorithm.tree import below_trail, dense_visibility
from lookahead.backends.base import StepInput
from lookahead.backends.cpu.cells import BLOCK, Integers, place, positions_of
from lookahead.backends.cpu.describe import HIDDEN


@dataclass(frozen=True)
class Part:
    """One sequence's rows of a run: its input, its lane, how many of its tokens are cached, by how much positions are
    shifted, and the rows' cells."""

    item: StepInput
    lane: int
    length: int
    shift: int
    cells: Integers

    @classmethod
    def of(cls, item: StepInput, lane: int, length: int, shift: int) -> Part:
        return cls(item, lane, length, shift, place(length, len(item.trail), item.tree.depths))

    @property
    def blocks(self) -> int:
        """How many blocks the rows read or write."""
        return int(self.cells.max()) // BLOCK + 1


def layout(parts: Sequence[Part], blocks: int, kv_heads: int, group: int, windows: Sequence[int]) -> dict[str, Any]:
    """The inputs of `describe` that say where rows stand, and the rows' `positions`, for runs on these blocks.

    The parts' lanes must be next to each other, in any order.
    """
    first = min(part.lane for part in parts)
    lanes = max(part.lane for part in parts) - first + 1
    sizes = [len(part.cells) for part in parts]
    # A product with a single row has a kernel of its own, which adds up in another order.
    places = max(max(sizes), 2 if group == 1 else 1)
    padded = np.zeros((lanes, places), dtype=np.int64)  # the row at each place
    masks = {window: np.full((lanes, places, blocks * BLOCK), HIDDEN, dtype=np.float32) for window in windows}
    home = positions_of(blocks * BLOCK)
    tokens, positions, needed, written, unpadded = [], [], list[int](), [], []
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        lane = part.lane - first
        tree = below_trail(part.item.trail, part.item.tree) if part.item.tree.tokens else None
        rows = np.arange(start, start + size)
        padded[lane] = rows[0]
        padded[lane, :size] = rows
        unpadded.append(lane * places + np.arange(size))
        own = part.length + (np.arange(size) if tree is None else np.asarray(tree.depths, dtype=np.int64))
        seen = np.tri(size, dtype=np.bool_) if tree is None else dense_visibility(tree.parents)
        for window, mask in masks.items():
            mask[lane, :size] = visible(own, seen, part, home, window)
        tokens.append(np.asarray(part.item.trail if tree is None else tree.tokens, dtype=np.int64))
        positions.append(own + part.shift)
        needed += [] if tree is None else [start + node for node in tree.needed]
        spots = np.empty((size, kv_heads, 4), dtype=np.int64)
        spots[..., 0] = lane
        spots[..., 1], spots[..., 3] = (part.cells // BLOCK)[:, None], (part.cells % BLOCK)[:, None]
        spots[..., 2] = np.arange(kv_heads)
        written.append(spots)
        start += size
    return {
        "tokens": np.concatenate(tokens),
        "positions": np.concatenate(positions),
        "cells": np.concatenate(written)[None],
        **vectors(padded, np.concatenate(unpadded), kv_heads, group),
        "ones": np.ones((2, blocks), dtype=np.float32),
        "needed": np.asarray(needed or [0], dtype=np.int64),
        **{f"mask_{window}": per_block(mask, blocks, group) for window, mask in masks.items()},
    }


def vectors(padded: Integers, unpadded: Integers, kv_heads: int, group: int) -> dict[str, Integers]:
    """The inputs that say which of the rows' vectors stands where.

    `padded` [L, P] are the rows at the places, and `unpadded` [R] the rows' places among all L P.
    """
    lanes, places = padded.shape
    heads, rows = kv_heads * group, len(unpadded)
    each = heads + 2 * kv_heads
    head = np.arange(heads).reshape(kv_heads, group, 1)
    query = (padded[:, None, None] * each + head).reshape(lanes, 1, kv_heads, group * places)
    key = np.arange(rows)[:, None] * each + heads + np.arange(kv_heads)
    # Results stand as [L, 2, heads, P]; both of a lane's halves are the same.
    lane, place = np.divmod(unpadded, places)
    answers = (lane[:, None] * 2 * heads + np.arange(heads)) * places + place[:, None]
    everything = np.arange(rows * each)[None]
    return {"vectors": everything, "query": query, "key": key, "value": key + kv_heads, "answers": answers}


def visible(own: Integers, seen: Any, part: Part, home: Integers, window: int) -> np.ndarray[Any, Any]:
    """What rows at the places `own` [n] see of a lane's cells: 0 or HIDDEN, [n, cells].

    They see the cached tokens, and those of the step's tokens that `seen` [n, n] allows; with a window only the last
    `window` places.
    """
    cached = home < part.length
    if not window:
        mask = np.broadcast_to(np.where(cached, np.float32(0), np.float32(HIDDEN)), (len(own), len(home))).copy()
    else:
        near = own[:, None] - home[None] < window
        mask = np.where(cached[None] & near, np.float32(0), np.float32(HIDDEN))
        seen = seen & (own[:, None] - own[None] < window)
    mask[:, part.cells] = np.where(seen, np.float32(0), np.float32(HIDDEN))
    return mask


def per_block(mask: np.ndarray[Any, Any], blocks: int, group: int) -> np.ndarray[Any, Any]:
    """A mask [L, P, cells] as attention reads it: [L, B, 1, G P, BLOCK], the same for each of a group's heads."""
    lanes, places, _ = mask.shape
    split = mask.reshape(lanes, places, blocks, BLOCK).transpose(0, 2, 1, 3)[:, :, None]
    spread = np.broadcast_to(split, (lanes, blocks, group, places, BLOCK))
    return np.ascontiguousarray(spread).reshape(lanes, blocks, 1, group * places, BLOCK)
