"""The packet: all numbers that the host sends the device for one step, in one piece of memory that is copied once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import MOST_AHEAD, StepInput

MOST_ENTRIES = 256
"""The most sequences of a step."""
SPARE_MOVES = 64
"""A packet has room for this many moves of accepted K/V more than the step has rows. If the step before accepted more
tokens, they are moved by a launch of their own."""
ENTRY = 5
"""Numbers per entry: its line in the page tables, its cached tokens, its first row, its trail's rows and its tree's
rows."""
TILE = 6
"""Numbers per tile: its sequence's line in the page tables, the tokens before its tree (those of its trail included),
the first row of the trail or tree that it is part of, how many rows that has, which block of queries the tile is, and 1
for a tree. A tile repeats what its entry says, because a program that has to look up one after the other waits."""

NOT_DRAWN = (0.0, 0.0, 1.0, 0.0)
"""The settings of a row whose target is the argmax."""


class Packet:
    """The numbers of one step of R rows, as named fields, int32 unless noted.

    An *entry* is one sequence's part of the step. Its rows are its trail (tokens to be cached, in the text's order) and
    then the nodes of its tree. A *tile* is a block of queries of one entry, all of its trail or all of its tree, which
    one program of attention works on.

    counts [2]         how many tiles and commits there are
    tokens [R]         the rows' tokens
    entry_of [R]       the rows' entries, -1 for a row that pads the step
    parents [R]        the rows' parents as nodes of their tree, -1 for a root and in a trail
    entries [E, 5]     see `ENTRY`
    tiles [T, 6]       see `TILE`
    commits [E, 2]     for each sequence whose accepted K/V move: its first move, and how many it has
    moves [M, 2]       from where to where, as places in the pool of pages
    needed [N]         the rows whose logits are needed
    draws [N, 5]       float64: how each needed row's target is drawn (see `kernels.draw`)
    next_uniforms [N, 32]  float64: the uniforms of the steps ahead
    noise [N]          the line of noise that decides a needed row's draw, -1 for the argmax

    The last three are there only if targets are drawn.

    `fields` are NumPy views of the host's memory, `views` gives the same views of a copy on the device.
    """

    def __init__(self, rows: int, needed: int, tiles: int, pinned: bool, *, drawn: bool = False) -> None:
        entries = min(rows, MOST_ENTRIES)
        parts: dict[str, tuple[tuple[int, ...], int]] = {
            "draws": ((needed if drawn else 0, 5), 2),
            "next_uniforms": ((needed if drawn else 0, MOST_AHEAD), 2),
            "counts": ((2,), 1),
            "tokens": ((rows,), 1),
            "entry_of": ((rows,), 1),
            "parents": ((rows,), 1),
            "entries": ((entries, ENTRY), 1),
            "tiles": ((tiles, TILE), 1),
            "commits": ((entries, 2), 1),
            "moves": ((rows + SPARE_MOVES, 2), 1),
            "needed": ((needed,), 1),
            "noise": ((needed if drawn else 0,), 1),
        }
        self._places: dict[str, tuple[int, int, tuple[int, ...], bool]] = {}
        start = 0
        for name, (shape, words) in parts.items():
            end = start + words * int(np.prod(shape))
            self._places[name] = start, end, shape, words == 2
            start = end
        self.host = torch.zeros(start, dtype=torch.int32, pin_memory=pinned)
        numbers = self.host.numpy()
        self.fields: dict[str, np.ndarray[Any, Any]] = {
            name: (numbers[a:b].view(np.float64) if wide else numbers[a:b]).reshape(shape)
            for name, (a, b, shape, wide) in self._places.items()
        }
        # Arrays grow, join and are copied in C: NumPy would take a microsecond for each of these.
        self._memory = memoryview(numbers)  # type: ignore[arg-type]
        self._zeros, self._minus_ones = array("i", [0]) * rows, array("i", [-1]) * rows
        self._counting = array("i", range(rows))
        self.entries_room, self.moves_room = entries, rows + SPARE_MOVES
        self.begin()

    def begin(self) -> None:
        """Start a new step: no entries yet."""
        self._tokens, self._entry_of, self._parents, self._needed = array("i"), array("i"), array("i"), array("i")
        self._entries, self._tiles = list[int](), list[int]()
        # Of the draws: the settings of each entry, how many rows they are for, and the uniforms of these.
        self._settings, self._drawn_rows, self._uniforms = list[tuple[float, ...]](), list[int](), array("d")

    def put(self, line: int, length: int, trail: Sequence[int], tree: TokenTree, queries: tuple[int, int]) -> int:
        """Write an entry. Returns where its needed rows begin.

        `line` is the sequence's line in the page tables, `length` its cached tokens. `queries` are how many queries a
        row has per K/V head, and how many a tile has.
        """
        first, trail_rows, nodes = len(self._tokens), len(trail), len(tree.tokens)
        root = first + trail_rows
        if trail:
            self._tokens.extend(trail)
            self._parents += self._minus_ones[:trail_rows]
            self._add_tiles(line, length + trail_rows, first, trail_rows, queries, 0)
        if nodes:
            self._tokens += tree.tokens
            self._parents += tree.parents
            self._add_tiles(line, length + trail_rows, root, nodes, queries, 1)
        self._entry_of += array("i", (len(self._entries) // ENTRY,)) * (trail_rows + nodes)
        self._entries += line, length, first, trail_rows, nodes
        start, needed = len(self._needed), tree.needed
        if len(needed) == nodes:  # all of them
            self._needed += self._counting[root : root + nodes]
        else:
            self._needed.extend([root + node for node in needed])
        return start

    def put_draws(self, start: int, item: StepInput) -> None:
        """Write how the targets of an input's needed rows, from `start` on, are drawn: not at all without uniforms and
        without noise. This is called for every entry, or for none."""
        rows, sampling, settings = len(item.tree.needed), item.sampling, NOT_DRAWN
        if item.uniforms or item.noise:
            settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        self._settings.append(settings)
        self._drawn_rows.append(rows)
        self._uniforms.extend(item.uniforms or [0.0] * rows)
        if item.next_uniforms:
            self.fields["next_uniforms"][start, : len(item.next_uniforms)] = item.next_uniforms
        if item.noise:
            self.fields["noise"][start : start + rows] = item.noise

    def _add_tiles(self, line: int, end: int, first: int, rows: int, queries: tuple[int, int], is_tree: int) -> None:
        group, block = queries
        for number in range(-(-rows * group // block)):
            self._tiles += line, end, first, rows, number, is_tree

    def end(self, commits: Sequence[int], moves: Sequence[int]) -> None:
        """Write what the entries gave, and the moves of accepted K/V, flat as in the fields."""
        places, memory = self._places, self._memory
        for name, numbers, rest in (
            ("tokens", self._tokens, self._zeros),
            ("entry_of", self._entry_of, self._minus_ones),
            ("parents", self._parents, self._minus_ones),
            ("needed", self._needed, self._zeros),
        ):
            start, end, *_ = places[name]
            middle = start + len(numbers)
            memory[start:middle] = numbers
            memory[middle:end] = rest[: end - middle]
        for name, flat in (("entries", self._entries), ("tiles", self._tiles), ("commits", commits), ("moves", moves)):
            start = places[name][0]
            memory[start : start + len(flat)] = array("i", flat)
        start = places["counts"][0]
        memory[start : start + 2] = array("i", (len(self._tiles) // TILE, len(commits) // 2))
        if len(self.fields["draws"]):
            self._end_draws()

    def _end_draws(self) -> None:
        """Write the settings and the uniforms of the needed rows."""
        draws, count = self.fields["draws"], len(self._needed)
        if len(set(self._settings)) == 1:
            draws[:count, :4] = self._settings[0]
        else:
            draws[:count, :4] = np.repeat(self._settings, self._drawn_rows, axis=0)
        draws[:count, 4] = self._uniforms
        draws[count:, 0] = 0.0

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {
            name: (memory[a:b].view(torch.float64) if wide else memory[a:b]).view(shape)
            for name, (a, b, shape, wide) in self._places.items()
        }
