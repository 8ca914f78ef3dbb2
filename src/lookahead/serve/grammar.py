"""Structured output: a grammar says which tokens may come next, for every node of a step's tree.

Each node gets the mask of its own path, so guesses and grammar work together: a guess that the grammar forbids is never
accepted, and the text is the one that plain decoding under the same grammar writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.generate import LookaheadModel
from lookahead.serve.errors import ApiError, bad_request, log
from lookahead.serve.vocabulary import read_vocabulary

ALL = np.uint32(0xFFFFFFFF)
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written in one way, with these separators. Free white space would let a small model write it for ever."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
KEPT = 64
"""Compiled grammars that are kept."""


class Grammars:
    """Compiles grammars for a model's vocabulary, and keeps the last ones."""

    def __init__(self, model: LookaheadModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = ""  # why the vocabulary cannot be read
        self._compiled = lru_cache(KEPT)(self._compile)

    def prepare(self) -> None:
        """Read the vocabulary, which takes about a second. Where that is impossible, the log says why, and all grammars
        are refused."""
        if self._tokenizer is not None or self._unreadable:
            return
        model = self._model
        try:
            self._tokenizer = read_vocabulary(model.tokenizer, model.backend.vocab_size, model.stop_ids)
        except Exception as error:  # whatever a tokenizer of an unknown kind raises; the other requests need no grammar
            self._unreadable = " ".join(str(error).split())[:400] or type(error).__name__
            log.warning("requests for structured output are refused: %s", self._refused())

    def mask(self, grammar: str, least: int = 0) -> GrammarMask:
        """A fresh mask for one sequence of at least so many tokens. Raises a 400 if the grammar cannot be compiled."""
        matcher = self._compiled(grammar).deep_copy()
        return GrammarMask(matcher, self._model.backend.vocab_size, self._model.stop_ids, least)

    def _compile(self, grammar: str) -> LLMatcher:
        self.prepare()
        if self._tokenizer is None:
            raise bad_request(
                f"{self._refused()}; leave out response_format, a tool_choice that forces a call, and strict tools",
                code="grammars_unavailable",
            )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher

    def _refused(self) -> str:
        return f"this model's tokenizer does not work with grammars: {self._unreadable}"


def refusal(why: str) -> ApiError:
    line = " ".join(why.split())
    return bad_request(f"the schema cannot be compiled: {line[:300]}", code="invalid_schema")


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts that fit a schema."""
    try:
        return LLMatcher.grammar_from_json_schema(closed(schema), overrides=COMPACT)  # type: ignore[arg-type]
    except ValueError as error:
        raise refusal(str(error)) from error


def embedded_json(schema: dict[str, Any]) -> str:
    """A schema as a part of a Lark grammar."""
    return "%json " + json.dumps({**closed(schema), "x-guidance": COMPACT})


COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "patternProperties", "unevaluatedProperties"}
"""What may give an object more properties than those that stand beside it."""


def closed(schema: Any) -> Any:
    """The schema with objects that have no properties but those they name, where it does not say otherwise.

    What fits it fits the schema as it was. A small model would invent properties until its tokens are spent. A schema
    with an `allOf` is left as it is, because its parts have to fit the same object.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed_part(name, part) for name, part in schema.items()}
    names = schema.get("properties")
    if isinstance(names, dict) and names and not COMBINED & schema.keys():
        required = schema.get("required") or ()
        if isinstance(required, (list, tuple)) and set(map(str, required)) <= names.keys():
            found.setdefault("additionalProperties", False)
    return found


def _closed_part(keyword: str, value: Any) -> Any:
    if keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):  # names and their schemas
        return {name: _closed(part) for name, part in value.items()}
    return value if keyword in ("const", "enum", "default", "examples") else _closed(value)


class GrammarMask:
    """A `TokenMask` that follows a grammar along the text.

    Before `least` tokens the text ends only where the grammar allows nothing else.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: frozenset[int], least: int = 0) -> None:
        self._matcher, self._ends, self._least = matcher, ends, least
        self._words = (vocabulary + 31) // 32
        self._others = np.full(self._words, ALL, dtype=np.uint32)  # all tokens but the ends
        for token in ends:
            self._others[token >> 5] &= ~np.uint32(1 << (token & 31))

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32]:
        """The allowed tokens after the root and after every guess that is allowed itself."""
        rows = np.full((len(tree.needed), self._words), ALL, dtype=np.uint32)
        first = len(sequence.tokens) - sequence.prompt_tokens  # the place of the root's target in the output
        self._fill(rows[0], first)
        consumed = 0
        left = self._allowed_below(tree, 0, rows[0])
        while left:
            guess = left.pop()
            depth = tree.depths[guess]
            if consumed >= depth:  # back to the guess's parent
                self._matcher.rollback(consumed - depth + 1)
            self._matcher.consume_token(tree.tokens[guess])
            consumed = depth
            row = rows[tree.place(guess)]
            self._fill(row, first + depth)
            left += self._allowed_below(tree, guess, row)
        if consumed:
            self._matcher.rollback(consumed)
        self._check()
        return rows

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self._ends:
                self._matcher.consume_token(token)
        self._check()

    def _allowed_below(self, tree: TokenTree, node: int, row: npt.NDArray[np.uint32]) -> list[int]:
        tokens = tree.tokens
        return [
            guess
            for guess in tree.guesses_below().get(node, ())
            if tokens[guess] not in self._ends and int(row[tokens[guess] >> 5]) >> (tokens[guess] & 31) & 1
        ]

    def _fill(self, row: npt.NDArray[np.uint32], place: int) -> None:
        """Write the tokens that are allowed at this place of the output."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if place < self._least:
            goes_on = row & self._others
            if goes_on.any():
                row[:] = goes_on

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot go on: {self._matcher.get_error():.200}")
