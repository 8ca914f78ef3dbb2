"""The small inputs of a step: its rows, their K/V cells, and what each row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.algorithm.tree import below_chunk
from lookahead.algorithm.visibility import dense_visibility
from lookahead.backends.base import StepInput
from lookahead.backends.cpu.cells import BLOCK, Integers, cells_of, positions_of
from lookahead.backends.cpu.groups import Group
from lookahead.backends.cpu.lower_attention import HIDDEN


@dataclass(frozen=True)
class BatchSequence:
    """A sequence of a run: its input, its index in the K/V buffer, its number of cached tokens, the shift of its
    positions, and its rows' cells."""

    input: StepInput
    index: int
    length: int
    shift: int
    cells: Integers

    @classmethod
    def of(cls, one: StepInput, index: int, length: int, shift: int) -> BatchSequence:
        return cls(one, index, length, shift, cells_of(length, len(one.chunk), one.tree.depths))

    @property
    def blocks(self) -> int:
        """How many blocks the rows read or write."""
        return int(self.cells.max()) // BLOCK + 1


def layout(
    batch: Sequence[BatchSequence], blocks: int, groups: Sequence[Group]
) -> tuple[dict[str, Any], Integers, Integers]:
    """The inputs of `lower` for the rows' cells and masks, for a run on these blocks; the rows' positions [R]; and the
    rows in the columns of each sequence [L, P], any row where a sequence has fewer.

    The sequences' indices must be adjacent, in any order.
    """
    first = min(sequence.index for sequence in batch)
    sequences = max(sequence.index for sequence in batch) - first + 1
    sizes = [len(sequence.cells) for sequence in batch]
    # A product with a single row has another kernel, which sums in another order.
    width = max(max(sizes), 2 if any(group.sharing == 1 for group in groups) else 1)
    padded = np.zeros((sequences, width), dtype=np.int64)
    reaches = dict.fromkeys(group.reach for group in groups)
    masks = {reach: np.full((sequences, width, blocks * BLOCK), HIDDEN, dtype=np.float32) for reach in reaches}
    home = positions_of(blocks * BLOCK)
    tokens, positions, needed, unpadded = [], [], list[int](), []
    start = 0
    for sequence, size in zip(batch, sizes, strict=True):
        index = sequence.index - first
        tree = below_chunk(sequence.input.chunk, sequence.input.tree) if sequence.input.tree.tokens else None
        rows = np.arange(start, start + size)
        padded[index] = rows[0]
        padded[index, :size] = rows
        unpadded.append(index * width + np.arange(size))
        own = sequence.length + (np.arange(size) if tree is None else np.asarray(tree.depths, dtype=np.int64))
        seen = np.tri(size, dtype=np.bool_) if tree is None else dense_visibility(tree.parents)
        for reach, mask in masks.items():
            mask[index, :size] = visible(own, seen, sequence, home, reach)
        tokens.append(np.asarray(sequence.input.chunk if tree is None else tree.tokens, dtype=np.int64))
        positions.append(own + sequence.shift)
        needed += [] if tree is None else [start + node for node in tree.needed]
        start += size
    inputs: dict[str, Any] = {
        "tokens": np.concatenate(tokens),
        "ones": np.ones((2, blocks), dtype=np.float32),
        "needed": np.asarray(needed or [0], dtype=np.int64),
    }
    cells, spots = np.concatenate([sequence.cells for sequence in batch]), np.concatenate(unpadded)
    for group in groups:
        if group.input("query") not in inputs:
            made = vectors(padded, spots, group)
            if group.own_kv:
                made |= key_vectors(len(spots), group) | {"cells": written(spots // width, cells, group)}
            inputs |= {group.input(kind): array for kind, array in made.items()}
        if group.sinks and group.input("maxima") not in inputs:
            inputs[group.input("maxima")] = per_head(spots, width, group)[..., None]
        if group.input("mask") not in inputs:
            inputs[group.input("mask")] = per_block(masks[group.reach], blocks, group)
    return inputs, np.concatenate(positions), padded


def vectors(padded: Integers, unpadded: Integers, group: Group) -> dict[str, Integers]:
    """The inputs with the indices of the rows' query and output vectors.

    `padded` [L, P] are the rows in the columns of each sequence, and `unpadded` [R] the rows' indices among all L P.
    """
    sequences, width = padded.shape
    kv_heads, sharing = group.kv_heads, group.sharing
    head = np.arange(group.heads).reshape(kv_heads, sharing, 1)
    query = (padded[:, None, None] * group.vectors + head).reshape(sequences, 1, kv_heads, sharing * width)
    # Results are [L, 2, heads, P]; both halves of a sequence are the same.
    return {"query": query, "answers": per_head(unpadded, width, group, copies=2)}


def key_vectors(rows: int, group: Group) -> dict[str, Integers]:
    """The inputs with the indices of the rows' key and value vectors, each [R, Hkv]."""
    key = np.arange(rows)[:, None] * group.vectors + group.heads + np.arange(group.kv_heads)
    return {"key": key, "value": key + group.kv_heads}


def per_head(unpadded: Integers, width: int, group: Group, copies: int = 1) -> Integers:
    """Indices of each row's heads [R, H] in the first of `copies` for each sequence: among [L, copies, heads, P]."""
    index, column = np.divmod(unpadded, width)
    return (index[:, None] * copies * group.heads + np.arange(group.heads)) * width + column[:, None]


def written(sequences: Integers, cells: Integers, group: Group) -> Integers:
    """Indices of the K/V of rows in these sequences [R] and cells [R]: sequence, block, K/V head and cell in the block,
    [1, R, Hkv, 4]."""
    spots = np.empty((1, len(cells), group.kv_heads, 4), dtype=np.int64)
    spots[..., 0] = sequences[:, None]
    spots[..., 1], spots[..., 3] = (cells // BLOCK)[:, None], (cells % BLOCK)[:, None]
    spots[..., 2] = np.arange(group.kv_heads)
    return spots


def visible(
    own: Integers, seen: Any, sequence: BatchSequence, home: Integers, reach: tuple[int | None, int | None]
) -> np.ndarray[Any, Any]:
    """What rows with the indices `own` [n] in their sequence see of its cells: 0 or HIDDEN, [n, cells].

    They see the cached tokens, and those of the step's tokens that `seen` [n, n] allows; with a window and a chunk as
    their `reach` only the last `window` tokens, and those of the same chunk.
    """
    cached = home < sequence.length
    if reach == (None, None):
        mask = np.broadcast_to(np.where(cached, np.float32(0), np.float32(HIDDEN)), (len(own), len(home))).copy()
    else:
        mask = np.where(cached[None] & near(own, home, *reach), np.float32(0), np.float32(HIDDEN))
        seen = seen & near(own, own, *reach)
    mask[:, sequence.cells] = np.where(seen, np.float32(0), np.float32(HIDDEN))
    return mask


def near(rows: Integers, others: Integers, window: int | None, chunk: int | None) -> np.ndarray[Any, Any]:
    """Whether tokens with the indices `rows` [n] see those with the indices `others` [m], [n, m], as to distance."""
    found = np.ones((len(rows), len(others)), dtype=np.bool_)
    if window is not None:
        found &= rows[:, None] - others[None] < window
    if chunk is not None:
        found &= rows[:, None] // chunk == others[None] // chunk
    return found


def per_block(mask: np.ndarray[Any, Any], blocks: int, group: Group) -> np.ndarray[Any, Any]:
    """A mask [L, P, cells] as attention reads it: [L, B, 1, G P, BLOCK], the same for all query heads of a K/V head."""
    sequences, width, _ = mask.shape
    split = mask.reshape(sequences, width, blocks, BLOCK).transpose(0, 2, 1, 3)[:, :, None]
    spread = np.broadcast_to(split, (sequences, blocks, group.sharing, width, BLOCK))
    return np.ascontiguousarray(spread).reshape(sequences, blocks, 1, group.sharing * width, BLOCK)
