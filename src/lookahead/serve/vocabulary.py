"""A model's vocabulary for llguidance, with a check that both agree on the bytes of each token.

llguidance infers token bytes from the tokenizer's decoder. If it misreads the decoder, its masks forbid tokens that the
grammar needs and allow others. So a sample of tokens is compared with `decode`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection
from copy import copy
from typing import Any

from llguidance import LLTokenizer

from lookahead.loading.decoder import fix_decoder

SPREAD, EACH = 256, 64
"""About how many tokens are compared: across the vocabulary, and of each kind in `KINDS`."""
SPACES = ("\u0120", "\u2581", " ")
"""A space in byte-level vocabularies, in SentencePiece, and verbatim."""
UNKNOWN = re.compile("\ufffd+")
KINDS = (
    lambda piece: piece.startswith(SPACES),
    lambda piece: not piece.lstrip("".join(SPACES)).isascii(),  # multi-byte characters, and parts of them
    lambda piece: all(mark in string.punctuation for mark in piece),
)


def read_vocabulary(tokenizer: Any, size: int, stop_ids: Collection[int]) -> LLTokenizer:
    """The tokenizer for llguidance. Raises ValueError if the tokens cannot be read."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ValueError(f"it is a {type(tokenizer).__name__}, which has no tokenizer.json")
    inner = copy(inner)  # the caller's own keeps its decoder, padding and truncation
    inner.no_padding()
    inner.no_truncation()
    fix_decoder(inner)
    read = LLTokenizer(inner.to_str(), n_vocab=size, eos_token=sorted(stop_ids), slices=LLTokenizer.json_slices())
    check_bytes(tokenizer, read, size)
    return read


def check_bytes(tokenizer: Any, read: LLTokenizer, size: int) -> None:
    """Raise ValueError if llguidance and the tokenizer disagree on the bytes of a sampled token.

    Special and added tokens are not compared: they are stored verbatim.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    others = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ordinary = {
        token: piece
        for piece, token in sorted(vocabulary.items(), key=lambda item: item[1])
        if token < size and token not in others and not read.is_special_token(token)  # as is the byte FF
    }
    # SentencePiece's decoders drop a leading space, so every token is decoded after another one.
    before = next((vocabulary[letter] for letter in string.ascii_letters if vocabulary.get(letter) in ordinary), None)
    begin = [] if before is None else [before]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    for token in sample(ordinary):
        expected, found = text([*begin, token]), read.decode_bytes([*begin, token])
        if not _same(expected, found):
            decoder = type(tokenizer.backend_tokenizer.decoder).__name__
            raise ValueError(
                f"llguidance reads token {token} as {read.decode_bytes([token])!r:.60}, which decodes to "
                f"{text([token])!r:.60}; the decoder in its tokenizer.json is {decoder!r}, and 'ByteLevel' or one of "
                "SentencePiece with 'ByteFallback' is needed"
            )


def sample(ordinary: dict[int, str]) -> list[int]:
    """The tokens to compare, deterministically: some of each kind, and some across the vocabulary."""
    tokens = list(ordinary)
    found = dict.fromkeys(tokens[:: max(1, len(tokens) // SPREAD)])
    for is_kind in KINDS:
        of_kind = [token for token, piece in ordinary.items() if is_kind(piece)]
        found |= dict.fromkeys(of_kind[:: max(1, len(of_kind) // EACH)])
    return list(found)


def _same(text: str, raw: bytes) -> bool:
    """Whether these bytes decode to this text. Decoders differ in how many U+FFFD a partial character gives."""
    return UNKNOWN.sub("\ufffd", text) == UNKNOWN.sub("\ufffd", raw.decode(errors="replace"))
