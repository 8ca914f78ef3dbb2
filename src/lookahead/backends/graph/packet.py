"""The packet: all integers that the host sends the device for one step, in one piece of memory that is copied once."""

from __future__ import annotations

import numpy as np
import torch

from lookahead.algorithm.native import build as native
from lookahead.algorithm.native import drafter as calls
from lookahead.algorithm.tree import TokenTree, packed_visibility

LONGEST_PATH = 64
"""The longest accepted path that a packet has room for. The K/V of a longer one is moved before the next step."""


class Packet:
    """The integers of one step, for B trees of K nodes each, as named int32 fields.

    lanes [B]             each sequence's lane of the K/V buffer
    lengths [B]           how many tokens it has cached: the root's position
    commit_lengths [B]    for the commit of the step before: the position of that step's root,
    commit_counts [B]     how many of that step's nodes below the root were accepted,
    commit_paths [B, 64]  and which ones
    tokens [B, K]         the nodes' tokens
    positions [B, K]      the nodes' positions
    needed [B, K]         the needed nodes, as rows of the whole step, B x K rows
    bits [B, K, words]    who sees whom within a tree, see `tree.packed_visibility`

    `fields` are NumPy views of the host's memory, `views` gives the same views of a copy on the device.
    """

    def __init__(self, batch: int, count: int, pinned: bool) -> None:
        words = (count + 31) // 32
        parts = {
            "lanes": (batch,),
            "lengths": (batch,),
            "commit_lengths": (batch,),
            "commit_counts": (batch,),
            "commit_paths": (batch, LONGEST_PATH),
            "tokens": (batch, count),
            "positions": (batch, count),
            "needed": (batch, count),
            "bits": (batch, count, words),
        }
        sizes = [int(np.prod(shape)) for shape in parts.values()]
        self.host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self._places = {}
        start = 0
        for (name, shape), size in zip(parts.items(), sizes, strict=True):
            self._places[name] = (start, start + size, shape)
            start += size
        numbers = self.host.numpy()
        self.fields = {name: numbers[a:b].reshape(shape) for name, (a, b, shape) in self._places.items()}
        self._sizes = count, words
        self._trees = list(zip(*[self.fields[name] for name in ("tokens", "positions", "needed", "bits")], strict=True))
        self._addresses = [[part.ctypes.data for part in parts] for parts in self._trees]
        self._itself = packed_visibility([-1] * count, words).view("<i4")

    def put_tree(self, place: int, tree: TokenTree, length: int) -> None:
        """Write a tree below a prefix of this length; what is left of the row's K tokens sees itself alone."""
        count, words = self._sizes
        if native.library() is not None:
            sizes = count, words, length, place * count
            calls.write_tree(tree, sizes, self._addresses[place])
            return
        size, rows = len(tree), len(tree.needed)
        tokens, positions, needed, bits = self._trees[place]
        tokens[:size], tokens[size:] = tree.tokens, 0
        positions[:size], positions[size:] = tree.depths, 0
        positions += length
        needed[:rows], needed[rows:] = tree.needed, 0
        needed += place * count
        bits[:size], bits[size:] = packed_visibility(tree.parents, words).view("<i4"), self._itself[size:]

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(shape) for name, (a, b, shape) in self._places.items()}
