"""A described model as the graph backend runs it: layers with kernels and buffers, in attention groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lookahead.backends.graph.groups import group_and_index, groups_of
from lookahead.backends.graph.layers.attention import AttentionLayer
from lookahead.backends.graph.layers.feed_forward import FeedForwardLayer
from lookahead.backends.graph.layers.head import EmbeddingLayer, HeadLayer
from lookahead.backends.graph.layers.norm import NormLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.dense import DenseMatrices, DenseMatrix, check_dense
from lookahead.backends.graph.matrices.products import Products
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.plain import check_plain_blocks
from lookahead.models.spec import Decoder


class PlannedBlock(NamedTuple):
    """The work of a block in every pass of one kind."""

    attention_norm: Run
    attention: Run
    feed_forward_norm: Run
    feed_forward: Run


@dataclass(frozen=True)
class GraphBlock:
    """A block's layers."""

    attention_norm: NormLayer
    attention: AttentionLayer
    feed_forward_norm: NormLayer
    feed_forward: FeedForwardLayer

    def plan(self, step: StepContext, *, first: bool) -> PlannedBlock:
        return PlannedBlock(
            self.attention_norm.plan(step, first=first),
            self.attention.plan(step),
            self.feed_forward_norm.plan(step),
            self.feed_forward.plan(step),
        )


class GraphModel:
    """The layers of a described model. Creating it fuses the model's matrices, whose parameters become views.

    `groups` are its attention groups, `shapes` the distinct head shapes of its layers.
    """

    def __init__(self, decoder: Decoder, ops: Ops, products: Products, *, drop_pages: bool = True) -> None:
        check_lowered(decoder)
        self.groups = groups_of(decoder, drop_pages=drop_pages)
        self.shapes = tuple(dict.fromkeys(group.shape for group in self.groups))
        caches = group_and_index(decoder, self.groups)
        matrices = DenseMatrices(products)
        self.embedding = EmbeddingLayer(decoder.embedding, ops)
        self.blocks = [
            GraphBlock(
                NormLayer(block.attention_norm, ops),
                AttentionLayer(block.attention, *caches[number], ops, matrices),
                NormLayer(block.feed_forward_norm, ops),
                FeedForwardLayer(block.feed_forward, ops, matrices),
            )
            for number, block in enumerate(decoder.blocks)
        ]
        self.head = HeadLayer(decoder, ops, matrices)

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the model's dtype on its device."""
        return self.embedding.table

    @property
    def matrices(self) -> list[DenseMatrix]:
        """All matrices, in the order of their products in a pass."""
        matrices = []
        for block in self.blocks:
            matrices += [block.attention.qkv, block.attention.out, block.feed_forward.gate_up, block.feed_forward.down]
        return [*matrices, self.head.head]

    def buffers(self) -> dict[str, int]:
        """The activation buffers that the layers need: the largest width of each, by name."""
        widths: dict[str, int] = {}
        for layer in (
            self.embedding,
            self.head,
            *(part for b in self.blocks for part in (b.attention, b.feed_forward)),
        ):
            for name, width in layer.buffers().items():
                widths[name] = max(width, widths.get(name, 0))
        return widths

    def addresses(self) -> list[int]:
        """The addresses of all weights. Captured steps read them there, so that in-place changes are seen; if a weight
        is replaced by another tensor, steps have to be captured again."""
        return [tensor.data_ptr() for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.embedding.tensors
        for block in self.blocks:
            for layer in (block.attention_norm, block.attention, block.feed_forward_norm, block.feed_forward):
                yield from layer.tensors
        yield from self.head.tensors


def check_lowered(decoder: Decoder) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that the kernels cannot run. Changes no weights."""
    try:
        check_plain_blocks(decoder)
        groups_of(decoder)
        HeadLayer.check_head(decoder)
        for block in decoder.blocks:
            AttentionLayer.check_attention(block.attention)
            FeedForwardLayer.check_feed_forward(block.feed_forward)
            check_dense(block.attention.qkv)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the graph backend does not run this model: {error}") from None
