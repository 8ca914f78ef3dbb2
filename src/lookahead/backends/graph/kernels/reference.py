"""Reference implementations of the kernels: the same functions and shapes in plain PyTorch, for tests and CPUs."""

from __future__ import annotations

import torch

from lookahead.backends import sampling
from lookahead.backends.graph.kernels.rows import Rows
from lookahead.backends.graph.records import SequenceRecord


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    work: object = None,
    tiles: object = None,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attention.attend`, with a dense mask, in the dtype of `q`. `work` and `tiles` are ignored."""
    heads, kv_heads, page = q.shape[1], keys.shape[1], keys.shape[2]
    records = rows.sequences.tolist()
    for sequence in sorted(set(rows.sequence_of.tolist()) - {-1}):
        record = records[sequence]
        first, prompt = record[SequenceRecord.FIRST_ROW], record[SequenceRecord.CHUNK_ROWS]
        nodes, end = record[SequenceRecord.NODES], record[SequenceRecord.LENGTH] + prompt
        root, last = first + prompt, first + prompt + nodes
        pages = rows.tables[record[SequenceRecord.SLOT], : -(-(end + nodes) // page)].long()
        k, v = (part[pages].transpose(0, 1).flatten(1, 2)[:, : end + nodes] for part in (keys, values))
        k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
        position = rows.positions[first:last].long()
        key_position = torch.cat([torch.arange(end, device=q.device), rows.positions[root:last].long()])
        seen = torch.arange(end, device=q.device) <= position[:, None]
        node = torch.arange(nodes, device=q.device)
        bits = (rows.bits[first:last, node // 32] >> (node % 32)) & 1 == 1
        bits[:prompt] = False
        seen = torch.cat([seen, bits], dim=1)
        if window:
            seen &= position[:, None] - key_position[None, :] < window
        if chunk:
            seen &= position[:, None] // chunk == key_position[None, :] // chunk
        v = v.masked_fill(~seen.any(dim=0)[:, None], 0)  # keys that no row sees may be NaN
        scores = torch.einsum("khd,hnd->hkn", q[first:last], k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand(-1, len(position), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[:, :, : end + nodes]
        out[first:last] = torch.einsum("hkn,hnd->khd", weights, v)
    return out


def copy_pinned(source: torch.Tensor, target: torch.Tensor) -> None:
    """As `copies.copy_pinned`."""
    target.copy_(source)


def copy_packet(
    source: torch.Tensor,
    target: torch.Tensor,
    changed: torch.Tensor,
    changes: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """As `copies.copy_packet`."""
    target.copy_(source)
    index, pages = changes[: int(changed)].unbind(1)
    tables.view(-1)[index.long().to(tables.device)] = pages.to(tables.device)


def move_accepted(cache: torch.Tensor, counts: torch.Tensor, commits: torch.Tensor, moves: torch.Tensor) -> None:
    """As `copies.move_accepted`."""
    page = cache.shape[4]
    for first, count in commits[: int(counts[1])].tolist():
        for source, target in moves[first : first + count].tolist():
            cache[:, :, target // page, :, target % page] = cache[:, :, source // page, :, source % page]


def top_tokens(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `top.top_tokens`. Ties are in any order, as with `torch.topk`."""
    out[:, 0] = logits.argmax(dim=-1)
    out[:, 1:] = sampling.top_tokens(logits, (out.shape[1] - 1) // 2)
    return out
