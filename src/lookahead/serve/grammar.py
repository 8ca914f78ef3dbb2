"""Structured output: a grammar gives the allowed next tokens for every node of a step's tree.

Each node has the mask of its own path: a draft token that the grammar forbids is never accepted, and the output is
the same as that of plain decoding under the same grammar.
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
"""Fixed separators and no free white space, which a small model might generate endlessly."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
KEPT = 64
"""The most compiled grammars in the cache."""
LIMITS = LLParserLimits(max_grammar_size=30_000, verbose_errors=False)
"""The size bounds the time to compile, which grows with the square of an object's optional properties: 30,000 symbols
are 3,700 of them and 4 s on a busy core; llguidance's own 500,000 are minutes. 128 tools of 20 properties have 21,000.
The other limits are llguidance's own. They bound a step: an object may have about 500 optional properties."""
WAYS, DEPTH = 8, 8
"""First tokens that are tried before a grammar is accepted, and tokens that follow each of them."""


class Grammars:
    """Compiles grammars for a model's vocabulary, and caches them.

    All sequences of a compiled grammar share its lexer, whose state grows with their texts up to a limit. Beyond it all
    of them fail, so the grammar is compiled again: a request must not fail because of other requests.
    """

    def __init__(self, model: LookaheadModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = ""  # why the vocabulary cannot be read
        self._full: Counter[str] = Counter()  # how often a grammar's lexer reached its limit
        self._compiled = lru_cache(KEPT)(self._compile)

    def prepare(self) -> None:
        """Read the vocabulary, which takes about a second. If that fails, the reason is logged, and all grammars are
        refused."""
        if self._tokenizer is not None or self._unreadable:
            return
        model = self._model
        try:
            self._tokenizer = read_vocabulary(model.tokenizer, model.backend.vocab_size, model.stop_ids)
        except Exception as error:  # unknown tokenizers may raise anything; other requests need no grammar
            self._unreadable = " ".join(str(error).split())[:400] or type(error).__name__
            log.warning("requests for structured output are refused: %s", self._refused())

    def special_token(self, tag: str) -> int | None:
        """The id of a tag that is one token, shown in texts, which llguidance takes for a special one: no text of a
        grammar matches it, so a grammar must name it by its id."""
        self.prepare()
        tokenizer = self._model.tokenizer
        ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
        if self._tokenizer is None or len(ids) != 1 or not self._tokenizer.is_special_token(ids[0]):
            return None
        return ids[0] if tag in tokenizer.decode(ids, skip_special_tokens=True) else None

    def mask(self, grammar: str, least: int = 0) -> GrammarMask:
        """A new mask for one sequence of at least `least` tokens. Raises a 400 if the grammar cannot be compiled."""
        renew, size = partial(self._renewed, grammar), self._model.backend.vocab_size
        return GrammarMask(self.newest(grammar), size, self._model.stop_ids, least, renew, kind_of(grammar))

    def newest(self, grammar: str) -> LLMatcher:
        """The compiled grammar, which is shared: copy it. Raises a 400 if it cannot be compiled."""
        return self._compiled(grammar, self._full[grammar])

    def _renewed(self, grammar: str, full: LLMatcher) -> LLMatcher:
        """The grammar compiled with a new lexer."""
        if self.newest(grammar) is full:
            self._full[grammar] += 1
        return self.newest(grammar)

    def _compile(self, grammar: str, full: int = 0) -> LLMatcher:
        self.prepare()
        if self._tokenizer is None:
            raise bad_request(
                f"{self._refused()}; leave out response_format, structured_outputs, a tool_choice that forces a call, "
                "and strict tools",
                code="grammars_unavailable",
            )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refusal(matcher.get_error(), kind=kind_of(grammar))
        if not full:  # already checked if only its lexer is renewed
            check_first_tokens(matcher, self._model.backend.vocab_size, self._model.stop_ids, kind_of(grammar))
        return matcher

    def _refused(self) -> str:
        return f"this model's tokenizer does not work with grammars: {self._unreadable}"


def kind_of(grammar: str) -> str:
    """What clients call a grammar: `schema` if it has one."""
    return "schema" if "%json" in grammar or '"json_schema"' in grammar else "grammar"


def refusal(why: str, what: str = "compiled", kind: str = "schema") -> ApiError:
    """A 400 with llguidance's reason, without its dump of the parser's state."""
    line = " ".join(re.split(r"<(?:state|backtrace|non-verbose)", why)[0].split())
    reason = REASONS.get(line, line[:300])
    return bad_request(f"the {kind} cannot be {what}: {reason}", code=f"invalid_{kind}")


REASONS = {"NoExtensionBias": "no text fits it"}
LEXER = "lexer error"
"""llguidance's name for lexer errors."""


def check_first_tokens(compiled: LLMatcher, vocabulary: int, ends: frozenset[int], kind: str = "schema") -> None:
    """Raise a 400 if a grammar fails within its first tokens.

    Some compile and then reach a state beyond the limits or a dead end: a `$ref` to itself, an endless chain of
    required properties, thousands of alternatives. The lowest token ids, which are single bytes, are tried: they finish
    a string or a number, and reach the next property, soonest.
    """
    row = np.zeros((vocabulary + 31) // 32, dtype="<u4")

    def tokens_after(matcher: LLMatcher) -> list[int]:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise refusal(matcher.get_error(), "followed", kind)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[: WAYS + len(ends)]
        return [token for token in allowed.tolist() if token not in ends][:WAYS]

    for token in tokens_after(compiled.deep_copy()):
        matcher, left = compiled.deep_copy(), [token]
        for _ in range(DEPTH):
            if left:
                matcher.consume_token(left[0])
                left = tokens_after(matcher)


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts that match a schema."""
    try:
        return LLMatcher.grammar_from_json_schema(closed(schema), overrides=COMPACT)  # type: ignore[arg-type]
    except ValueError as error:
        raise refusal(str(error)) from error


def embedded_json(schema: dict[str, Any]) -> str:
    """A schema embedded in a Lark grammar."""
    return "%json " + json.dumps({**closed(schema), "x-guidance": COMPACT})


COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "patternProperties", "unevaluatedProperties"}
"""Keywords that may add properties to an object besides those listed."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it does not say otherwise.

    Whatever matches it matches the original schema. Small models would invent properties until they run out of tokens.
    A schema with `allOf` is left unchanged, because all of its subschemas apply to the same object.
    """
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed_keyword(name, value) for name, value in schema.items()}
    names = schema.get("properties")
    if isinstance(names, dict) and names and not COMBINED & schema.keys():
        required = schema.get("required") or ()
        if isinstance(required, (list, tuple)) and set(map(str, required)) <= names.keys():
            found.setdefault("additionalProperties", False)
    return found


def _closed_keyword(keyword: str, value: Any) -> Any:
    if keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):  # a mapping of names to schemas
        return {name: _closed(schema) for name, schema in value.items()}
    return value if keyword in ("const", "enum", "default", "examples") else _closed(value)


class GrammarMask:
    """A `TokenMask` that follows a grammar along the text.

    Before `least` tokens the text ends only where the grammar allows nothing else. `compiled` is not modified.
    `renew` returns it with a new lexer, once the lexer has reached its limit.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        vocabulary: int,
        ends: frozenset[int],
        least: int = 0,
        renew: Callable[[LLMatcher], LLMatcher] = lambda compiled: compiled,
        kind: str = "schema",
    ) -> None:
        self._kind = kind
        self._compiled, self._ends, self._least, self._renew = compiled, ends, least, renew
        self._matcher = compiled.deep_copy()
        self._taken: list[int] = []
        self._words = (vocabulary + 31) // 32
        self._others = np.full(self._words, ALL, dtype=np.uint32)  # all tokens but EOS
        for token in ends:
            self._others[token >> 5] &= ~np.uint32(1 << (token & 31))

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32]:
        """The allowed tokens after the root and after every guess that is allowed itself.

        A guess that takes the grammar beyond its limits does not fail the request: only the text itself does, as in
        plain decoding. If such a guess is accepted, `accept` raises.
        """
        failed: set[int] = set()
        first = len(sequence.tokens) - sequence.prompt_tokens  # index of the root's target in the output
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
        """Fill the rows of the root and the guesses. Returns the node after which the grammar failed, or None."""
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
            row = rows[tree.needed_index(guess)]
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
        """After a lexer error, continue with a new lexer. Returns False if the error persists."""
        if LEXER in self._matcher.get_error():
            self._compiled = self._renew(self._compiled)
            self._restart()
        return not self._matcher.is_error()

    def _restart(self) -> None:
        """Replay the text in a new matcher: a failed one cannot be reused."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._taken)

    def _allowed_below(self, tree: TokenTree, node: int, row: npt.NDArray[np.uint32]) -> list[int]:
        tokens = tree.tokens
        return [
            guess
            for guess in tree.draft_children().get(node, ())
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
        return refusal(self._matcher.get_error(), f"followed after {len(self._taken)} tokens", self._kind)
