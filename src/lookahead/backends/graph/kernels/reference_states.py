"""Reference implementations of the kernels of recurrent layers: the same functions and shapes in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lookahead.backends.graph.kernels.state_rows import NO_INPUT, StateRows
from lookahead.backends.graph.kernels.state_shapes import Channels, Columns, Gating, ScanShape
from lookahead.backends.graph.records import SequenceRecord
from lookahead.models.norm import Norm
from lookahead.models.reference_parts import activate


def list_walks(rows: StateRows) -> None:
    """As `walks.list_walks`."""
    size, reach = rows.above.shape
    sequence_of, parents, records = rows.sequence_of.tolist(), rows.parents.tolist(), rows.sequences.tolist()
    above, kept = [[NO_INPUT] * reach for _ in range(size)], [-1] * size
    order, chunk_walks, tree_walks, nodes = list(range(size)), list[list[int]](), list[list[int]](), 0
    for sequence in sorted(set(sequence_of) - {-1}):
        record = records[sequence]
        slot, length = record[SequenceRecord.SLOT], record[SequenceRecord.LENGTH]
        first, chunk = record[SequenceRecord.FIRST_ROW], record[SequenceRecord.CHUNK_ROWS]
        root, end = first + chunk, first + chunk + record[SequenceRecord.NODES]
        if chunk:
            chunk_walks.append([slot, int(length == 0), first, chunk, 0])
        # 1. What comes before each row.
        for row in range(first, end):
            at = row
            for j in range(reach):
                at = root + parents[at] if at >= root else at - 1
                if length + at >= first:
                    above[row][j] = at if at >= first else at - first
        # 2. Where each node is kept, and the paths to the leaves, each of which writes what first children lead from.
        for node in range(end - root):
            kept[root + node] = (int(rows.kept_base) + nodes) % rows.ring
            nodes += 1
        first_child = {parents[node]: node - root for node in range(end - 1, root - 1, -1)}
        for leaf in range(end - root):
            if leaf in first_child:
                continue
            path, at = list[int](), leaf
            while at >= 0:
                path.insert(0, root + at)
                at = parents[root + at]
            begin = size + len(tree_walks) * rows.most_nodes
            order += [0] * (begin + len(path) - len(order))
            order[begin : begin + len(path)] = path
            later = [index for index, row in enumerate(path) if first_child[parents[row]] != row - root]
            tree_walks.append([slot, int(length + chunk == 0), begin, len(path), max(later, default=0)])
    for tensor, numbers in (
        (rows.above, above),
        (rows.kept, kept),
        (rows.order, order),
        (rows.chunk_walks, chunk_walks),
        (rows.tree_walks, tree_walks),
        (rows.chunk_count, [len(chunk_walks)]),
        (rows.tree_count, [len(tree_walks)]),
    ):
        if numbers and reach:
            tensor[: len(numbers)] = torch.tensor(numbers, dtype=tensor.dtype)


def scan(
    states: torch.Tensor,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    skip: torch.Tensor | None,
    out: torch.Tensor,
    walks: torch.Tensor,
    count: torch.Tensor,
    order: torch.Tensor,
    shape: ScanShape,
    *,
    stores: bool,
) -> None:
    """As `scan.scan`."""
    for slot, fresh, begin, tokens, write_from in walks[: int(count)].tolist():
        rows = order[begin : begin + tokens].long()
        for layer in range(len(states)):
            state = torch.zeros_like(states[layer, slot]) if fresh else states[layer, slot].clone()
            q, k, v, decay, beta = _scanned(mixed[layer, rows].float(), gates[layer, rows], shape)
            for i in range(tokens):
                state = state * decay[i]
                new = v[i] - (state * k[i]).sum(1) if shape.delta else v[i]
                state = state + k[i] * (new * beta[i])[:, None]
                if i >= write_from:
                    y = (state * q[i]).sum(1)
                    if skip is not None and not shape.delta:
                        y = y + v[i] * skip.float()[:, None]
                    out[rows[i]] = y.flatten().to(out.dtype)
            if stores:
                states[layer, slot] = state


def _scanned(x: torch.Tensor, gates: torch.Tensor, shape: ScanShape) -> tuple[torch.Tensor, ...]:
    """q and k [rows, H, key, 1], v [rows, H, value], decay [rows, H, 1, 1] and beta [rows, H, 1] of some rows."""
    heads, keys, group = shape.heads, shape.key_heads * shape.key, shape.heads // shape.key_heads
    q, k = (x[:, at : at + keys].unflatten(1, (shape.key_heads, shape.key)) for at in (shape.q_at, shape.k_at))
    v = x[:, shape.v_at : shape.v_at + heads * shape.value].unflatten(1, (heads, shape.value))
    if shape.delta:
        q_scale, k_scale = gates[:, 2 * heads :].unflatten(1, (2, shape.key_heads)).unbind(1)
        q, k = q * q_scale[..., None], k * k_scale[..., None]
    q, k = (each.repeat_interleave(group, dim=1)[..., None] for each in (q, k))
    return q, k, v, gates[:, :heads, None, None], gates[:, heads : 2 * heads, None]


def convolve(
    projected: torch.Tensor,
    channels: Channels,
    stored: torch.Tensor,
    mixed: torch.Tensor,
    kept_inputs: torch.Tensor,
    kept_mixed: torch.Tensor | None,
    rows: StateRows,
) -> None:
    """As `convolve.convolve`."""
    size, taps = len(rows.sequence_of), channels.taps
    used = rows.sequence_of >= 0
    inputs = _inputs(projected[:size], channels)
    slots = rows.sequences[rows.sequence_of.clamp_min(0).long(), SequenceRecord.SLOT].long()
    total = inputs.float() * channels.weight[:, -1].float()
    for j in range(1, taps):
        source = rows.above[:, j - 1].long()
        earlier = stored[slots, (taps - 1 + source).clamp(0, taps - 2)]
        before = inputs[source.clamp_min(0)].where((source >= 0)[:, None], earlier)
        before = before.masked_fill((source == NO_INPUT)[:, None], 0)
        total += before.float() * channels.weight[:, taps - 1 - j].float()
    if channels.bias is not None:
        total += channels.bias.float()
    y = total.to(inputs.dtype)
    if channels.activation is not None:
        y = activate(channels.activation, (), y.float()).to(inputs.dtype)
    if channels.gated:
        y = y * columns_of(projected[:size], channels.count, channels.count, channels.columns)
    mixed[:size][used] = y[used]
    nodes = rows.kept >= 0
    kept_inputs[rows.kept[nodes].long()] = inputs[nodes]
    if kept_mixed is not None:
        kept_mixed[rows.kept[nodes].long()] = y[nodes]


def columns_of(projected: torch.Tensor, first: int, count: int, columns: Columns) -> torch.Tensor:
    """Columns [rows, count] from `first` on: see `state_shapes.Columns`."""
    column = slice(first, first + count)
    index = column if columns.order is None else columns.order[column].long()
    x = projected[:, index] if columns.bias is None else projected[:, index] + columns.bias[index]
    return x if columns.scales is None else (x.float() * columns.scales[column]).to(x.dtype)


def _inputs(projected: torch.Tensor, channels: Channels) -> torch.Tensor:
    """The inputs [rows, channels] of the convolution."""
    count = channels.count
    x = columns_of(projected, channels.first, count, channels.columns)
    return x * columns_of(projected, 2 * count, count, channels.columns) if channels.gated else x


def store_inputs(projected: torch.Tensor, channels: Channels, stored: torch.Tensor, rows: StateRows) -> None:
    """As `convolve.store_inputs`."""
    inputs, before = _inputs(projected[: len(rows.sequence_of)], channels), channels.taps - 1
    for slot, _fresh, begin, tokens, _write_from in rows.chunk_walks[: int(rows.chunk_count)].tolist():
        stored[slot] = torch.cat([stored[slot], inputs[begin : begin + tokens]])[-before:]


def replay_inputs(
    stored: torch.Tensor, kept_inputs: torch.Tensor, walks: torch.Tensor, count: torch.Tensor, order: torch.Tensor
) -> None:
    """As `convolve.replay_inputs`."""
    before = stored.shape[2]
    for slot, _fresh, begin, tokens, _write_from in walks[: int(count)].tolist():
        accepted = kept_inputs[:, order[begin : begin + tokens].long()]
        stored[:, slot] = torch.cat([stored[:, slot], accepted], dim=1)[:, -before:]


def gate(
    projected: torch.Tensor,
    mixed: torch.Tensor,
    gating: Gating,
    shape: ScanShape,
    gates: torch.Tensor,
    kept_gates: torch.Tensor,
    rows: StateRows,
) -> None:
    """As `gates.gate`."""
    size, heads = len(rows.sequence_of), shape.heads
    used, projected = rows.sequence_of >= 0, projected[: len(rows.sequence_of)]
    time = columns_of(projected, gating.time_at, heads, gating.columns).float() + gating.time_bias.float()
    time = F.softplus(time)
    if gating.limited:
        time = time.clamp(*gating.limits).where(_is_prompt(rows)[:, None], time)
    decay, beta, lengths = torch.exp(-gating.a_log.float().exp() * time), time, list[torch.Tensor]()
    if shape.delta:
        beta = torch.sigmoid(columns_of(projected, gating.beta_at, heads, gating.columns)).float() * gating.beta_scale
        for at, scale in ((shape.q_at, shape.key**-0.5), (shape.k_at, 1.0)):
            x = mixed[:size, at : at + shape.key_heads * shape.key].float().view(size, shape.key_heads, shape.key)
            lengths.append(torch.rsqrt((x * x).sum(-1) + 1e-6) * scale)
    found, nodes = torch.cat([decay, beta, *lengths], dim=1), rows.kept >= 0
    gates[:size][used] = found[used]
    kept_gates[rows.kept[nodes].long()] = found[nodes]


def _is_prompt(rows: StateRows) -> torch.Tensor:
    """Whether each row is a token of a prompt [R]: of a chunk, or a root."""
    records = rows.sequences[rows.sequence_of.clamp_min(0).long()].unbind(1)
    first, row = records[SequenceRecord.FIRST_ROW], torch.arange(len(rows.kept), device=rows.kept.device)
    root = first + records[SequenceRecord.CHUNK_ROWS]
    position = records[SequenceRecord.LENGTH] + row - first
    return (row <= root) & (position < rows.prompts[rows.sequence_of.clamp_min(0).long()])


def gated_norm(
    x: torch.Tensor,
    projected: torch.Tensor,
    gate_at: int,
    norm: Norm | None,
    parts: int,
    out: torch.Tensor,
    *,
    norm_first: bool,
    columns: Columns,
) -> None:
    """As `gated_norm.gated_norm`."""
    rows, width = out.shape
    factor = F.silu(columns_of(projected[:rows], gate_at, width, columns).float()).view(rows, parts, -1)
    y = x[:rows].float().view(rows, parts, -1)
    y = _normed(norm, y, out.dtype) * factor if norm_first else _normed(norm, y * factor, out.dtype)
    out.copy_(y.flatten(1))


def _normed(spec: Norm | None, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm of x [rows, parts, width] fp32, rounded as if x had this dtype."""
    if spec is None:
        return x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps)
    x = x.to(dtype).float() if spec.rounds_first else x
    if spec.weight is not None:
        x = x * (spec.weight.float() + spec.offset)
    return x.to(dtype).float() if spec.rounds_first else x
