"""The decoder of a byte-level tokenizer that transformers 5.17 made from a GGUF file.

That release puts SentencePiece's decoders in front of `ByteLevel`. They match nothing in a byte-level vocabulary, so
the text is nearly always the same. But a program that infers token bytes from the decoder, as llguidance does, mistakes
the vocabulary for SentencePiece; and if an added token is not spelled in bytes, `Fuse` makes `ByteLevel` leave the
entire text unchanged. Folders to which such a tokenizer was saved have the same decoder. Newer releases use only
`ByteLevel`.
"""

from __future__ import annotations

import json
import re
from typing import Any

SPACE = "\u2581"
"""SentencePiece's space."""
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
FIRST = [
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
]
LAST: list[list[dict[str, Any]]] = [[], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]]
"""What follows `ByteLevel`. If the file does not say whether words begin with a space, there is a `Strip`, which drops
the first space of a text."""


def fix_decoder(inner: Any) -> bool:
    """Set a byte-level `tokenizers.Tokenizer`'s decoder to `ByteLevel` if it has that of transformers 5.17.

    Returns whether it had. None and other tokenizers are not changed.
    """
    decoder: Any = getattr(inner, "decoder", None)
    if type(decoder).__name__ != "Sequence" or not _is_of_5_17(json.loads(decoder.__getstate__())["decoders"]):
        return False
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    pieces = inner.get_vocab(with_added_tokens=False).keys() - added
    if any(SPACE in piece or BYTE_PIECE.fullmatch(piece) for piece in pieces):  # the first decoders are needed
        return False
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    return True


def _is_of_5_17(decoders: list[dict[str, Any]]) -> bool:
    count = len(FIRST)
    kinds = [one["type"] for one in decoders[count : count + 1]]
    return decoders[:count] == FIRST and kinds == ["ByteLevel"] and decoders[count + 1 :] in LAST
