"""Tiny mixtures of experts of many classes, and plain twins of quantised ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny import tiny

from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import NAMES, QuantisedExperts, expert_matrices, is_experts

SIZES = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"sliding_window": None}),
    "qwen2": ("Qwen2Moe", {"shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Moe", {"head_dim": 8, "norm_topk_prob": True}),
    "gpt-oss": ("GptOss", {"head_dim": 8, "sliding_window": 7, "swiglu_limit": 0.5}),
    "olmoe": ("Olmoe", {}),
    "granite": ("GraniteMoe", {}),
    "granite-shared": ("GraniteMoeShared", {"shared_intermediate_size": 48}),
    "glm4": ("Glm4Moe", {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}),
    "ernie": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2}),
    "hunyuan": ("HunYuanMoEV1", {"moe_topk": 2, "head_dim": 8}),
    "phi": ("Phimoe", {"sliding_window": None}),
    "afmoe": ("Afmoe", {"head_dim": 8, "num_dense_layers": 1}),
    "minimax": ("MiniMaxM2", {"head_dim": 8}),
    "dots1": ("Dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "gemma4": (
        "Gemma4Text",
        {"enable_moe_block": True, "top_k_experts": 2, "head_dim": 8, "hidden_size_per_layer_input": 0},
    ),
}


def mixture(name: str, **changes: Any) -> Any:
    """A tiny model of this kind, whose experts are 24 wide; those of classes without a width of their own 64."""
    kind, fields = KINDS[name]
    return tiny(kind, tie_word_embeddings=False, **{**SIZES, **fields, **changes})


def experts_of(model: Any) -> dict[str, Any]:
    """The experts modules of a model by their names, plain or quantised."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


@torch.no_grad()
def dequantised(model: Any, plain: Any) -> Any:
    """A copy of `plain`, a model of the same class, with the dequantised weights of a quantised model."""
    made = copy.deepcopy(plain)
    for name, module in model.named_modules():
        if isinstance(module, QuantisedExperts):
            for own, matrix in zip(NAMES, expert_matrices(module), strict=True):
                weights = torch.stack([matrix.weight(expert, torch.float32) for expert in range(matrix.experts)])
                parameter = getattr(made.get_submodule(name), own)
                parameter.copy_(weights.mT if made.get_submodule(name).is_transposed else weights)
        elif isinstance(module, QuantisedLinear) and not isinstance(
            model.get_submodule(parent(name)), QuantisedExperts
        ):
            made.get_submodule(name).weight.copy_(module.dequantised())
    return made


def parent(name: str) -> str:
    return name.rpartition(".")[0]
