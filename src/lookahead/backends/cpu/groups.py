"""Groups of layers whose attention has the same shape, positions and window, so that they share ONNX inputs."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead.models.spec import Decoder, Rope


@dataclass(frozen=True)
class Group:
    """What the attention of a group's layers has in common. See `spec.Attention`.

    `rope` is an index into `ropes_of(decoder)`, or None for layers that do not use positions.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int | None
    window: int | None

    @property
    def sharing(self) -> int:
        """Query heads per K/V head."""
        return self.heads // self.kv_heads

    @property
    def vectors(self) -> int:
        """Vectors of width head_dim per row: its queries, keys and values."""
        return self.heads + 2 * self.kv_heads

    def input(self, kind: str) -> str:
        """The name of this group's ONNX input of a kind. It includes all that the input depends on, so that equal
        groups share it: `mask_3_per_kv_window_4096`, `cosine_9_3_rope_0`, `query_9_3`."""
        if kind == "mask":
            return f"mask_{self.sharing}_per_kv_" + ("full" if self.window is None else f"window_{self.window}")
        name = f"{kind}_{self.heads}_{self.kv_heads}"
        return f"{name}_rope_{self.rope}" if kind in ("cosine", "sine") else name


def ropes_of(decoder: Decoder) -> list[Rope]:
    """The rotary positions of all layers, each once, in the order of the layers."""
    return list(dict.fromkeys(b.attention.rope for b in decoder.blocks if b.attention.rope is not None))


def layer_groups(decoder: Decoder) -> list[Group]:
    """The group of each layer."""
    ropes = ropes_of(decoder)
    groups = []
    for block in decoder.blocks:
        attention = block.attention
        rope = None if attention.rope is None else ropes.index(attention.rope)
        groups.append(Group(attention.heads, attention.kv_heads, attention.head_dim, rope, attention.window))
    return groups
