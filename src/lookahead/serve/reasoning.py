"""Reasoning: what a model says between tags such as <think> and </think> before its answer.

The tags are found in the vocabulary or the chat template, or named in the settings. Some templates begin the reasoning
themselves, so the prompt says where the output begins: see `stage_of`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
TAIL = 32
"""Tokens at the end of a prompt in which a template begins or ends the reasoning."""


@dataclass(frozen=True)
class Tags:
    """What encloses a model's reasoning. `end_id` is the end's token, if it is one."""

    begin: str
    end: str
    end_id: int | None = None


class Stage(Enum):
    """Where in its reply a model is. `UNDECIDED`: it may begin to reason, or answer at once."""

    UNDECIDED = "undecided"
    THINKING = "thinking"
    ANSWER = "answer"


def find_tags(setting: str, tokenizer: Any, template: str) -> Tags | None:
    """The tags of a model. The setting is `auto`, `none` or both tags; only named ones may be unknown to the model.

    Raises ValueError if the text of the named ones is not shown: then it cannot be found in the output.
    """
    if setting == "none":
        return None
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    if setting != "auto":
        begin, end = setting.split()
        tags = Tags(begin, end, vocabulary.get(end))
        for tag in (tags.begin, tags.end):
            if not is_shown(tokenizer, tag):
                raise ValueError(f"the tokenizer leaves {tag!r} out of texts, so reasoning_tags cannot be {setting!r}")
        return tags
    for begin, end in KNOWN:
        known = (begin in vocabulary and end in vocabulary) or (begin in template and end in template)
        if known and is_shown(tokenizer, begin) and is_shown(tokenizer, end):
            return Tags(begin, end, vocabulary.get(end))
    return None


def is_shown(tokenizer: Any, tag: str) -> bool:
    """Whether a tag that the model writes appears in its text: control tokens do not."""
    ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    return tag in tokenizer.decode(ids, skip_special_tokens=True)


def stage_of(tags: Tags | None, tail: str, begun: str = "") -> Stage:
    """Where the output begins. `tail` is the end of the prompt, and `begun` a message that is to be continued."""
    if tags is None:
        return Stage.ANSWER
    if begun.strip():
        return Stage.THINKING if begun.rfind(tags.begin) > begun.rfind(tags.end) else Stage.ANSWER
    tail = tail.rstrip()
    if tail.endswith(tags.begin):
        return Stage.THINKING
    return Stage.ANSWER if tail.endswith(tags.end) else Stage.UNDECIDED


class ReasoningReader:
    """Splits streamed text into reasoning and answer. White space around the reasoning is dropped.

    Text that may turn out to be a tag is held back until that is decided. `tokens` counts those of the reasoning; in
    the piece that ends it, up to the end's token.
    """

    def __init__(self, tags: Tags | None, stage: Stage) -> None:
        self.tags = tags
        self.stage = Stage.ANSWER if tags is None else stage
        self.tokens = 0
        self._held = ""
        self._begun = False  # some reasoning was returned
        self._gap = False  # white space before the answer is dropped

    @property
    def settled(self) -> bool:
        """Whether all text is the answer from now on."""
        return self.stage is Stage.ANSWER and not self._gap

    def push(self, text: str, tokens: Sequence[int] = ()) -> tuple[str, str]:
        """Add text and the tokens behind it. Returns the new reasoning, and the new text of the answer."""
        if self.settled or self.tags is None:
            return "", text
        before = self.stage
        self._held += text
        if self.stage is Stage.UNDECIDED:
            self._decide(self.tags.begin)
        reasoning = self._think(self.tags.end) if self.stage is Stage.THINKING else ""
        self._count(before, tokens)
        if self.stage is not Stage.ANSWER:
            return reasoning, ""
        answer = self._held.lstrip() if self._gap else self._held
        self._gap, self._held = self._gap and not answer, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back is reasoning if it had begun, and else the answer."""
        text, self._held = self._held, ""
        return (text.rstrip(), "") if self.stage is Stage.THINKING else ("", text)

    def _decide(self, begin: str) -> None:
        start = self._held.lstrip()
        if start.startswith(begin):
            self.stage, self._held = Stage.THINKING, start[len(begin) :]
        elif not begin.startswith(start):
            self.stage = Stage.ANSWER

    def _think(self, end: str) -> str:
        """The reasoning that is certain: not what may be its end tag, nor white space in front of that."""
        if not self._begun:
            self._held = self._held.lstrip()
        found = self._held.find(end)
        if found >= 0:
            text, self._held = self._held[:found].rstrip(), self._held[found + len(end) :]
            self.stage, self._gap = Stage.ANSWER, True
        else:
            pending = next((n for n in range(len(end) - 1, 0, -1) if self._held.endswith(end[:n])), 0)
            text = self._held[: len(self._held) - pending].rstrip()
            self._held = self._held[len(text) :]
        self._begun = self._begun or bool(text)
        return text

    def _count(self, before: Stage, tokens: Sequence[int]) -> None:
        if before is Stage.UNDECIDED and self.stage is Stage.ANSWER and not self._gap:  # an answer at once
            self.tokens = 0
        elif before is not Stage.ANSWER:
            end = None if self.tags is None or self.stage is not Stage.ANSWER else self.tags.end_id
            self.tokens += list(tokens).index(end) + 1 if end is not None and end in tokens else len(tokens)


def with_reasoning(grammar: str, tags: Tags | None, stage: Stage, special: Callable[[str], int | None]) -> str:
    """A grammar of replies that may reason before they follow `grammar`. `special` is the id of a tag that llguidance
    takes for a special token, which no text of a grammar matches."""
    if tags is None or stage is Stage.ANSWER:
        return grammar
    begin, end = special(tags.begin), special(tags.end)
    opening = json.dumps(tags.begin) if begin is None else f"<[{begin}]>"
    rest = "inner" if end is None else f"TEXT <[{end}]>"
    thought = f"{rest} GAP" if stage is Stage.THINKING else f"({opening} {rest} GAP)?"
    rules = ["%llguidance {}", f"start: {thought} @answer", r"TEXT: /(.|\n)*/", r"GAP: /\s{0,4}/"]
    if end is None:
        rules[2] = f"inner[lazy]: TEXT {json.dumps(tags.end)}\n{rules[2]}"
    own = json.loads(grammar)["grammars"][0] if grammar.lstrip().startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**own, "name": "answer"}]})
