"""Prompts that are longer than a pass, for callers that run steps on a backend themselves. The engine's scheduler cuts
prompts itself, into chunks that run beside other sequences' steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lookahead.backends.base import NO_TREE, Backend, StepInput
from lookahead.config import SamplingParams


def run_prompt_chunks(backend: Backend, inputs: Sequence[StepInput]) -> list[StepInput]:
    """Cache the prompt chunks that do not fit into one pass with all the rest, each in a pass of its own. Returns the
    inputs of the pass that remains."""
    items, most = list(inputs), prompt_chunk(backend)
    rows = sum(len(item.chunk) + item.tree.size for item in items)
    while True:
        longest = max(range(len(items)), key=lambda index: len(items[index].chunk))
        slot, tokens = items[longest].slot, items[longest].chunk
        if not tokens or (rows <= backend.most_rows and len(tokens) <= most):
            return items
        backend.step([StepInput(slot, tokens[:most], NO_TREE, SamplingParams(), ())])
        items[longest] = replace(items[longest], chunk=tokens[most:])
        rows -= min(most, len(tokens))


def prompt_chunk(backend: Backend) -> int:
    """The most prompt tokens that a pass may have of one sequence."""
    return min(backend.capabilities.prompt_chunk or backend.most_rows, backend.most_rows)
