"""Which sequences share one of the model's own caches, as the rows of a batch, and how these come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.backends.eager.cache_rows import joined, row_of


@dataclass
class Group:
    """Sequences that run together: their cache, and its mask [B, T], False for positions that hold no token.

    `slots[i]` is the sequence of row i. A sequence that has left is still in the cache.
    """

    cache: Any
    mask: torch.Tensor
    slots: list[int]

    def length_of(self, slot: int) -> int:
        """Number of cached tokens of this slot."""
        return int(self.mask[self.slots.index(slot)].sum())


class CacheGroups:
    """The group of every slot that has cached tokens."""

    def __init__(self) -> None:
        self._of: dict[int, Group] = {}

    def of(self, slot: int) -> Group | None:
        """The group of this slot; None before its first token."""
        return self._of.get(slot)

    def drop(self, slot: int) -> None:
        """Forget what this slot has cached."""
        self._of.pop(slot, None)

    def gather(self, slots: list[int]) -> Group | None:
        """The cache of these slots alone, in this order; None before their first token."""
        groups = [self._of.get(slot) for slot in slots]
        first = groups[0]
        if first is None or (first.slots == slots and all(group is first for group in groups)):
            return first
        rows = [self._row(slot) for slot in slots]
        if len(rows) == 1:
            group = rows[0]
        else:
            cache, mask = joined([row.cache for row in rows], [row.mask[0] for row in rows])
            group = Group(cache, mask, slots)
        self.put(group)
        return group

    def _row(self, slot: int) -> Group:
        """The cache of one sequence of a group."""
        group = self._of[slot]
        index = group.slots.index(slot)
        return Group(row_of(group.cache, len(group.slots), index), group.mask[index : index + 1], [slot])

    def put(self, group: Group) -> None:
        """Let all slots of a group share its cache from now on."""
        self._of.update(dict.fromkeys(group.slots, group))

    def restore(self, slot: int, group: Group) -> None:
        """Give this slot alone the row that it had in a group."""
        self._of[slot] = group
