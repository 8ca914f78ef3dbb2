"""What an engine needs of a backend: slots that hold K/V, one forward pass over trees, and a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lookahead.algorithm.tree import StepOutput, TokenTree
from lookahead.config import SamplingParams

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, keys and values [heads, n, dim] of one sequence's last n tokens."""


@dataclass(slots=True)
class StepInput:
    """One sequence's part of a forward pass.

    `trail` are the tokens before the tree's root that are not cached yet: the prompt, on the first step; else nothing.
    `uniforms` align with `tree.needed` (empty for greedy); `top` is how many likeliest tokens to return per needed
    node. With `logits` the output holds their logits, too. `continues_alone` is a hint: the next step will be a plain
    one-token step whose input is this step's target.
    """

    slot: int
    trail: Sequence[int]
    tree: TokenTree
    sampling: SamplingParams
    uniforms: Sequence[float]
    top: int = 0
    logits: bool = False
    continues_alone: bool = False


def padded(batch: int) -> int:
    """The size of a batch when it is captured: the next power of two."""
    return 1 << (batch - 1).bit_length()


class Backend(Protocol):
    """The device side: weights, K/V, one forward. It knows nothing of windows, pools or text.

    `model` is the transformers model that it runs. `max_length` is the most positions a sequence may have, None
    without a limit.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_length: int | None

    # Slots

    def open(self) -> int:
        """A slot for a new sequence, with nothing cached."""
        ...

    def close(self, slot: int) -> None:
        """Give the slot back."""
        ...

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        ...

    # A step

    def prepare(self, tokens: int, budget: int) -> None:
        """Do beforehand what the first steps of one sequence of so many tokens would otherwise wait for."""
        ...

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        """Start one forward pass over every input's trail and tree. It may still run on return."""
        ...

    def collect(self, running: Any) -> list[StepOutput]:
        """Wait for what `launch` returned: the targets and top tokens of the needed nodes."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        ...

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Per slot of the last step: keep the trail, the root and these tree nodes, in order; drop the rest."""
        ...

    # K/V from and for elsewhere

    def adopt(self, slot: int, length: int, layers: Layers) -> None:
        """Fill a slot with the K/V of a sequence's first `length` tokens that were computed elsewhere.

        `layers` holds the last n of them; a sliding layer needs no more than its window.
        """
        ...

    def cached(self, slot: int) -> Layers:
        """Copies of a slot's K/V of all its cached tokens."""
        ...
