"""Reference implementations of the kernels between the matrix products: the same functions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lookahead.backends.graph.kernels.delta import Delta
from lookahead.models import reference_parts
from lookahead.models.feed_forward import Activation
from lookahead.models.norm import Norm


def embed(
    table: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    *,
    aliases: torch.Tensor | None = None,
    scale: float = 1.0,
    position_table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """As `ends.embed`."""
    for token, other in () if aliases is None else aliases.tolist():
        tokens = tokens.where(tokens != token, other)
    out.copy_(table[tokens.long()])
    if scale != 1.0:
        out *= scale
    if position_table is not None:
        assert positions is not None
        out += position_table[positions.clamp(max=len(position_table) - 1).long()]


def add_norm(
    residual: torch.Tensor,
    deltas: Sequence[Delta],
    norms: Sequence[Norm | None],
    outs: Sequence[torch.Tensor],
    rows: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    output_scale: torch.Tensor | None = None,
) -> None:
    """As `norms.add_norm`."""
    chosen = slice(len(outs[0])) if rows is None else rows.long()
    x = residual[chosen]
    for delta in deltas:
        added = delta.values[chosen] if delta.bias is None else delta.values[chosen] + delta.bias
        x = x + reference_parts.norm(delta.norm, added) * scale
    if deltas and output_scale is not None:
        x = x * output_scale
    if deltas and rows is None:
        residual[chosen] = x
    x = x.to(outs[0].dtype) if rows is None else x
    for norm, out in zip(norms, outs, strict=True):
        out.copy_(reference_parts.norm(norm, x))


def activate(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation,
    constants: Sequence[float] = (),
    *,
    gated: bool = True,
    alternate: bool = False,
    gate_scale: float = 1.0,
) -> None:
    """As `activations.activate`."""
    inner = x[: len(out)] if bias is None else x[: len(out)] + bias
    gate, up = (inner[:, ::2], inner[:, 1::2]) if alternate else inner.chunk(2, dim=-1) if gated else (inner, None)
    gate = gate * gate_scale if gate_scale != 1.0 else gate
    if up is not None and activation is Activation.CLAMPED:
        out.copy_(reference_parts.gated(activation, constants, gate.float(), up.float()))
        return
    active = reference_parts.activate(activation, constants, gate.float()).to(out.dtype)
    out.copy_(active if up is None else active * up)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None) -> None:
    """As `activations.apply_gate`."""
    x *= torch.sigmoid(gate[: len(x)] if bias is None else gate[: len(x)] + bias)


def apply_head_gates(
    x: torch.Tensor, source: torch.Tensor, bias: torch.Tensor | None, heads: torch.Tensor, dim: int
) -> None:
    """As `activations.apply_head_gates`."""
    given = source[: len(x)] if bias is None else source[: len(x)] + bias
    x *= torch.sigmoid(given.view(len(x), -1, dim)[:, heads.long()].flatten(1))


def scale(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, factor: float) -> None:
    """As `activations.scale`."""
    value = x[: len(out)] if bias is None else x[: len(out)] + bias
    out.copy_(value * factor)


def last_columns(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """As `ends.last_columns`."""
    torch.mm(x, weight.t(), out=out)


def finish_logits(logits: torch.Tensor, bias: torch.Tensor | None, scale: float, cap: float | None) -> None:
    """As `ends.finish_logits`."""
    wide = logits.float() if bias is None else logits.float() + bias.float()
    logits.copy_(reference_parts.softcap(wide * scale, cap))
