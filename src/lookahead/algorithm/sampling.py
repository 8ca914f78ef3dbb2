"""From logits to targets: the argmax, or one draw by inverse CDF with the uniform of the output position.

The paper's Algorithm 4 tries the guesses one by one and renormalises after each refusal. Our guesses are fixed tokens,
not draws, so this has the same distribution as drawing one token from P and accepting a guess that equals it. A target
is therefore one draw. Its uniform belongs to the *output position*, so the same seed gives the same tokens with any
tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lookahead.config import SamplingParams

NO_DRAW = -1.0
"""Stands in place of a uniform and means: take the argmax. The window's targets are greedy, as in section 3.2."""


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[R, V] logits -> [R, V] float64 probabilities after temperature, top-k, top-p and min-p, in that order."""
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= params.top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    probs = scores.softmax(dim=-1)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[R, V] probabilities and [R] uniforms in [0, 1) -> [R] tokens, each the first whose CDF exceeds its uniform."""
    cdf = probs.cumsum(dim=-1)
    threshold = (uniforms * cdf[:, -1])[:, None]
    tokens = torch.searchsorted(cdf, threshold, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(tokens, last)


def pick(logits: torch.Tensor, params: SamplingParams, uniforms: Sequence[float]) -> torch.Tensor:
    """[R, V] logits -> [R] targets. `uniforms[r]` is for row r, or NO_DRAW for the argmax."""
    greedy = logits.argmax(dim=-1)
    drawn = [r for r, u in enumerate(uniforms) if u != NO_DRAW]
    if params.greedy or not drawn:
        return greedy
    rows = torch.tensor(drawn, device=logits.device)
    u = torch.tensor([uniforms[r] for r in drawn], dtype=torch.float64, device=logits.device)
    return greedy.index_copy(0, rows, draw(distribution(logits[rows], params), u))


LEVELS = 16
"""Probability levels of a top token. The last level holds all probabilities below 2^-7.5."""


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[R, V] logits -> [R, 2 count] int32: the `count` likeliest tokens, best first, and then the level of each.

    Level l holds the probabilities above 2^(-(l + 1) / 2), up to 2^(-l / 2).
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    log2 = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)) / math.log(2)
    return torch.cat([ids, (-2 * log2).clamp_(0, LEVELS - 1).to(ids.dtype)], dim=1).to(torch.int32)
