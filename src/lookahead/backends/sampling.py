"""From logits to targets: the argmax, or one draw by inverse CDF with the uniform of the output position.

The paper's Algorithm 4 tries the guesses one by one and renormalises after each refusal. Our guesses are fixed tokens,
not draws, so this has the same distribution as drawing one token from P and accepting a guess that equals it. A target
is therefore one draw. Its uniform belongs to the *output position*, so the same seed gives the same tokens with any
tree.

Logits become a target in this order: the repetition penalty, the frequency and presence penalties, the logit bias, the
ban of end tokens and the mask (all of these are `adjusted`); then temperature, top-k, top-p and min-p
(`distribution`); then the draw. transformers has the same order, except that it adds a bias before the penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lookahead.algorithm.sampling import LEVELS, NO_DRAW, Adjustment
from lookahead.config import SamplingParams


def adjusted(
    logits: torch.Tensor, params: SamplingParams, adjustment: Adjustment, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """[R, V] logits -> [R, V] float32 scores: those from which the targets of a tree's R needed nodes are sampled.

    `paths[r]` are the tokens on the path from the root to row r, without the root. They count as output, so that a row
    is adjusted as if they had been accepted one by one.
    """
    scores, size = logits.float(), logits.shape[1]
    if params.penalised:
        prompt, output = adjustment.text[: adjustment.prompt_tokens], adjustment.text[adjustment.prompt_tokens :]
        counts = torch.from_numpy(_counts(output, paths, size)).to(logits.device)
        known = torch.from_numpy(np.bincount(np.asarray(prompt, np.int64), minlength=size) > 0).to(logits.device)
        # 1. The repetition penalty, for tokens of prompt and output.
        penalty = params.repetition_penalty
        repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where((counts > 0) | known, repeated, scores)
        # 2. The frequency and presence penalties, for tokens of the output.
        scores = scores - params.frequency_penalty * counts
        scores = torch.where(counts > 0, scores - params.presence_penalty, scores)
    # 3. The bias.
    if params.bias:
        bias = np.zeros(size, np.float32)
        for token, value in params.bias:
            bias[token] = value
        scores = scores + torch.from_numpy(bias).to(logits.device)
    # 4. The tokens that cannot be chosen.
    if adjustment.mask is not None or adjustment.end_depth > 0:
        rows = allowed_rows(adjustment, [len(path) for path in paths], size)
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, :size]
        scores = scores.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
    return scores


def allowed_rows(adjustment: Adjustment, depths: Sequence[int], size: int) -> npt.NDArray[np.uint32]:
    """[R, ceil(V / 32)]: the tokens that may be chosen after nodes of these depths. `size` is V.

    A row whose mask allows end tokens alone keeps them: a text that is complete must end.
    """
    ends = np.zeros(-(-size // 32), np.uint32)
    for token in adjustment.ends:
        if token < size:
            ends[token // 32] |= np.uint32(1 << token % 32)
    if adjustment.mask is None:
        rows = np.full((len(depths), len(ends)), 0xFFFFFFFF, np.uint32)
    else:
        rows = adjustment.mask.copy()
    for row, depth in zip(rows, depths, strict=True):
        if depth < adjustment.end_depth and (row & ~ends).any():
            row &= ~ends
    return rows


def _counts(output: Sequence[int], paths: Sequence[Sequence[int]], size: int) -> npt.NDArray[np.int32]:
    """[R, V]: the count of each token in the output, where row r's output ends with `paths[r]`."""
    counts = np.tile(np.bincount(np.asarray(output, np.int64), minlength=size).astype(np.int32), (len(paths), 1))
    for row, path in enumerate(paths):
        for token in path:
            counts[row, token] += 1
    return counts


def log_probs(
    logits: torch.Tensor, targets: torch.Tensor, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """[R, V] logits and [R] tokens -> [R, n] the `count` likeliest tokens, and [R, 1 + n] log-probabilities: the given
    token's, and theirs. They are of the softmax of all V logits, in float32."""
    values = logits.float().log_softmax(dim=-1)
    likely = values.topk(min(count, values.shape[1]), dim=-1).indices
    gathered = values.gather(1, torch.cat([targets[:, None].to(likely.dtype), likely], dim=1))
    return likely.to(torch.int32).cpu().numpy(), gathered.cpu().numpy()


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


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[R, V] logits -> [R, 2 count] int32: the `count` likeliest tokens, best first, and then the level of each.

    Level l holds the probabilities above 2^(-(l + 1) / 2), up to 2^(-l / 2).
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    log2 = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)) / math.log(2)
    log2 = log2.nan_to_num_(-LEVELS)  # a row of -inf only
    return torch.cat([ids, (-2 * log2).clamp_(0, LEVELS - 1).to(ids.dtype)], dim=1).to(torch.int32)
