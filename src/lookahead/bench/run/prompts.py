"""Prompt sets: our own `builtin` one, and the paper's, read from a folder or through the `datasets` library.

The 32 builtin prompts (`builtin.jsonl`) have five kinds, in turn, so that the first few are a sample of all. What is to
be summarised, or taken out of a text, stands in the prompt: there an answer repeats what was asked.

A prompt is a conversation: one or more user turns, each answered before the next is asked. `raw` text is completed as
it stands; everything else goes through the model's chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lookahead.bench.run.methods import near

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One conversation of a set. `kind` is its category. `reference`: what the answer to its last turn is compared
    with."""

    id: str
    turns: tuple[str, ...]
    kind: str = ""
    system: str | None = None
    raw: bool = False
    reference: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """Where a set comes from: `file` in the data folder, or `hub` (name, config, split) through `datasets`. A preset
    takes `sample` prompts of it if it does not say how many; None for all."""

    name: str
    file: str
    hub: tuple[str, str | None, str]
    read: Callable[[dict[str, Any]], Prompt]
    max_tokens: int = 256
    sample: int | None = None


def _summary(row: dict[str, Any]) -> Prompt:
    """As the paper's appendix D lays it out, in our words: the text and a few rules as the system message."""
    text = row["article"] if "article" in row else row["document"]
    system = (
        f"Answer from the text below and from nothing else.\n\n{text}\n\n"
        "Write plain, businesslike English. Give only what is asked for, with no greeting and no remark about yourself."
    )
    reference = row.get("highlights", row.get("summary"))
    return Prompt(str(row["id"]), ("Summarise the text briefly.",), system=system, reference=reference)


def _mt_bench(row: dict[str, Any]) -> Prompt:
    ours = "turns" in row  # the hub's copy has other names
    turns, key = (row["turns"], row["question_id"]) if ours else (row["prompt"], row["prompt_id"])
    return Prompt(str(key), tuple(turns), str(row.get("category", "")))


def _humaneval(row: dict[str, Any]) -> Prompt:
    # Less the line break at its end: a prompt that ends in one makes a model begin in the middle of a token.
    return Prompt(str(row["task_id"]), (row["prompt"].rstrip(),), raw=True)


def _mbpp(row: dict[str, Any]) -> Prompt:
    tests = "\n".join(row["test_list"])
    return Prompt(str(row["task_id"]), (f"{row['text']}\nYour Python code should pass these tests:\n\n{tests}",))


def _gsm8k(row: dict[str, Any]) -> Prompt:
    return Prompt(row["question"][:60], (f"{row['question']}\nThink step by step.",))


def _classeval(row: dict[str, Any]) -> Prompt:
    return Prompt(str(row["task_id"]), (f"Complete the class {row['class_name']}.\n\n{row['skeleton']}",))


PAPER_SETS = {
    one.name: one
    for one in (
        PromptSet("mt-bench", "mt_bench.jsonl", ("HuggingFaceH4/mt_bench_prompts", None, "train"), _mt_bench, 1024),
        PromptSet("humaneval", "humaneval.jsonl", ("openai/openai_humaneval", None, "test"), _humaneval, 512),
        PromptSet("mbpp", "mbpp.jsonl", ("google-research-datasets/mbpp", "full", "test"), _mbpp, 512, 100),
        PromptSet("gsm8k", "gsm8k_test.jsonl", ("openai/gsm8k", "main", "test"), _gsm8k, 512, 100),
        PromptSet("classeval", "classeval.json", ("FudanSELab/ClassEval", None, "test"), _classeval, 2048, 40),
        PromptSet("cnn-dm", "cnn_dm_sample.jsonl", ("abisee/cnn_dailymail", "3.0.0", "test"), _summary, 256, 50),
        PromptSet("xsum", "xsum_sample.jsonl", ("EdinburghNLP/xsum", None, "test"), _summary, 256, 50),
    )
}
"""The paper's, with its limits of new tokens where it names one (HumanEval 512, ClassEval 2048), and samples of the
sets whose whole would take hours."""
SETS = ("builtin", *PAPER_SETS)


