"""Routers of every kind, mixtures of experts with random weights, and pairs of rows and experts as tests want them."""

from __future__ import annotations

from typing import Any

import torch
from quantising import random_layer

from lookahead.backends.graph.kernels.experts import ExpertRows
from lookahead.models.feed_forward import Activation, FeedForward, MoE, Router, Scoring
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.number_formats import Format

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalised": True, "scale": 2.5},
    "chosen": {"scoring": Scoring.CHOSEN, "bias": True},
    "sigmoid": {"scoring": Scoring.SIGMOID, "normalised": True, "choice_bias": True, "scale": 1.5},
    "groups": {"scoring": Scoring.SIGMOID, "choice_bias": True, "groups": 4, "kept_groups": 2, "group_best": 2},
    "expert scale": {"expert_scale": True},
    "sparse mixer": {"scoring": Scoring.SPARSE_MIXER, "top_k": 2, "jitter": 0.1},
}
"""Options of routers, by name."""


def linear(out: int, width: int, source: torch.Generator, *, bias: bool = False, scale: float = 1.0) -> Matrix:
    part = torch.nn.Linear(width, out, bias=bias)
    for parameter in part.parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=source)
    return Matrix((part,))


def random_router(name: str, experts: int = 12, width: int = 32, top_k: int = 3, seed: int = 0) -> Router:
    """A router of a kind of ROUTERS."""
    options, source = dict(ROUTERS[name]), torch.Generator().manual_seed(seed)
    logits = linear(experts, width, source, bias=options.pop("bias", False), scale=width**-0.5)
    for key in ("choice_bias", "expert_scale"):
        if options.pop(key, False):
            options[key] = torch.rand(experts, generator=source)
    return Router(logits, **{"top_k": top_k, **options})


def random_experts(
    experts: int, out: int, width: int, source: torch.Generator, format: Format | None = None, bias: bool = False
) -> ExpertMatrix:
    own = torch.randn(experts, out, generator=source) if bias else None
    if format is not None:
        layer = random_layer(format, experts * out, width, int(torch.randint(99, (), generator=source)))
        return ExpertMatrix(layer, experts, own)
    return ExpertMatrix(torch.randn(experts, out, width, generator=source) * width**-0.5, experts, own)


def random_mixture(
    router: str = "normalised",
    experts: int = 12,
    hidden: int = 32,
    inner: int = 24,
    format: Format | None = None,
    *,
    shared: bool = False,
    bias: bool = False,
    activation: Activation = Activation.SILU,
    seed: int = 0,
) -> MoE:
    """`shared`: with a shared expert behind a gate. `bias`: of experts, and of the shared one."""
    source = torch.Generator().manual_seed(seed)
    own = None
    if shared:
        scale = hidden**-0.5
        down = linear(hidden, inner, source, bias=bias, scale=scale)
        own = FeedForward(linear(2 * inner, hidden, source, scale=scale), down)
    return MoE(
        random_router(router, experts, hidden),
        random_experts(experts, 2 * inner, hidden, source, format, bias),
        random_experts(experts, hidden, inner, source, format, bias),
        activation,
        (7.0, 1.702) if activation is Activation.CLAMPED else (),
        alternate=activation is Activation.CLAMPED,
        shared=own,
        shared_gate=linear(1, hidden, source) if shared else None,
    )


def listed(chosen: list[list[int]], experts: int, block: int, device: torch.device) -> ExpertRows:
    """The rows by expert for these choices of each row, as `choose_experts` lists them."""
    top_k, flat = len(chosen[0]), [expert for own in chosen for expert in own]
    rows = ExpertRows.new(experts, top_k, len(chosen), device)
    pairs = [[pair for pair, own in enumerate(flat) if own == expert] for expert in range(experts)]
    tiles = [(expert, first) for expert in range(experts) for first in range(0, len(pairs[expert]), block)]
    for expert, own in enumerate(pairs):
        rows.table[expert, : len(own)] = torch.tensor(own, dtype=torch.int32)
    rows.counts.copy_(torch.tensor([len(own) for own in pairs]))
    rows.tiles[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 2)
    rows.numbers[0] = len(tiles)
    rows.chosen.copy_(torch.tensor(chosen).flatten())
    return rows
