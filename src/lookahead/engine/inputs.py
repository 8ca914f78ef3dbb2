"""What a request's part of a pass is for the backend: its tree, how targets are chosen, and what is to be returned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.successors import KEPT_TOKENS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import MOST_AHEAD, Backend, StepInput
from lookahead.config import SamplingParams
from lookahead.engine.request import Request
from lookahead.engine.scheduler import Part

GREEDY = SamplingParams()
"""The sampling of a request with a verifier. The verifier chooses its tokens; the backend's targets only feed the
window and the sources, for which greedy targets are enough."""


def input_of(part: Part, only_pass: bool, backend: Backend) -> StepInput:
    """The input of a part. `only_pass`: its step has no other pass. ValueError if the request's mask cannot be used."""
    request, sequence, tree = part.request, part.request.sequence, part.tree
    if not part.whole:
        return StepInput(request.slot, part.chunk, tree, GREEDY, ())
    top = KEPT_TOKENS if sequence.wants_top else 0
    if request.verifier is not None:
        return StepInput(request.slot, part.chunk, tree, GREEDY, (), top, logits=True)
    if (noise := request.noise) is not None:
        return StepInput(request.slot, part.chunk, tree, noise.sampling, (), top, noise=noise.lines(tree))
    item = StepInput(request.slot, part.chunk, tree, sequence.sampling, sequence.uniforms(tree), top)
    if only_pass and sequence.continues_alone:
        item.continues_alone, item.next_uniforms = True, sequence.next_uniforms(MOST_AHEAD)
    if sequence.sampling.logprobs is not None:
        item.logprobs = sequence.sampling.logprobs
    if sequence.adjusts:
        item.adjustment = sequence.adjustment()
    if request.mask is not None:
        item.adjustment = masked(request, tree, item.adjustment, backend.vocab_size)
    return item


def masked(request: Request, tree: TokenTree, adjustment: Adjustment | None, vocabulary: int) -> Adjustment | None:
    """The adjustment with the allowed tokens of the request's mask in it. ValueError if they cannot be used."""
    rows = None if request.mask is None else request.mask.rows(tree, request.sequence)
    if rows is None:
        return adjustment
    shape = (len(tree.needed), -(-vocabulary // 32))
    if rows.dtype != np.uint32 or rows.shape != shape:
        raise ValueError(f"the mask is {rows.dtype} {list(rows.shape)}; it must be uint32 {list(shape)}")
    if not rows[0].any():
        raise ValueError("the mask allows no token after the text; it must allow one, such as an end token")
    if adjustment is None:
        adjustment = Adjustment(request.sequence.tokens, request.sequence.prompt_tokens)
    adjustment.mask = np.ascontiguousarray(rows)
    return adjustment


def needs_most(inputs: Sequence[StepInput], slot: int | None) -> int:
    """The index of the input that a pass had too little memory for: that of `slot`, or the one with the most tokens."""
    if slot is not None:
        return [item.slot for item in inputs].index(slot)
    return max(range(len(inputs)), key=lambda index: len(inputs[index].chunk) + inputs[index].tree.size)
