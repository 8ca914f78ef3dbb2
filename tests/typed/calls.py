"""Typed calls of the public interface, for mypy: `tests/test_signature.py` checks this file and never runs it.

Each line that must be refused says so: an unused `type: ignore` is an error, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import lookahead
import lookahead.parallel
from lookahead import Completion, Decoding, LookaheadConfig, Stream

model = lookahead.load()
one: Completion = model.generate("text", max_tokens=3, temperature=0.5, stop="x", logit_bias={3: 1.0})
ids: Completion = model.generate([1, 2, 3], seed=5)
chat: Completion = model.generate([{"role": "user", "content": "text"}], logprobs=2)
many: list[Completion] = model.generate(["text", "another"], config=LookaheadConfig(window=3))
lists: list[Completion] = model.generate([[1, 2], [3]])
chats: list[Completion] = model.generate([[{"role": "user", "content": "text"}]])
pieces: Stream = model.stream("text", min_tokens=2, repetition_penalty=None)
together: Completion = lookahead.parallel.load("name", ranks=2, timeout=9.0).generate("text", max_tokens=3)
joined: Completion = lookahead.parallel.load("name").generate()
hook: Decoding = lookahead.decoding(window=15, ngram=5, max_depth=None, seed=7)
config: LookaheadConfig = LookaheadConfig().adapted(budget=64, sources=["suffix"])


def refused(several: Sequence[str], maybe: str | None) -> None:
    model.generate("text", max_new_tokens=3)  # type: ignore[call-overload]
    model.generate("text", max_tokens="3")  # type: ignore[call-overload]
    model.generate(maybe)  # type: ignore[arg-type]
    model.stream("text", max_new_tokens=3)  # type: ignore[arg-type]
    model.stream("text", temperature=None)  # type: ignore[arg-type]
    model.stream("text", 256)  # type: ignore[call-arg]
    lookahead.decoding(windows=3)  # type: ignore[arg-type]
    lookahead.decoding(window=None)  # type: ignore[arg-type]
    LookaheadConfig().adapted(windows=3)  # type: ignore[call-arg]
    print(model.generate(several).text)  # type: ignore[attr-defined]
