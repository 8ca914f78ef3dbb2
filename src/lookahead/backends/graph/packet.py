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
        self.entries_room, self.moves_room = entries, moves
        self.begin()

    def begin(self) -> None:
        """Start a new step: no entries yet."""
        # Arrays grow and join in C. One NumPy assignment per entry and field would take several times as long.
        self._tokens, self._entry_of, self._parents = array("i"), array("i"), array("i")
        self._needed, self._entries, self._tiles = array("i"), array("i"), array("i")
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
            self._parents.extend(NO_PARENT * trail_rows)
            self._add_tiles(line, length + trail_rows, first, trail_rows, queries, 0)
        if nodes:
            self._tokens.extend(tree.tokens)
            self._parents.extend(tree.parents)
            self._add_tiles(line, length + trail_rows, root, nodes, queries, 1)
        self._entry_of.extend(array("i", (len(self._entries) // ENTRY,)) * (trail_rows + nodes))
        self._entries.extend((line, length, first, trail_rows, nodes))
        start, needed = len(self._needed), tree.needed
        if len(needed) == nodes:  # all of them
            self._needed.extend(range(root, root + nodes))
        else:
            self._needed.extend([root + node for node in needed])
        return start

    def put_draws(self, start: int, item: StepInput) -> None:
        """Write how the targets of an input's needed rows, from `start` on, are drawn: not at all without uniforms and
        without noise."""
        end = start + len(item.tree.needed)
        draws, sampling = self.fields["draws"][start:end], item.sampling
        draws[:, 0] = 0.0
        if item.uniforms or item.noise:
            draws[:, :4] = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        if item.noise:
            self.fields["noise"][start:end] = item.noise
        elif item.uniforms:
            draws[:, 4] = item.uniforms
            self.fields["next_uniforms"][start, : len(item.next_uniforms)] = item.next_uniforms

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
            self._tiles.extend((line, end, first, rows, number, is_tree))

    def end(self, commits: Sequence[int], moves: Sequence[int]) -> None:
        """Write what the entries gave, and the moves of accepted K/V, flat as in the fields."""
        fields = self.fields
        for name, numbers, rest in (
            ("tokens", self._tokens, 0),
            ("entry_of", self._entry_of, -1),
            ("parents", self._parents, -1),
            ("needed", self._needed, 0),
        ):
            fields[name][: len(numbers)] = numbers
            fields[name][len(numbers) :] = rest
        _fill(fields["entries"], self._entries)
        _fill(fields["tiles"], self._tiles)
        _fill(fields["commits"], array("i", commits))
        _fill(fields["moves"], array("i", moves))
        if len(fields["draws"]):
            fields["draws"][len(self._needed) :, 0] = 0.0
        if self.adjusted:
            lines, counted = self._counted
            _fill(fields["line_of"], self._line_of)
            _fill(fields["rules"], self._rules)
            _fill(fields["mask_of"], self._mask_of)
            fields["mask_of"][len(self._mask_of) :] = -1
            fields["counted"][0] = -1
            _fill(fields["counted"][0], lines)
            _fill(fields["counted"][1], counted)
        fields["counts"][:] = len(self._tiles) // TILE, len(commits) // 2

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(dtype).view(shape) for name, (a, b, shape, dtype) in self._places.items()}


def _fill(field: np.ndarray[Any, Any], numbers: array[int] | array[float]) -> None:
    """Write numbers to the beginning of a field."""
    if numbers:
        field.reshape(-1)[: len(numbers)] = numbers
