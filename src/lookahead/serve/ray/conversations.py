"""Which requests belong to one conversation, so that they can go where the K/V pages of their beginning are.

A conversation has the name of a session that its client gives, or one that is found here. Its first request goes to the
replica with the least to do, and that becomes its home.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens per step of the search for a known beginning."""
TAIL = 8
"""Tokens at the end of a prompt that may not be in the next one, such as the beginning of the assistant's turn."""
KEPT = 1 << 16
"""Prompts, and conversations, that are remembered."""


class Conversations:
    """Finds the conversation of a prompt: the one with the longest earlier prompt that it begins with.

    Only whole prompts count. Conversations that share nothing but a long system prompt are different ones, so that they
    may be on different replicas.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def name(self, owner: str, prompt: Sequence[int]) -> str:
        """The name of the prompt's conversation, or nothing for one that is too short to matter."""
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
    """Where conversations are at home: conversation -> the replica that has answered it last."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._homes: OrderedDict[str, str] = OrderedDict()

    def find(self, conversation: str) -> str:
        """Its home, or nothing."""
        return self._homes.get(conversation, "")

    def assign(self, conversation: str, replica: str) -> None:
        if conversation and replica:
            self._homes[conversation] = replica
            self._homes.move_to_end(conversation)
            while len(self._homes) > self._kept:
                self._homes.popitem(last=False)

    def forget(self, conversation: str) -> None:
        """Its home is gone."""
        self._homes.pop(conversation, None)