def load(name: str, data_dir: Path | None = None, limit: int | None = None, turns: int | None = None) -> list[Prompt]:
    """The prompts of a set; `limit` of them, evenly spaced; `turns` of each conversation."""
    check(name)
    if name == "builtin":
        lines = Path(__file__).with_name("builtin.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[:limit]]
        return [Prompt(f"{row['kind']}-{i}", (row["prompt"],), row["kind"]) for i, row in enumerate(rows)]
    source = PAPER_SETS[name]
    rows = read_rows(name, data_dir)
    try:
        found = [source.read(row) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"set {name!r}: a row is not as expected ({type(error).__name__}: {error}); "
                         f"is {source.file} the right file?") from error  # fmt: skip
    return [replace(prompt, turns=prompt.turns[:turns]) for prompt in evenly_spaced(found, limit)]


def sample(name: str, data_dir: Path | None, limit: int | None, turns: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a set, in an order of which every beginning is a fair sample of the set. A run that
    ends early has such a beginning, and one with a larger limit has the same prompts and more."""
    found = load(name, data_dir, turns=turns)
    return (found if name == "builtin" else spread(found))[:limit]


def read_rows(name: str, data_dir: Path | None) -> list[dict[str, Any]]:
    """The rows of one of the paper's sets as they are stored, in the folder or on the hub."""
    source = PAPER_SETS[name]
    return _from_hub(source) if data_dir is None else _from_folder(source, data_dir)


def evenly_spaced(found: list[T], limit: int | None) -> list[T]:
    """`limit` of these; all where there are no more."""
    count = len(found)
    if limit is None or limit >= count:
        return found
    return [found[i * count // limit] for i in range(limit)]


def spread(found: list[T]) -> list[T]:
    """The same in an order of which every beginning is spread evenly over the whole: by indices with reversed bits."""
    count, bits = len(found), max(1, (len(found) - 1).bit_length())

    def turned(row: int) -> int:
        return int(f"{-(-(row << bits) // count):0{bits}b}"[::-1], 2)

    return [found[row] for row in sorted(range(count), key=turned)]


def check(name: str) -> str:
    if name in SETS:
        return name
    raise ValueError(f"unknown prompt set {name!r}: {near(name, SETS)}choose from {', '.join(SETS)}")


def messages(prompt: Prompt, answers: Sequence[str]) -> list[dict[str, str]]:
    chat = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "user", "content": prompt.turns[len(answers)]}]


def read_own(path: Path) -> list[str]:
    """A user's: one prompt per line; in a `.jsonl` file, or where the first line is an object, each line's "prompt"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read the prompts in {str(path)!r}: {why}") from error
    found = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise ValueError(f"no prompts in {str(path)!r}: write one per line")
    if path.suffix != ".jsonl" and not next(iter(found.values())).startswith('{"'):
        return list(found.values())
    prompts = []
    for number, line in found.items():
        row = _parse(line, path, number)
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise ValueError(f'line {number} of {str(path)!r} is no JSON object with a "prompt" of text')
        prompts.append(row["prompt"])
    return prompts


def _from_folder(source: PromptSet, folder: Path) -> list[dict[str, Any]]:
    path = folder / source.file
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"set {source.name!r} needs {path}, which cannot be read ({error.strerror}): put it there (it is "
            f"{source.hub[0]} on the hub), or leave --data-dir out to fetch it from the hub"
        ) from error
    if path.suffix == ".json":
        return list(_parse(text, path, 1))
    return [_parse(line, path, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _parse(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def _from_hub(source: PromptSet) -> list[dict[str, Any]]:
    name, config, split = source.hub
    hint = f"or give --data-dir, a folder with {source.file}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"set {source.name!r} comes from the hub ({name}) through the datasets library, which is not installed: "
            f"pip install 'lookahead-decoding[bench]', {hint}"
        ) from error
    try:
        return [dict(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:  # whatever the hub's client raises: there is no list of it
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"set {source.name!r}: {name} cannot be fetched ({first[:160]}): go online, {hint}") from error
