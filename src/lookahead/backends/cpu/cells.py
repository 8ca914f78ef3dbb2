"""Where keys and values are: cells in blocks, so that a token adds up its values in the same order in every step.

A sum of floats depends on the order of its terms and on how the kernel divides it. A block has BLOCK cells, and one
matrix product sums one block, cell by cell. Blocks are then summed one by one. Masked cells add exact zeros. So a
token's sum is the same, bit for bit, if two things hold whatever else is in the step:

- a position always belongs to the same block;
- in a block, the cells that the token sees are in the order of positions.

The first HOME cells of a block are the *home cells* of HOME consecutive positions, for accepted tokens. The other SPARE
cells are for a step's further nodes. A step's nodes take the cells from the root's on, in their order
(parents before children), each in the block of its position. So a chain is in its home cells already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 128
"""Cells per block. ONNX Runtime's matrix product divides sums after 128 terms or more, so never inside a block."""
SPARE = 32
"""Cells of a block that are no position's home cell. A tree of SPARE + 1 nodes always fits."""
HOME = BLOCK - SPARE
"""Positions that have their home cells in one block."""

Integers = npt.NDArray[np.int64]


def home(positions: Integers) -> Integers:
    """The home cells of these positions."""
    return positions // HOME * BLOCK + positions % HOME


def positions_of(cells: int) -> Integers:
    """Per cell, the position whose home it is; for a spare cell, a position that no text reaches."""
    cell = np.arange(cells)
    return np.where(cell % BLOCK < HOME, cell // BLOCK * HOME + cell % BLOCK, np.iinfo(np.int64).max)


def blocks_for(tokens: int) -> int:
    """The number of blocks that hold the home cells of this number of tokens."""
    return -(-tokens // HOME)


def cells_of(length: int, chunk: int, depths: Sequence[int]) -> Integers:
    """The cells of a prompt chunk of `chunk` tokens behind `length` cached ones, and of a tree's nodes behind it.

    `depths` are the nodes' depths, the root's first, or nothing without a tree. Nodes that find no cell in the block of
    their position (in a tree of more than SPARE + 1 nodes) go into further blocks. Their sums are then right, too, but
    may be rounded otherwise.
    """
    chain = home(np.arange(length, length + chunk))
    if not len(depths):
        return chain
    root = length + chunk
    block = (root + np.asarray(depths, dtype=np.int64)) // HOME
    cells = np.empty(len(block), dtype=np.int64)
    first = int(home(np.array([root]))[0])
    last = int(block.max())
    spilled = [chain[:0]]
    for number in range(root // HOME, last + 1):
        nodes = np.flatnonzero(block == number)
        start = max(first, number * BLOCK)
        room = (number + 1) * BLOCK - start
        cells[nodes[:room]] = start + np.arange(min(room, len(nodes)))
        spilled.append(nodes[room:])
    rest = np.sort(np.concatenate(spilled))
    cells[rest] = (last + 1) * BLOCK + np.arange(len(rest))
    return np.concatenate([chain, cells])
