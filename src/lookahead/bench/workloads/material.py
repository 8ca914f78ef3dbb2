"""What the workloads are made of: code files, articles, passages, problems and chats, from a data folder or built in.

The built-in material is small: seven texts, four files, and the chats and problems of the set `builtin`. It shows that
a row runs; figures to compare with others need `--data-dir`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from lookahead.bench.run.prompts import Prompt, evenly_spaced, load, read_rows

T = TypeVar("T")

FOLLOW_UPS = (
    "Say the same in half as many words.",
    "Now as a list of three points.",
    "Which of these points matters most, and why?",
)
"""Second turns of the built-in chats, which have only one."""
MAX_CODE = 6000
"""Characters of the longest file that is taken, so that file and answer fit into a context of 4,096 tokens."""
MAX_ARTICLE = 6000


@dataclass(frozen=True)
class CodeFile:
    """A Python file, and code that tests it."""

    name: str
    code: str
    tests: str


@dataclass(frozen=True)
class Material:
    """Each field makes up to `limit` items, evenly spaced over what there is."""

    files: Callable[[int], list[CodeFile]]
    articles: Callable[[int], list[str]]
    passages: Callable[[int], list[str]]
    problems: Callable[[int], list[Prompt]]
    chats: Callable[[int], list[Prompt]]
    source: str


def material(data_dir: Path | None) -> Material:
    """What the folder holds; without one what is built in."""
    if data_dir is None:
        return Material(
            _limited(_own_files()),
            _limited(_own_texts(2)),
            _limited(_own_texts(1)),
            _limited(_own("maths")),
            _limited(_own_chats()),
            "built in",
        )
    return Material(
        lambda count: _files(data_dir, count),
        lambda count: _texts(data_dir, "cnn-dm", "article", count),
        lambda count: _texts(data_dir, "xsum", "document", count),
        lambda count: load("gsm8k", data_dir, count),
        lambda count: load("mt-bench", data_dir, count),
        "data folder",
    )


def _limited(found: list[T]) -> Callable[[int], list[T]]:
    return lambda count: evenly_spaced(found, count)


# From a data folder.


def _files(folder: Path, count: int) -> list[CodeFile]:
    """Files of HumanEval, MBPP and ClassEval in turn."""
    read: dict[str, Callable[[dict[str, Any]], CodeFile]] = {
        "humaneval": lambda row: _file(row["entry_point"], row["prompt"] + row["canonical_solution"], row["test"]),
        "mbpp": lambda row: _file(f"task_{row['task_id']}", row["code"], "\n".join(row["test_list"])),
        "classeval": lambda row: _file(row["class_name"], row["solution_code"], row["test"]),
    }
    each = -(-count // len(read))
    sets = []
    for name, made in read.items():
        files = [file for row in read_rows(name, folder) if len((file := made(row)).code) <= MAX_CODE]
        sets.append(evenly_spaced(files, each))
    return [file for file in chain.from_iterable(zip_longest(*sets)) if file is not None][:count]


def _file(name: str, code: str, tests: str) -> CodeFile:
    """With one kind of line break, and no spaces at the ends of lines."""
    lines = code.replace("\r\n", "\n").strip().split("\n")
    return CodeFile(
        f"{name.lower()}.py", "\n".join(line.rstrip() for line in lines), tests.replace("\r\n", "\n").strip()
    )


def _texts(folder: Path, name: str, field: str, count: int) -> list[str]:
    found = [row[field] for row in read_rows(name, folder)]
    return evenly_spaced([text for text in found if len(text) <= MAX_ARTICLE], count)


# Built in.


def _own_files() -> list[CodeFile]:
    lines = Path(__file__).with_name("files.jsonl").read_text(encoding="utf-8").splitlines()
    return [CodeFile(**json.loads(line)) for line in lines]


def _own(*kinds: str) -> list[Prompt]:
    return [prompt for prompt in load("builtin") if prompt.kind in kinds]


def _own_texts(shortest: int) -> list[str]:
    """The texts of at least `shortest` sentences that the built-in prompts ask about, each once."""
    found = [prompt.turns[0].split("\n\n", 1)[1] for prompt in _own("summarising", "extraction")]
    return [text for text in dict.fromkeys(found) if text.count(". ") >= shortest]


def _own_chats() -> list[Prompt]:
    chats: Sequence[Prompt] = _own("chat")
    return [
        Prompt(chat.id, (*chat.turns, FOLLOW_UPS[index % len(FOLLOW_UPS)]), chat.kind)
        for index, chat in enumerate(chats)
    ]
