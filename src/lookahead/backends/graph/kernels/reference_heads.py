"""Reference implementations of `locate` and `heads`: the same functions and shapes in plain PyTorch."""

from __future__ import annotations

import torch

from lookahead.backends.graph.kernels.projections import Projections
from lookahead.backends.graph.kernels.rows import PATH, Rows
from lookahead.backends.graph.records import SequenceRecord
from lookahead.backends.graph.sizes import PAGE
from lookahead.models.reference import head_norm


def locate_rows(rows: Rows) -> None:
    """As `locate.locate_rows`."""
    page, like = PAGE, rows.positions
    size, words = rows.bits.shape
    row = torch.arange(size, device=like.device)
    used = rows.sequence_of >= 0
    records = rows.sequences[rows.sequence_of.clamp_min(0).long()].long().unbind(1)
    slot, length = records[SequenceRecord.SLOT], records[SequenceRecord.LENGTH]
    chunk = records[SequenceRecord.CHUNK_ROWS]
    root = records[SequenceRecord.FIRST_ROW] + chunk
    node = row - root
    seen = torch.zeros(size, 32 * words, dtype=torch.int64, device=like.device)
    depth = torch.full_like(row, -1)
    ancestors = torch.zeros(size, PATH, dtype=torch.int64, device=like.device)
    steps = torch.arange(PATH, device=like.device)
    at = torch.where(used & (node >= 0), node, -1)
    while (climbing := at >= 0).any():
        above = at.clamp_min(0)
        seen.scatter_add_(1, above[:, None], climbing.long()[:, None])
        depth += climbing
        ancestors = torch.where(climbing[:, None] & (steps == depth[:, None]), above[:, None], ancestors)
        at = rows.parents.long()[torch.where(climbing, root + above, 0)].where(climbing, -1)
    index = length + chunk + node
    pages = rows.tables[slot, torch.where(used, index // page, 0)].long()
    position = torch.where(used, length + chunk + torch.where(node >= 0, depth, node), 0)
    rows.positions.copy_(position)
    if rows.shifts is not None:
        rows.rotary.copy_((position + torch.where(used, rows.shifts[slot], 0)).clamp(0, rows.furthest))
    rows.cells.copy_(torch.where(used, pages * page + index % page, row % page))
    weights = 1 << torch.arange(32, device=like.device)
    rows.bits.copy_((seen.view(size, words, 32) * weights).sum(-1).to(torch.int32))
    index = (length + chunk)[:, None] + torch.where(steps <= depth[:, None], ancestors, depth[:, None] - steps)
    at = position[:, None] % PATH - steps
    is_path = (used & (node >= 0))[:, None] & (at >= 0)
    pages = rows.tables[slot[:, None], torch.where(is_path, index // page, 0)].long()
    cells = torch.where(is_path, pages * page + index % page, -1)
    rows.paths.scatter_(1, at % PATH, cells.to(torch.int32))


def norm_heads(qkv: torch.Tensor, projections: Projections, out: torch.Tensor) -> torch.Tensor:
    """As `heads.norm_heads`."""
    whole = projections.whole_norms
    parts = zip(projections.norms, _heads(qkv[: len(out)], projections), (whole, whole, False), strict=True)
    return out.copy_(torch.cat([head_norm(norm, part, whole) for norm, part, whole in parts], dim=1).flatten(1))


def rotate_write(
    qkv: torch.Tensor,
    projections: Projections,
    rows: Rows,
    q: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
) -> None:
    """As `heads.rotate_write`."""
    positions, parts = rows.rotary.long(), list(_heads(qkv[: len(q)], projections))
    for index, norm in enumerate(projections.norms):
        if not projections.norms_last:
            parts[index] = head_norm(norm, parts[index], whole=False)
        if index < 2:
            parts[index] = _rotate(parts[index], projections, positions)
        if projections.norms_last:
            parts[index] = head_norm(norm, parts[index], whole=False)
    if projections.query_scale is not None:
        parts[0] = parts[0] * projections.query_scale[positions, None, None].to(qkv.dtype)
    q.copy_(parts[0])
    if keys is not None and values is not None:
        cells, page = rows.cells.long(), keys.shape[2]
        keys[cells // page, :, cells % page] = parts[1]
        values[cells // page, :, cells % page] = parts[2]


def _heads(qkv: torch.Tensor, given: Projections) -> tuple[torch.Tensor, ...]:
    """Queries [R, H, D], keys and values [R, Hkv, D] after bias and clamp."""
    x = (qkv if given.bias is None else qkv + given.bias).view(len(qkv), -1, given.dim)
    x = x if given.order is None else x[:, given.order.long()]
    x = x if given.clip is None else x.clamp(-given.clip, given.clip)
    return x.split([given.heads, given.kv_heads, given.kv_heads], dim=1)


def _rotate(x: torch.Tensor, given: Projections, positions: torch.Tensor) -> torch.Tensor:
    """x [R, heads, D] rotated in fp32, then rounded."""
    if given.cosine is None or given.sine is None:
        return x
    cosine, sine = given.cosine[positions, None], given.sine[positions, None]
    turned, rest = x.float().split([2 * cosine.shape[-1], given.dim - 2 * cosine.shape[-1]], dim=-1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if given.interleaved else turned.chunk(2, dim=-1)
    pairs = first * cosine - second * sine, second * cosine + first * sine
    turned = torch.stack(pairs, dim=-1).flatten(-2) if given.interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)
