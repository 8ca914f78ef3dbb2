"""What readers of mixtures of experts share: routers, stacked experts, and the usual block of both.

Noise that a class adds to its router while training is none of a description's business.
"""

from __future__ import annotations

from typing import Any

import torch

from lookahead.models.feed_forward import Activation, FeedForward, MoE, Router, Scoring
from lookahead.models.matrix import Matrix
from lookahead.models.parts import read_feed_forward
from lookahead.models.quantised_experts import expert_matrices


def read_router(module: Any, **fields: Any) -> Router:
    """A router of transformers, which has a `weight` [experts, hidden] and maybe a `bias`; `fields` are those of
    `Router`, where the usual ones do not hold: a softmax over all experts, of which `top_k` are chosen."""
    return Router(**{"logits": Matrix((_linear(module),)), "top_k": getattr(module, "top_k", None), **fields})


def read_grouped_router(module: Any, choice_bias: torch.Tensor) -> Router:
    """DeepSeek's: sigmoids, a bias that only chooses, groups, and a scale."""
    return read_router(
        module,
        scoring=Scoring.SIGMOID,
        normalised=module.norm_topk_prob,
        choice_bias=choice_bias.detach(),
        groups=module.num_group,
        kept_groups=module.topk_group,
        scale=float(module.routed_scaling_factor),
    )


def read_moe(experts: Any, router: Router, activation: str, **fields: Any) -> MoE:
    """A mixture of experts that are stacked in one module; `fields` are those of `MoE`."""
    gate_up, down = expert_matrices(experts)
    return MoE(router, gate_up, down, Activation.named(activation), **fields)


def read_softmax_moe(block: Any, activation: str, **fields: Any) -> MoE:
    """A block with `experts` and a `gate`, whose weights are a softmax over all experts; maybe not normalised."""
    router = read_router(block.gate, normalised=getattr(block.gate, "norm_topk_prob", True))
    return read_moe(block.experts, router, activation, **fields)


def read_grouped_moe(block: Any, activation: str) -> MoE:
    """A block with `experts`, a `gate` as DeepSeek's, and `shared_experts`."""
    router = read_grouped_router(block.gate, block.gate.e_score_correction_bias)
    return read_moe(block.experts, router, activation, shared=read_feed_forward(block.shared_experts, activation))


def is_mixture(block: Any) -> bool:
    """Whether a layer's feed-forward has experts: the first layers of a model may do without."""
    return hasattr(block, "experts")


def read_dense_or(block: Any, activation: str, read: Any) -> FeedForward | MoE:
    """A layer's feed-forward; `read`(block, activation) reads one that has experts."""
    found: FeedForward | MoE = (read if is_mixture(block) else read_feed_forward)(block, activation)
    return found


def _linear(module: Any) -> torch.nn.Module:
    """A router as a linear module with the same weights. Routers of transformers are classes of their own."""
    if type(module) is torch.nn.Linear:
        return module
    bias: torch.nn.Parameter | None = getattr(module, "bias", None)
    experts, hidden = module.weight.shape
    made = torch.nn.Linear(hidden, experts, bias=bias is not None, device="meta")
    made.weight = module.weight
    if bias is not None:
        made.bias = bias
    return made
