"""The text and bytes of single tokens, and log-probabilities in OpenAI's formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lookahead.engine.byte_text import byte_of_mark
from lookahead.engine.request import TokenLogprobs

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LEAST = -9999.0
"""Replaces a log-probability of minus infinity, which JSON cannot represent."""


class TokenFormatter:
    """Formats single tokens of a model, and their log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text_and_bytes = lru_cache(1 << 16)(self._text_and_bytes)

    def _text_and_bytes(self, token: int) -> tuple[str, list[int]]:
        """A token's text and its bytes. For a part of a character the text is U+FFFD, and the bytes are exact."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return "", []
        if found := BYTE.fullmatch(piece):
            raw = bytes([int(found[1], 16)])
        elif piece.startswith("\u2581"):  # SentencePiece's space, which `decode` would drop
            raw = piece.replace("\u2581", " ").encode()
        else:
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            if "\ufffd" not in text or not all(mark in byte_of_mark() for mark in piece):
                return text, list(text.encode())
            raw = bytes(byte_of_mark()[mark] for mark in piece)
        return raw.decode("utf-8", "replace"), list(raw)

    def chat_logprobs(self, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Log-probabilities in the format of chat completions."""
        return [
            {**self._entry(token, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top]}
            for token, one in zip(tokens, found, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.text_and_bytes(token)
        return {"token": text, "logprob": max(LEAST, logprob), "bytes": raw}

    def _top_logprobs(self, one: TokenLogprobs) -> dict[str, float]:
        return {self.text_and_bytes(token)[0]: max(LEAST, value) for token, value in one.top}

    def completion_logprobs(
        self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, Any]:
        """Log-probabilities in the format of completions. `offset` is where the first token's text begins. A prompt's
        first token has None."""
        texts = [self.text_and_bytes(token)[0] for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(LEAST, one.logprob) for one in found],
            "top_logprobs": [None if one is None else self._top_logprobs(one) for one in found],
            "text_offset": offsets,
        }
