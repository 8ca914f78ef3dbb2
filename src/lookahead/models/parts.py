"""What readers share: the parts of a description, from modules whose names many families have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError, rope_limit
from lookahead.models.feed_forward import Activation, FeedForward, MoE
from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.spec import Attention, Decoder, Rope

TextReader = Callable[[Any, Any, Any], Decoder]
"""(text model without its head, LM head, config of the text model) -> its description. In a model that also reads
images these three have other names than in one for text alone."""


@dataclass(frozen=True)
class CausalLM:
    """The reader of a class whose config is of text alone; `base` and `head` are the paths of these two modules."""

    read_text: TextReader
    base: str = "model"
    head: str = "lm_head"

    def __call__(self, model: Any) -> Decoder:
        check_causal(model.config)
        return self.read_text(model.get_submodule(self.base), model.get_submodule(self.head), model.config)


NormReader = Callable[[Any], Norm]
"""Reads the norm modules of a class."""
FeedForwardReader = Callable[[Any], FeedForward | MoE]
"""Reads the feed-forward of a class's layers."""


def read_norm(module: Any, **changes: Any) -> Norm:
    """A norm module of transformers, or torch's LayerNorm; `changes` are fields that the module does not show."""
    if isinstance(module, torch.nn.LayerNorm):
        changes = {"bias": _own(module.bias), "centered": True, "rounds_first": False, **changes}
        return Norm(_own(module.weight), module.eps, **changes)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(_own(getattr(module, "weight", None)), eps, **changes)


def read_attention(
    module: Any,
    rope: Rope | None,
    window: int | None,
    *,
    out: str = "o_proj",
    norm: NormReader = read_norm,
    **changes: Any,
) -> Attention:
    """Attention with q_proj, k_proj and v_proj, and maybe q_norm and k_norm.

    `out` names the module of the output projection, `norm` reads the class's norms, and `changes` are fields that the
    module does not show.
    """
    dim, qkv = module.head_dim, Matrix((module.q_proj, module.k_proj, module.v_proj))
    fields = {
        "heads": module.q_proj.out_features // dim,
        "kv_heads": module.k_proj.out_features // dim,
        "head_dim": dim,
        "scale": changes.get("scale") or float(module.scaling),
        "qkv": qkv,
        "out": Matrix((getattr(module, out),)),
        "q_norm": norm(module.q_norm) if hasattr(module, "q_norm") else None,
        "k_norm": norm(module.k_norm) if hasattr(module, "k_norm") else None,
    }
    return Attention(**{**fields, "rope": rope, "window": window, **changes})


def read_feed_forward(module: Any, activation: str) -> FeedForward:
    """A feed-forward with gate_proj and up_proj, or gate_up_proj for both, and down_proj."""
    fused = hasattr(module, "gate_up_proj")
    gate_up = Matrix((module.gate_up_proj,) if fused else (module.gate_proj, module.up_proj))
    return FeedForward(gate_up, Matrix((module.down_proj,)), Activation.named(activation))


def with_bias(linear: Any, bias: torch.nn.Parameter) -> torch.nn.Module:
    """A linear module with the weights of this one, which has none, and a bias."""
    if isinstance(linear, QuantisedLinear):
        return linear.with_bias(bias)
    made = torch.nn.Linear(linear.in_features, linear.out_features, device="meta")
    made.weight, made.bias = linear.weight, bias
    return made


def read_ungated(up: Any, down: Any, activation: str, *, transposed: bool = False) -> FeedForward:
    """A feed-forward of two matrices, without a gate."""
    return FeedForward(
        Matrix((up,), transposed), Matrix((down,), transposed), Activation.named(activation), gated=False
    )


def read_rope(module: Any, config: Any, **changes: Any) -> Rope:
    """The rotation of a rotary module of transformers, which has a frequency for each pair of columns that it turns."""
    return Rope(module, 2 * len(module.inv_freq), rope_limit(config), **changes)


@dataclass(frozen=True)
class EqualAxes:
    """A rotary module with positions along three axes, called with the same position for all of them."""

    module: Any

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = self.module(x, positions[None].expand(3, -1, -1))
        return (cosine[0], sine[0]) if cosine.dim() == 4 else (cosine, sine)  # 4-D up to transformers 5.21


def read_ropes_by_type(module: Any, config: Any) -> dict[str, Rope]:
    """The rotations of a rotary module that has other frequencies for each of the config's layer types."""
    return {
        kind: Rope(partial(module, layer_type=kind), 2 * len(getattr(module, f"{kind}_inv_freq")), rope_limit(config))
        for kind in sorted(set(config.layer_types))
    }


def layer_windows(config: Any) -> list[int | None]:
    """The windows of a class whose masks follow the config's layer types."""
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def score_softcap(config: Any) -> float | None:
    """The softcap of attention scores. SDPA has none; older versions of transformers leave it out there, without
    a word, and newer ones refuse SDPA."""
    cap: float | None = config.attn_logit_softcapping
    return None if config._attn_implementation == "sdpa" else cap


def check_causal(config: Any) -> None:
    """Refuse a model of a decoder's class that is an encoder: its tokens see the ones after them."""
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise UnsupportedModelError("its attention is bidirectional")


def grouped_order(heads: int, kv_heads: int) -> tuple[int, ...]:
    """`head_order` of a matrix that has for each K/V head its query heads, its key and its value, one after another."""
    group = heads // kv_heads
    starts = range(0, heads + 2 * kv_heads, group + 2)
    queries = [start + member for start in starts for member in range(group)]
    return (*queries, *(start + group for start in starts), *(start + group + 1 for start in starts))


def _own(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
