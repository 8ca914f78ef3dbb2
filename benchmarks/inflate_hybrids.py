"""Hybrids to measure with: `python benchmarks/inflate_hybrids.py delta-7b VERB ...`, as `inflate.py`.

`inflate_hybrid` puts a small Llama's layers into a hybrid, with layers that have a recurrent state between them. What
these add is nothing, for speed: then the hybrid computes the small model's function. Or it is STRENGTH of what passes
by, for exactness: then every token depends on the states, and the text is still text.

- Gated delta nets are those of Qwen3.5, whose attention has gates, and norms of queries and keys. A gate's bias makes
  it 1. A bias also makes the last column of every query and key so large that a norm divides by nothing else, and the
  norm's weight undoes it. So heads must be wider than the small model's, and the model in fp32 or bf16.
- Mamba-2 is that of Granite 4 without experts, whose attention and feed-forward are Llama's.
- The feed-forwards of added layers add nothing. Decays and time steps are drawn as where training starts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from inflate import (
    ModelShape,
    check_shape,
    head_dim,
    head_indices,
    head_rows,
    main,
    put,
    put_attention,
    put_norm,
    shaped_load,
)
from inflate_experts import SHAPES as OTHER_SHAPES
from inflate_experts import calibration
from inflate_experts import load_in as load_in_other
from random_hybrids import FULL, LINEAR, allocated_hybrid, draw_weights

import lookahead

STRENGTH = 0.05
"""The size of what an added layer adds, relative to that of the residual stream. With it, delta-small and mamba-small
answered 3 of 3 prompts in other words than the embedded model from the fifth token on, and in good ones."""
CONSTANT = 2.0**20
"""The last column of queries and keys in Qwen3.5. Those of the embedded model are shorter than 2^6, so that their
squares are nothing beside this one's, and the norm's weight, which is stored less 1, has 16 bits."""
GATE = 64.0
"""The bias of a gate: its sigmoid is 1, whatever the random weights add to it."""
CALIBRATED = 256
"""Tokens of text that what the added layers add is scaled by."""


@dataclass(frozen=True)
class HybridShape(ModelShape):
    """A hybrid's shape. `layers` are those with attention, of heads of `dim`; before each of them are `between` others.

    `fields` are those of the config, which say how large the states are. `strength`: see STRENGTH.
    """

    kind: str
    dim: int
    fields: tuple[tuple[str, int], ...]
    between: int = 1
    strength: float = 0.0


def delta_fields(keys: int, values: int, dim: int) -> tuple[tuple[str, int], ...]:
    """Gated delta nets with this number of heads of keys and of values, of this width."""
    heads = ("linear_num_key_heads", keys), ("linear_num_value_heads", values)
    return (*heads, ("linear_key_head_dim", dim), ("linear_value_head_dim", dim))


def mamba_fields(heads: int, dim: int, groups: int, state: int) -> tuple[tuple[str, int], ...]:
    """Mamba-2 with this number of heads of this width, whose groups share B and C of `state` columns."""
    widths = ("mamba_n_heads", heads), ("mamba_d_head", dim), ("mamba_n_groups", groups)
    return (*widths, ("mamba_d_state", state), ("mamba_expand", 2))


_DELTA, _MAMBA = "Qwen3_5Text", "GraniteMoeHybrid"
SPEED_SHAPES = {
    "delta-small": HybridShape(576, 30, 1536, 9, 3, _DELTA, 128, delta_fields(4, 8, 64)),
    "delta-7b": HybridShape(4096, 30, 5632, 16, 4, _DELTA, 256, delta_fields(16, 32, 128)),
    "mamba-small": HybridShape(576, 30, 1536, 9, 3, _MAMBA, 64, mamba_fields(18, 64, 1, 64)),
    "mamba-7b": HybridShape(4096, 30, 5632, 64, 8, _MAMBA, 64, mamba_fields(128, 64, 1, 128)),
}
"""delta-7b has the width and the mixers of Qwen3.5-9B, mamba-7b those of Granite-4-H-Small, whose attention has as many
columns in half as many heads. Both have 60 layers, every other one with attention, and feed-forwards of half the width
that is usual, which makes 7.4 and 7.9 billion weights without the embeddings."""
HYBRID_SHAPES = {
    **SPEED_SHAPES,
    **{f"{name}-states": replace(shape, strength=STRENGTH) for name, shape in SPEED_SHAPES.items()},
}
SHAPES = {**OTHER_SHAPES, **HYBRID_SHAPES}


@torch.no_grad()
def inflate_hybrid(model: Any, shape: HybridShape, ids: list[int], *, dtype: torch.dtype | None = None) -> Any:
    """A hybrid of this shape whose layers with attention are those of `model`, a small Llama.

    The text `ids` is what the strength is measured by; see `HybridShape`.
    """
    check_hybrid(model, shape)
    small, device = model.config, str(model.device)
    large = allocated_hybrid(shape.kind, _config(small, shape, dtype or model.dtype), device)
    large.generation_config = copy.deepcopy(model.generation_config)
    generator = torch.Generator(device).manual_seed(0)
    draw_weights(large, generator)
    centre = 1.0 if shape.kind == _DELTA else 0.0
    large.model.embed_tokens.weight[:, small.hidden_size :] = 0
    put(large.model.embed_tokens.weight, model.model.embed_tokens.weight)
    put(large.lm_head.weight, model.lm_head.weight)
    _put_norm(large.model.norm, model.model.norm, centre)
    mixers = []
    for number, block in enumerate(large.model.layers):
        index, place = divmod(number, shape.between + 1)
        if place < shape.between or index >= small.num_hidden_layers:  # adds nothing
            _mlp(block)[2].zero_()
            mixer = _mixer(block)
            for parameter in (block.self_attn.o_proj if mixer is None else mixer.out_proj).parameters():
                parameter.zero_()
            mixers += [] if mixer is None else [mixer]
            continue
        old = model.model.layers[index]
        _put_norm(block.input_layernorm, old.input_layernorm, centre)
        _put_norm(block.post_attention_layernorm, old.post_attention_layernorm, centre)
        put_heads = put_normed_attention if shape.kind == _DELTA else put_attention
        put_heads(block.self_attn, old.self_attn, small, shape)
        gate, up, down = _mlp(block)
        # Neurons: the small model's first, the others with nothing to gate.
        up[small.intermediate_size :] = 0
        for weight, own in ((gate, old.mlp.gate_proj), (up, old.mlp.up_proj), (down, old.mlp.down_proj)):
            put(weight, own.weight)
        down[small.hidden_size :] = 0
    if shape.strength:
        _let_add(large, mixers, shape.strength, small.hidden_size, ids, generator)
    return large


def check_hybrid(model: Any, shape: HybridShape) -> None:
    """Raise ValueError for a model that cannot be put into this shape."""
    check_shape(model, shape)
    dim = head_dim(model.config)
    if shape.dim < dim or (shape.kind == _DELTA and shape.dim == dim) or (shape.kind == _MAMBA and shape.dim != dim):
        raise ValueError(f"heads of {shape.dim} for those of {dim} of the small model, in a {shape.kind}")


def _config(small: Any, shape: HybridShape, dtype: torch.dtype) -> Any:
    fields = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers * (shape.between + 1),
        "layer_types": [*[LINEAR] * shape.between, FULL] * shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "vocab_size": small.vocab_size,
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / shape.hidden,
        "hidden_act": small.hidden_act,
        "max_position_embeddings": small.max_position_embeddings,
        "bos_token_id": small.bos_token_id,
        "eos_token_id": small.eos_token_id,
        "pad_token_id": small.pad_token_id,
        "tie_word_embeddings": False,
    }
    rope = copy.deepcopy(small.rope_parameters)
    if shape.kind == _DELTA:
        rope["partial_rotary_factor"] = head_dim(small) / shape.dim
        fields |= {"intermediate_size": shape.intermediate, "attention_bias": True}
    else:
        fields |= {"shared_intermediate_size": shape.intermediate, "num_local_experts": 0, "num_experts_per_tok": 0}
        fields |= {"position_embedding_type": "rope", "attention_multiplier": head_dim(small) ** -0.5}
    config = getattr(transformers, f"{shape.kind}Config")(**fields, rope_parameters=rope, **dict(shape.fields))
    config.dtype = dtype
    return config


def put_normed_attention(attention: Any, old: Any, small: Any, shape: HybridShape) -> None:
    """The small model's heads at the beginning of wider ones, whose queries and keys are normed and whose results have
    gates. `inflate.put_attention` says where heads go."""
    dim, wide, hidden = head_dim(small), shape.dim, small.hidden_size
    q_heads, kv_heads, source = head_indices(small, shape)
    for bias in (attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias, attention.o_proj.bias):
        bias.zero_()
    # 1. Norms of queries and keys that leave the small model's columns as they are, and no others.
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(-1)
        norm.weight[:dim] = CONSTANT / wide**0.5 - 1
    queries, gates = attention.q_proj.bias.view(shape.heads, 2, wide).unbind(1)
    keys = attention.k_proj.bias.view(shape.kv_heads, wide)
    queries[:, -1], keys[:, -1], gates[:] = CONSTANT, CONSTANT, GATE
    # 2. Scores are divided by the root of the wider heads' width.
    attention.q_proj.weight.view(shape.heads, 2, wide, -1)[:, 0, -1] = 0
    attention.k_proj.weight.view(shape.kv_heads, wide, -1)[:, -1] = 0
    factor = (wide / dim) ** 0.5
    # 3. Values beyond the small model's go nowhere, and so do those of added heads.
    attention.o_proj.weight.view(len(attention.o_proj.weight), shape.heads, wide)[:, :, dim:] = 0
    for head in set(range(shape.heads)) - set(q_heads):
        attention.o_proj.weight[:, head_rows(head, wide)] = 0
    for index, head in enumerate(q_heads):
        at = head_rows(index, dim)
        put(attention.q_proj.weight[2 * head * wide :], old.q_proj.weight[at] * factor)
        put(attention.o_proj.weight[:, head * wide :], old.o_proj.weight[:, at])
    for head, index in zip(kv_heads, source, strict=True):
        at = head_rows(index, dim)
        put(attention.k_proj.weight[head * wide :], old.k_proj.weight[at])
        put(attention.v_proj.weight[head * wide :], old.v_proj.weight[at])
    attention.o_proj.weight[hidden:] = 0


def _put_norm(large: Any, small: Any, centre: float) -> None:
    """Norms of Qwen3.5 have weights less 1."""
    put_norm(large, small)
    large.weight -= centre


def _mixer(block: Any) -> Any:
    """The mixer with a state of a layer; None in one with attention."""
    return getattr(block, "linear_attn", None) or getattr(block, "mamba", None)


def _mlp(block: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights of gate, up and down of a layer's feed-forward."""
    if hasattr(block, "shared_mlp"):
        gate, up = block.shared_mlp.input_linear.weight.chunk(2)
        return gate, up, block.shared_mlp.output_linear.weight
    return block.mlp.gate_proj.weight, block.mlp.up_proj.weight, block.mlp.down_proj.weight


