"""Detokenisation for vocabularies whose tokens are bytes: as in GPT-2, Llama 3, Qwen and SmolLM2.

There the text is the tokens' bytes in a row, read as UTF-8. So new text follows from new tokens alone, in a tenth of
the time that decoding the last tokens again takes. `text.Detokenizer` is the twin for all other tokenizers.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

SAMPLES, LENGTH = 200, 12
new_decoder = codecs.getincrementaldecoder("utf-8")


@lru_cache(1)
def byte_of_mark() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies spell bytes: a printable byte is its own character, and the n-th of
    the others is U+0100 + n."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes in the text, computed on first use. A special token has none."""

    def __init__(self, spell: Callable[[int], str | None], special: frozenset[str]) -> None:
        super().__init__()
        self._spell, self._special, self._bytes = spell, special, byte_of_mark()

    def __missing__(self, token: int) -> bytes:
        piece = self._spell(token)
        if piece is None or piece in self._special:
            found = b""
        elif all(mark in self._bytes for mark in piece):
            found = bytes([self._bytes[mark] for mark in piece])
        else:  # an added token, which is spelled as it is
            found = piece.encode()
        self[token] = found
        return found


def token_bytes(inner: Any) -> TokenBytes | None:
    """The bytes of a `tokenizers.Tokenizer`'s tokens, or None if its decoder does more than join them.

    That is tested on random tokens.
    """
    if type(inner.decoder).__name__ != "ByteLevel":
        return None
    special = frozenset(token.content for token in inner.get_added_tokens_decoder().values() if token.special)
    found = TokenBytes(inner.id_to_token, special)
    size, rng = inner.get_vocab_size(), random.Random(0)
    for _ in range(SAMPLES):
        ids = [rng.randrange(size + 2) for _ in range(LENGTH)]
        if inner.decode(ids, skip_special_tokens=True) != b"".join([found[token] for token in ids]).decode(
            errors="replace"
        ):
            return None
    return found


class ByteDetokenizer:
    """Turns token ids into stable text: text that no later token can change. An unfinished character is held back."""

    def __init__(self, known: TokenBytes) -> None:
        self._known, self._decoder = known, new_decoder("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Add newly accepted tokens, one or several. Returns the text that became stable."""
        known = self._known
        return self._decoder.decode(b"".join([known[token] for token in ids]))

    def peek(self) -> str:
        """Text that is held back although it is stable: none."""
        return ""

    def flush(self) -> str:
        """Return all text that was held back, because the sequence has ended."""
        return self._decoder.decode(b"", final=True)
