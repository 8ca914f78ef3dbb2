"""Small descriptions that differ from a plain one in one knob each. Backends are compared with `reference` on them.

`KNOBS` has a function of a `Maker` for each. All have two layers or more, and knobs of a layer are on some of them
only, so that a backend that applies a knob to every layer is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from described import HIDDEN, VOCABULARY, Angles

from lookahead.models.feed_forward import Activation, FeedForward, MoE
from lookahead.models.matrix import Matrix
from lookahead.models.norm import Norm
from lookahead.models.spec import Attention, Block, Decoder, Rope

HEADS, KV_HEADS, DIM, INNER = 4, 2, 8, 48


class Conv1D(torch.nn.Module):
    """As GPT-2's: the weight is [in, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)


class Maker:
    """Makes random parts on a device; equal parts for equal calls."""

    def __init__(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, size: float = 0.3) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * size).to(self.device, self.dtype)

    def linear(self, out: int, width: int, bias: bool = False) -> torch.nn.Linear:
        made = torch.nn.Linear(width, out, bias=bias, device="meta")
        made.weight = torch.nn.Parameter(self.random(out, width))
        if bias:
            made.bias = torch.nn.Parameter(self.random(out))
        return made

    def matrix(self, *outs: int, width: int = HIDDEN, bias: bool = False) -> Matrix:
        return Matrix(tuple(self.linear(out, width, bias) for out in outs))

    def conv(self, *outs: int, width: int = HIDDEN) -> Matrix:
        return Matrix(tuple(Conv1D(self.random(width, out), self.random(out)) for out in outs), transposed=True)

    def norm(self, width: int = HIDDEN, eps: float = 1e-5, **changes: Any) -> Norm:
        return Norm(1 + self.random(width) - changes.get("offset", 0.0), eps, **changes)

    def layer_norm(self, width: int = HIDDEN) -> Norm:
        return Norm(1 + self.random(width), 1e-5, self.random(width), centered=True, rounds_first=False)

    def rope(self, dim: int = DIM, theta: float = 1e4, **changes: Any) -> Rope:
        return Rope(Angles(theta, dim), dim, **changes)

    def attention(
        self, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM, bias: bool = False, **changes: Any
    ) -> Attention:
        fields = {
            "scale": dim**-0.5,
            "qkv": self.matrix(heads * dim, kv_heads * dim, kv_heads * dim, bias=bias),
            "out": self.matrix(HIDDEN, width=heads * dim, bias=bias),
            "rope": self.rope(dim),
        }
        return Attention(heads, kv_heads, dim, **{**fields, **changes})

    def feed_forward(self, bias: bool = False, gated: bool = True, **changes: Any) -> FeedForward:
        up = self.matrix(INNER, INNER, bias=bias) if gated else self.matrix(INNER, bias=bias)
        return FeedForward(up, self.matrix(HIDDEN, width=INNER, bias=bias), gated=gated, **changes)

    def block(
        self, attention: Attention | None = None, feed_forward: FeedForward | MoE | None = None, **changes: Any
    ) -> Block:
        fields = {
            "mixer_norm": self.norm(),
            "mixer": attention or self.attention(),
            "feed_forward_norm": self.norm(),
            "feed_forward": feed_forward or self.feed_forward(),
        }
        return Block(**{**fields, **changes})

    def decoder(self, *blocks: Block, head_bias: bool = False, **changes: Any) -> Decoder:
        head = self.matrix(VOCABULARY, bias=head_bias)
        return Decoder(**{
            "embedding": self.random(VOCABULARY, HIDDEN, size=1.0), "blocks": blocks, "norm": self.norm(), "head": head,
            **changes,
        })  # fmt: skip


def _attention(**changes: Any) -> Callable[[Maker], Decoder]:
    """Plain layers around one whose attention has these fields; a function is called with the maker."""

    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        return make.decoder(make.block(), make.block(make.attention(**found)), make.block())

    return made


def _feed_forward(**changes: Any) -> Callable[[Maker], Decoder]:
    return lambda make: make.decoder(make.block(), make.block(feed_forward=make.feed_forward(**changes)))


def _block(**changes: Any) -> Callable[[Maker], Decoder]:
    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        return make.decoder(make.block(), make.block(**found), make.block())

    return made


def _decoder(**changes: Any) -> Callable[[Maker], Decoder]:
    def made(make: Maker) -> Decoder:
        found = {name: value(make) if callable(value) else value for name, value in changes.items()}
        return make.decoder(make.block(), make.block(), **found)

    return made


