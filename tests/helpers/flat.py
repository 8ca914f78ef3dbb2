"""Flat steps for kernel tests: sequences with random pages, chunks and trees, described as a packet describes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.graph.kernels import reference_heads
from lookahead.backends.graph.kernels.rows import Rows, new_rows
from lookahead.backends.graph.packet import Packet
from lookahead.backends.graph.sizes import PAGE


@dataclass
class Part:
    """One sequence of a step: its cached tokens, its chunk's length, its tree's parents, and its prompt's length."""

    length: int
    chunk: int = 0
    parents: Sequence[int] = (-1,)
    prompt: int = 0

    @property
    def end(self) -> int:
        return self.length + self.chunk + len(self.parents)


def tree_of(parents: Sequence[int]) -> TokenTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return TokenTree([1] * len(parents), parents, depths, range(len(parents)))


def random_parents(count: int, rng: random.Random, reach: int = 9) -> list[int]:
    return [-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, count))][:count]


def tables_of(parts: Sequence[Part], device: torch.device, seed: int = 0) -> tuple[torch.Tensor, int]:
    """Page tables [sequences + 1, longest] with pages in random order, and how many there are. Page 0 is spare."""
    counts = [-(-part.end // PAGE) for part in parts]
    pages = list(range(1, sum(counts) + 3))
    random.Random(seed).shuffle(pages)
    table = torch.zeros(len(parts) + 1, max(counts), dtype=torch.int32)
    for slot, count in enumerate(counts):
        table[slot, :count] = torch.tensor([pages.pop() for _ in range(count)])
    return table.to(device), sum(counts) + 3


def rows_of(
    parts: Sequence[Part],
    tables: torch.Tensor,
    queries: tuple[int, int],
    *,
    padding: int = 0,
    slots: Sequence[int] | None = None,
) -> Rows:
    """The located rows of a step of these parts, plus `padding` rows. Part i has page-table slot slots[i]."""
    size = sum(part.chunk + len(part.parents) for part in parts) + padding
    group, block = queries
    packet = Packet(size, size, [2 * len(parts) + -(-size * group // block)], 1, False)
    packet.begin()
    chunks, trees = [[1] * part.chunk for part in parts], [tree_of(part.parents) for part in parts]
    packet.write_rows(slots or range(len(parts)), [part.length for part in parts], chunks, trees, [queries])
    packet.write_commits((), [()])
    most = max(len(part.parents) for part in parts)
    rows = new_rows(packet.views(packet.host.to(tables.device)), 0, tables, max(32, most))
    reference_heads.locate_rows(rows)
    return rows
