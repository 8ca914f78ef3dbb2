"""Hybrids in the shapes of published ones, with random weights. Layers with recurrent states need some care: see
`draw_weights`."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from families import Shape, shape
from inflate_experts import allocated

LINEAR, FULL = "linear_attention", "full_attention"

RANDOM_HYBRIDS: dict[str, Shape] = {
    "qwen3.5-9b": shape("Qwen3_5Text", 4096, 12288, 32, 16, 4, 248320, head_dim=256),
    "granite-4-h-tiny": shape(
        "GraniteMoeHybrid", 1536, 512, 40, 12, 4, 100352, num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
        mamba_expand=2, layer_types=[FULL if layer % 10 == 5 else LINEAR for layer in range(40)],
        embedding_multiplier=12.0, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Qwen3.5-9B: 32 layers, 3 of 4 with gated delta nets of 16 key heads and 32 value heads of 128, the others with 16
query heads and 4 K/V heads of 256, feed-forwards of 12,288. It is what its config class has for a default.
Granite-4-H-Tiny: 40 layers, of which 5, 15, 25 and 35 have attention with 12 query heads and 4 K/V heads of 128 and
without positions, the others Mamba-2 with 48 heads of 64 and states of 128; 64 experts of 512, of which 6 are chosen,
and a shared one of 1,024."""


@torch.no_grad()
def random_hybrid(shape: Shape, device: str = "cuda", *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model of this shape with random weights."""
    kind, fields = shape
    config = getattr(transformers, f"{kind}Config")(**{**fields, **changes})
    config.dtype = dtype
    model = allocated_hybrid(kind, config, device)
    model.tie_weights()
    draw_weights(model, torch.Generator(device).manual_seed(0))
    model.generation_config.eos_token_id = None
    return model


def allocated_hybrid(kind: str, config: Any, device: str) -> Any:
    """A model whose weights are not set. Qwen3.5's config of text is that of a class without `Text`."""
    return allocated(f"{kind.removesuffix('Text')}ForCausalLM", config, device)


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Random weights, norms of 1, and decays and time steps as where the training of such models starts: states keep
    what they read for 1 to 1,000 tokens. What goes into states is about 1 in size, whatever the model's width is."""
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if "norm" in name:
            shifted = "Qwen3_5" in type(model).__name__ and not name.endswith("linear_attn.norm.weight")
            parameter.fill_(0 if shifted else 1)
        elif kind == "A_log":
            parameter.copy_(torch.empty_like(parameter).uniform_(1, 16, generator=generator).log())
        elif kind == "dt_bias":
            least, most = math.log(0.001), math.log(0.1)
            steps = torch.empty_like(parameter, dtype=torch.float32).uniform_(least, most, generator=generator).exp()
            parameter.copy_(steps.expm1().log())
        elif kind == "D":
            parameter.fill_(1)
        else:
            mixes = "in_proj" in name or "conv1d.weight" in name
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if mixes else 0.02, generator=generator)
