"""A described model in plain PyTorch: slow, and easy to read beside `spec`. Readers and backends are checked by it.

There is no KV cache: every call computes all rows of the text, and a row sees the rows that a mask allows. It rounds
where the modules of transformers round, so in half precision it is as close to them as two kernels are to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lookahead.models.feed_forward import FeedForward, MoE, Router, Scoring
from lookahead.models.norm import Norm
from lookahead.models.reference_parts import activate, expert_matrix, gated, matrix, norm, softcap
from lookahead.models.reference_recurrent import recurrent
from lookahead.models.spec import Attention, Block, Branch, Decoder, Mixer, Rope, SideBySide


@torch.no_grad()
def forward(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """The logits [n, vocabulary] of n tokens of plain text: row i has those of the token after tokens[: i + 1]."""
    return forward_tree(model, (), tokens, range(-1, len(tokens) - 1))


@torch.no_grad()
def forward_tree(
    model: Decoder,
    prefix: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    shift: int = 0,
    generated: int | None = None,
) -> torch.Tensor:
    """The logits [nodes, vocabulary] of a token tree after a prefix.

    Node i is tokens[i] and is a child of node parents[i] < i, or of the prefix if that is -1. It sees the
    prefix, its ancestors and itself, and its index is len(prefix) + its depth. Its position is its index plus `shift`,
    as it is after images, which have more tokens than positions. The nodes and the prefix's last `generated` tokens
    were generated, those before them are a prompt; None: the nodes are of the prompt, too.
    """
    start, ids = len(prefix), torch.tensor([*prefix, *tokens], device=model.embedding.device)
    indices = torch.arange(len(ids))
    visible, before = torch.ones(len(ids), len(ids), dtype=torch.bool).tril(), list(range(-1, start - 1))
    for node, parent in enumerate(parents):
        row = start + node
        above = start + parent if parent >= 0 else start - 1  # the row of the token before this one
        indices[row] = indices[above] + 1 if above >= 0 else 0
        visible[row] = visible[above] if above >= 0 else False
        visible[row, row] = True
        before.append(above)
    positions = torch.cat([indices[:start], indices[start:] + shift])
    prompt = torch.arange(len(ids)) < (len(ids) if generated is None else start - generated)
    device = ids.device
    rows = Rows(indices.to(device), positions.to(device), visible.to(device), prompt.to(device), before)
    x = norm(model.norm, run_blocks(model, ids, rows)[start:]).to(model.embedding.dtype)
    logits = matrix(model.head, x) * model.logit_scale
    return softcap(logits, model.logit_softcap)


class Rows(NamedTuple):
    """indices [rows]: of the tokens in their text, which windows and chunks count. positions [rows]: what positions are
    encoded by. visible [rows, rows]: whether the token of a row sees that of a column, apart from windows. prompt
    [rows]: whether the token is part of a prompt. before: the row of the token before each, -1 for a text's first."""

    indices: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    prompt: torch.Tensor
    before: list[int]


def run_blocks(model: Decoder, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The residual stream [rows, hidden] after the last block; ids [rows]."""
    for token, other in model.aliases:
        ids = torch.where(ids == token, other, ids)
    x = model.embedding[ids] * model.embedding_scale
    if model.position_embedding is not None:
        x = x + model.position_embedding[rows.positions]
    if model.residual_fp32:
        x = x.float()
    shared: KeysValues = {}
    for number, each in enumerate(model.blocks):
        x = block(each, x, rows, shared, number, model.embedding.dtype)
    return x


KeysValues = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> its keys and values [rows, kv_heads, head_dim], for later layers that read them."""


def block(
    spec: Block, x: torch.Tensor, rows: Rows, shared: KeysValues, number: int, dtype: torch.dtype
) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden], by block `number`. Its halves read x in this dtype."""
    between, result = x, x
    if spec.mixer is not None:
        mixed = mix(spec.mixer, norm(spec.mixer_norm, x.to(dtype)), rows, shared, number)
        mixed = norm(spec.mixer_out_norm, mixed) * spec.residual_scale
        result = x + mixed
        between = x if spec.parallel else result
    if spec.feed_forward is not None:
        fed = feed_forward(spec.feed_forward, norm(spec.feed_forward_norm, between.to(dtype)))
        result = result + norm(spec.feed_forward_out_norm, fed) * spec.residual_scale
    return result if spec.output_scale is None else result * spec.output_scale


def mix(spec: Mixer, x: torch.Tensor, rows: Rows, shared: KeysValues, number: int) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""

    def branch(each: Branch) -> torch.Tensor:
        return mix(each.mixer, x * each.input_scale, rows, shared, number) * each.output_scale

    if isinstance(spec, SideBySide):
        return branch(spec.recurrent) + branch(spec.attention)
    if isinstance(spec, Attention):
        return attention(spec, x, rows, shared, number)
    return recurrent(spec, x, rows.before, rows.prompt)


def attention(spec: Attention, x: torch.Tensor, rows: Rows, shared: KeysValues, number: int) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    indices, positions, visible = rows.indices, rows.positions, rows.visible
    # 1. Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim].
    projected = matrix(spec.qkv, x).view(len(x), -1, spec.head_dim)
    heads = projected if spec.head_order is None else projected[:, list(spec.head_order)]
    if spec.clip is not None:
        heads = heads.clamp(-spec.clip, spec.clip)
    if spec.kv_layer is None:
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        k, v = place_heads(spec, spec.k_norm, k, positions), head_norm(spec.v_norm, v, whole=False)
        shared[number] = k, v
    else:
        q, (k, v) = heads, shared[spec.kv_layer]
    q = place_heads(spec, spec.q_norm, q, positions)
    if spec.query_scale is not None:
        q = q * spec.query_scale(positions).to(q.dtype)[:, None, None]
    # 2. A group of query heads shares a K/V head.
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # 3. Scores [heads, rows, rows]; the softmax is in fp32.
    if spec.window is not None:
        visible = visible & (indices[None, :] > indices[:, None] - spec.window)
    if spec.chunk is not None:
        visible = visible & (indices[None, :] // spec.chunk == indices[:, None] // spec.chunk)
    scores = softcap(torch.einsum("ihd,jhd->hij", q, k) * spec.scale, spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[:, None, None].expand(-1, len(x), 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype)[..., : len(x)]
    # 4. Concatenate the heads' outputs.
    attended = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
    if spec.output_gate is not None:
        attended = attended * torch.sigmoid(matrix(spec.output_gate, x))
    if spec.gate_heads is not None:
        attended = attended * torch.sigmoid(projected[:, list(spec.gate_heads)].flatten(1))
    return matrix(spec.out, attended)


def place_heads(spec: Attention, own: Norm | None, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries or keys x [rows, heads, head_dim] after their norm and rotation."""
    if spec.rope is not None and spec.norms_after_rope:
        return head_norm(own, rotate(spec.rope, x, positions), spec.whole_norms)
    x = head_norm(own, x, spec.whole_norms)
    return x if spec.rope is None else rotate(spec.rope, x, positions)


