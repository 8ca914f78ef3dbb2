"""From accepted token ids to text that may be shown: incremental detokenisation and stop strings.

A step may accept several tokens at once. The final text and the token it stops at do not depend on how the tokens are
grouped: they are the same as with one token at a time. A `Detokenizer` turns ids into stable text; a `TextStream` adds
the stop strings of one request.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from lookahead.engine.byte_text import ByteDetokenizer, TokenBytes, token_bytes

REPLACEMENT = "\ufffd"  # decoders write it for bytes that do not (yet) make a character
INCOMPLETE = 3  # an unfinished UTF-8 character has at most 3 bytes, so at most 3 trailing U+FFFD can change
CONTEXT = 16  # tokens kept left of new ones: at least 4 characters, even where each token is a single byte
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how SentencePiece vocabularies spell a raw byte


class TokenizerLike(Protocol):
    """What a tokenizer must have. `convert_ids_to_tokens` or `id_to_token` is used, too, where it exists."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str | list[str]: ...


class SharedTokenizer:
    """A tokenizer for many texts, which caches what is learned about its tokens.

    Decoding with the `tokenizers` object inside a transformers tokenizer takes a third of the time. It is used if it
    decodes a sample to the same text. `token_bytes` is set if its tokens are bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.traces: dict[int, bool] = {}
        self.bytes: dict[int, bool] = {}
        self.token_bytes: TokenBytes | None = None
        self.id_to_token = _piece_lookup(tokenizer)
        options = _decode_options(tokenizer)
        self.decode: Callable[..., str] = partial(tokenizer.decode, **options)
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is not None:
            size = inner.get_vocab_size()
            ids = list(range(0, size, max(1, size // 500)))
            samples = [ids, *([token] for token in ids[::5])]
            if all(inner.decode(ids, skip_special_tokens=True) == self._text(ids) for ids in samples):
                self.decode = inner.decode
                self.token_bytes = token_bytes(inner)

    def _text(self, ids: list[int]) -> str:
        return self.decode(ids, skip_special_tokens=True)


class Detokenizer:
    """Turns token ids into stable text: text that no later token can change.

    All `push` results and `flush` together equal `tokenizer.decode(all_ids, skip_special_tokens=True)`. Where the
    tokenizer has the option `clean_up_tokenization_spaces`, it is off: the clean-up deletes the space before a later
    ".", so it would change text that was shown already, and the model did not write the cleaned text.

    Only the *tail*, the last tokens, is decoded: at most 2 * CONTEXT tokens and the newest block. A text decoded from
    the middle differs from the whole one at its left edge only: SentencePiece and WordPiece decoders drop the first
    token's leading space, and a UTF-8 character that is cut in two becomes up to three U+FFFD. So new text is read from
    the right end, and the tail is shortened only if at least three characters stay as a margin on the left.

    Two kinds of text are held back until a later token makes them stable:
    - up to three U+FFFD at the end. They may be an unfinished character.
    - a run of byte pieces (`<0x0A>`) at the end. Byte-fallback decoders turn the whole run into U+FFFD when any
      part of it is invalid, so it is stable only after the token that follows it. Until then `push` decodes nothing,
      and the whole run stays in the tail, which may get longer than usual.

    Tokens that leave no trace in the text (skipped special tokens, ids past the vocabulary) are dropped at once.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._options = _decode_options(tokenizer)
        self._piece = _piece_lookup(tokenizer)
        shared = tokenizer if isinstance(tokenizer, SharedTokenizer) else None
        self._traces = {} if shared is None else shared.traces  # id -> whether it leaves a trace in the text
        self._bytes = {} if shared is None else shared.bytes  # id -> whether it is a byte piece
        self._anchor: int | None = None  # a token that leaves a trace
        self._tail: list[int] = []
        self._open = 0  # byte pieces at the end of the tail
        self._offset = 0  # characters of the tail's text that are stable
        self._stable: list[str] = []
        self._flushed = False

    @property
    def text(self) -> str:
        """All stable text so far."""
        return "".join(self._stable)

    def push(self, ids: Sequence[int]) -> str:
        """Add newly accepted tokens, one or several. Returns the text that became stable."""
        if self._flushed:
            raise RuntimeError("push() after flush(): use a new Detokenizer for another sequence")
        stable = len(self._tail) - self._open
        for token in ids:
            if self._leaves_trace(token):
                self._tail.append(token)
                self._open = self._open + 1 if self._is_byte(token) else 0
        end = len(self._tail) - self._open
        if end == stable:
            return ""
        text = self._decode(self._tail[:end])
        ending = text[-INCOMPLETE:]
        held = len(ending) - len(ending.rstrip(REPLACEMENT))
        self._stable.append(text[self._offset : len(text) - held])
        self._offset = len(text) - held
        self._shorten(held)
        return self._stable[-1]

    def peek(self) -> str:
        """The text of an open run of byte pieces, without an unfinished character at its end. Empty without a run."""
        return self._decode(self._tail)[self._offset :].rstrip(REPLACEMENT) if self._open else ""

    def flush(self) -> str:
        """Return all text that was held back, because the sequence has ended."""
        if self._flushed:
            return ""
        self._flushed = True
        self._stable.append(self._decode(self._tail)[self._offset :])
        return self._stable[-1]

    def _shorten(self, held: int) -> None:
        if self._open or len(self._tail) <= 2 * CONTEXT:
            return
        tail = self._tail[-CONTEXT:]
        text = self._decode(tail)
        offset = len(text) - held
        if offset >= INCOMPLETE and text[offset:] == REPLACEMENT * held:
            self._tail, self._offset = tail, offset

    def _leaves_trace(self, token: int) -> bool:
        known = self._traces.get(token)
        if known is not None:
            if known and self._anchor is None:
                self._anchor = token
            return known
        trace = self._is_byte(token) or bool(self._decode([token]))
        if trace:
            self._anchor = token
        elif self._anchor is None:
            return True  # a skipped token, or a leading space that decoders drop: it is safe to keep it
        else:
            anchor = self._anchor
            trace = self._decode([anchor, token, anchor]) != self._decode([anchor, anchor])
        self._traces[token] = trace
        return trace

    def _is_byte(self, token: int) -> bool:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = BYTE_PIECE.fullmatch(self._piece(token) or "") is not None
        return known

    def _decode(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=True, **self._options))


