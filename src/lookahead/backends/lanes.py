"""Slots that are lanes of one buffer: what the eager and the CPU backend have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from lookahead.backends.base import CacheUse


class Buffer(Protocol):
    """K/V of all sequences, one in each lane."""

    def reserve(self, lanes: int, size: int, /) -> None:
        """Make room for so many lanes of this size. The content is kept."""
        ...

    def move_lane(self, source: int, target: int, length: int) -> None:
        """Copy a lane's first `length` tokens over another lane."""
        ...


BufferT = TypeVar("BufferT", bound=Buffer)


class Lanes(Generic[BufferT]):
    """The slots of a backend whose buffer grows when a step needs it. They share nothing, and nothing is captured.

    `_lane` and `_length` are a slot's lane and how many of its tokens are cached.
    """

    def __init__(self, buffer: BufferT) -> None:
        self._buffer = buffer
        self._lane: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._next_slot = 0

    @torch.inference_mode()
    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = self._next_slot
        self._next_slot += 1
        self._lane[slot], self._length[slot] = len(self._lane), 0
        self._buffer.reserve(len(self._lane), 1)
        return slot

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Move the last lane into the freed one, so that the lanes in use stay side by side."""
        lane = self._lane.pop(slot)
        del self._length[slot]
        self._forget(slot)
        last = len(self._lane)
        for other, other_lane in self._lane.items():
            if other_lane == last:
                self._buffer.move_lane(last, lane, self._length[other])
                self._lane[other] = lane

    def _forget(self, slot: int) -> None:
        """Drop what else the backend knows of a slot."""
        raise NotImplementedError

    def length(self, slot: int) -> int:
        return self._length[slot]

    def reserve(self, slot: int, tokens: int) -> bool:
        """The buffer grows when a step needs it."""
        return True

    def holds(self) -> int | None:
        return None

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing is shared between sequences here."""

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> None:
        """Nothing is captured here, so nothing has to be prepared."""
