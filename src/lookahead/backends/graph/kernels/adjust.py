"""Penalties, logit bias and masks, applied to the logits before sampling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lookahead.backends.graph.kernels.records import (
    FREQUENCY,
    HAS_BIAS,
    PRESENCE,
    REPETITION,
    adjusting_rule,
    load_root,
)
from lookahead.backends.graph.kernels.rows import Rows, TreeRows

BLOCK = 1024


@triton.jit
def _adjust(
    logits, out, needed, rows, tokens, table_slot_of, rules, tables, mask_of, stride, vocabulary, words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows of out, blocks of columns). `rows` are sequence_of, sequences and parents, `tables` counts, bias
    and masks; see `adjust`."""
    sequence_of, sequences, parents = rows
    counts, bias, masks = tables
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    node = tl.load(needed + row)
    sequence = tl.maximum(tl.load(sequence_of + node), 0)
    slot = tl.load(table_slot_of + sequence).to(tl.int64)
    if slot >= 0:
        repetition = adjusting_rule(rules, sequence, REPETITION)
        presence = adjusting_rule(rules, sequence, PRESENCE)
        frequency = adjusting_rule(rules, sequence, FREQUENCY)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            stored = tl.load(counts + slot * vocabulary + column, mask=inside, other=0)
            count = stored & 0x3FFFFFFF
            # The tokens on the path to the row, without the root's, which is already in `counts`.
            root = load_root(sequences, sequence)
            parent = tl.load(parents + node)
            while parent >= 0:
                count += (column == tl.load(tokens + node)).to(tl.int32)
                node = root + parent
                parent = tl.load(parents + node)
            seen = (count > 0) | (stored >= 0x40000000)
            repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(seen, repeated, x)
            x = x - frequency * count.to(tl.float32)
            x = tl.where(count > 0, x - presence, x)
        if adjusting_rule(rules, sequence, HAS_BIAS) != 0.0:
            x += tl.load(bias + slot * vocabulary + column, mask=inside, other=0.0)
    mask = tl.load(mask_of + row).to(tl.int64)
    if mask >= 0:
        word = tl.load(masks + mask * words + column // 32, mask=inside, other=0)
        x = tl.where(((word >> (column % 32)) & 1) == 1, x, float("-inf"))
    tl.store(out + row * vocabulary + column, x, mask=inside)


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
    """logits [R, V] of any float dtype -> out fp32 [R, V], which may be the same memory: the logits to sample from.

    Integers are int32. Per row of logits: needed [R], its row in the step; mask_of [R], its mask or -1. Per row of the
    step: tokens, and `rows`. Per sequence of the step: table_slot_of [B], its slot in the tables, or -1 without
    penalties and bias; rules fp32 [B, 4], see `records.Rule`. The tables: counts [slots, V], the occurrences of a token
    in the output, with bit 30 set if it is in the prompt; bias fp32 [slots, V]; masks [M, ceil(V / 32)], the bits of
    the allowed tokens.

    It computes what `sampling.adjusted` defines: the repetition penalty of transformers, for tokens of prompt and
    output; OpenAI's frequency and presence penalties, for tokens of the output; the bias; -inf outside the mask. The
    output of a tree's row ends with the tokens on the path from the root to the row. The root's token is in `counts`.
    """
    count, vocabulary = logits.shape
    _adjust[(count, triton.cdiv(vocabulary, BLOCK))](
        logits, out, needed, (rows.sequence_of, rows.sequences, rows.parents), tokens, table_slot_of, rules,
        (counts, bias, masks), mask_of, logits.stride(0), vocabulary, masks.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _count_tokens(counts, slots, tokens, size, vocabulary, BLOCK: tl.constexpr):
    """Grid: (blocks of pairs). The order of integer additions does not matter."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < size, other=-1).to(tl.int64)
    token = tl.load(tokens + at, mask=at < size, other=-1)
    one = tl.zeros((BLOCK,), tl.int32) + 1
    tl.atomic_add(counts + slot * vocabulary + token, one, mask=(slot >= 0) & (token >= 0))


def count_tokens(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count accepted tokens, in place: slots, tokens [n] int32 are pairs, -1 for padding.

    counts [slots, V] int32, as in `adjust`. A pair may occur several times.
    """
    size = len(tokens)
    _count_tokens[(triton.cdiv(size, 256),)](counts, slots, tokens, size, counts.shape[1], BLOCK=256, num_warps=4)
