"""The log-probabilities of what a step accepted."""

from __future__ import annotations

import torch

from lookahead.algorithm.verify import Verdict
from lookahead.backends.sampling import log_probs
from lookahead.engine.request import StepResult, TokenLogprobs


def logprobs_of(result: StepResult, verdict: Verdict, count: int) -> list[TokenLogprobs]:
    """The log-probabilities of the accepted tokens, each with the `count` likeliest tokens at its position.

    A verifier may choose other tokens than the backend's targets; then they are computed from the logits, which its
    steps always have.
    """
    output, rows = result.output, [result.input.tree.needed_index(node) for node in (0, *verdict.path)]
    if output.likely is None or output.logprobs is None:
        logits = output.logits[rows]
        likely, values = log_probs(logits, torch.tensor(verdict.tokens, device=logits.device), count)
    else:
        likely, values = output.likely[rows], output.logprobs[rows]
    return [
        TokenLogprobs(chosen, list(zip(tokens, others, strict=True)))
        for (chosen, *others), tokens in zip(values[:, : 1 + count].tolist(), likely[:, :count].tolist(), strict=True)
    ]
