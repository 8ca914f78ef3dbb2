"""Which requests belong to one conversation, so that they can go where the K/V pages of their beginning are.

Ray's router sends requests with the same name to the replica that had this name before, and others to the one with the
least to do. The name is a session that the client names, or is found here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens per step of the search: the pages of the K/V have as many."""
TAIL = 8
"""Tokens at the end of a prompt that may not be in the next one, such as the beginning of the assistant's turn."""
KEPT = 1 << 16
"""Prompts that are remembered."""


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
