"""Penalties, logit bias and masks: what a request changes about the logits before a target is chosen from them."""

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
    logits, out, needed, rows, tokens, line_of, rules, tables, mask_of, vocabulary, words, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (rows of out, blocks of columns). `rows` are entry_of, entries and parents, `tables` counts, bias and
    masks; see `adjust`."""
    entry_of, entries, parents = rows
    counts, bias, masks = tables
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    x = tl.load(logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32)
    node = tl.load(needed + row)
    entry = tl.maximum(tl.load(entry_of + node), 0)
    line = tl.load(line_of + entry).to(tl.int64)
    if line >= 0:
        repetition = adjusting_rule(rules, entry, REPETITION)
        presence = adjusting_rule(rules, entry, PRESENCE)
        frequency = adjusting_rule(rules, entry, FREQUENCY)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            stored = tl.load(counts + line * vocabulary + column, mask=inside, other=0)
            count = stored & 0x3FFFFFFF
            # The row's own token and those above it, without the root's, which is in `counts`.
            root = load_root(entries, entry)
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
        if adjusting_rule(rules, entry, HAS_BIAS) != 0.0:
            x += tl.load(bias + line * vocabulary + column, mask=inside, other=0.0)
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
    line_of: torch.Tensor,
    rules: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    masks: torch.Tensor,
    mask_of: torch.Tensor,
) -> torch.Tensor:
    """logits [R, V] of any float dtype -> out fp32 [R, V], which may be the same memory: the logits to choose from.

    Integers are int32. Per row of logits: needed [R], its row in the step; mask_of [R], its mask or -1. Per row of the
    step: tokens, and what `rows` says. Per entry of the step: line_of [E], its sequence's line in the tables, or -1 for
    neither penalties nor bias; rules fp32 [E, 4], see `records.Rule`. The tables: counts [lines, V], how often a token
    is in the output, and in bit 30 whether it is in the prompt; bias fp32 [lines, V]; masks [M, ceil(V / 32)], the bits
    of the allowed tokens.

    It computes what `sampling.adjusted` defines: the repetition penalty as transformers has it, for tokens of prompt
    and output; frequency and presence penalties as OpenAI has them, for tokens of the output; the bias; -inf outside of
    the mask. The output of a tree's row ends with the tokens from below the root to the row's own. The root's token is
    in `counts`.
    """
    count, vocabulary = logits.shape
    _adjust[(count, triton.cdiv(vocabulary, BLOCK))](
        logits, out, needed, (rows.entry_of, rows.entries, rows.parents), tokens, line_of, rules,
        (counts, bias, masks), mask_of, vocabulary, masks.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _count_tokens(counts, lines, tokens, size, vocabulary, BLOCK: tl.constexpr):
    """Grid: (blocks of pairs). Integers may be added in any order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(lines + at, mask=at < size, other=-1).to(tl.int64)
    token = tl.load(tokens + at, mask=at < size, other=-1)
    one = tl.zeros((BLOCK,), tl.int32) + 1
    tl.atomic_add(counts + line * vocabulary + token, one, mask=(line >= 0) & (token >= 0))


def count_tokens(counts: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count accepted tokens, in place: lines, tokens [n] int32 are pairs, or -1 where there is none.

    counts [lines, V] int32, as for `adjust`. A pair may occur several times.
    """
    size = len(tokens)
    _count_tokens[(triton.cdiv(size, 256),)](counts, lines, tokens, size, counts.shape[1], BLOCK=256, num_warps=4)
