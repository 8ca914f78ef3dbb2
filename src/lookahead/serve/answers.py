"""A model's text as the parts of an answer: reasoning, message text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lookahead.serve.reasoning import ReasoningReader
from lookahead.serve.requests import Piece
from lookahead.serve.tools import Call, CallReader


@dataclass
class Part:
    """What some text adds to an answer."""

    reasoning: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)


class AnswerReader:
    """Reads one choice. Tool calls are looked for behind the reasoning only. `shows` is false if the reasoning is to be
    left out."""

    def __init__(self, thoughts: ReasoningReader, caller: CallReader, shows: bool = True) -> None:
        self.thoughts, self.caller, self.shows = thoughts, caller, shows
        self.reasoning = self.said = ""

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return self.caller.calls

    @property
    def is_plain(self) -> bool:
        """Whether all text is message text from now on."""
        return self.thoughts.settled and not self.caller.box.tools

    def push(self, piece: Piece) -> Part:
        """Add a piece. With the last one, text that was held back is released."""
        reasoning, text = self.thoughts.push(piece.text, piece.tokens)
        said, calls = self.caller.push(text)
        part = Part(reasoning, said, list(calls))
        if piece.finish_reason is not None:
            rest, text = self.thoughts.finish()
            said, calls = self.caller.push(text)
            more, last = self.caller.finish(piece.finish_reason == "length")
            part = Part(part.reasoning + rest, part.said + said + more, [*part.calls, *calls, *last])
        if not self.shows:
            part.reasoning = ""
        self.reasoning += part.reasoning
        self.said += part.said
        return part

    def push_all(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.push(piece)
