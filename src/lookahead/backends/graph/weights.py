"""The weights of a Llama-like model, laid out for few and large matrix products.

q, k and v become one matrix, gate and up another. The model's own parameters become views of these matrices, so nothing
is held twice, and the model still works on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.backends.families import check_family, rotary_tables
from lookahead.models.facts import position_limit, sliding_windows


@dataclass(frozen=True)
class Layer:
    """One block: its matrices [out, in] and its vectors.

    before, after [hidden]: the norms before attention and before the MLP. qkv [(H + 2 Hkv) D, hidden], bias
    [(H + 2 Hkv) D] or None, norms [2, D] of q and k, or None. out [hidden, H D], gate_up [2 inner, hidden], down
    [hidden, inner]. window: the sliding window's tokens, 0 for none.
    """

    before: torch.Tensor
    qkv: torch.Tensor
    bias: torch.Tensor | None
    norms: torch.Tensor | None
    out: torch.Tensor
    after: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    window: int


@dataclass(frozen=True)
class Weights:
    """A whole model.

    embedding, head [vocabulary, hidden]; norm [hidden], the last one. `dim` is D, a head's width; `scale` multiplies
    attention scores. `rotary` is the model's own module that makes the rotary tables. `limit`: the number of positions
    that the model cannot go beyond, or None.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    eps: float
    heads: int
    kv_heads: int
    dim: int
    scale: float
    rotary: Any
    limit: int | None

    @property
    def has_copies(self) -> bool:
        """Whether some weights are copies of the model's: these do not change with the model's own."""
        return any(layer.bias is not None or layer.norms is not None for layer in self.layers)

    @torch.no_grad()
    def follow(self, now: Weights) -> bool:
        """Bring these weights up to date with `now`, the same model's weights of today. False if that is impossible.

        Matrices share the model's memory, so they are up to date. Biases and norms of q and k are copies: copy them
        again. If a weight was replaced by another tensor, captured steps hold the wrong address, so return False.
        """
        if self._places() != now._places():
            return False
        for old, new in zip(self.layers, now.layers, strict=True):
            for kept, copied in ((old.bias, new.bias), (old.norms, new.norms)):
                if kept is not None and copied is not None:
                    kept.copy_(copied)
        return True

    def _places(self) -> list[int]:
        """The addresses of all weights that share the model's memory."""
        tensors = [self.embedding, self.norm, self.head]
        for layer in self.layers:
            tensors += [layer.before, layer.qkv, layer.out, layer.after, layer.gate_up, layer.down]
        return [tensor.data_ptr() for tensor in tensors]

    def tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines [positions, D / 2] of the first positions, fp32."""
        return rotary_tables(self.rotary, self.dim, positions, self.limit, self.embedding.device)


def check_graph(model: Any) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that the graph backend does not run."""
    check_family(model, "graph")


@torch.no_grad()
def relay(model: Any) -> Weights:
    """Fuse the model's projections layer by layer, let its parameters be views of them, and collect all weights."""
    config, layers = model.config, []
    windows = sliding_windows(config)
    for number, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        qkv = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        norms = None
        if hasattr(attention, "q_norm"):
            norms = torch.stack([attention.q_norm.weight, attention.k_norm.weight]).detach()
        layers.append(
            Layer(
                before=block.input_layernorm.weight.detach(),
                qkv=qkv,
                bias=None if biases[0] is None else torch.cat(biases).detach(),
                norms=norms,
                out=attention.o_proj.weight.detach(),
                after=block.post_attention_layernorm.weight.detach(),
                gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
                down=mlp.down_proj.weight.detach(),
                window=windows.get("" if "" in windows else config.layer_types[number]) or 0,
            )
        )
    attention = model.model.layers[0].self_attn
    return Weights(
        embedding=model.model.embed_tokens.weight.detach(),
        layers=tuple(layers),
        norm=model.model.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=attention.head_dim,
        scale=float(attention.scaling),
        rotary=model.model.rotary_emb,
        limit=limit.positions if (limit := position_limit(config)).hard else None,
    )


def _fuse(*parts: torch.nn.Linear) -> torch.Tensor:
    """The parts' weights [out, in] as one matrix [sum of outs, in]. Each part's weight becomes a view into it."""
    first = parts[0].weight
    size, width = sum(p.out_features for p in parts), parts[0].in_features
    places = [first.data_ptr() + first.element_size() * width * sum(p.out_features for p in parts[:i])
              for i in range(len(parts))]  # fmt: skip
    one_piece = len({p.weight.untyped_storage().data_ptr() for p in parts}) == 1
    if one_piece and [p.weight.data_ptr() for p in parts] == places:  # fused already
        return torch.as_strided(first.detach(), (size, width), (width, 1))
    whole = first.new_empty(size, width)
    start = 0
    for part in parts:
        view = whole[start : start + part.out_features]
        view.copy_(part.weight)
        part.weight = torch.nn.Parameter(view, requires_grad=False)
        start += part.out_features
    return whole
