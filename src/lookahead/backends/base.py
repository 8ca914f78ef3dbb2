"""What the engine needs from a backend: slots that hold K/V, a forward pass over trees, and a commit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.sampling import adjusted
from lookahead.config import SamplingParams

MOST_AHEAD = 32
"""The most steps that a backend may run one after the other without the host."""

NO_LIMIT = sys.maxsize
"""The `most_rows` of a backend whose passes may have any number of tokens."""

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, keys and values [heads, n, dim] of one sequence's last n tokens."""


@dataclass(slots=True)
class StepInput:
    """One sequence's part of a forward pass.

    `chunk` is its prompt chunk: the tokens before the tree's root that are not cached yet. On the first step these are
    the prompt without its last token, later none; with several ranks also accepted tokens that another rank computed.
    Any but the last chunk of a long prompt comes with `NO_TREE`: it is cached, and there is nothing to commit.

    `uniforms` align with `tree.needed` and are empty for greedy decoding. `top` is how many top tokens to return per
    needed node. With `logits` the output has the needed nodes' logits, too. `continues_alone` is a hint: the next step
    will be a plain one-token step whose input is this step's target. Then `next_uniforms` are the uniforms of the next
    MOST_AHEAD output positions, so that a backend can run some of these steps without the host.

    `noise`, for a backend that `draws_noise`, takes the place of uniforms: for each needed node the row of the
    backend's noise from which its target is drawn as `torch.multinomial` draws, or -1 for the argmax. With an
    `adjustment` targets are chosen from adjusted logits (`sampling.adjusted`). With `logprobs` the output has
    log-probabilities: of the targets, and of the `logprobs` likeliest tokens.
    """

    slot: int
    chunk: Sequence[int]
    tree: TokenTree
    sampling: SamplingParams
    uniforms: Sequence[float]
    top: int = 0
    logits: bool = False
    continues_alone: bool = False
    next_uniforms: Sequence[float] = ()
    noise: Sequence[int] = ()
    adjustment: Adjustment | None = None
    logprobs: int | None = None

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of the needed nodes, as their targets are chosen from them."""
        if self.adjustment is None:
            return logits
        paths = [self.tree.path_tokens(node) for node in self.tree.needed]
        return adjusted(logits, self.sampling, self.adjustment, paths)


NO_TREE = TokenTree([], [], [], [])
"""The tree of an input that only caches its prompt chunk."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Callers ask this, never which class a backend is.

    `name` is the name that users give it: 'graph', 'cpu' or 'eager'. `kernels` tells apart versions of one backend
    whose steps cost different times on the same machine; files of measured costs are kept under it.

    Exactness: `exact_nodes` is the most nodes of a tree whose logits equal those of single-token steps bit for bit, and
    `exact_depth` the largest depth of its root and guesses. None where logits are equal up to rounding only, or where
    that is not known. With `branches` a tree may have any form; without, it must be one chain. `backends.exact` fits
    every config to these three.

    The form of a pass: with `pads` it is padded to its longest input, so that a prompt should run whole and in a pass
    of its own; without, it has the rows of all inputs and no others. `row_sizes` are the numbers of rows that passes
    are captured for, smallest first: a pass takes the time of the next larger one, and one of a whole budget hardly
    longer than one of a single token. Empty where a pass has exactly the rows that it needs. `prompt_chunk` is the most
    prompt tokens that a pass may have of one sequence; None where only the pass's rows limit it.

    `overlaps`: the device runs beside the host, so that a next step may begin before the host has handled the results
    of the last one. `draws_noise`: `StepInput.noise` is understood. `ranks` is the number of processes that run every
    pass together, with tensor or lookahead parallelism: all of them must choose the same trees, so that none may choose
    by its own measurements or files.
    """

    name: str
    kernels: str = ""
    exact_nodes: int | None = None
    exact_depth: int | None = None
    branches: bool = True
    pads: bool = False
    row_sizes: tuple[int, ...] = ()
    prompt_chunk: int | None = None
    overlaps: bool = False
    draws_noise: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class CacheUse:
    """Which part of the K/V pages is in use, 0 to 1; how many prompt tokens were looked up in the prefix cache so far,
    and how many of them were found there. All are 0 for a backend without pages."""

    used: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0


class Backend(Protocol):
    """The device side: weights, K/V and the forward pass. A backend knows nothing of windows, pools or text.

    `model` is the transformers model that it runs. `max_length` is the most positions a sequence may have, or None if
    there is no limit. `most_rows` is the most tokens of a pass, prompt chunks and trees of all inputs together, or
    NO_LIMIT. `most_nodes` is the most nodes of all trees of a pass, or None if there is no limit. `captures` counts
    what the backend has compiled, searched for or captured so far: a time in which it grew is not the time of a step.
    """

    capabilities: Capabilities
    model: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_length: int | None
    most_rows: int
    most_nodes: int | None

    @property
    def captures(self) -> int: ...

    # Slots

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """Open a slot for a new sequence that begins with these tokens.

        Its `length` is 0, unless the backend has the K/V of another sequence with the same salt that began the same:
        then these are shared, and `length` is up to len(tokens) - 1.
        """
        ...

    def close(self, slot: int) -> None:
        """Free the slot and its K/V. What was given to `remember` may stay while there is room."""
        ...

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for this number of tokens of the sequence, the nodes of its next tree included.

        False if there is no memory for them, until another slot is closed.
        """
        ...

    def holds(self) -> int | None:
        """The most tokens that a sequence may have, its last tree included, if it is the only one. None: any number."""
        ...

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the K/V of these tokens, which are the slot's cached ones."""
        ...

    def length(self, slot: int) -> int:
        """How many tokens of the sequence are cached."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the K/V pages are, and what the prefix cache was good for."""
        ...

    # A step

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> None:
        """Compile and capture in advance what up to `sequences` sequences need at once, with prompts of up to `tokens`
        tokens and trees of up to `budget` nodes each."""
        ...

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        """Start one forward pass over every input's prompt chunk and tree. It may still be running on return."""
        ...

    def collect(self, running: Any) -> list[StepOutput]:
        """Wait for the pass that `launch` started, and return what it computed for the needed nodes."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        ...

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Per slot of the last step, keep the K/V of the prompt chunk, the root and these nodes; drop the rest."""
        ...

    # K/V from outside, and for outside

    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        """Fill a slot with the K/V of a sequence's first `length` tokens, which were computed elsewhere.

        A layer of `layers` may hold only the last of these tokens, if it has a sliding window of no more. A further
        token's position is its index in the sequence plus `offset`, which has a number for each axis of the model's
        positions: an image has more tokens than positions. Without it positions are indices.
        """
        ...

    def cached(self, slot: int) -> Layers:
        """Copy the K/V of all tokens that a slot has cached."""
        ...