class StopStrings:
    """The stop strings of a request. They find a stop in a text, and text that may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not isinstance(stops, Iterable):
            raise ValueError(f"stop strings must come as a sequence: pass [{str(stops)!r}], not {stops!r}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"a stop string must be a non-empty str, got {stop!r} in {stops!r}")
        self.stops = tuple(stops)
        self._longest = max(map(len, self.stops), default=1)

    def find(self, text: str) -> tuple[int, str] | None:
        """The stop string that starts earliest in the text, as (start, stop string); of several there, the longest."""
        matches = [(start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        return min(matches, key=lambda match: (match[0], -len(match[1])), default=None)

    def pending(self, text: str) -> int:
        """Length of the longest suffix of `text` that may be the beginning of a stop string."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class TextStream:
    """The text of one request. Call `push_token` for every accepted token, and `take` to get new text.

    Generation stops at the first token after which the decoded text contains a stop string (an unfinished character
    at its end does not count). The text is cut where the stop string starts. The prompt is not searched. Text that may
    be the beginning of a stop string is held back, so text that was taken never has to be withdrawn. The text of the
    first `min_tokens` tokens is not searched: a stop string must begin after it.
    """

    def __init__(self, tokenizer: TokenizerLike, stops: StopStrings | Sequence[str] = (), min_tokens: int = 0) -> None:
        self._unsearched = min_tokens  # how many more tokens are not searched
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._detokenizer = _detokenizer(tokenizer, bool(self._stops.stops))
        self._queue: list[int] = []  # tokens to detokenise in `take`; used only without stop strings
        self._held = ""  # stable text that may be the start of a stop string
        self._released: list[str] = []
        self._taken = 0  # how many items of _released were taken
        self._finished = False
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All text that was taken or can be taken. After a stop or `finish` it is the final text."""
        self._drain()
        return "".join(self._released)

    def push_token(self, token: int) -> bool:
        """Add one token. Returns True when a stop string is complete; tokens after it are ignored."""
        if self._finished and self.stop is None:
            raise RuntimeError("push_token() after finish(): use a new TextStream for another request")
        if self._finished:
            return True
        if not self._stops.stops:
            self._queue.append(token)
            return False
        if self._unsearched > 0:
            self._unsearched -= 1
            self._released.append(self._detokenizer.push([token]))
            return False
        self._held += self._detokenizer.push([token])
        if self._cut(self._held + self._detokenizer.peek()):
            return True
        ready = len(self._held) - self._stops.pending(self._held)
        self._released.append(self._held[:ready])
        self._held = self._held[ready:]
        return False

    def push_tokens(self, tokens: Sequence[int]) -> None:
        """Add several tokens."""
        if self._stops.stops or self._finished:
            for token in tokens:
                self.push_token(token)
        else:
            self._queue += tokens

    def take(self) -> str:
        """The text that became ready since the last `take`."""
        self._drain()
        first, self._taken = self._taken, len(self._released)
        return "".join(self._released[first:])

    def finish(self) -> str:
        """Take all the text that is left, because generation has ended.

        It includes bytes that never became a character, as U+FFFD. If these complete a stop string that contains
        U+FFFD, the text is cut there and `stop` is set.
        """
        self._drain()
        if not self._finished:
            self._finished = True
            rest = self._held + self._detokenizer.flush()
            if not self._cut(rest):
                self._released.append(rest)
        return self.take()

    def _drain(self) -> None:
        if self._queue:
            self._released.append(self._detokenizer.push(self._queue))
            self._queue = []

    def _cut(self, text: str) -> bool:
        # Only text that was not released needs searching, because the beginning of a stop string is held back.
        match = self._stops.find(text)
        if match is None:
            return False
        start, self.stop = match
        self._released.append(text[:start])
        self._finished = True
        return True


def _detokenizer(tokenizer: TokenizerLike, searched: bool) -> Detokenizer | ByteDetokenizer:
    """The fastest detokenizer for this tokenizer. A text that is searched for stop strings always gets the general one:
    the two release invalid bytes at different tokens."""
    known = tokenizer.token_bytes if isinstance(tokenizer, SharedTokenizer) else None
    return Detokenizer(tokenizer) if searched or known is None else ByteDetokenizer(known)


def _decode_options(tokenizer: TokenizerLike) -> dict[str, Any]:
    """The option that turns the clean-up of spaces off, if the tokenizer has it (`tokenizers.Tokenizer` has not)."""
    name = "clean_up_tokenization_spaces"
    try:
        parameters = inspect.signature(tokenizer.decode).parameters.values()
    except (TypeError, ValueError):  # compiled code without a signature
        return {}
    return {name: False} if any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters) else {}


def _piece_lookup(tokenizer: TokenizerLike) -> Callable[[int], str | None]:
    """A function from an id to its spelling in the vocabulary, or to None if the tokenizer does not know it."""
    for name in ("convert_ids_to_tokens", "id_to_token"):
        if hasattr(tokenizer, name):
            return cast("Callable[[int], str | None]", getattr(tokenizer, name))
    return lambda token: None
