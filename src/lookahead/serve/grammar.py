"""Structured output: a grammar says which tokens may come next, for every node of a step's tree.

Each node gets the mask of its own path, so guesses and grammar work together: a guess that the grammar forbids is never
accepted, and the text is the one that plain decoding under the same grammar writes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

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
LIMITS = LLParserLimits(max_grammar_size=30_000, verbose_errors=False)
"""The size bounds the time to compile, which grows with the square of an object's optional properties: 30,000 symbols
are 3,700 of them and 4 s on a busy core; llguidance's own 500,000 are minutes. 128 tools of 20 properties have 21,000.
The other limits are llguidance's own. They bound a step: an object may have about 500 optional properties."""
WAYS, DEPTH = 8, 8
"""How many first tokens are tried before a grammar is accepted, and how many tokens follow each of them."""


class Grammars:
    """Compiles grammars for a model's vocabulary, and keeps the last ones.

    All sequences of a compiled grammar share its lexer, which grows with their texts until it is full. Then every one
    of them fails, so the grammar is compiled again: what others write must not end a request.
    """

    def __init__(self, model: LookaheadModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = ""  # why the vocabulary cannot be read
        self._full: Counter[str] = Counter()  # how often a grammar's lexer was full
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
        renew, size = partial(self._renewed, grammar), self._model.backend.vocab_size
        return GrammarMask(self.newest(grammar), size, self._model.stop_ids, least, renew)

    def newest(self, grammar: str) -> LLMatcher:
        """The compiled grammar, which nobody may change. Raises a 400 if it cannot be compiled."""
        return self._compiled(grammar, self._full[grammar])

    def _renewed(self, grammar: str, full: LLMatcher) -> LLMatcher:
        """The grammar with another lexer than the one that is full."""
        if self.newest(grammar) is full:
            self._full[grammar] += 1
        return self.newest(grammar)

    def _compile(self, grammar: str, full: int = 0) -> LLMatcher:
        self.prepare()
        if self._tokenizer is None:
            raise bad_request(
                f"{self._refused()}; leave out response_format, a tool_choice that forces a call, and strict tools",
                code="grammars_unavailable",
            )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if not full:  # a grammar whose lexer is renewed has passed
            check_first_tokens(matcher, self._model.backend.vocab_size, self._model.stop_ids)
        return matcher

    def _refused(self) -> str:
        return f"this model's tokenizer does not work with grammars: {self._unreadable}"


def refusal(why: str, what: str = "compiled") -> ApiError:
    """A 400 with llguidance's reason, without the parser's state that may follow it."""
    line = " ".join(re.split(r"<(?:state|backtrace|non-verbose)", why)[0].split())
    reason = REASONS.get(line, line[:300])
    return bad_request(f"the schema cannot be {what}: {reason}", code="invalid_schema")


REASONS = {"NoExtensionBias": "no text fits it"}
LEXER = "lexer error"
"""How llguidance names an error of the lexer."""


def check_first_tokens(compiled: LLMatcher, vocabulary: int, ends: frozenset[int]) -> None:
    """Raise a 400 if a grammar fails within its first tokens.

    Some compile and then lead to a state that is beyond the limits, or to none: a `$ref` to itself, an endless chain of
    required properties, thousands of alternatives. The lowest tokens, which are single bytes, are tried: they get
    through a string or a number, to the next property, soonest.
    """
    row = np.zeros((vocabulary + 31) // 32, dtype="<u4")

    def tokens_after(matcher: LLMatcher) -> list[int]:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise refusal(matcher.get_error(), "followed")
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[: WAYS + len(ends)]
        return [token for token in allowed.tolist() if token not in ends][:WAYS]

    for token in tokens_after(compiled.deep_copy()):
        matcher, left = compiled.deep_copy(), [token]
        for _ in range(DEPTH):
            if left:
                matcher.consume_token(left[0])
                left = tokens_after(matcher)


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

    Before `least` tokens the text ends only where the grammar allows nothing else. `compiled` stays as it is.
    `renew` gives another one in place of one whose lexer is full.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        vocabulary: int,
        ends: frozenset[int],
        least: int = 0,
        renew: Callable[[LLMatcher], LLMatcher] = lambda compiled: compiled,
    ) -> None:
        self._compiled, self._ends, self._least, self._renew = compiled, ends, least, renew
        self._matcher = compiled.deep_copy()
        self._taken: list[int] = []
        self._words = (vocabulary + 31) // 32
        self._others = np.full(self._words, ALL, dtype=np.uint32)  # all tokens but the ends
        for token in ends:
            self._others[token >> 5] &= ~np.uint32(1 << (token & 31))

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32]:
        """The allowed tokens after the root and after every guess that is allowed itself.

        A guess after which the grammar is beyond its limits does not end the request: only if the text itself comes to
        that state does it, as in plain decoding. Whatever would follow the guess is then refused by `accept`.
        """
        failed: set[int] = set()
        first = len(sequence.tokens) - sequence.prompt_tokens  # the place of the root's target in the output
        renewed = False
        while True:
            rows = np.full((len(tree.needed), self._words), ALL, dtype=np.uint32)
            node = self._walk(tree, first, rows, failed)
            if node is None:
                return rows
            if node == 0:
                if renewed or not self._replace_lexer():
                    raise self._refusal()
                renewed, failed = True, set()
            else:
                failed.add(node)
                self._restart()

    def _walk(self, tree: TokenTree, first: int, rows: npt.NDArray[np.uint32], skipped: set[int]) -> int | None:
        """Fill the rows of the root and the guesses. Returns the node after which the grammar has failed, if one."""
        self._fill(rows[0], first)
        if self._matcher.is_error():
            return 0
        consumed = 0
        left = self._allowed_below(tree, 0, rows[0])
        while left:
            guess = left.pop()
            if guess in skipped:
                continue
            depth = tree.depths[guess]
            if consumed >= depth:  # back to the guess's parent
                self._matcher.rollback(consumed - depth + 1)
            self._matcher.consume_token(tree.tokens[guess])
            consumed = depth
            row = rows[tree.place(guess)]
            self._fill(row, first + depth)
            if self._matcher.is_error():
                return guess
            left += self._allowed_below(tree, guess, row)
        if consumed:
            self._matcher.rollback(consumed)
        return None

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self._ends:
                self._matcher.consume_token(token)
                self._taken.append(token)
        if self._matcher.is_error() and not self._replace_lexer():
            raise self._refusal()

    def _replace_lexer(self) -> bool:
        """After an error of the lexer: go on with another. False if that is no help."""
        if LEXER in self._matcher.get_error():
            self._compiled = self._renew(self._compiled)
            self._restart()
        return not self._matcher.is_error()

    def _restart(self) -> None:
        """Bring another matcher to where the text is: one that has failed never works again."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._taken)

    def _allowed_below(self, tree: TokenTree, node: int, row: npt.NDArray[np.uint32]) -> list[int]:
        tokens = tree.tokens
        return [
            guess
            for guess in tree.guesses_below().get(node, ())
            if tokens[guess] not in self._ends and int(row[tokens[guess] >> 5]) >> (tokens[guess] & 31) & 1
        ]

    def _fill(self, row: npt.NDArray[np.uint32], position: int) -> None:
        """Write the tokens that are allowed at this position of the output."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if position < self._least:
            goes_on = row & self._others
            if goes_on.any():
                row[:] = goes_on

    def _refusal(self) -> ApiError:
        return refusal(self._matcher.get_error(), f"followed after {len(self._taken)} tokens")
