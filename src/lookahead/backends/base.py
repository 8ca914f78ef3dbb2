"""The backend interface of the engine: slots that hold K/V, a forward pass over trees, and a commit.

To add a backend:

1. Write a class with the attributes and methods of `Backend` in a folder of its own. `eager.backend` is the simplest;
   one with pages can keep them in `kv.slots`. State in its `Capabilities` what it can do: nothing else is assumed.
2. Add its name to `config.BACKENDS` and a branch to `choose.make_backend`, which also decides whether 'auto' takes it.
3. Compare its logits with `models.reference` or the eager backend's, and its text with autoregressive decoding, for the
   rows of tests/helpers/model_table.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.sampling import adjusted
from lookahead.config import SamplingParams

MOST_AHEAD = 32
"""Maximum number of consecutive steps that a backend may run without the host."""

NO_LIMIT = sys.maxsize
"""The `most_rows` of a backend whose passes may have any number of tokens."""

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Per layer that has its own K/V, keys and values [heads, n, dim] of one sequence's last n tokens."""


@dataclass(slots=True)
class StepInput:
    """The input of one sequence to a forward pass.

    `chunk` is its prompt chunk: the tokens before the tree's root that are not cached yet. On the first step these are
    the prompt without its last token, later none; with several ranks also accepted tokens that another rank computed.
    All but the last chunk of a long prompt come with `NO_TREE`: they are cached, and there is nothing to commit.

    `uniforms` align with `tree.needed` and are empty for greedy decoding. `top` is the number of top tokens to return
    per needed node. With `logits` the output includes the needed nodes' logits. `continues_alone` is a hint: the next
    step will be a plain one-token step whose input is this step's target, unless the sequence ends. Then
    `next_uniforms` are the uniforms of the next MOST_AHEAD output positions, so that a backend can run some of these
    steps without the host.

    `noise`, for a backend that `draws_noise`, replaces the uniforms: for each needed node the row of the backend's
    noise with which its target is sampled as in `torch.multinomial`, or -1 for the argmax. With an `adjustment` targets
    are sampled from adjusted logits (`sampling.adjusted`). With `logprobs` the output includes log-probabilities: of
    the targets, and of the `logprobs` likeliest tokens.

    `prompt_tokens` is the number of tokens of the sequence's prompt: some recurrent models treat those differently from
    tokens that were generated, also if they run again. None: chunks and the roots behind them are of the prompt.
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
    prompt_tokens: int | None = None

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of the needed nodes, adjusted for sampling."""
        if self.adjustment is None:
            return logits
        paths = [self.tree.path_tokens(node) for node in self.tree.needed]
        return adjusted(logits, self.sampling, self.adjustment, paths)


NO_TREE = TokenTree([], [], [], [])
"""The tree of an input that only caches its prompt chunk."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Callers check this, never the class of a backend.

    `name` is its name for users: 'graph', 'cpu' or 'eager'. `kernels` distinguishes versions of one backend whose steps
    take different times on the same machine; measured costs are stored under it.

    Exactness: `exact_nodes` is the maximum number of nodes of a tree whose logits equal those of single-token steps bit
    for bit, and `exact_depth` the maximum depth of its draft tokens. None where logits are equal only up to rounding,
    or where that is not known. With `branches` a tree may have any shape; without, it must be one chain.
    `backends.exact` fits every config to these three.

    The shape of a pass: with `pads` it is padded to its longest input, so that a prompt should run in one piece and in
    a separate pass; without, it has just the rows of all inputs. `row_sizes` are the captured numbers of rows, in
    ascending order: a pass takes the time of the next larger size, and a full budget takes hardly longer than a single
    token. Empty where a pass is not padded to a size. `prompt_chunk` is the maximum number of prompt tokens of one
    sequence in a pass; None where only the pass's rows limit it. Without `runs_prompts` a sequence has to begin with
    adopted K/V: only the model's own forward pass runs its prompts (see `Decoder.causal_prompt`).

    Sequences: at most `most_sequences` may be open, or None for no limit. Without `adopts`, a sequence has more than
    K/V, so that `adopt` and `cached` are refused: each sequence runs its prompt. Then others share its beginning only
    up to the end of a prompt chunk that ends at a multiple of `shares_at` tokens, or not at all if that is None.

    `overlaps`: the device runs asynchronously, so that the next step may begin before the host has handled the results
    of the last one. `runs_ahead`: after a step that `continues_alone` the next one starts without the host, and takes
    less time than others. `draws_noise`: `StepInput.noise` is supported. `ranks` is the number of processes that run
    every pass together, with tensor or lookahead parallelism: all of them must choose the same trees, so none may rely
    on its own measurements or files.

    `experts`: the experts of all layers, of which a pass reads those that its rows have chosen: the time of a pass then
    depends on its text. 0 without experts, or where nobody counts what is read.
    """

    name: str
    kernels: str = ""
    exact_nodes: int | None = None
    exact_depth: int | None = None
    branches: bool = True
    pads: bool = False
    row_sizes: tuple[int, ...] = ()
    prompt_chunk: int | None = None
    most_sequences: int | None = None
    runs_prompts: bool = True
    adopts: bool = True
    shares_at: int | None = None
    overlaps: bool = False
    runs_ahead: bool = False
    draws_noise: bool = False
    ranks: int = 1
    experts: int = 0


