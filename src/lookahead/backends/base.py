"""What an engine needs of a backend: slots that hold K/V, one forward pass over trees, and a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lookahead.algorithm.tree import StepOutput, TokenTree
from lookahead.config import SamplingParams


@dataclass(slots=True)
class StepInput:
    """One sequence's part of a forward pass.

    `trail` are the tokens before the tree's root that are not cached yet: the prompt, on the first step; else nothing.
    `uniforms` align with `tree.needed` (empty for greedy); `top` is how many likeliest tokens to return per row.
    With `logits` the result holds their logits, too. `continues_alone` is a hint: the next step will be a plain
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
    """The device side: weights, K/V, one forward. It knows nothing of windows, pools or text."""

    max_length: int | None

    def open(self) -> int:
        """A slot for a new sequence, with nothing cached."""
        ...

    def close(self, slot: int) -> None:
        """Give the slot back."""
        ...

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        ...

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        """Start one forward pass over every input's trail and tree; it may still run on return."""
        ...

    def collect(self, launched: Any) -> list[StepOutput]:
        """Wait for it: the needed rows' targets and top rows."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        ...

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Per slot of the last step: keep the trail, the root and these tree nodes, in order; drop the rest."""
        ...
