"""From accepted token ids to text that may be shown: incremental detokenisation and stop strings.

A decoding step may accept several tokens at once, so nothing here depends on how tokens arrive: for any token
sequence, every partition into blocks gives the same final text and the same stopping token as one token at a
time. A `Detokenizer` turns ids into stable text; a `TextStream` adds the stop strings of one request.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
INCOMPLETE = 3  # an unfinished UTF-8 character has at most 3 bytes, so at most 3 trailing U+FFFD can change
CONTEXT = 16  # tokens kept left of new ones: at least 4 characters, even where each token is a single byte
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how SentencePiece vocabularies spell a raw byte


class TokenizerLike(Protocol):
    """All that a tokenizer must have; `convert_ids_to_tokens` or `id_to_token` is used where there is one."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str | list[str]: ...


class Detokenizer:
    """Token ids in, stable text out: text that no later token can change.

    All `push` results and `flush` together equal `tokenizer.decode(all_ids, skip_special_tokens=True)`, with
    `clean_up_tokenization_spaces=False` where the tokenizer takes it: that clean-up deletes the space before
    a later ".", so cleaned text is neither final while streaming nor what the model wrote.

    Only a window of the last tokens is decoded: at most 2 * CONTEXT and the newest block. A decode that
    starts in the middle differs from the whole one at its left edge only: SentencePiece and WordPiece
    decoders drop the first token's leading space, and a UTF-8 character cut in two becomes up to three
    U+FFFD, after which the decoder is back in step. So text is read off the window's right end, and the
    window is shortened only when at least those three characters are left as a margin.

    Held back until settled:
    - up to three trailing U+FFFD, which may be an unfinished character. What follows frees a genuine one.
    - a trailing run of byte pieces (`<0x0A>`). Byte-fallback decoders turn a whole run into U+FFFD when any
      of it is invalid, so only the token after the run settles it. An open run stays in the window, the one
      case of a longer window; until the run closes, `push` decodes nothing.

    Tokens that leave no trace (skipped special tokens, ids past the vocabulary) are dropped on entry: they
    neither fill the window nor end a run.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._options = _decode_options(tokenizer)
        self._piece = _piece_lookup(tokenizer)
        self._traces: dict[int, bool] = {}  # id -> whether it leaves a trace in the text
        self._anchor: int | None = None  # a token known to leave one
        self._window: list[int] = []
        self._open = 0  # byte pieces at the end of the window
        self._offset = 0  # characters of the window's text that are stable
        self._stable: list[str] = []
        self._flushed = False

    @property
    def text(self) -> str:
        """All stable text so far."""
        return "".join(self._stable)

    def push(self, ids: Sequence[int]) -> str:
        """Take newly accepted tokens, one or a whole block; return the text that became stable."""
        if self._flushed:
            raise RuntimeError("push() after flush(): use a new Detokenizer for another sequence")
        settled = len(self._window) - self._open
        for token in ids:
            if self._leaves_trace(token):
                self._window.append(token)
                self._open = self._open + 1 if self._is_byte(token) else 0
        end = len(self._window) - self._open
        if end == settled:
            return ""
        text = self._decode(self._window[:end])
        tail = text[-INCOMPLETE:]
        held = len(tail) - len(tail.rstrip(REPLACEMENT))
        self._stable.append(text[self._offset : len(text) - held])
        self._offset = len(text) - held
        self._shorten(held)
        return self._stable[-1]

    def peek(self) -> str:
        """What would follow the stable text if this were the end, less an unfinished character.

        Empty outside a run of byte pieces.
        """
        return self._decode(self._window)[self._offset :].rstrip(REPLACEMENT) if self._open else ""

    def flush(self) -> str:
        """End of the sequence: return all that is held, as the tokenizer decodes it."""
        if self._flushed:
            return ""
        self._flushed = True
        self._stable.append(self._decode(self._window)[self._offset :])
        return self._stable[-1]

    def _shorten(self, held: int) -> None:
        if self._open or len(self._window) <= 2 * CONTEXT:
            return
        tail = self._window[-CONTEXT:]
        text = self._decode(tail)
        offset = len(text) - held
        if offset >= INCOMPLETE and text[offset:] == REPLACEMENT * held:
            self._window, self._offset = tail, offset

    def _leaves_trace(self, token: int) -> bool:
        if token in self._traces:
            return self._traces[token]
        trace = self._is_byte(token) or bool(self._decode([token]))
        if trace:
            self._anchor = token
        elif self._anchor is None:
            return True  # a skipped token or a leading space: not told apart yet, and keeping it is right
        else:
            around = [self._anchor, self._anchor]
            trace = self._decode([around[0], token, around[1]]) != self._decode(around)
        self._traces[token] = trace
        return trace

    def _is_byte(self, token: int) -> bool:
        return BYTE_PIECE.fullmatch(self._piece(token) or "") is not None

    def _decode(self, ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=True, **self._options))


class StopStrings:
    """The stop strings of a request, validated, and the two questions a stream asks about its text."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str):
            raise ValueError(f"stop strings must come as a sequence: pass [{stops!r}], not {stops!r}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"a stop string must be a non-empty str, got {stop!r} in {stops!r}")
        self.stops = tuple(stops)
        self._longest = max(map(len, self.stops), default=1)

    def find(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the occurrence that starts earliest; of several there, the longest."""
        found = [(start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def pending(self, text: str) -> int:
        """Length of the longest suffix of `text`, itself without a stop, that could become a stop string."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class TextStream:
    """The text of one request: `push_token` for every accepted token, `take` whenever text should go out.

    Generation stops at the first token after which the decoded text, less an unfinished character at its
    end, contains a stop string; the text is cut where the earliest occurrence starts. Only pushed tokens are
    looked at, so the prompt never matches. Text goes out once no continuation can make it part of a stop
    string: what was taken is never withdrawn.
    """

    def __init__(self, tokenizer: TokenizerLike, stops: StopStrings | Sequence[str] = ()) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._detokenizer = Detokenizer(tokenizer)
        self._queue: list[int] = []  # tokens to detokenise in `take`; used only without stop strings
        self._held = ""  # stable text that may be the start of a stop string
        self._released: list[str] = []
        self._taken = 0  # how many entries of _released were taken
        self._finished = False
        self.stop: str | None = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All text taken or ready to be taken; after a stop or `finish`, the final text."""
        self._drain()
        return "".join(self._released)

    def push_token(self, token: int) -> bool:
        """Append one token; True when a stop string is complete. Tokens after a stop are ignored."""
        if self._finished and self.stop is None:
            raise RuntimeError("push_token() after finish(): use a new TextStream for another request")
        if self._finished:
            return True
        if not self._stops.stops:
            self._queue.append(token)
            return False
        self._held += self._detokenizer.push([token])
        if self._cut(self._held + self._detokenizer.peek()):
            return True
        ready = len(self._held) - self._stops.pending(self._held)
        self._released.append(self._held[:ready])
        self._held = self._held[ready:]
        return False

    def take(self) -> str:
        """The text that became ready since the last `take`."""
        self._drain()
        first, self._taken = self._taken, len(self._released)
        return "".join(self._released[first:])

    def finish(self) -> str:
        """Generation ended, by a stop string or without one: take all the rest.

        Bytes that never became a character are part of it. Should they complete a stop string after all (one
        that itself contains U+FFFD), the text is cut there and `stop` is set.
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
        # The unreleased text is all that needs searching: an occurrence that began before it was held back.
        found = self._stops.find(text)
        if found is None:
            return False
        start, self.stop = found
        self._released.append(text[:start])
        self._finished = True
        return True


def _decode_options(tokenizer: TokenizerLike) -> dict[str, Any]:
    """What turns the clean-up of spaces off; a bare `tokenizers.Tokenizer` has none, nor the argument."""
    name = "clean_up_tokenization_spaces"
    try:
        parameters = inspect.signature(tokenizer.decode).parameters.values()
    except (TypeError, ValueError):  # compiled code without a signature
        return {}
    return {name: False} if any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters) else {}


def _piece_lookup(tokenizer: TokenizerLike) -> Callable[[int], str | None]:
    """id -> its spelling in the vocabulary, where the tokenizer can tell."""
    for name in ("convert_ids_to_tokens", "id_to_token"):
        if hasattr(tokenizer, name):
            return cast("Callable[[int], str | None]", getattr(tokenizer, name))
    return lambda token: None
