"""Steps that a backend runs ahead, and what a host may ask for instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny import VOCABULARY, greedy, random_tree, root

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import SamplingParams

TEXTS = ([5, 9, 5, 9, 5, 3], [8, 1, 30, 2, 60, 7])
"""Of equal length, so that a mix-up of the two would go unnoticed by their lengths."""

Ask = Callable[[Sequence[int], Sequence[int]], list[StepInput]]


def steps(
    backend: GraphBackend, ask: Ask, *, hint: bool, commit: bool = True
) -> tuple[list[StepOutput], list[torch.Tensor]]:
    """Run three plain steps of two sequences, then the step that `ask` makes, then one more per slot for its logits."""
    slots = [backend.open() for _ in TEXTS]
    tokens = list[int]()
    for slot, text in zip(slots, TEXTS, strict=True):
        tokens.append(backend.step([greedy(slot, text[:-1], root(text[-1]))])[0].targets[0])
        backend.commit([(slot, ())])
    for number in range(2):
        items = [greedy(slot, (), root(token)) for slot, token in zip(slots, tokens, strict=True)]
        for item in items:
            item.continues_alone = hint
        tokens = [result.targets[0] for result in backend.step(items)]
        if commit or not number:
            backend.commit([(slot, ()) for slot in slots])
    asked = ask(slots, tokens)
    found = backend.step(asked)
    if commit:
        backend.commit([(item.slot, ()) for item in asked])
    after = [backend.step([greedy(slot, (), root(1), logits=True)])[0].logits.clone() for slot in slots]
    for slot in slots:
        backend.close(slot)
    return found, after


def same(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    return [greedy(slot, (), root(token), 8) for slot, token in zip(slots, tokens, strict=True)]


def with_logits(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    return [greedy(slot, (), root(token), 8, logits=True) for slot, token in zip(slots, tokens, strict=True)]


def drawn(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    params = SamplingParams(temperature=5.0)
    return [StepInput(slot, (), root(token), params, [0.8], 8) for slot, token in zip(slots, tokens, strict=True)]


def other_root(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    return same(slots, [tokens[0], (tokens[1] + 1) % VOCABULARY])


def other_order(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    """The slots in the other order, but the tokens not: each slot gets the other one's token."""
    return same(slots[::-1], tokens)


def one_of_them(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    return same(slots[1:], tokens[1:])


def trees(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    made = []
    for slot, token in zip(slots, tokens, strict=True):
        tree = random_tree(9, token)
        made.append(greedy(slot, (), TokenTree([token, *tree.tokens[1:]], tree.parents, tree.depths, tree.needed), 8))
    return made


def with_chunk(slots: Sequence[int], tokens: Sequence[int]) -> list[StepInput]:
    """As in lookahead parallelism: a rank has yet to run tokens that another one accepted."""
    return [greedy(slots[0], [3, 4], root(tokens[0]), 8), greedy(slots[1], (), root(tokens[1]), 8)]


ASKED = (same, with_logits, drawn, other_root, other_order, one_of_them, trees, with_chunk)


def hinted(backend: GraphBackend, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Run and commit a plain step with the hint, so that a step ahead follows it. Returns the targets."""
    items = same(slots, tokens)
    for item in items:
        item.continues_alone = True
    found = [result.targets[0] for result in backend.step(items)]
    backend.commit([(slot, ()) for slot in slots])
    return found


class Replayed:
    """Stands in for a CUDA graph on a CPU: capturing runs nothing, and a replay runs the step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = torch.inference_mode()(step)
