"""The workloads: conversations that look like the work people do, made of a `Material`.

A task's later turns follow from a script, not from the answers: what a tool says, or a person asks next, is the same
for every model. The transcript holds the model's own answers, as in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.bench.run.prompts import Prompt
from lookahead.bench.workloads.material import CodeFile, Material

Message = dict[str, str]

PASSAGES = 4
"""Passages that a question is asked about."""
EDITS = (
    "Add a docstring to every function that has none.",
    "Rename the first parameter of the first function to `first`, everywhere it is used.",
    "Add type hints to all parameters and results.",
    "Raise a ValueError with a clear message where an argument cannot be right.",
)
ARTICLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "headline": {"type": "string", "maxLength": 120},
        "people": {"type": "array", "maxItems": 6, "items": {"type": "string", "maxLength": 60}},
        "places": {"type": "array", "maxItems": 6, "items": {"type": "string", "maxLength": 60}},
        "events": {
            "type": "array",
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "maxLength": 160},
                    "quote": {"type": "string", "maxLength": 160},
                },
                "required": ["what", "quote"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["headline", "people", "places", "events"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """One conversation. `turns[i]` are the messages that come before answer i; `schema` binds the answers, where the
    caller can bind them."""

    id: str
    turns: tuple[tuple[Message, ...], ...]
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Workload:
    """`make(material, limit)` gives the tasks. `tokens` and `quick_tokens` are the most new tokens of an answer.
    With `predicted` the answer's prediction is the model's own answer with three lines changed. With `samples` above 1
    each prompt is answered by that many samples at temperature 1 at once, `epochs` times; with `drift` the model's
    weights change by about this share between two epochs."""

    name: str
    about: str
    make: Callable[[Material, int], list[Task]]
    tokens: int = 256
    quick_tokens: int = 48
    predicted: bool = False
    samples: int = 1
    epochs: int = 1
    drift: float = 0.0


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def edit(material: Material, limit: int) -> list[Task]:
    """The answer is the file again, with a change."""
    return [
        Task(
            f"edit {file.name}",
            ((user(f"{fenced(file.code)}\n\n{EDITS[i % len(EDITS)]} Answer with the whole file and nothing else."),),),
        )
        for i, file in enumerate(material.files(limit))
    ]


def extract(material: Material, limit: int) -> list[Task]:
    asked = f"Fill in this JSON schema from the article. Answer with JSON alone.\n\n{json.dumps(ARTICLE_SCHEMA)}"
    return [
        Task(f"extract {i}", ((user(f"{asked}\n\nArticle:\n\n{text}"),),), schema=ARTICLE_SCHEMA)
        for i, text in enumerate(material.articles(limit))
    ]


def rag(material: Material, limit: int) -> list[Task]:
    """A question about one of several passages, to be answered with quotes."""
    texts = material.passages(limit * PASSAGES)
    tasks = []
    for i in range(min(limit, max(1, len(texts) // PASSAGES))):
        own = texts[PASSAGES * i : PASSAGES * (i + 1)]
        passages = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(own, 1))
        asked = (
            f"What does passage [{i % len(own) + 1}] report? Quote the sentences that say it, word for word, and write "
            "one sentence of your own after each quote."
        )
        tasks.append(Task(f"rag {i}", ((user(f"Use the passages below.\n\n{passages}\n\n{asked}"),),)))
    return tasks


def summary(material: Material, limit: int) -> list[Task]:
    return [
        Task(f"summary {i}", ((user(f"Summarise this article in five sentences.\n\n{text}"),),))
        for i, text in enumerate(material.articles(limit))
    ]


SYSTEM = (
    "You work on a Python project. In every turn answer with one short sentence about what you know and what you do "
    'next, and then with one tool call as JSON, such as {"tool": "read_file", "path": "main.py"}. The tools are '
    "list_files(), read_file(path), write_file(path, content), run_tests(path) and done(summary)."
)


def agent(material: Material, limit: int) -> list[Task]:
    """Loops of 6 to 10 turns: tool results that repeat the file, the tests and their errors, as such loops do."""
    return [_agent(file, i, 6 + i % 5) for i, file in enumerate(material.files(limit))]


def _agent(file: CodeFile, number: int, turns: int) -> Task:
    tests, lines = f"test_{file.name}", file.tests.split("\n")
    edited = f"{EDITS[number % len(EDITS)]}"
    failing = next((line for line in lines if "assert" in line), lines[-1]).strip()
    traceback = (
        f'Traceback (most recent call last):\n  File "{tests}", line 3, in <module>\n    {failing}\nAssertionError'
    )
    changed = f"# {edited}\n{file.code}"
    results = [
        ("list_files()", f"{file.name}\n{tests}\nREADME.md"),
        (f"read_file({file.name!r})", fenced(file.code)),
        (f"read_file({tests!r})", fenced("\n".join(lines[:20]))),
        (f"run_tests({tests!r})", f"{traceback}\n1 failed, {len(lines)} passed"),
        (f"write_file({file.name!r})", f"written: {len(changed)} characters"),
        (f"run_tests({tests!r})", f"{traceback}\n1 failed, {len(lines)} passed"),
        (f"read_file({file.name!r})", fenced(changed)),
        (f"write_file({file.name!r})", f"written: {len(changed) + 40} characters"),
        (f"run_tests({tests!r})", f"{len(lines) + 1} passed"),
    ]
    said = [user(f"Result of {call}:\n\n{result}") for call, result in results[: turns - 1]]
    task = user(f"{edited} It is about {file.name}. Run the tests before and after.")
    first: tuple[Message, ...] = ({"role": "system", "content": SYSTEM}, task)
    return Task(f"agent {file.name}", (first, *((message,) for message in said)))


def chat(material: Material, limit: int) -> list[Task]:
    return [_asked(prompt, "chat") for prompt in material.chats(limit)]


def rollouts(material: Material, limit: int) -> list[Task]:
    return [_asked(prompt, "rollouts") for prompt in material.problems(limit)]


def _asked(prompt: Prompt, name: str) -> Task:
    turns: Sequence[str] = prompt.turns
    return Task(f"{name} {prompt.id}", tuple((user(turn),) for turn in turns))


WORKLOADS = {
    one.name: one
    for one in (
        Workload("edit", "a file of code, to be written again with a change", edit, 1024, 96),
        Workload(
            "edit-predicted", "the same; `prediction` is the model's own answer with three lines changed", edit,
            1024, 96, predicted=True,
        ),
        Workload("extract", "an article to a JSON schema", extract),
        Workload("rag", "answers that quote one of four passages", rag),
        Workload("summary", "a summary of an article", summary),
        Workload("agent", "6 to 10 turns over one transcript with tool calls and results", agent, 128, 24),
        Workload("rollouts", "8 samples of each prompt at T = 1, three epochs", rollouts, 256, 48, samples=8, epochs=3),
        Workload(
            "rollouts-drift", "the same, with weights that change by 1% between two epochs", rollouts, 256, 48,
            samples=8, epochs=3, drift=0.01,
        ),
        Workload("chat", "two turns of a chat", chat),
    )
}  # fmt: skip
