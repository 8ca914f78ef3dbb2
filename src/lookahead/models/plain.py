"""Which fields of a description no backend lowers yet."""

from __future__ import annotations

from dataclasses import fields

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Attention, Block, Decoder, FeedForward, Matrix, Norm


def check_plain(decoder: Decoder) -> None:
    """Raise UnsupportedModelError for a description with a field that no backend lowers yet."""
    for block in decoder.blocks:
        check_plain_attention(block.attention)
    check_plain_blocks(decoder)


def check_plain_attention(attention: Attention) -> None:
    """The same for what happens between an attention layer's matrices."""
    _check_defaults("attention", attention, {"rope", "window", "q_norm", "k_norm"})
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            _check_norm(norm)
    if attention.rope is not None and attention.rope.interleaved:
        raise UnsupportedModelError("its rotary pairs are interleaved")


def check_plain_blocks(decoder: Decoder) -> None:
    """The same for all the rest."""
    for block in decoder.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        _check_defaults("feed-forward", feed_forward, {"activation"})
        _check_defaults("block", block, set())
        for matrix in (attention.qkv, attention.out, feed_forward.gate_up, feed_forward.down):
            _check_defaults("matrix", matrix, set())
        for norm in (block.attention_norm, block.feed_forward_norm):
            if norm is not None:
                _check_norm(norm)
        if block.attention_norm is None or block.feed_forward_norm is None:
            raise UnsupportedModelError("it has no norm before attention or feed-forward")
    _check_norm(decoder.norm)
    _check_defaults("decoder", decoder, set())


def _check_norm(norm: Norm) -> None:
    _check_defaults("norm", norm, set())
    if norm.weight is None or norm.weight.dim() != 1:
        raise UnsupportedModelError("a norm has no weight, or one per head")


def _check_defaults(
    name: str, part: Attention | FeedForward | Block | Decoder | Matrix | Norm, known: set[str]
) -> None:
    for field in fields(part):
        has_default = type(field.default) in (type(None), bool, int, float, tuple)
        if has_default and field.name not in known and getattr(part, field.name) != field.default:
            raise UnsupportedModelError(f"{field.name} of its {name} is not supported yet")
