"""The kernels' slow twins: the same functions and shapes in PyTorch's own operations, for tests and for CPUs."""

from __future__ import annotations

import torch

from lookahead.algorithm import sampling


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    bits: torch.Tensor,
    out: torch.Tensor | None = None,
    work: object = None,
    *,
    scale: float,
    window: int = 0,
    tiles: object = None,
    order: object = None,
) -> torch.Tensor:
    """As `attention.attend`, with a dense mask, in the dtype of `q`. `work`, `tiles` and `order` are ignored."""
    batch, count, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = torch.empty_like(q) if out is None else out
    for b in range(batch):
        length = int(lengths[b])
        k = keys[lanes[b], :, : length + count].repeat_interleave(group, dim=0)
        v = values[lanes[b], :, : length + count].repeat_interleave(group, dim=0)
        node = torch.arange(count, device=q.device)
        seen = (bits[b][:, node // 32] >> (node % 32)) & 1 == 1
        seen = torch.cat([torch.ones(count, length, dtype=torch.bool, device=q.device), seen], dim=1)
        if window:
            places = torch.cat([torch.arange(length, device=q.device), positions[b].long()])
            seen &= positions[b].long()[:, None] - places[None, :] < window
        scores = torch.einsum("khd,hnd->hkn", q[b], k) * scale
        scores = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[b] = torch.einsum("hkn,hnd->khd", scores, v)
    return out


def copy_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """As `fused.copy_pinned`."""
    target.copy_(source)


def place_nodes(parents: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor) -> None:
    """See `fused`."""
    batch, count, words = bits.shape
    seen = torch.zeros(batch, count, 32 * words, dtype=torch.int64, device=bits.device)
    depth = torch.full_like(parents, -1)
    at = torch.arange(count, device=bits.device).expand(batch, count)
    while (climbing := at >= 0).any():
        above = at.clamp_min(0)
        seen.scatter_add_(2, above[..., None], climbing.long()[..., None])
        depth += climbing
        at = parents.long().gather(1, above).where(climbing, -1)
    positions.copy_(lengths[:, None] + depth)
    weights = 1 << torch.arange(32, device=bits.device)
    bits.copy_((seen.view(batch, count, words, 32) * weights).sum(-1).to(torch.int32))


def embed(table: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `fused.embed`."""
    return torch.index_select(table, 0, tokens, out=out)


def add_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fused.add_norm`."""
    if rows is not None:
        residual = residual[rows.long()]
        delta = delta if delta is None else delta[rows.long()]
        residual = residual if delta is None else residual + delta
    else:
        residual, delta = residual[: len(out)], delta if delta is None else delta[: len(out)]
        if delta is not None:
            residual += delta
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return out.copy_(normed.to(residual.dtype) * weight)


def rotate_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    norms: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """As `fused.rotate_write`."""
    batch, count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    x = qkv[: batch * count] if bias is None else qkv[: batch * count] + bias
    x = x.view(batch, count, heads + 2 * kv_heads, dim)
    parts = list(x.split([heads, kv_heads, kv_heads], dim=2))
    cos, sin = cosine[positions.long()][:, :, None], sine[positions.long()][:, :, None]
    for i in (0, 1):
        part = parts[i].float()
        if norms is not None:
            part = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + eps)
            part = (part.to(qkv.dtype) * norms[i]).float()
        first, second = part.chunk(2, dim=-1)
        parts[i] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    q.copy_(parts[0])
    for b in range(batch):
        place = slice(int(lengths[b]), int(lengths[b]) + count)
        keys[lanes[b], :, place] = parts[1][b].transpose(0, 1)
        values[lanes[b], :, place] = parts[2][b].transpose(0, 1)


def gate(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `fused.gate`."""
    first, up = x[: len(out)].chunk(2, dim=-1)
    return out.copy_(torch.nn.functional.silu(first) * up)


def move_accepted(
    cache: torch.Tensor, lanes: torch.Tensor, lengths: torch.Tensor, paths: torch.Tensor, counts: torch.Tensor
) -> None:
    """As `fused.move_accepted`."""
    for lane, length, path, count in zip(lanes.tolist(), lengths.tolist(), paths, counts.tolist(), strict=True):
        source = length + path[:count].long()
        cache[:, :, lane, :, length + 1 : length + 1 + count] = cache[:, :, lane].index_select(3, source)


def top_tokens(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `top.top_tokens`. Of equal logits any may come first, as with `torch.topk`."""
    out[:, 0] = logits.argmax(dim=-1)
    out[:, 1:] = sampling.top_tokens(logits, (out.shape[1] - 1) // 2)
    return out
