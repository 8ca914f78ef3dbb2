"""Groups of layers whose attention has the same shape, positions and visibility, so that they share ONNX inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lookahead.models.spec import Decoder, Rope, attentions_of

QueryScale = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Group:
    """What the attention of a group's layers has in common. See `spec.Attention`.

    `rope` is an index into `ropes_of(decoder)`, or None for layers that do not use positions; `rotary_dim` are the
    columns that it turns. `query_scale` is an index into `query_scales_of(decoder)`. `own_kv` is False for layers that
    read the keys and values of another layer.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int | None
    window: int | None
    rotary_dim: int = 0
    chunk: int | None = None
    query_scale: int | None = None
    own_kv: bool = True
    sinks: bool = False

    @property
    def sharing(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads

    @property
    def vectors(self) -> int:
        """Vectors of width head_dim per row: its queries and, unless they are another layer's, its keys and values."""
        return self.heads + (2 * self.kv_heads if self.own_kv else 0)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The window and the chunk that limit what a row sees."""
        return self.window, self.chunk

    def input(self, kind: str) -> str:
        """The name of this group's ONNX input of a kind. It includes all that the input depends on, so that equal
        groups share it: `mask_3_per_kv_window_4096`, `cosine_9_3_rope_0`, `query_9_3`."""
        if kind == "mask":
            limits = [f"{name}_{size}" for name, size in (("window", self.window), ("chunk", self.chunk)) if size]
            return "_".join([f"mask_{self.sharing}_per_kv", *(limits or ["full"])])
        if kind == "query_scale":
            return f"query_scale_{self.query_scale}_{self.sharing}_per_kv"
        name = f"{kind}_{self.heads}_{self.kv_heads}"
        if not self.own_kv and kind in ("query", "vectors", "cosine", "sine"):
            name += "_without_kv"
        return f"{name}_rope_{self.rope}" if kind in ("cosine", "sine") else name


def ropes_of(decoder: Decoder) -> list[Rope]:
    """The rotary positions of all layers, each once, in the order of the layers."""
    return list(dict.fromkeys(spec.rope for spec in attentions_of(decoder) if spec.rope is not None))


def query_scales_of(decoder: Decoder) -> list[QueryScale]:
    """The functions that scale queries by position, each once, in the order of the layers."""
    found = [attention.query_scale for attention in attentions_of(decoder)]
    return list(dict.fromkeys(scale for scale in found if scale is not None))


def layer_groups(decoder: Decoder) -> list[Group]:
    """The group of each layer."""
    ropes, scales = ropes_of(decoder), query_scales_of(decoder)
    groups = []
    for spec in attentions_of(decoder):
        groups.append(
            Group(
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                None if spec.rope is None else ropes.index(spec.rope),
                spec.window,
                0 if spec.rope is None else spec.rope.dim,
                spec.chunk,
                None if spec.query_scale is None else scales.index(spec.query_scale),
                spec.kv_layer is None,
                spec.sinks is not None,
            )
        )
    return groups
