"""The packet: all integers that the host sends the device for one step, in one piece of memory that is copied once."""

from __future__ import annotations

import numpy as np
import torch

from lookahead.algorithm.tree import TokenTree

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
    parents [B, K]        the nodes' parents, -1 for a root, from which the device finds positions and who sees whom
    needed [B, K]         the needed nodes, as rows of the whole step, B x K rows

    `fields` are NumPy views of the host's memory, `views` gives the same views of a copy on the device.
    """

    def __init__(self, batch: int, count: int, pinned: bool) -> None:
        parts = {
            "lanes": (batch,),
            "lengths": (batch,),
            "commit_lengths": (batch,),
            "commit_counts": (batch,),
            "commit_paths": (batch, LONGEST_PATH),
            "tokens": (batch, count),
            "parents": (batch, count),
            "needed": (batch, count),
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
        self._count = count
        self._trees = list(zip(*(self.fields[name] for name in ("tokens", "parents", "needed")), strict=True))

    def put_tree(self, entry: int, tree: TokenTree) -> None:
        """Write a tree. What it leaves over of the K nodes becomes roots, which see themselves alone."""
        size, needed_count = len(tree), len(tree.needed)
        tokens, parents, needed = self._trees[entry]
        tokens[:size], parents[:size], needed[:needed_count] = tree.tokens, tree.parents, tree.needed
        if size < self._count:
            tokens[size:], parents[size:] = 0, -1
        if needed_count < self._count:
            needed[needed_count:] = 0
        if entry:
            needed += entry * self._count

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of `memory`, a copy of `host` on the device."""
        return {name: memory[a:b].view(shape) for name, (a, b, shape) in self._places.items()}