def _let_add(
    large: Any, mixers: list[Any], strength: float, hidden: int, ids: list[int], generator: torch.Generator
) -> None:
    """Output projections that add this share of the residual stream's size to the small model's channels, each token's
    in a direction of its own."""
    sizes = list[tuple[float, float]]()
    blocks = [block for block in large.model.layers if _mixer(block) is not None]

    def note(block: Any, given: tuple[Any, ...]) -> None:
        sizes.append((_size(given[0][..., :hidden]), 0.0))

    def note_inner(module: Any, given: tuple[Any, ...]) -> None:
        sizes[-1] = (sizes[-1][0], _size(given[0]))

    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    hooks += [mixer.out_proj.register_forward_pre_hook(note_inner) for mixer in mixers]
    try:
        large.model(torch.tensor([ids[:CALIBRATED]], device=large.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for mixer, (stream, inner) in zip(mixers, sizes, strict=True):
        weight = mixer.out_proj.weight
        weight.normal_(std=strength * stream / (inner * weight.shape[1] ** 0.5), generator=generator)
        weight[hidden:] = 0


def _size(x: torch.Tensor) -> float:
    """The root mean square of a token in the middle."""
    return float(x.float().square().mean(-1).sqrt().median())


def make_hybrid(small: Any, name: str) -> Any:
    """A loaded small model in one of HYBRID_SHAPES."""
    ids = calibration(small.tokenizer, small.model)
    return inflate_hybrid(small.model, HYBRID_SHAPES[name], ids, dtype=small.dtype)


def load_in(name: str, load: Callable[..., Any] = lookahead.load) -> Callable[..., Any]:
    """`lookahead.load`, but the model comes in one of SHAPES."""
    if name in HYBRID_SHAPES:
        return shaped_load(name, load, partial(make_hybrid, name=name))
    return load_in_other(name, load)


if __name__ == "__main__":
    main(SHAPES, load_in)
