"""A described model in plain PyTorch: slow, and easy to read beside `spec`. Readers and backends are checked by it.

There is no KV cache: every call computes all rows of the text, and a row sees the rows that a mask allows. It rounds
where the modules of transformers round, so in half precision it is as close to them as two kernels are to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from lookahead.models.spec import Activation, Attention, Block, Decoder, FeedForward, Matrix, Norm, Rope

ACTIVATIONS = {Activation.SILU: F.silu}


@torch.no_grad()
def forward(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """The logits [n, vocabulary] of n tokens of plain text: row i has those of the token after tokens[: i + 1]."""
    return forward_tree(model, (), tokens, range(-1, len(tokens) - 1))


@torch.no_grad()
def forward_tree(model: Decoder, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
    """The logits [nodes, vocabulary] of a token tree after a prefix.

    Node i is tokens[i] and is a child of node parents[i] < i, or of the prefix if that is -1. It sees the
    prefix, its ancestors and itself, and its position is len(prefix) + its depth.
    """
    start, ids = len(prefix), torch.tensor([*prefix, *tokens], device=model.embedding.device)
    positions = torch.arange(len(ids))
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for node, parent in enumerate(parents):
        row = start + node
        above = start + parent if parent >= 0 else start - 1  # the row of the token before this one
        positions[row] = positions[above] + 1 if above >= 0 else 0
        visible[row] = visible[above] if above >= 0 else False
        visible[row, row] = True
    x = run_blocks(model, ids, positions.to(ids.device), visible.to(ids.device))
    return matrix(model.head, norm(model.norm, x[start:]))


def run_blocks(model: Decoder, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The residual stream [rows, hidden] after the last block.

    ids and positions [rows]; visible [rows, rows]: whether the token of a row sees the token of a column, before the
    layers' windows.
    """
    x = model.embedding[ids]
    for each in model.blocks:
        x = block(each, x, positions, visible)
    return x


def block(spec: Block, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    x = x + attention(spec.attention, norm(spec.attention_norm, x), positions, visible)
    return x + feed_forward(spec.feed_forward, norm(spec.feed_forward_norm, x))


def attention(spec: Attention, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]; positions [rows], visible [rows, rows]."""
    # 1. Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim].
    heads = matrix(spec.qkv, x).view(len(x), -1, spec.head_dim)
    q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    if spec.q_norm is not None:
        q = norm(spec.q_norm, q)
    if spec.k_norm is not None:
        k = norm(spec.k_norm, k)
    if spec.rope is not None:
        q, k = rotate(spec.rope, q, positions), rotate(spec.rope, k, positions)
    # 2. A group of query heads shares a K/V head.
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # 3. Scores [heads, rows, rows]; the softmax is in fp32.
    if spec.window is not None:
        visible = visible & (positions[None, :] > positions[:, None] - spec.window)
    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
    # 4. Concatenate the heads' outputs.
    return matrix(spec.out, torch.einsum("hij,jhd->ihd", weights, v).flatten(1))


def rotate(spec: Rope, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of columns of x [rows, heads, dim] by the angles of positions [rows], in x's dtype."""
    cosine, sine = (
        table[positions, None].to(x.dtype) for table in spec.tables(int(positions.max()) + 1, positions.device)
    )
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def feed_forward(spec: FeedForward, x: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    gate, up = matrix(spec.gate_up, x).chunk(2, dim=-1)
    return matrix(spec.down, ACTIVATIONS[spec.activation](gate) * up)


def norm(spec: Norm, x: torch.Tensor) -> torch.Tensor:
    """x [..., width] -> [..., width]: in fp32, then rounded to x's dtype, then times the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    return spec.weight * wide.to(x.dtype)


def matrix(spec: Matrix, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] -> [rows, out]."""
    return F.linear(x, spec.weight(), spec.bias())
