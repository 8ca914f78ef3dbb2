"""Penalties, logit bias and masks: what a request changes about the logits before a target is chosen from them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

IN_PROMPT = 1 << 30
"""The bit of `counts` that says: this token occurs in the prompt. The bits below count it in the output."""

BLOCK = 1024


@triton.jit
def _adjust(
    logits, out, needed, parents, tokens, slots, penalties, counts, bias, masks, mask_of, vocabulary, words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows of out, blocks of columns). See `adjust`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    x = tl.load(logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        repetition = tl.load(penalties + row * 3)
        presence = tl.load(penalties + row * 3 + 1)
        frequency = tl.load(penalties + row * 3 + 2)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            stored = tl.load(counts + slot * vocabulary + column, mask=inside, other=0)
            count = stored & 0x3FFFFFFF
            # The row's own token and those above it, without the root's, which is in `counts`.
            node = tl.load(needed + row)
            parent = tl.load(parents + node)
            while parent >= 0:
                count += (column == tl.load(tokens + node)).to(tl.int32)
                node = parent
                parent = tl.load(parents + node)
            seen = (count > 0) | (stored >= 0x40000000)
            repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where(seen, repeated, x)
            x = x - frequency * count.to(tl.float32)
            x = tl.where(count > 0, x - presence, x)
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
    parents: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    masks: torch.Tensor,
    mask_of: torch.Tensor,
) -> torch.Tensor:
    """logits [R, V] of any float dtype -> out fp32 [R, V], which may be the same memory: the logits to choose from.

    Integers are int32. Per row of logits: needed [R], its row in the step; slots [R], its sequence's place in the
    tables, or -1 for neither penalties nor bias; penalties fp32 [R, 3]: repetition (1: none), presence and frequency
    (0: none); mask_of [R], its mask or -1. Per row of the step: parents, the absolute row of its parent or -1 for a
    root, and tokens. The tables: counts [slots, V], how often a token is in the output, and in bit 30 whether it is in
    the prompt; bias fp32 [slots, V]; masks [M, ceil(V / 32)], the bits of the allowed tokens.

    In this order: the repetition penalty as transformers has it, for tokens of prompt and output; frequency and
    presence penalties as OpenAI has them, for tokens of the output; the bias; -inf outside of the mask. The output of
    a tree's row ends with the tokens from below the root to the row's own. The root's token is in `counts`.
    """
    rows, vocabulary = logits.shape
    _adjust[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, out, needed, parents, tokens, slots, penalties, counts, bias, masks, mask_of, vocabulary,
        masks.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _count_tokens(counts, slots, tokens, size, vocabulary, BLOCK: tl.constexpr):
    """Grid: (blocks of pairs). Integers may be added in any order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < size, other=-1).to(tl.int64)
    token = tl.load(tokens + at, mask=at < size, other=-1)
    one = tl.zeros((BLOCK,), tl.int32) + 1
    tl.atomic_add(counts + slot * vocabulary + token, one, mask=(slot >= 0) & (token >= 0))


def count_tokens(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count accepted tokens, in place: slots, tokens [n] int32 are pairs, or -1 where there is none.

    counts [slots, V] int32, as for `adjust`. A pair may occur several times.
    """
    size = len(tokens)
    _count_tokens[(triton.cdiv(size, 256),)](counts, slots, tokens, size, counts.shape[1], BLOCK=256, num_warps=4)
