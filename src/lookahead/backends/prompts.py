"""Prompts longer than a pass, for callers that run steps on a backend themselves. The engine's scheduler chunks prompts
itself, and runs the chunks beside other sequences' steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lookahead.backends.base import NO_TREE, Backend, StepInput
from lookahead.config import SamplingParams


def run_prompt_chunks(backend: Backend, inputs: Sequence[StepInput]) -> list[StepInput]:
    """Cache the prompt chunks that do not fit into one pass with the rest, each in a separate pass. Returns the inputs
    of the remaining pass."""
    remaining, most = list(inputs), prompt_chunk(backend)
    rows = sum(len(sequence.chunk) + sequence.tree.size for sequence in remaining)
    while True:
        longest = max(range(len(remaining)), key=lambda index: len(remaining[index].chunk))
        slot, tokens = remaining[longest].slot, remaining[longest].chunk
        if not tokens or (rows <= backend.most_rows and len(tokens) <= most):
            return remaining
        backend.step([StepInput(slot, tokens[:most], NO_TREE, SamplingParams(), ())])
        remaining[longest] = replace(remaining[longest], chunk=tokens[most:])
        rows -= min(most, len(tokens))


def prompt_chunk(backend: Backend) -> int:
    """Maximum prompt tokens of one sequence in a pass."""
    return min(backend.capabilities.prompt_chunk or backend.most_rows, backend.most_rows)
