"""The decoder of a byte-level tokenizer that transformers 5.17 made from a GGUF file.

That release puts SentencePiece's decoders in front of `ByteLevel`. They find nothing in a byte-level vocabulary, so the
text is nearly always the same. But a program that reads the decoder to learn how tokens are spelled takes the
vocabulary for one of SentencePiece, as llguidance does; and where an added token is not spelled in bytes, `Fuse` makes
`ByteLevel` leave the whole text as it is. Folders to which such a tokenizer was saved have the decoder, too. Newer
releases give `ByteLevel` alone.
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
"""What comes after `ByteLevel`. A file that does not say whether words begin with a space gets the `Strip`, which drops
the first space of a text."""


def mend_decoder(inner: Any) -> bool:
    """Give a `tokenizers.Tokenizer` of bytes the decoder `ByteLevel`, if it has the one of transformers 5.17.

    Returns whether it had. None and other kinds of tokenizers are left alone.
    """
    decoder: Any = getattr(inner, "decoder", None)
    if type(decoder).__name__ != "Sequence" or not _is_of_5_17(json.loads(decoder.__getstate__())["decoders"]):
        return False
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    pieces = inner.get_vocab(with_added_tokens=False).keys() - added
    if any(SPACE in piece or BYTE_PIECE.fullmatch(piece) for piece in pieces):  # the first decoders have work to do
        return False
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    return True


def _is_of_5_17(parts: list[dict[str, Any]]) -> bool:
    count = len(FIRST)
    kinds = [part["type"] for part in parts[count : count + 1]]
    return parts[:count] == FIRST and kinds == ["ByteLevel"] and parts[count + 1 :] in LAST
