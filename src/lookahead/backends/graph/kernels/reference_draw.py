"""Reference implementations of `draw` and `adjust`: the same functions and shapes in plain PyTorch."""

from __future__ import annotations

import torch

from lookahead.backends import sampling
from lookahead.backends.graph.kernels.rows import Rows, TreeRows
from lookahead.backends.graph.records import Draw, Rule, SequenceRecord
from lookahead.config import SamplingParams

IN_PROMPT = 1 << 30
"""The bit of `counts` for tokens of the prompt. The bits below count occurrences in the output."""


def draw_targets(
    logits: torch.Tensor, settings: torch.Tensor, out: torch.Tensor, tops: object = None, work: object = None
) -> torch.Tensor:
    """As `draw.draw_targets`. `tops` and `work` are ignored."""
    for row, draw in enumerate(settings.tolist()):
        if draw[Draw.TEMPERATURE] > 0 and draw[Draw.UNIFORM] >= 0:
            params = SamplingParams(draw[Draw.TEMPERATURE], int(draw[Draw.TOP_K]), draw[Draw.TOP_P], draw[Draw.MIN_P])
            out[row, 0] = sampling.pick(logits[row : row + 1], params, [draw[Draw.UNIFORM]])[0]
    return out


def multinomial_targets(
    logits: torch.Tensor,
    settings: torch.Tensor,
    noise: torch.Tensor,
    depths: torch.Tensor,
    out: torch.Tensor,
    tops: object = None,
    work: object = None,
) -> torch.Tensor:
    """As `draw.multinomial_targets`. `tops` and `work` are ignored."""
    for row, draw in enumerate(settings.tolist()):
        depth, temperature = int(depths[row]), draw[Draw.TEMPERATURE]
        if temperature > 0 and depth >= 0:
            filters = int(draw[Draw.TOP_K]), draw[Draw.TOP_P], draw[Draw.MIN_P]
            probs = _warped(logits[row].float() / temperature, *filters).softmax(dim=-1)
            out[row, 0] = (probs / noise[depth]).argmax()
    return out


def _warped(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """scores [V] -> scores with -inf for the tokens that transformers' top-k, top-p and min-p remove.

    Sums are in float64 and those of transformers in float32, so the two may differ near the limit of top-p.
    """
    if 0 < top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ascending, order = scores.sort(stable=True)
        removed = ascending.double().softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed[-1] = False
        scores = scores.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), -torch.inf)
    if min_p > 0:
        probs = scores.softmax(dim=-1)
        scores = scores.masked_fill(probs < min_p * probs.max(), -torch.inf)
    return scores


def log_probs(logits: torch.Tensor, out: torch.Tensor, tops: object, values: torch.Tensor) -> torch.Tensor:
    """As `draw.log_probs`. `tops` is ignored."""
    return values.copy_(logits.float().log_softmax(dim=-1).gather(1, out[:, : values.shape[1]].long()))


def adjust(
    logits: torch.Tensor,
    out: torch.Tensor,
    needed: torch.Tensor,
    rows: Rows | TreeRows,
    tokens: torch.Tensor,
    table_slot_of: torch.Tensor,
    rules: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    masks: torch.Tensor,
    mask_of: torch.Tensor,
) -> torch.Tensor:
    """As `adjust.adjust`."""
    column = torch.arange(logits.shape[1], device=logits.device)
    parents, token_ids, sequences = rows.parents.tolist(), tokens.tolist(), rows.sequences.tolist()
    for row, (node, mask) in enumerate(zip(needed.tolist(), mask_of.tolist(), strict=True)):
        x, sequence = logits[row].float(), max(0, int(rows.sequence_of[node]))
        slot, record = int(table_slot_of[sequence]), sequences[sequence]
        root = record[SequenceRecord.FIRST_ROW] + record[SequenceRecord.CHUNK_ROWS]
        if slot >= 0:
            repetition, presence = rules[sequence, Rule.REPETITION], rules[sequence, Rule.PRESENCE]
            frequency, biased = rules[sequence, Rule.FREQUENCY], rules[sequence, Rule.HAS_BIAS]
            count = counts[slot] & (IN_PROMPT - 1)
            while parents[node] >= 0:
                count[token_ids[node]] += 1
                node = root + parents[node]
            seen = (count > 0) | (counts[slot] >= IN_PROMPT)
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * count
            x = torch.where(count > 0, x - presence, x)
            x = x + bias[slot] if biased else x
        if mask >= 0:
            x = x.masked_fill((masks[mask][column // 32] >> (column % 32)) & 1 == 0, -torch.inf)
        out[row] = x
    return out


def count_tokens(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """As `adjust.count_tokens`."""
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if slot >= 0 and token >= 0:
            counts[slot, token] += 1
