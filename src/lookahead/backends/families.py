"""The Llama-like families, which the graph and the CPU backend compute by themselves instead of calling the model.

All have pre-norm RMSNorm blocks, rotary positions and a SiLU gate. Qwen2 adds biases, Qwen3 norms of q and k.
"""

from __future__ import annotations

from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.patches import patch_of

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_family(model: Any, backend: str) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that is not of these families as they are."""

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"the {backend} backend does not run this model: {reason}")

    name, config = type(model).__name__, model.config
    if name not in FAMILIES:
        refuse(f"{name} is none of {', '.join(FAMILIES)}")
    if getattr(config, "hidden_act", "silu") != "silu":
        refuse(f"its activation is {config.hidden_act!r}")
    matrices = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        matrices += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for module in matrices:
        if type(module) is not torch.nn.Linear:
            refuse(f"a {type(module).__name__} is no plain matrix")
    for module in model.modules():
        if getattr(module, "_hf_hook", None) is not None:
            refuse("it is spread over devices")
    patch = patch_of(model.modules())
    if patch is not None:
        refuse(f"{patch} would not be called")
    plain = [p for p in model.parameters() if type(p.data) is not torch.Tensor]
    if plain or (getattr(model, "_tp_size", None) or 1) > 1:
        refuse("its weights are quantised or split between processes")
    if len({(p.dtype, p.device) for p in model.parameters()}) > 1:
        refuse("its weights have several dtypes or devices")
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if attention.o_proj.bias is not None or mlp.down_proj.bias is not None or mlp.gate_proj.bias is not None:
            refuse("its output projections have biases")
    if model.lm_head.bias is not None:
        refuse("its head has a bias")


def rotary_tables(
    rotary: Any, dim: int, positions: int, limit: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines [positions, dim / 2] of the first positions, fp32, made by the model's rotary module.

    Some modules scale by the furthest position they are asked for. We want the factors of a short text, so we ask for
    one position first, and for none beyond the limit: nodes there can never be accepted.
    """
    wide = torch.zeros(1, device=device, dtype=torch.float32)
    place = torch.arange(positions, device=device).clamp(max=(limit or positions) - 1)[None]
    rotary(wide, place[:, :1])
    cosine, sine = rotary(wide, place)
    half = dim // 2
    return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()
