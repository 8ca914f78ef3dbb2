"""The backend's input for a scheduled request: its chunk and tree, how targets are chosen, and what to return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.algorithm.sampling import Adjustment
from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import MOST_AHEAD, NO_TREE, Backend, StepInput
from lookahead.config import SamplingParams
from lookahead.engine.batch import ScheduledBatch, ScheduledRequest
from lookahead.engine.request import Request

GREEDY = SamplingParams()
"""The sampling of a request with a verifier, which chooses its tokens. The backend's targets only feed the window and
the sources, for which greedy targets are enough."""


def prepare_input(scheduled: ScheduledRequest, chunk: Sequence[int] = ()) -> StepInput:
    """What is known of a request's input before its tree."""
    request, sequence = scheduled.request, scheduled.request.sequence
    step_input = StepInput(request.slot, chunk, NO_TREE, GREEDY, (), prompt_tokens=sequence.prompt_tokens)
    step_input.top = MAX_SUCCESSORS if sequence.wants_top else 0
    if request.verifier is not None:
        step_input.logits = True
    elif request.noise is not None:
        step_input.sampling = request.noise.sampling
    else:
        step_input.sampling, step_input.logprobs = sequence.sampling, sequence.sampling.logprobs
    return step_input


def make_input(scheduled: ScheduledRequest, next_is_plain: bool, backend: Backend) -> StepInput:
    """The input of a scheduled request. `next_is_plain`: so is its next step. ValueError if the mask is bad."""
    request, sequence, tree = scheduled.request, scheduled.request.sequence, scheduled.tree
    if not scheduled.is_last_chunk:
        return StepInput(request.slot, scheduled.chunk, tree, GREEDY, (), prompt_tokens=sequence.prompt_tokens)
    step_input, scheduled.next_input = scheduled.next_input or prepare_input(scheduled, scheduled.chunk), None
    step_input.tree = tree
    if step_input.logits or (request.plain and sequence.greedy and not next_is_plain):
        return step_input
    if request.noise is not None:
        step_input.noise = request.noise.rows(tree)
        return step_input
    if not sequence.greedy:
        step_input.uniforms = sequence.uniforms(tree)
    if next_is_plain:
        step_input.continues_alone, step_input.next_uniforms = True, sequence.next_uniforms(MOST_AHEAD)
    if sequence.adjusts:
        step_input.adjustment = sequence.adjustment()
    if request.mask is not None:
        step_input.adjustment = with_mask(request, tree, step_input.adjustment, backend.vocab_size)
    return step_input


def make_inputs(batch: ScheduledBatch, backend: Backend) -> tuple[list[StepInput], list[tuple[Request, Exception]]]:
    """The inputs of a batch. A request whose mask fails leaves the batch, and is returned with its exception."""
    inputs: list[StepInput] = []
    failed: list[tuple[Request, Exception]] = []
    for scheduled in batch.requests:
        try:
            inputs.append(make_input(scheduled, batch.next_is_plain, backend))
        except Exception as error:
            if scheduled.request.mask is None:
                raise
            failed.append((scheduled.request, error))
    if failed:
        failed_requests = [request for request, _ in failed]
        batch.keep([scheduled for scheduled in batch.requests if scheduled.request not in failed_requests])
    return inputs, failed


def with_mask(request: Request, tree: TokenTree, adjustment: Adjustment | None, vocabulary: int) -> Adjustment | None:
    """The adjustment with the request's mask of allowed tokens. ValueError if the mask is invalid."""
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


def largest_input(inputs: Sequence[StepInput], slot: int | None) -> int:
    """The index of the input to drop when memory is short: that of `slot`, or the one with the most tokens."""
    if slot is not None:
        return [step_input.slot for step_input in inputs].index(slot)
    return max(range(len(inputs)), key=lambda index: len(inputs[index].chunk) + inputs[index].tree.size)
