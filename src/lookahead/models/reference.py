"""A described model in plain PyTorch: slow, and easy to read beside `spec`. Readers and backends are checked by it.

There is no KV cache: every call computes all rows of the text, and a row sees the rows that a mask allows. It rounds
where the modules of transformers round, so in half precision it is as close to them as two kernels are to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from lookahead.models.feed_forward import Activation, FeedForward, MoE, Router, Scoring
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.norm import Norm
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.spec import Attention, Block, Decoder, Rope

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.RELU: F.relu,
    Activation.RELU2: lambda x: F.relu(x).square(),
}
"""All but those with constants."""


@torch.no_grad()
def forward(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """The logits [n, vocabulary] of n tokens of plain text: row i has those of the token after tokens[: i + 1]."""
    return forward_tree(model, (), tokens, range(-1, len(tokens) - 1))


@torch.no_grad()
def forward_tree(
    model: Decoder, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int], shift: int = 0
) -> torch.Tensor:
    """The logits [nodes, vocabulary] of a token tree after a prefix.

    Node i is tokens[i] and is a child of node parents[i] < i, or of the prefix if that is -1. It sees the
    prefix, its ancestors and itself, and its index is len(prefix) + its depth. Its position is its index plus `shift`,
    as it is after images, which have more tokens than positions.
    """
    start, ids = len(prefix), torch.tensor([*prefix, *tokens], device=model.embedding.device)
    indices = torch.arange(len(ids))
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for node, parent in enumerate(parents):
        row = start + node
        above = start + parent if parent >= 0 else start - 1  # the row of the token before this one
        indices[row] = indices[above] + 1 if above >= 0 else 0
        visible[row] = visible[above] if above >= 0 else False
        visible[row, row] = True
    positions = torch.cat([indices[:start], indices[start:] + shift])
    rows = Rows(indices.to(ids.device), positions.to(ids.device), visible.to(ids.device))
    x = run_blocks(model, ids, rows)
    logits = matrix(model.head, norm(model.norm, x[start:])) * model.logit_scale
    return softcap(logits, model.logit_softcap)


class Rows(NamedTuple):
    """indices [rows]: of the tokens in their text, which windows and chunks count. positions [rows]: what positions are
    encoded by. visible [rows, rows]: whether the token of a row sees that of a column, apart from windows."""

    indices: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor


def run_blocks(model: Decoder, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The residual stream [rows, hidden] after the last block; ids [rows]."""
    for token, other in model.aliases:
        ids = torch.where(ids == token, other, ids)
    x = model.embedding[ids] * model.embedding_scale
    if model.position_embedding is not None:
        x = x + model.position_embedding[rows.positions]
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, each in enumerate(model.blocks):
        x = block(each, x, rows, shared, number)
    return x


KeysValues = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> its keys and values [rows, kv_heads, head_dim], for later layers that read them."""


def block(spec: Block, x: torch.Tensor, rows: Rows, shared: KeysValues, number: int) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden], by block `number`."""
    own, fed_forward = spec.plain()
    attended = attention(own, norm(spec.mixer_norm, x), rows, shared, number)
    attended = norm(spec.mixer_out_norm, attended) * spec.residual_scale
    between = x if spec.parallel else x + attended
    fed = feed_forward(fed_forward, norm(spec.feed_forward_norm, between))
    fed = norm(spec.feed_forward_out_norm, fed) * spec.residual_scale
    x = x + attended + fed if spec.parallel else between + fed
    return x if spec.output_scale is None else x * spec.output_scale


def attention(spec: Attention, x: torch.Tensor, rows: Rows, shared: KeysValues, number: int) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    indices, positions, visible = rows
    # 1. Queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim].
    heads = matrix(spec.qkv, x).view(len(x), -1, spec.head_dim)
    if spec.head_order is not None:
        heads = heads[:, list(spec.head_order)]
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
    if not spec.gated:
        return matrix(spec.down, activate(spec.activation, spec.constants, inner))
    return matrix(spec.down, gated(spec.activation, spec.constants, *inner.chunk(2, dim=-1)))


def mixture(spec: MoE, x: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]. Experts run the rows that chose them; a row adds its own in order."""
    chosen, weights = route(spec.router, x)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, rank = (chosen == expert).nonzero(as_tuple=True)
        inner = expert_matrix(spec.gate_up, expert, x[rows])
        gate, up = (inner[:, ::2], inner[:, 1::2]) if spec.alternate else inner.chunk(2, dim=-1)
        own = expert_matrix(spec.down, expert, gated(spec.activation, spec.constants, gate, up))
        out[rows] += (own * weights[rows, rank, None]).to(x.dtype)
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
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
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


def gated(activation: Activation, constants: Sequence[float], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activation of gate [rows, width] times up."""
    if activation is not Activation.CLAMPED:
        return activate(activation, constants, gate) * up
    limit, factor = constants
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * factor))


def activate(activation: Activation, constants: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The activation, with its constants, of x [rows, width]."""
    if activation is not Activation.XIELU:
        return ACTIVATIONS[activation](x)
    square, bent, linear, least = constants
    above = square * x * x + linear * x
    return torch.where(x > 0, above, (torch.expm1(x.clamp(max=least)) - x) * bent + linear * x)


def norm(spec: Norm | None, x: torch.Tensor) -> torch.Tensor:
    """x [..., width] -> [..., width], in fp32; None leaves it as it is."""
    if spec is None:
        return x
    wide = x.float()
    if spec.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.rounds_first:
        wide = wide.to(x.dtype)
    if spec.weight is not None:
        weight = spec.weight if spec.rounds_first else spec.weight.float()
        wide = wide * (weight + spec.offset if spec.offset else weight)
    if spec.bias is not None:
        wide = wide + spec.bias
    return wide.to(x.dtype)


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def matrix(spec: Matrix, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] -> [rows, out]. A quantised part may round x."""
    if any(spec.formats):
        apart = [(part, Matrix((part,), spec.transposed)) for part in spec.parts]
        return torch.cat([part(x) if any(one.formats) else matrix(one, x) for part, one in apart], dim=-1)
    return F.linear(x, spec.weight(), spec.bias())


def expert_matrix(spec: ExpertMatrix, expert: int, x: torch.Tensor) -> torch.Tensor:
    """x [rows, in] -> [rows, out], by one expert. A quantised one may round x."""
    bias = None if spec.bias is None else spec.bias[expert].detach()
    if isinstance(spec.weights, QuantisedLinear):
        return spec.weights.product(x, expert * spec.shape[0], (expert + 1) * spec.shape[0], bias)
    return F.linear(x, spec.weight(expert, x.dtype), bias)
