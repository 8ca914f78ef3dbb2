"""The rows of a step: their positions, K/V cells and ancestors, from what the packet says of their sequences."""

from __future__ import annotations

import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import load_sequence
from lookahead.backends.graph.kernels.rows import PATH, Rows
from lookahead.backends.graph.sizes import PAGE


@triton.jit
def _locate_rows(
    sequence_of, parents, sequences, tables, shifts, positions, rotary, cells, bits, paths,
    rows, words, longest, furthest,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). Every node of a tree climbs to its root and collects its ancestors."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence = tl.load(sequence_of + row, mask=inside, other=-1)
    used = sequence >= 0
    slot, length, chunk, first_row = load_sequence(sequences, tl.maximum(sequence, 0), used)
    root = first_row + chunk
    node = row - root  # below 0 in a chunk
    word = tl.arange(0, WORDS)
    seen = tl.zeros((BLOCK, WORDS), tl.int32)
    depth = tl.zeros((BLOCK,), tl.int32) - 1
    above = tl.arange(0, PATH)  # how far above a node its ancestors are
    ancestors = tl.zeros((BLOCK, PATH), tl.int32)
    at = tl.where(used & (node >= 0), node, -1)
    while tl.max(at, 0) >= 0:
        climbing = at >= 0
        bit = tl.where(climbing, 1 << (tl.maximum(at, 0) % 32), 0)
        seen |= tl.where((tl.maximum(at, 0) // 32)[:, None] == word[None, :], bit[:, None], 0)
        depth += climbing.to(tl.int32)
        ancestors = tl.where(climbing[:, None] & (above[None, :] == depth[:, None]), at[:, None], ancestors)
        at = tl.load(parents + root + at, mask=climbing, other=-1)
    position = length + chunk + tl.where(node >= 0, depth, node)
    # Padding rows write to page 0, which is never read.
    index = length + chunk + node
    page = tl.load(tables + slot * longest + index // PAGE, mask=used, other=0)
    position = tl.where(used, position, 0)
    tl.store(positions + row, position, mask=inside)
    if shifts is not None:
        shifted = position + tl.load(shifts + slot, mask=used, other=0)
        tl.store(rotary + row, tl.minimum(tl.maximum(shifted, 0), furthest), mask=inside)
    tl.store(cells + row, tl.where(used, page * PAGE + index % PAGE, row % PAGE), mask=inside)
    tl.store(bits + row[:, None] * words + word[None, :], seen, mask=inside[:, None] & (word < words)[None, :])
    # The cells of the path through the row's own block of positions: of its ancestors, and before the root of the text.
    index = (length + chunk)[:, None] + tl.where(above[None, :] <= depth[:, None], ancestors, depth[:, None] - above)
    at = (position % PATH)[:, None] - above[None, :]
    is_path = (used & (node >= 0))[:, None] & (at >= 0)
    page = tl.load(tables + slot[:, None] * longest + index // PAGE, mask=is_path, other=0)
    cell = tl.where(is_path, page * PAGE + index % PAGE, -1)
    tl.store(paths + row[:, None] * PATH + tl.where(at >= 0, at, at + PATH), cell, mask=inside[:, None])


def locate_rows(rows: Rows) -> None:
    """Compute the rows' positions, K/V cells, ancestor bits and paths from their sequences and parents; see `Rows`."""
    size, words = rows.bits.shape
    _locate_rows[(triton.cdiv(size, 32),)](
        rows.sequence_of, rows.parents, rows.sequences, rows.tables, rows.shifts, rows.positions, rows.rotary,
        rows.cells, rows.bits, rows.paths, size, words, rows.tables.shape[1], rows.furthest,
        PAGE=PAGE, BLOCK=32, WORDS=triton.next_power_of_2(words), PATH=PATH, num_warps=1,
    )  # fmt: skip
