"""The prompts that acceptance is measured on: the user's, or a few of our own."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain in a short paragraph why the sky is blue.",
    "List five tips for writing clear emails.",
    "Summarise the plot of Romeo and Juliet in a few sentences.",
)
"""Code, an explanation, a list and a story: what a chat model is asked for. Yours are better."""


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; in a `.jsonl` file, or where the first line is a JSON object, each line's "prompt"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read the prompts in {str(path)!r}: {why}") from error
    numbered = [(i, line.strip()) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"no prompts in {str(path)!r}: write one per line")
    if path.suffix == ".jsonl" or numbered[0][1].startswith('{"'):
        return [_prompt_of(line, i, path) for i, line in numbered]
    return [line for _, line in numbered]


def _prompt_of(line: str, number: int, path: Path) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'line {number} of {str(path)!r} is no JSON object with a "prompt" of text')
    return prompt