def _norms(make: Maker, kind: Callable[..., Norm]) -> Decoder:
    """Norms of this kind before both halves of a block, and at the end."""
    block = make.block(mixer_norm=kind(), feed_forward_norm=kind())
    return make.decoder(make.block(), block, make.block(), norm=kind())


def _sharing(make: Maker) -> Decoder:
    """The last two layers read the keys and values of the second and the first one."""
    first, second = make.block(make.attention(window=9)), make.block()
    shared = [
        make.block(make.attention(qkv=make.matrix(HEADS * DIM), kv_layer=layer, window=window))
        for layer, window in ((1, None), (0, 9))
    ]
    return make.decoder(first, second, *shared)


def _one_norm(make: Maker) -> Decoder:
    """A parallel block whose halves share a norm."""
    norm = make.layer_norm()
    return make.decoder(make.block(), make.block(mixer_norm=norm, feed_forward_norm=norm, parallel=True))


def _scale_by_position(positions: torch.Tensor) -> torch.Tensor:
    return 1 + 0.3 * torch.log1p(positions.float() // 8)


KNOBS: dict[str, Callable[[Maker], Decoder]] = {
    # norms
    "norm weight + 1": lambda make: _norms(make, lambda: make.norm(offset=1.0, rounds_first=False)),
    "norm in fp32": lambda make: _norms(make, lambda: make.norm(rounds_first=False)),
    "norm without weight": lambda make: _norms(make, lambda: Norm(None, 1e-5)),
    "layer norm": lambda make: _norms(make, make.layer_norm),
    "layer norm without bias": lambda make: _norms(make, lambda: make.norm(centered=True, rounds_first=False)),
    "layer norm without weight": lambda make: _norms(make, lambda: Norm(None, 1e-5, centered=True, rounds_first=False)),
    # blocks
    "norms before and after": _block(
        mixer_out_norm=lambda make: make.norm(), feed_forward_out_norm=lambda make: make.norm(offset=1.0)
    ),
    "norms after": _block(
        mixer_norm=None,
        feed_forward_norm=None,
        mixer_out_norm=lambda make: make.norm(),
        feed_forward_out_norm=lambda make: make.norm(),
    ),
    "parallel, one norm": _one_norm,
    "parallel, two norms": _block(parallel=True),
    "parallel, then not": lambda make: make.decoder(make.block(parallel=True), make.block(), make.block(parallel=True)),
    "residual scale": _block(residual_scale=0.22),
    "output scale": _block(output_scale=lambda make: make.random(1, size=1.0)),
    "output scale of a parallel block": _block(parallel=True, output_scale=lambda make: make.random(1, size=1.0)),
    "norms after, scaled": _block(
        mixer_out_norm=lambda make: make.norm(),
        feed_forward_out_norm=lambda make: make.norm(),
        residual_scale=0.4,
        output_scale=lambda make: make.random(1, size=1.0),
    ),
    # biases
    "biases of attention": _attention(bias=True),
    "bias of q alone": _attention(
        qkv=lambda make: Matrix(
            (make.linear(HEADS * DIM, HIDDEN, bias=True), *make.matrix(KV_HEADS * DIM, KV_HEADS * DIM).parts)
        )
    ),
    "bias of out alone": _attention(out=lambda make: make.matrix(HIDDEN, width=HEADS * DIM, bias=True)),
    "biases of the feed-forward": _feed_forward(bias=True),
    "biases without a gate": _feed_forward(bias=True, gated=False, activation=Activation.GELU),
    "bias of the head": lambda make: make.decoder(make.block(), make.block(), head_bias=True),
    "biases of parallel halves": lambda make: make.decoder(
        make.block(), make.block(make.attention(bias=True), make.feed_forward(bias=True), parallel=True)
    ),
    # feed-forwards
    **{
        f"{activation.value}{'' if gated else ' without a gate'}": _feed_forward(
            gated=gated,
            activation=activation,
            constants=(0.8, 0.6, 0.5, -1e-6) if activation is Activation.XIELU else (),
        )
        for activation in Activation
        if activation is not Activation.CLAMPED  # of experts: see `mixture_knobs`
        for gated in (True, False)
    },
    # positions
    "part of a head is rotated": _attention(rope=lambda make: make.rope(4)),
    "interleaved pairs": _attention(rope=lambda make: make.rope(interleaved=True)),
    "interleaved pairs of a part": _attention(rope=lambda make: make.rope(4, interleaved=True)),
    "no rope on one layer": _attention(rope=None),
    "another theta": _attention(rope=lambda make: make.rope(theta=30.0)),
    "queries scaled by position": _attention(query_scale=lambda make: _scale_by_position),
    "learned positions": lambda make: make.decoder(
        make.block(make.attention(rope=None)),
        make.block(make.attention(rope=None)),
        position_embedding=make.random(1024, HIDDEN, size=0.5),
    ),
    # norms of queries, keys and values
    "q and k norm": _attention(q_norm=lambda make: make.norm(DIM), k_norm=lambda make: make.norm(DIM)),
    "q norm alone": _attention(q_norm=lambda make: make.norm(DIM, 0.1)),
    "k norm alone": _attention(k_norm=lambda make: make.norm(DIM, 0.1)),
    "q and k norm with weight + 1": _attention(
        q_norm=lambda make: make.norm(DIM, offset=1.0, rounds_first=False),
        k_norm=lambda make: make.norm(DIM, offset=1.0, rounds_first=False),
    ),
    "q and k norm of different eps": _attention(
        q_norm=lambda make: make.norm(DIM, 0.1), k_norm=lambda make: make.norm(DIM, 0.3)
    ),
    "q, k and v norm": _attention(
        q_norm=lambda make: make.norm(DIM, rounds_first=False),
        k_norm=lambda make: make.norm(DIM, rounds_first=False),
        v_norm=lambda make: Norm(None, 1e-6, rounds_first=False),
    ),
    "norms over all heads": _attention(
        q_norm=lambda make: make.norm(HEADS * DIM, rounds_first=False),
        k_norm=lambda make: make.norm(KV_HEADS * DIM, rounds_first=False),
        whole_norms=True,
    ),
    "layer norms of q and k": _attention(
        q_norm=lambda make: make.layer_norm(DIM), k_norm=lambda make: make.layer_norm(DIM)
    ),
    "a layer norm per head": _attention(
        q_norm=lambda make: Norm(1 + make.random(HEADS, DIM), 1e-5, centered=True, rounds_first=False),
        k_norm=lambda make: Norm(1 + make.random(KV_HEADS, DIM), 1e-5, centered=True, rounds_first=False),
    ),
    "norms after the rotation": _attention(
        q_norm=lambda make: make.norm(DIM), k_norm=lambda make: make.norm(DIM), norms_after_rope=True
    ),
    "norms without weight after the rotation": _attention(
        q_norm=lambda make: Norm(None, 1e-5), k_norm=lambda make: Norm(None, 1e-5), norms_after_rope=True
    ),
    # heads
    "clipped": _attention(clip=0.4),
    "clipped, with biases": _attention(clip=0.4, bias=True),
    "heads in groups": _attention(head_order=(0, 1, 4, 5, 2, 6, 3, 7), bias=True),
    "heads in triples": _attention(kv_heads=HEADS, head_order=(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11)),
    "values are keys": _attention(
        qkv=lambda make: make.matrix(HEADS * DIM, KV_HEADS * DIM),
        head_order=(0, 1, 2, 3, 4, 5, 4, 5),
        k_norm=lambda make: make.norm(DIM),
        v_norm=lambda make: Norm(None, 1e-6),
    ),
    "keys and values of earlier layers": _sharing,
    "one K/V head": _attention(kv_heads=1),
    "narrow heads": _attention(dim=6, heads=6),
    "wide heads": _attention(dim=40, heads=2, kv_heads=1),
    "transposed weights": lambda make: make.decoder(
        make.block(),
        make.block(
            make.attention(qkv=make.conv((HEADS + 2 * KV_HEADS) * DIM), out=make.conv(HIDDEN, width=HEADS * DIM)),
            FeedForward(make.conv(INNER), make.conv(HIDDEN, width=INNER), Activation.GELU_TANH, gated=False),
        ),
    ),
    # scores
    "window": _attention(window=9),
    "chunks": _attention(chunk=16),
    "softcap": _attention(softcap=1.5, scale=0.6),
    "sinks": _attention(sinks=lambda make: make.random(HEADS, size=2.0)),
    "sinks, softcap and a window": _attention(
        sinks=lambda make: make.random(HEADS, size=2.0), softcap=1.5, scale=0.6, window=9
    ),
    "scale": _attention(scale=0.9),
    # ends
    "embedding scale": _decoder(embedding_scale=5.5),
    "logit scale": _decoder(logit_scale=0.3),
    "logit softcap": _decoder(logit_softcap=2.0),
    "logit scale and softcap": _decoder(logit_scale=0.5, logit_softcap=2.0),
    "tokens read as others": _decoder(aliases=((3, 50), (7, 2), (11, 2))),
    "tied head": lambda make: _tied(make.decoder(make.block(), make.block())),
}


def _tied(decoder: Decoder) -> Decoder:
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device="meta")
    head.weight = torch.nn.Parameter(decoder.embedding, requires_grad=False)
    return replace(decoder, head=Matrix((head,)))
