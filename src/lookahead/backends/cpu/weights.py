"""The weights of a Llama-like model, as the model holds them: no tensor is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lookahead.backends.families import check_family, rotary_tables
from lookahead.models.facts import UnsupportedModelError, position_limit, sliding_windows

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """A matrix [out, in], and its bias [out] or None."""

    matrix: Array
    bias: Array | None = None


@dataclass(frozen=True)
class Layer:
    """One block. `before` and `after` [hidden] are the norms before attention and before the MLP; `q_norm` and `k_norm`
    [D] are Qwen3's. `window` is the number of tokens of the sliding window, 0 for none."""

    before: Array
    q: Linear
    k: Linear
    v: Linear
    q_norm: Array | None
    k_norm: Array | None
    out: Linear
    after: Array
    gate: Linear
    up: Linear
    down: Linear
    window: int


@dataclass(frozen=True)
class Weights:
    """A whole model: `heads` query heads of width `dim` share `kv_heads` K/V heads. `scale` multiplies the scores."""

    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Array
    eps: float
    heads: int
    kv_heads: int
    dim: int
    scale: float
    rotary: Any
    limit: int | None

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows that layers have, each once; 0 is full attention."""
        return tuple(sorted({layer.window for layer in self.layers}))

    def tables(self, positions: int) -> tuple[Array, Array]:
        """The rotary cosines and sines [positions, D / 2] of the first positions."""
        cosine, sine = rotary_tables(self.rotary, self.dim, positions, self.limit, torch.device("cpu"))
        return cosine.numpy(), sine.numpy()


def joined(*linears: Linear) -> Linear:
    """Layers of the same input as one, with their outputs one after the other. This copies them."""
    if all(linear.bias is None for linear in linears):
        return Linear(np.concatenate([linear.matrix for linear in linears]))
    biases = [np.zeros(len(one.matrix), np.float32) if one.bias is None else one.bias for one in linears]
    return Linear(np.concatenate([linear.matrix for linear in linears]), np.concatenate(biases))


def check_cpu(model: Any) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that the CPU backend does not run."""
    check_family(model, "cpu")
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu":
        raise UnsupportedModelError(f"the cpu backend does not run this model: it is on {weight.device.type}")
    if weight.dtype != torch.float32:
        kind = str(weight.dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"the cpu backend does not run this model: its weights are {kind}; load it with dtype='float32'"
        )


def weights_of(model: Any) -> Weights:
    """The weights of a model that `check_cpu` accepts. The arrays share the model's memory."""
    config = model.config
    windows = sliding_windows(config)
    layers = []
    for number, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        layers.append(
            Layer(
                before=_array(block.input_layernorm.weight),
                q=_linear(attention.q_proj),
                k=_linear(attention.k_proj),
                v=_linear(attention.v_proj),
                q_norm=_array(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
                k_norm=_array(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
                out=_linear(attention.o_proj),
                after=_array(block.post_attention_layernorm.weight),
                gate=_linear(mlp.gate_proj),
                up=_linear(mlp.up_proj),
                down=_linear(mlp.down_proj),
                window=windows.get("" if "" in windows else config.layer_types[number]) or 0,
            )
        )
    attention = model.model.layers[0].self_attn
    limit = position_limit(config)
    return Weights(
        embedding=_array(model.model.embed_tokens.weight),
        layers=tuple(layers),
        norm=_array(model.model.norm.weight),
        head=_array(model.lm_head.weight),
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=attention.head_dim,
        scale=float(attention.scaling),
        rotary=model.model.rotary_emb,
        limit=limit.positions if limit.hard else None,
    )


def _array(parameter: torch.Tensor) -> Array:
    return parameter.detach().contiguous().numpy()


def _linear(module: torch.nn.Linear) -> Linear:
    return Linear(_array(module.weight), None if module.bias is None else _array(module.bias))
