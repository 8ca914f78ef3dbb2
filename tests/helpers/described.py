"""Descriptions that are made by hand: single matrices, and a decoder whose layers differ in all that can differ."""

from __future__ import annotations

from typing import Any

import torch

from lookahead.models.feed_forward import FeedForward
from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.spec import Attention, Block, Decoder, Rope

VOCABULARY, HIDDEN = 61, 32


def matrix(weight: Any, bias: Any = None) -> Matrix:
    """A matrix of one part, from a weight [out, in] and a bias [out], of numpy or torch."""
    weight = torch.as_tensor(weight)
    made = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    made.weight = torch.nn.Parameter(weight)
    if bias is not None:
        made.bias = torch.nn.Parameter(torch.as_tensor(bias))
    return Matrix((made,))


class Angles:
    """A rotary module: pair i of a head turns by position / theta ** (2 i / dim)."""

    def __init__(self, theta: float, dim: int) -> None:
        self.frequencies = theta ** -(torch.arange(0, dim, 2) / dim)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * self.frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def uneven_decoder(*, head_bias: bool = False, seed: int = 0) -> Decoder:
    """Layers that differ in heads, K/V heads, head width, rope, window, scale, norms of q and k, eps, biases and width
    of the feed-forward. The last layer is as the first one.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, size: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size

    def plain(out: int, width: int) -> Matrix:
        return matrix(random(out, width))

    def biased(out: int, width: int) -> Matrix:
        return matrix(random(out, width), random(out))

    def norm(width: int, eps: float) -> Norm:
        return Norm(1 + random(width), eps)

    def attention(heads: int, kv_heads: int, dim: int, linear: Any = plain, **changes: Any) -> Attention:
        qkv = Matrix(tuple(linear(n * dim, HIDDEN).parts[0] for n in (heads, kv_heads, kv_heads)))
        settings = {"scale": dim**-0.5, "out": linear(HIDDEN, heads * dim), **changes}
        return Attention(heads, kv_heads, dim, qkv=qkv, **settings)

    def feed_forward(inner: int, linear: Any = plain) -> FeedForward:
        return FeedForward(linear(2 * inner, HIDDEN), linear(HIDDEN, inner))

    near, far, wide = Rope(Angles(1e4, 8), 8), Rope(Angles(30.0, 8), 8), Rope(Angles(1e4, 16), 16)
    layers = [
        (attention(4, 2, 8, rope=near), feed_forward(64)),
        (attention(4, 4, 16, biased, rope=wide, window=7, scale=0.4), feed_forward(48, biased)),
        (attention(6, 2, 8, q_norm=norm(8, 1e-2)), feed_forward(64)),  # no rope
        (attention(4, 2, 8, rope=far, window=7, k_norm=norm(8, 0.3)), feed_forward(64)),
        (attention(4, 2, 8, biased, rope=near), feed_forward(64)),
    ]
    blocks = [Block(norm(HIDDEN, 1e-6), *layer[:1], norm(HIDDEN, 0.1), *layer[1:]) for layer in layers]
    head = (biased if head_bias else plain)(VOCABULARY, HIDDEN)
    return Decoder(random(VOCABULARY, HIDDEN, size=1.0), blocks, norm(HIDDEN, 1e-2), head)
