"""What a decoder-only language model is: its blocks, their attention and feed-forwards, norms, positions and matrices.

A reader (`models.families`) describes a Hugging Face model in these words. `models.reference` runs a description in
plain PyTorch; a backend lowers it to what it runs fast, or refuses it. Nothing here is per model that can differ per
layer. Tensors and modules are the model's own, not copies, unless a reader has to compute something from weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import FeedForward, MoE
from lookahead.models.matrix import ExpertMatrix, Matrix, check_shape
from lookahead.models.norm import Norm
from lookahead.models.recurrent import GatedDelta, Mamba2, Recurrent


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions: the first `dim` columns of each head are turned, in pairs.

    A pair is columns i and i + dim / 2, or if `interleaved` columns 2 i and 2 i + 1. `module` is the model's own, which
    knows theta and scaling: module(x, positions) returns cosines and sines, whose first dim / 2 columns are those of
    the pairs. Positions from `limit` on are never requested: some modules scale by the furthest one. Layers with equal
    rotation share one object.
    """

    module: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dim: int
    limit: int | None = None
    interleaved: bool = False

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

    The projections. `qkv` gives all queries, then all keys, then all values. If the model's own matrix has another
    order of heads, `head_order` has for each of these heads its index in the matrix; a value may be the same head as
    its key. `kv_layer`: this layer has queries only, and reads the keys and values of an earlier layer, by its index.
    `clip`: queries, keys and values are clamped to -clip and clip.

    Norms and positions. `q_norm`, `k_norm`, `v_norm` are applied to each head, or with `whole_norms` those of q and k
    to all heads as one vector [heads x head_dim]; before the rotation, or `norms_after_rope`. `rope`: None for a layer
    that does not use positions. `query_scale`: positions [n] -> factors [n] in fp32 that multiply the queries.

    Scores. They are multiplied by `scale`; `softcap` limits them to cap tanh(score / cap). `window`: a token sees the
    last `window` tokens, itself included; None for all of them. `chunk`: it sees those whose position // chunk is its
    own. `sinks` [heads]: a logit per head that takes part in the softmax without a value.

    Results. With `output_gate` those of all heads are multiplied by the sigmoid of its product, before `out`. With
    `gate_heads` the gate comes from the matrix of queries, keys and values: for each query head the index of its gate.
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
    v_norm: Norm | None = None
    whole_norms: bool = False
    norms_after_rope: bool = False
    head_order: tuple[int, ...] | None = None
    kv_layer: int | None = None
    clip: float | None = None
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    output_gate: Matrix | None = None
    gate_heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UnsupportedModelError(f"a token sees {self.window} tokens")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} K/V heads evenly")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"{self.rope.dim} columns are rotated of heads that have {self.head_dim}")
        for norm, heads in ((self.q_norm, self.heads), (self.k_norm, self.kv_heads), (self.v_norm, self.kv_heads)):
            if norm is None or norm.weight is None:
                continue
            whole = self.whole_norms and norm is not self.v_norm
            allowed = [(heads * self.head_dim,)] if whole else [(self.head_dim,), (heads, self.head_dim)]
            if tuple(norm.weight.shape) not in allowed:
                raise ValueError(f"a norm of {list(norm.weight.shape)} for {heads} heads of {self.head_dim}")
        if self.head_order is not None and len(self.head_order) != self.vectors:
            raise ValueError(f"an order of {len(self.head_order)} heads for {self.vectors}")
        if self.gate_heads is not None and (len(self.gate_heads) != self.heads or self.output_gate is not None):
            raise ValueError(f"{len(self.gate_heads)} gates of {self.heads} heads")
        given = max((*(self.head_order or range(self.vectors)), *(self.gate_heads or ()))) + 1
        check_shape("qkv", self.qkv, (given * self.head_dim, None))
        check_shape("out", self.out, (None, self.heads * self.head_dim))
        if self.output_gate is not None:
            check_shape("output_gate", self.output_gate, (self.heads * self.head_dim, None))

    @property
    def vectors(self) -> int:
        """Heads of a token: its query heads, and its own key and value heads."""
        return self.heads + (2 * self.kv_heads if self.kv_layer is None else 0)


@dataclass(frozen=True, eq=False)
class Branch:
    """One of several mixers of the same x: mixer(x * input_scale) * output_scale."""

    mixer: Attention | Recurrent
    input_scale: float = 1.0
    output_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class SideBySide:
    """The sum of an attention and a mixer with a recurrent state, which read the same x (Falcon-H1)."""

    attention: Branch
    recurrent: Branch

    def __post_init__(self) -> None:
        if not isinstance(self.attention.mixer, Attention) or isinstance(self.recurrent.mixer, Attention):
            raise ValueError("an attention and a mixer with a recurrent state, in this order")


Mixer = Attention | Recurrent | SideBySide


