"""What a decoder-only language model is: its blocks, their attention and feed-forwards, norms, positions and matrices.

A reader (`models.families`) describes a Hugging Face model in these words. `models.reference` runs a description in
plain PyTorch; a backend lowers it to what it runs fast, or refuses it. Nothing here is per model that can differ per
layer. Tensors and modules are the model's own, not copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError


class Activation(Enum):
    """The function between the two matrices of a feed-forward, by the name that configs use."""

    SILU = "silu"


@dataclass(frozen=True, eq=False)
class Matrix:
    """y = x W^T + b, for x [rows, in] and y [rows, out].

    `parts` are the model's own linear modules that read the same x; their outputs are concatenated in y. So
    q, k and v are one Matrix, whether the model has one module for them or three.
    """

    parts: tuple[torch.nn.Linear, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if type(part) is not torch.nn.Linear:  # quantised, or with an adapter around it
                raise UnsupportedModelError(f"a {type(part).__name__} is no plain matrix")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return sum(part.out_features for part in self.parts), self.parts[0].in_features

    @property
    def has_bias(self) -> bool:
        """Whether some part has a bias."""
        return any(part.bias is not None for part in self.parts)

    def weight(self) -> torch.Tensor:
        """W [out, in]: of a single part its own tensor, of several a copy."""
        weights = [part.weight.detach() for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def bias(self) -> torch.Tensor | None:
        """b [out], with zeros where a part has none; None if no part has one."""
        if not self.has_bias:
            return None
        found = [
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in self.parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps), computed in fp32, rounded to x's dtype, then times weight [width]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions: of each head, column i and column i + dim / 2 are a pair that is turned by an angle.

    `module` is the model's own, which knows theta and scaling: module(x, positions) returns cosines and sines. `dim` is
    the width of a head. Positions from `limit` on are never requested: some modules scale by the furthest one. Layers
    with equal rotation share one object.
    """

    module: Any
    dim: int
    limit: int | None = None

    def tables(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines [positions, dim / 2] of the first positions, fp32.

        The module is called with one position first, so that it has the factors of a short text. Positions from the
        limit on are clamped: nodes there can never be accepted.
        """
        like = torch.zeros(1, device=device, dtype=torch.float32)
        requested = torch.arange(positions, device=device).clamp(max=(self.limit or positions) - 1)[None]
        self.module(like, requested[:, :1])
        cosine, sine = self.module(like, requested)
        half = self.dim // 2
        return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()


@dataclass(frozen=True, eq=False)
class Attention:
    """Softmax attention over the text so far: `heads` query heads of width `head_dim` share `kv_heads` K/V heads.

    `qkv` gives all queries, then all keys, then all values. `scale` multiplies the scores. `rope`: None for a layer
    that does not use positions. `window`: a token sees the last `window` tokens, itself included; None for all of them.
    `q_norm` and `k_norm` [head_dim] are applied to each head, before the rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: Matrix
    out: Matrix
    rope: Rope | None = None
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UnsupportedModelError(f"a token sees {self.window} tokens")
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and len(norm.weight) != self.head_dim:
                raise ValueError(f"a norm of {len(norm.weight)} columns for heads of {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} K/V heads evenly")
        _check_shape("qkv", self.qkv, ((self.heads + 2 * self.kv_heads) * self.head_dim, None))
        _check_shape("out", self.out, (None, self.heads * self.head_dim))


@dataclass(frozen=True, eq=False)
class FeedForward:
    """down(activation(gate) * up), where `gate_up` gives all of gate and then all of up."""

    gate_up: Matrix
    down: Matrix
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        _check_shape("gate_up", self.gate_up, (2 * self.down.shape[1], None))


@dataclass(frozen=True, eq=False)
class Block:
    """x += attention(attention_norm(x)); x += feed_forward(feed_forward_norm(x))."""

    attention_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model: embedding [vocabulary, hidden], the blocks, the final norm, and the LM head.

    The head's weight [vocabulary, hidden] may be the embedding itself.
    """

    embedding: torch.Tensor
    blocks: Sequence[Block]
    norm: Norm
    head: Matrix

    def __post_init__(self) -> None:
        _check_shape("head", self.head, (None, self.embedding.shape[1]))
        if self.head.shape[0] != len(self.embedding):
            raise UnsupportedModelError(f"it reads {len(self.embedding)} tokens and gives {self.head.shape[0]} logits")

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.embedding.shape[1]

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]

    @property
    def windows(self) -> list[int | None]:
        """The layers' windows, each once, None first."""
        found = {block.attention.window for block in self.blocks}
        return sorted(found, key=lambda window: -1 if window is None else window)


def _check_shape(name: str, matrix: Matrix, expected: tuple[int | None, int | None]) -> None:
    """Raise ValueError for a matrix of another shape: a reader has mixed something up."""
    if any(size is not None and size != found for size, found in zip(expected, matrix.shape, strict=True)):
        raise ValueError(f"{name} is a matrix {matrix.shape}, where (out, in) must be {expected}")
