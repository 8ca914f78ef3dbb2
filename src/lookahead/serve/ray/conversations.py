"""Routes requests of one conversation to the replica that has their prefix in its K/V cache.

A conversation is named by the client's session id, or recognised here by its prompt. Its first request goes to the
least loaded replica, which becomes its home.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens per block of the search for a known prefix."""
TAIL = 8
"""Trailing tokens of a prompt that the next prompt may lack, such as the start of the assistant's turn."""
KEPT = 1 << 16
"""The most prompts, and the most conversations, remembered."""


class Conversations:
    """Finds the conversation of a prompt: that of the longest earlier prompt which is its prefix.

    Only complete prompts count. Conversations that share only a system prompt stay separate, so that they can run on
    different replicas.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def name(self, owner: str, prompt: Sequence[int]) -> str:
        """The name of the prompt's conversation, or "" for one too short to matter."""
        count = (len(prompt) - TAIL) // BLOCK
        if count < 1:
            return ""
        hashes, running = [], hashlib.blake2b(owner.encode(), digest_size=16)
        for block in range(len(prompt) // BLOCK):
            running.update(array("q", prompt[block * BLOCK : (block + 1) * BLOCK]).tobytes())
            hashes.append(running.digest())
        known = next((one for one in reversed(hashes) if one in self._names), None)
        name = hashes[count - 1].hex() if known is None else self._names[known]
        for one in (known, hashes[count - 1]):
            if one is not None:
                self._names[one] = name
                self._names.move_to_end(one)
        while len(self._names) > self._kept:
            self._names.popitem(last=False)
        return name


class Homes:
    """Conversation -> the replica that answered it last."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._homes: OrderedDict[str, str] = OrderedDict()

    def find(self, conversation: str) -> str:
        """Its replica, or ""."""
        return self._homes.get(conversation, "")

    def assign(self, conversation: str, replica: str) -> None:
        if conversation and replica:
            self._homes[conversation] = replica
            self._homes.move_to_end(conversation)
            while len(self._homes) > self._kept:
                self._homes.popitem(last=False)

    def forget(self, conversation: str) -> None:
        """Its replica is gone."""
        self._homes.pop(conversation, None)