@dataclass(frozen=True, eq=False)
class Block:
    """x += mixer(mixer_norm(x)); x += feed_forward(feed_forward_norm(x)).

    A norm that is None is left out, and so is a half: a block may have a mixer or a feed-forward alone.
    `mixer_out_norm` and `feed_forward_out_norm` are applied to what is added, which is then multiplied by
    `residual_scale`. `parallel`: both halves read the block's input, x += mixer(mixer_norm(x)) +
    feed_forward(feed_forward_norm(x)), and the norms may be one object. `output_scale` [1] multiplies x at the end.
    """

    mixer_norm: Norm | None
    mixer: Mixer | None
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | MoE | None
    mixer_out_norm: Norm | None = None
    feed_forward_out_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: torch.Tensor | None = None

    @property
    def attention(self) -> Attention | None:
        """The mixer if it is attention, or the attention in it."""
        found = self.mixer.attention.mixer if isinstance(self.mixer, SideBySide) else self.mixer
        return found if isinstance(found, Attention) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer if it has a recurrent state, or the one in it that has."""
        found = self.mixer.recurrent.mixer if isinstance(self.mixer, SideBySide) else self.mixer
        return None if isinstance(found, Attention) else found

    def with_attention(self, **changes: Any) -> Block:
        """This block, with other fields of its attention."""
        assert self.attention is not None
        changed = replace(self.attention, **changes)
        if isinstance(self.mixer, SideBySide):
            return replace(self, mixer=replace(self.mixer, attention=replace(self.mixer.attention, mixer=changed)))
        return replace(self, mixer=changed)

    def plain(self) -> tuple[Attention, FeedForward | MoE]:
        """The halves of a block of attention and a feed-forward. Raises UnsupportedModelError for another one."""
        if self.recurrent is not None:
            raise UnsupportedModelError("it keeps a recurrent state")
        if not isinstance(self.mixer, Attention) or self.feed_forward is None:
            raise UnsupportedModelError("a layer of it has no attention, or no feed-forward")
        return self.mixer, self.feed_forward


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model: embedding [vocabulary, hidden], the blocks, the final norm, and the LM head.

    A token's vector is its embedding times `embedding_scale` plus, with learned positions, its row of
    `position_embedding` [positions, hidden]. `aliases` are pairs of a token and another one whose embedding it has: a
    class may read placeholders of images as padding. The head's weight [vocabulary, hidden] may be the embedding
    itself. Logits are multiplied by `logit_scale`; then `logit_softcap` limits them to cap tanh(logit / cap).

    `residual_fp32`: the residual stream is in fp32. The blocks read it in the weights' dtype, the last norm in fp32.

    Attention is causal. Not `causal_prompt`: the tokens of a prompt may see each other, so only the model's own forward
    pass runs prompts; what follows them is causal.
    """

    embedding: torch.Tensor
    blocks: Sequence[Block]
    norm: Norm
    head: Matrix
    embedding_scale: float = 1.0
    position_embedding: torch.Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    aliases: tuple[tuple[int, int], ...] = ()
    causal_prompt: bool = True
    residual_fp32: bool = False

    def __post_init__(self) -> None:
        check_shape("head", self.head, (None, self.embedding.shape[1]))
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
        found = {block.attention.window for block in self.blocks if block.attention is not None}
        return sorted(found, key=lambda window: -1 if window is None else window)


def attentions_of(decoder: Decoder) -> list[Attention]:
    """The attention of each layer. Raises UnsupportedModelError for a model with other layers."""
    return [block.plain()[0] for block in decoder.blocks]


def check_plain(decoder: Decoder) -> None:
    """Raise UnsupportedModelError for what only hybrids have. A backend calls it that does not run them."""
    for block in decoder.blocks:
        attention, feed_forward = block.plain()
        if attention.gate_heads is not None:
            raise UnsupportedModelError("the gates of its attention are in the matrix of the queries")
        dense = feed_forward.shared if isinstance(feed_forward, MoE) else feed_forward
        if isinstance(feed_forward, MoE) and feed_forward.router.sum_eps:
            raise UnsupportedModelError("its routers add a number to a sum")
        if isinstance(feed_forward, MoE) and (not feed_forward.gated or feed_forward.latent_in is not None):
            raise UnsupportedModelError("its experts have no gate, or read a projection of their input")
        if dense is not None and (dense.gate_scale, dense.out_scale) != (1.0, 1.0):
            raise UnsupportedModelError("its feed-forwards have factors")
    if decoder.residual_fp32:
        raise UnsupportedModelError("its residual stream is in fp32")


def expert_matrices_in(decoder: Decoder) -> Iterator[ExpertMatrix]:
    """All matrices of a description that each expert has one of."""
    for block in decoder.blocks:
        if isinstance(block.feed_forward, MoE):
            yield from (block.feed_forward.gate_up, block.feed_forward.down)


def fp32_tensors_in(decoder: Decoder) -> Iterator[torch.Tensor]:
    """The weights of all routers, and what decays and skips are computed from: they are used in fp32, so they may be in
    fp32 where the other weights are not."""
    for block in decoder.blocks:
        if isinstance(block.recurrent, GatedDelta | Mamba2):
            yield from (block.recurrent.a_log, block.recurrent.dt_bias)
        if isinstance(block.recurrent, Mamba2):
            yield block.recurrent.skip
        if isinstance(block.feed_forward, MoE):
            router = block.feed_forward.router
            own = router.logits.weight(), router.logits.bias(), router.choice_bias, router.expert_scale
            yield from (tensor for tensor in own if tensor is not None)


def experts_of(decoder: Decoder) -> int:
    """The experts of all layers."""
    layers = (block.feed_forward for block in decoder.blocks)
    return sum(layer.gate_up.experts for layer in layers if isinstance(layer, MoE))


def matrices_in(part: Any) -> Iterator[Matrix]:
    """All matrices of a description, or of a part of one, but those of experts: see `expert_matrices_in`."""
    if isinstance(part, Matrix):
        yield part
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for item in part:
            yield from matrices_in(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from matrices_in(getattr(part, field.name))