def head_norm(spec: Norm | None, x: torch.Tensor, whole: bool) -> torch.Tensor:
    """The norm of each head of x [rows, heads, head_dim], or of all heads as one vector."""
    return norm(spec, x.flatten(1)).view_as(x) if whole else norm(spec, x)


def rotate(spec: Rope, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of columns of x [rows, heads, head_dim] by the angles of positions [rows], in x's dtype."""
    cosine, sine = (
        table[positions, None].to(x.dtype) for table in spec.tables(int(positions.max()) + 1, positions.device)
    )
    turned, rest = x[..., : spec.dim], x[..., spec.dim :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if spec.interleaved else turned.chunk(2, dim=-1)
    pairs = first * cosine - second * sine, second * cosine + first * sine
    turned = torch.stack(pairs, dim=-1).flatten(-2) if spec.interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def feed_forward(spec: FeedForward | MoE, x: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    if isinstance(spec, MoE):
        return mixture(spec, x)
    inner = matrix(spec.gate_up, x)
    if spec.gated:
        gate, up = inner.chunk(2, dim=-1)
        inner = gated(spec.activation, spec.constants, gate * spec.gate_scale, up)
    else:
        inner = activate(spec.activation, spec.constants, inner)
    return matrix(spec.down, inner) * spec.out_scale


def mixture(spec: MoE, x: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]. Experts run the rows that chose them; a row adds its own in order."""
    chosen, weights = route(spec.router, x)
    given = x if spec.latent_in is None else matrix(spec.latent_in, x)
    out = torch.zeros_like(given)
    for expert in chosen.unique().tolist():
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        inner = expert_matrix(spec.gate_up, expert, given[rows])
        if spec.gated:
            gate, up = (inner[:, ::2], inner[:, 1::2]) if spec.alternate else inner.chunk(2, dim=-1)
            inner = gated(spec.activation, spec.constants, gate, up)
        else:
            inner = activate(spec.activation, spec.constants, inner)
        own = expert_matrix(spec.down, expert, inner)
        out[rows] += (own * weights[rows, rank, None]).to(x.dtype)
    out = out if spec.latent_out is None else matrix(spec.latent_out, out)
    if spec.shared is None:
        return out
    shared = feed_forward(spec.shared, x)
    return out + (shared if spec.shared_gate is None else shared * torch.sigmoid(matrix(spec.shared_gate, x)))


def route(spec: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts [rows, top_k] of x [rows, hidden], the best one first, and their weights, fp32."""
    bias = spec.logits.bias()
    logits = F.linear(x.float(), spec.logits.weight().float(), None if bias is None else bias.float())
    if spec.scoring is Scoring.SPARSE_MIXER:
        chosen, weights = sparse_mixer(logits, spec.top_k, spec.jitter)
    else:
        scores = {Scoring.SOFTMAX: logits.softmax(-1), Scoring.SIGMOID: logits.sigmoid()}.get(spec.scoring, logits)
        chosen = best(kept(spec, scores if spec.choice_bias is None else scores + spec.choice_bias.float()), spec.top_k)
        weights = scores.gather(1, chosen)
        if spec.scoring is Scoring.CHOSEN:
            weights = weights.softmax(-1)
    if spec.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps).clamp(min=1e-20)
    weights = weights * spec.scale
    return chosen, weights if spec.expert_scale is None else weights * spec.expert_scale.float()[chosen]


def kept(spec: Router, scores: torch.Tensor) -> torch.Tensor:
    """Scores [rows, experts], those of the groups that are not chosen from at -inf."""
    if spec.groups == 1:
        return scores
    grouped = scores.unflatten(1, (spec.groups, -1))
    sums = grouped.topk(spec.group_best, -1).values.sum(-1)
    allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best(sums, spec.kept_groups), True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the largest scores of each row, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def sparse_mixer(logits: torch.Tensor, top_k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Scoring`."""
    chosen, weights, left = [], [], logits
    for _ in range(top_k):
        first = best(left, 1)
        top = left.gather(1, first)
        far = (top - logits) / logits.abs().clamp(min=top) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, first))
        chosen.append(first)
        left = left.scatter(1, first, float("-inf"))
    return torch.cat(chosen, 1), torch.cat(weights, 1)
