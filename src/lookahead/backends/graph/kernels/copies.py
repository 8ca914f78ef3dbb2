"""Copies of a step, one launch each: the packet and results from and to pinned memory, and accepted K/V."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_pinned(source, target, size, BLOCK: tl.constexpr):
    """Grid: (blocks of numbers)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a few integers [n] from or to pinned memory, with a kernel.

    In a captured step the GPU's copy engine takes several microseconds to start and stop, a kernel one or two.
    """
    _copy_pinned[(triton.cdiv(source.numel(), 512),)](source, target, source.numel(), BLOCK=512)


@triton.jit
def _copy_packet(source, target, size, changed, changes, tables, BLOCK: tl.constexpr):
    """Grid: (blocks of numbers, and one program for the page-table updates)."""
    block = tl.program_id(0)
    if block < tl.num_programs(0) - 1:
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
    else:
        count = tl.load(changed)
        for first in range(0, count, BLOCK):
            change = first + tl.arange(0, BLOCK)
            index = tl.load(changes + 2 * change, mask=change < count, other=0)
            page = tl.load(changes + 2 * change + 1, mask=change < count, other=0)
            tl.store(tables + index, page, mask=change < count)


def copy_packet(
    source: torch.Tensor,
    target: torch.Tensor,
    changed: torch.Tensor,
    changes: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Copy a packet [n] from pinned memory, as `copy_pinned` does, and apply its page-table updates.

    `changed` [1] and `changes` [C, 2] are fields of `source`: the number of updates, and each one's index into the
    flattened `tables` and its page. All are int32. Programs do not wait for each other, so the updates are read from
    `source`. No index occurs twice.
    """
    _copy_packet[(triton.cdiv(source.numel(), 512) + 1,)](
        source, target, source.numel(), changed, changes, tables, BLOCK=512
    )  # fmt: skip


@triton.jit
def _move_accepted(
    cache, counts, commits, moves, pages, width, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (layers x 2, sequences at a time, blocks of heads and columns). A sequence's moves run one after the other:
    each reads a cell that only later moves write."""
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = column // DIM * PAGE * DIM + column % DIM
    base = cache + tl.program_id(0).to(tl.int64) * pages * width * PAGE
    for commit in range(tl.program_id(1), tl.load(counts + 1), tl.num_programs(1)):
        first = tl.load(commits + 2 * commit)
        for i in range(first, first + tl.load(commits + 2 * commit + 1)):
            source = tl.load(moves + 2 * i).to(tl.int64)
            target = tl.load(moves + 2 * i + 1).to(tl.int64)
            value = tl.load(base + source // PAGE * width * PAGE + source % PAGE * DIM + at, mask=inside)
            tl.store(base + target // PAGE * width * PAGE + target % PAGE * DIM + at, value, mask=inside)


def move_accepted(cache: torch.Tensor, counts: torch.Tensor, commits: torch.Tensor, moves: torch.Tensor) -> None:
    """Commit: move the accepted nodes' K/V next to their prefix, in place. The roots are there already.

    cache [layers, 2, pages, Hkv, PAGE, D]. int32: counts [2], whose second number is the number of commits; commits
    [B, 2], each one's first move and number of moves; moves [M, 2], source and target cell.
    """
    layers, two, pages, heads, page, dim = cache.shape
    width = heads * dim
    block = min(2048, triton.next_power_of_2(width))
    _move_accepted[(layers * two, min(8, len(commits)), triton.cdiv(width, block))](
        cache, counts, commits, moves, pages, width, DIM=dim, PAGE=page, BLOCK=block, num_warps=4,
    )  # fmt: skip
