"""Slots as indices into the batch dimension of one K/V buffer, shared by the eager and the CPU backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from lookahead.backends.base import CacheUse
from lookahead.machine import available_memory

KEPT_BYTES, EXCESS = 16 << 20, 4
"""A buffer that few sequences use is made smaller if it has more bytes than KEPT_BYTES and EXCESS times what they need.
Not much is kept: room for one long sequence, kept for later, would be room for as many as run at once then. With 160 MB
kept, 64 short sequences of the embedded model took 10 GB. To make a GiB again took 3 s on two busy cores, and the 64
short replies that fill it a minute."""


def is_excess(held: int, needed: int) -> bool:
    """Whether a buffer of `held` bytes is to be made smaller, where `needed` are in use."""
    return held > max(KEPT_BYTES, EXCESS * needed)


class Buffer(Protocol):
    """K/V of all sequences, one at each index of its batch dimension."""

    def reserve(self, sequences: int, size: int, /) -> None:
        """Make room for this number of sequences of this size. The content is preserved."""
        ...

    def shrink(self, sequences: int, tokens: int) -> None:
        """Free memory that this number of sequences of up to `tokens` tokens leaves unused, if it is much. Their
        content is preserved."""
        ...

    def copy_sequence(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens at index `source` to index `target`."""
        ...

    def bytes_for(self, sequences: int, tokens: int) -> int:
        """The memory that this number of sequences of up to `tokens` tokens needs."""
        ...

    def fit(self, sequences: int, tokens: int, most_bytes: int) -> None:
        """If there is no room for this number of sequences of up to `tokens` tokens, and growing as usual would take
        more than `most_bytes`, have memory for exactly these. What is used must be within them, and is preserved."""
        ...


SHARE = 3
"""Of the host's memory that is free when a server begins, the K/V may take a third: a buffer that grows is copied."""
SLACK = 16
"""Near its limit a buffer grows to 1/SLACK more than it needs, so that not every step copies it."""


BufferT = TypeVar("BufferT", bound=Buffer)


class BatchedSlots(Generic[BufferT]):
    """The slots of a backend whose buffer grows when a step needs it. They share nothing, and nothing is captured.

    `_index` and `_length` are a slot's index into the batch dimension, and its number of cached tokens. `_last` has the
    slots whose last step is not committed. Beyond `most_bytes` of K/V there is room for a single sequence only: others
    wait, or are preempted. None: no limit.
    """

    most_bytes: int | None = None

    device: torch.device
    _last: Mapping[int, object]

    def __init__(self, buffer: BufferT) -> None:
        self._buffer = buffer
        self._index: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._next_slot = 0

    @torch.inference_mode()
    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        self._fit(len(self._index) + 1, 1)
        self._buffer.reserve(len(self._index) + 1, 1)  # first: without memory for it, there is no slot
        slot = self._next_slot
        self._next_slot += 1
        self._index[slot], self._length[slot] = len(self._index), 0
        return slot

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Move the last sequence to the freed index, so that the indices in use stay contiguous."""
        index = self._index.pop(slot)
        del self._length[slot]
        self._forget(slot)
        last = len(self._index)
        for other, other_index in self._index.items():
            if other_index == last:
                self._buffer.copy_sequence(last, index, self._length[other])
                self._index[other] = index
        if not self._last:  # the K/V of a step that is not committed are behind the lengths
            self._buffer.shrink(last, max(self._length.values(), default=0))

    def _forget(self, slot: int) -> None:
        """Drop the backend's other state of a slot."""
        raise NotImplementedError

    def length(self, slot: int) -> int:
        return self._length[slot]

    def reserve(self, slot: int, tokens: int) -> bool:
        """Whether there is room for `tokens` tokens of the sequence. The buffer grows when a step needs it."""
        if self.most_bytes is None:
            return True
        count, longest = len(self._index), max(tokens, max(self._length.values()))
        if count > 1 and self._buffer.bytes_for(count, longest) > self.most_bytes:
            return False
        self._fit(count, tokens)
        return True

    def _fit(self, sequences: int, tokens: int) -> None:
        """Near the limit: free what others have left before the buffer grows."""
        if self.most_bytes is not None and not self._last:  # the K/V of an uncommitted step are behind the lengths
            longest = max(tokens, max(self._length.values(), default=0))
            self._buffer.fit(sequences, longest + longest // SLACK, self.most_bytes)

    def holds(self) -> int | None:
        return None

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing is shared between sequences here."""

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> Mapping[str, float]:
        """Nothing is captured here. Several sequences get a limit of memory, on a CPU."""
        free = available_memory() if self.device.type == "cpu" and self.most_bytes is None else None
        if free is not None and sequences > 1:
            self.most_bytes = free // SHARE
        return {}
