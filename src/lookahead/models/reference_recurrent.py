"""Mixers with a recurrent state in plain PyTorch: every row starts from the states of the row before it in its text.

`delta_update` and `mamba_update` are the decoding of a single token. Kernels are tested against them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from lookahead.models.norm import Norm
from lookahead.models.recurrent import Convolution, GatedDelta, Mamba2, Recurrent, ShortConv
from lookahead.models.reference_parts import activate, matrix, norm

LENGTH_EPS = 1e-6
"""Is added to the squared length of queries and keys of gated delta nets."""


def recurrent(spec: Recurrent, x: torch.Tensor, before: Sequence[int], prompt: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden].

    The token before that of row i is in row before[i] < i, or there is none if that is -1. prompt [rows]: whether the
    token is part of a prompt.
    """
    if isinstance(spec, GatedDelta):
        return gated_delta(spec, x, before)
    if isinstance(spec, Mamba2):
        return mamba2(spec, x, before, prompt)
    return short_conv(spec, x, before)


def gated_delta(spec: GatedDelta, x: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]; the numbers are those of `GatedDelta`."""
    # 1. Columns q, k, v, z, b, a.
    columns = matrix(spec.projection, x)
    if spec.order is not None:
        columns = columns[:, spec.order]
    mixed, z, b, a = columns.split([sum(spec.columns[:3]), *spec.columns[3:]], dim=-1)
    # 2. The convolution; every head gets the query and key of its group.
    q, k, v = convolve(spec.convolution, mixed, before).split(spec.columns[:3], dim=-1)
    group = spec.heads // spec.key_heads
    q, k = (each.float().unflatten(-1, (spec.key_heads, -1)).repeat_interleave(group, dim=1) for each in (q, k))
    v = v.float().unflatten(-1, (spec.heads, -1))
    # 3. Lengths.
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + LENGTH_EPS) for each in (q, k))
    q = q / spec.key_dim**0.5
    # 4. How much of the old value is replaced, and how much of the state remains.
    beta = (b.sigmoid() * spec.beta_scale).float()
    decay = torch.exp(-spec.a_log.float().exp() * F.softplus(a.float() + spec.dt_bias))
    # 5. The states.
    y = scan(delta_update, spec.state_shape, before, q, k, v, decay, beta)
    # 6. The gated norm.
    y, z = y.to(x.dtype), z.unflatten(-1, (spec.heads, -1))
    return matrix(spec.out, gate(spec.norm, y, z, norm_first=True).flatten(1))


def scan(
    update: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    shape: tuple[int, ...],
    before: Sequence[int],
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """The outputs [rows, ...] of updates. Each takes the state after the row before it, and its own row of inputs."""
    empty = torch.zeros(shape, device=inputs[0].device)
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for last, *row in zip(before, *inputs, strict=True):
        output, state = update(states[last] if last >= 0 else empty, *row)
        outputs.append(output)
        states.append(state)
    return torch.stack(outputs)


def delta_update(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [heads, value_dim] of a token, and the state [heads, key_dim, value_dim] after it.

    All in fp32: state [heads, key_dim, value_dim], q and k [heads, key_dim], v [heads, value_dim], decay and beta
    [heads].
    """
    state = state * decay[:, None, None]
    recalled = (state * k[:, :, None]).sum(1)
    state = state + k[:, :, None] * ((v - recalled) * beta[:, None])[:, None, :]
    return (state * q[:, :, None]).sum(1), state


def mamba2(spec: Mamba2, x: torch.Tensor, before: Sequence[int], prompt: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]; the numbers are those of `Mamba2`."""
    # 1. Columns z, x, B, C, dt.
    columns = matrix(spec.projection, x)
    if spec.column_scales is not None:
        columns = (columns * spec.column_scales).to(x.dtype)
    z, mixed, dt = columns.split([spec.columns[0], sum(spec.columns[1:4]), spec.columns[4]], dim=-1)
    # 2. The convolution; every head gets B and C of its group.
    inner, b, c = convolve(spec.convolution, mixed, before).float().split(spec.columns[1:4], dim=-1)
    inner = inner.unflatten(-1, (spec.heads, -1))
    group = spec.heads // spec.groups
    b, c = (each.unflatten(-1, (spec.groups, -1)).repeat_interleave(group, dim=1) for each in (b, c))
    # 3. Time steps.
    dt = F.softplus(dt.float() + spec.dt_bias.float())
    dt = torch.where(prompt[:, None], dt.clamp(*spec.prompt_time_steps), dt)
    # 4. The states.
    a = -spec.a_log.float().exp()
    y = scan(mamba_update, spec.state_shape, before, inner, b, c, dt, a.expand_as(dt))
    y = (y + inner * spec.skip.float()[:, None]).flatten(1).to(x.dtype)
    # 5. The gate, and a norm of each part.
    if spec.norm is not None:
        assert spec.norm.weight is not None
        y, z = (each.unflatten(-1, (len(spec.norm.weight), -1)) for each in (y, z))
    return matrix(spec.out, gate(spec.norm, y, z, norm_first=spec.norm_first).flatten(1))


def mamba_update(
    state: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [heads, head_dim] of a token without the skip, and the state [heads, head_dim, state_dim] after it.

    All in fp32: state [heads, head_dim, state_dim], x [heads, head_dim], b and c [heads, state_dim], dt and a [heads].
    """
    state = state * torch.exp(dt * a)[:, None, None] + (dt[:, None] * b)[:, None, :] * x[:, :, None]
    return (state * c[:, None, :]).sum(-1), state


def short_conv(spec: ShortConv, x: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]."""
    b, c, inner = matrix(spec.projection, x).split(spec.columns, dim=-1)
    return matrix(spec.out, c * convolve(spec.convolution, b * inner, before))


def convolve(spec: Convolution, x: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
    """x [rows, channels] -> [rows, channels], in x's dtype."""
    padded = torch.cat([torch.zeros_like(x[:1]), x])  # row -1 of x is at 0
    rows, sources = torch.arange(len(x)), []
    above = torch.tensor([-1, *before]) + 1  # of the padded rows; that of the padding is the padding
    at = rows + 1
    for _ in range(spec.taps):
        sources.append(padded[at.to(x.device)].float())
        at = above[at]
    sums = torch.zeros_like(sources[0])
    for tap, source in enumerate(reversed(sources)):
        sums = sums + source * spec.weight[:, tap].float()
    if spec.bias is not None:
        sums = sums + spec.bias.float()
    sums = sums.to(x.dtype)
    return sums if spec.activation is None else activate(spec.activation, (), sums)


def gate(spec: Norm | None, y: torch.Tensor, z: torch.Tensor, *, norm_first: bool) -> torch.Tensor:
    """norm(y) silu(z) or norm(y silu(z)) [rows, parts, width], of y and z [rows, parts, width], in y's dtype."""
    if spec is None:
        return y * F.silu(z)
    opened = F.silu(z.float())
    if norm_first:
        return (norm(spec, y) * opened).to(y.dtype)
    return norm(spec, y.float() * opened, y.dtype)