@dataclass(frozen=True)
class CacheUse:
    """The share of K/V pages in use, 0 to 1, and the prompt tokens looked up and found in the prefix cache so far. All
    are 0 for a backend without pages."""

    used: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0


class Backend(Protocol):
    """The device side: weights, K/V and the forward pass. A backend knows nothing of windows, pools or text.

    `model` is the transformers model that it runs. `max_length` is the maximum number of positions of a sequence, or
    None for no limit. `most_rows` is the maximum number of tokens of a pass, over prompt chunks and trees of all
    inputs, or NO_LIMIT. `most_nodes` is the maximum number of nodes of all trees of a pass, or None for no limit.
    `captures` counts what the backend has compiled, tuned or captured so far: a step during which it grew must not be
    timed. `expert_reads` is the number of experts that all passes collected so far have read, each layer's counted, if
    `capabilities.experts`.
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
    def expert_reads(self) -> int: ...

    @property
    def captures(self) -> int: ...

    # Slots

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """Open a slot for a new sequence that begins with these tokens.

        Its `length` is 0, unless the backend has cached K/V of a common prefix with the same salt: then that is shared,
        and `length` is up to len(tokens) - 1.
        """
        ...

    def close(self, slot: int) -> None:
        """Free the slot and its K/V. What was given to `remember` may stay cached while there is room."""
        ...

    def reserve(self, slot: int, tokens: int) -> bool:
        """Reserve memory for this number of tokens of the sequence, including the nodes of its next tree.

        False if there is too little until another slot is closed.
        """
        ...

    def holds(self) -> int | None:
        """Maximum tokens of a single sequence, including its last tree. None for no limit."""
        ...

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences share the K/V of these tokens, which are cached in the slot."""
        ...

    def length(self, slot: int) -> int:
        """Number of cached tokens of the sequence."""
        ...

    def cache_use(self) -> CacheUse:
        """How full the K/V pages are, and the prefix cache's hits."""
        ...

    def reload_weights(self) -> None:
        """Read the weights of `model` again, which were changed, and forget the K/V of the old ones. No slot may be
        open."""
        ...

    # A step

    def prepare(self, tokens: int, budget: int, sequences: int = 1) -> Mapping[str, float]:
        """Compile and capture in advance what up to `sequences` concurrent sequences need, with prompts of up to
        `tokens` tokens and trees of up to `budget` nodes each. Returns the seconds that the backend has spent on it so
        far, by what it did."""
        ...

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        """Start one forward pass over every input's prompt chunk and tree. It may still be running on return."""
        ...

    def collect(self, running: Any) -> list[StepOutput]:
        """Wait for the pass that `launch` started, and return the results of its needed nodes."""
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Launch and collect."""
        ...

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Per slot of the last step, keep the K/V of the prompt chunk, the root and these nodes; drop the rest."""
        ...

    # Importing and exporting K/V

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
