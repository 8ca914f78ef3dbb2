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

NO_PARENT = NO_MASK = array("i", (-1,))
NO_RULES = (1.0, 0.0, 0.0, 0.0)
"""The `rules` of an entry whose logits are taken as they come."""
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

    The last three are there only if targets are drawn. The next are there only if logits are adjusted
    (see `kernels.adjust`):

    line_of [E]        the entries' lines in the tables of counts and biases, or -1
    rules [E, 4]       float32: the entries' penalties, and whether they have a bias
    mask_of [N]        the needed rows' masks, -1 for none
    counted [2, C]     tokens that were accepted since the last step: the lines to count them in, and the tokens

    `fields` are NumPy views of the host's memory, `views` gives the same views of a copy on the device.
    """

    def __init__(
        self, rows: int, needed: int, tiles: int, pinned: bool, *, drawn: bool = False, adjusted: bool = False
    ) -> None:
        entries, moves = min(rows, MOST_ENTRIES), rows + SPARE_MOVES
        whole, single, double = torch.int32, torch.float32, torch.float64
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "draws": ((needed if drawn else 0, 5), double),
            "next_uniforms": ((needed if drawn else 0, MOST_AHEAD), double),
            "counts": ((2,), whole),
            "tokens": ((rows,), whole),
            "entry_of": ((rows,), whole),
            "parents": ((rows,), whole),
            "entries": ((entries, ENTRY), whole),
            "tiles": ((tiles, TILE), whole),
            "commits": ((entries, 2), whole),
            "moves": ((moves, 2), whole),
            "needed": ((needed,), whole),
            "noise": ((needed if drawn else 0,), whole),
        }
        if adjusted:
            parts["line_of"] = (entries,), whole
            parts["rules"] = (entries, 4), single
            parts["mask_of"] = (needed,), whole
            parts["counted"] = (2, moves), whole
        self._places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        start = 0
        for name, (shape, dtype) in parts.items():
            end = start + dtype.itemsize // 4 * int(np.prod(shape))
            self._places[name] = start, end, shape, dtype
            start = end
        self.host = torch.zeros(start, dtype=torch.int32, pin_memory=pinned)
        self.fields: dict[str, np.ndarray[Any, Any]] = {
            name: view.numpy() for name, view in self.views(self.host).items()
        }
        self.adjusted = adjusted
        # Arrays grow, join and are copied in C: NumPy would take a microsecond for each of these.
        self._memory = memoryview(self.host.numpy())  # type: ignore[arg-type]
        self._zeros, self._minus_ones = array("i", [0]) * rows, array("i", [-1]) * rows
        self._counting = array("i", range(rows))
        self.entries_room, self.moves_room = entries, moves
        self.begin()

    def begin(self) -> None:
        """Start a new step: no entries yet."""
        self._tokens, self._entry_of, self._parents, self._needed = array("i"), array("i"), array("i"), array("i")
        self._entries, self._tiles = list[int](), list[int]()
        # Of the draws: the settings of each entry, how many rows they are for, and the uniforms of these.
        self._settings, self._drawn_rows, self._uniforms = list[tuple[float, ...]](), list[int](), array("d")
        if self.adjusted:
            self._line_of, self._rules, self._mask_of = array("i"), array("f"), array("i")
            self._counted = array("i"), array("i")

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

    def put_rules(self, line: int, rules: Sequence[float], mask_of: array[int]) -> None:
        """Write how the last entry's logits are adjusted."""
        self._line_of.append(line)
        self._rules.extend(rules)
        self._mask_of.extend(mask_of)

    def put_counted(self, line: int, tokens: Sequence[int]) -> bool:
        """Write tokens that are to be counted in this line of the table. False if there is no room for them."""
        lines, counted = self._counted
        if len(counted) + len(tokens) > self.moves_room:
            return False
        lines.extend(array("i", (line,)) * len(tokens))
        counted.extend(tokens)
        return True

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
        if self.adjusted:
            self._end_rules()

    def _end_draws(self) -> None:
        """Write the settings and the uniforms of the needed rows."""
        draws, count = self.fields["draws"], len(self._needed)
        if len(set(self._settings)) == 1:
            draws[:count, :4] = self._settings[0]
        else:
            draws[:count, :4] = np.repeat(self._settings, self._drawn_rows, axis=0)
        draws[:count, 4] = self._uniforms
        draws[count:, 0] = 0.0

    def _end_rules(self) -> None:
        """Write how the entries' logits are adjusted, and what is to be counted."""
        fields, (lines, counted) = self.fields, self._counted
        fields["mask_of"][:] = fields["counted"][0] = -1
        for field, numbers in (
            (fields["line_of"], self._line_of),
            (fields["rules"].reshape(-1), self._rules),
            (fields["mask_of"], self._mask_of),
            (fields["counted"][0], lines),
            (fields["counted"][1], counted),
        ):
            field[: len(numbers)] = numbers

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(dtype).view(shape) for name, (a, b, shape, dtype) in self._places.items()}
