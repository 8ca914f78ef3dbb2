"""A described model as the graph backend runs it: layers with kernels and buffers, in attention groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lookahead.backends.graph.groups import group_and_index, groups_of
from lookahead.backends.graph.layers.attention import AttentionLayer
from lookahead.backends.graph.layers.experts import MoELayer
from lookahead.backends.graph.layers.feed_forward import FeedForwardLayer
from lookahead.backends.graph.layers.head import EmbeddingLayer, HeadLayer
from lookahead.backends.graph.layers.norm import NORMED, Addition, LayerOutput, NormLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.experts import StackedExperts
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.matrices.products import Products
from lookahead.backends.graph.matrices.quantised import check_quantised
from lookahead.backends.graph.ops import Ops
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE
from lookahead.models.norm import Norm
from lookahead.models.spec import Block, Decoder, check_plain, matrices_in


class GraphBlock:
    """A block's layers in the order in which they run, and `added`, what the norm after the block adds to the stream.

    A sequential block has two norms, each of which adds the output of the layer before it. A parallel block has one,
    which writes the inputs of both halves, and the next norm adds both outputs.
    """

    def __init__(
        self, spec: Block, attention: AttentionLayer, added: Addition, width: int, ops: Ops, matrices: Matrices
    ) -> None:
        attended = LayerOutput("delta", attention.out.bias, spec.mixer_out_norm)
        norms: tuple[Norm | None, ...] = (spec.mixer_norm,)
        source, target = NORMED[0], "delta_2" if spec.parallel else "delta"
        if spec.parallel and spec.feed_forward_norm is not spec.mixer_norm:
            norms, source = (spec.mixer_norm, spec.feed_forward_norm), NORMED[1]
        self.attention, (_, feed_forward) = attention, spec.plain()
        self.feed_forward = (
            MoELayer(feed_forward, ops, matrices, source, target)
            if isinstance(feed_forward, MoE)
            else FeedForwardLayer(feed_forward, ops, matrices, source, target)
        )
        fed = LayerOutput(target, self.feed_forward.bias, spec.feed_forward_out_norm)
        self.layers: list[NormLayer | AttentionLayer | FeedForwardLayer | MoELayer] = [
            NormLayer(added, norms, width, ops)
        ]
        if spec.parallel:
            self.layers += [attention, self.feed_forward]
        else:
            own = Addition((attended,), spec.residual_scale)
            self.layers += [attention, NormLayer(own, (spec.feed_forward_norm,), width, ops), self.feed_forward]
        self.added = Addition((attended, fed) if spec.parallel else (fed,), spec.residual_scale, spec.output_scale)

    def plan(self, step: StepContext) -> list[Run]:
        """The work of the layers in every pass of one kind."""
        return [layer.plan(step) for layer in self.layers]


class GraphModel:
    """The layers of a described model. Creating it fuses the model's matrices, whose parameters become views.

    `groups` are its attention groups, `shapes` the distinct head shapes of its layers.
    """

    def __init__(self, decoder: Decoder, ops: Ops, products: Products, *, drop_pages: bool = True) -> None:
        check_lowered(decoder)
        self.groups = groups_of(decoder, drop_pages=drop_pages)
        self.shapes = tuple(dict.fromkeys(group.shape for group in self.groups))
        caches = group_and_index(decoder, self.groups)
        matrices = Matrices(products, ops)
        self.embedding = EmbeddingLayer(decoder, ops)
        self.blocks: list[GraphBlock] = []
        added = Addition()
        for number, block in enumerate(decoder.blocks):
            attention = AttentionLayer(block.plain()[0], *caches[number], ops, matrices)
            self.blocks.append(GraphBlock(block, attention, added, decoder.hidden, ops, matrices))
            added = self.blocks[-1].added
        self.head = HeadLayer(decoder, added, ops, matrices)

    @property
    def experts(self) -> int:
        """The experts of all layers."""
        layers = (block.feed_forward for block in self.blocks)
        return sum(layer.gate_up.experts for layer in layers if isinstance(layer, MoELayer))

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the model's dtype on its device."""
        return self.embedding.table

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """All matrices, in the order of their products in a pass."""
        matrices = []
        for block in self.blocks:
            matrices += [*block.attention.matrices, *block.feed_forward.matrices]
        return [*matrices, self.head.head]

    def buffers(self) -> dict[str, int]:
        """The activation buffers that the layers need: the largest width of each, by name."""
        widths: dict[str, int] = {}
        layers = [layer for block in self.blocks for layer in block.layers]
        for needs in (self.embedding.buffers(), *(layer.buffers() for layer in layers), self.head.buffers()):
            for name, width in needs.items():
                widths[name] = max(width, widths.get(name, 0))
        return widths

    def addresses(self) -> list[int]:
        """The addresses of all weights. Captured steps read them there, so that in-place changes are seen; if a weight
        is replaced by another tensor, steps have to be captured again."""
        return [tensor.data_ptr() for tensor in self._tensors()]

    def has_computed_weights(self, model: torch.nn.Module) -> bool:
        """Whether some numbers are not weights of `model`, but were computed from them by its reader."""
        own = storages_of(model)
        return any(self._constants()) or any(not _is_in(own, tensor) for tensor in self._tensors())

    def can_follow(self, now: GraphModel, model: torch.nn.Module) -> bool:
        """Whether steps captured with these layers compute what `now`, new layers of the same `model`, would compute.

        Tensors that the reader computed are updated in place. Constants are part of a captured step.
        """
        if self._constants() != now._constants():
            return False
        own, computed = storages_of(model), []
        tensors, others = list(self._tensors()), list(now._tensors())
        if len(tensors) != len(others):  # a matrix of another number format, or a bias that came or went
            return False
        for before, new in zip(tensors, others, strict=True):
            if before.data_ptr() == new.data_ptr():
                continue
            if _is_in(own, new) or (before.shape, before.dtype) != (new.shape, new.dtype):
                return False
            computed.append((before, new))
        for before, new in computed:
            before.copy_(new)
        return True

    def _constants(self) -> list[tuple[float, ...]]:
        return [block.feed_forward.spec.constants for block in self.blocks]

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.embedding.tensors
        for block in self.blocks:
            for layer in block.layers:
                yield from layer.tensors
        yield from self.head.tensors


def storages_of(model: torch.nn.Module) -> set[int]:
    """The addresses of the memory that holds the model's parameters and buffers."""
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}


def _is_in(storages: set[int], tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in storages


def check_lowered(decoder: Decoder) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that the kernels cannot run. Changes no weights."""
    try:
        check_plain(decoder)
        groups_of(decoder)
        for block in decoder.blocks:
            attention, feed_forward = block.plain()
            AttentionLayer.check_attention(attention)
            if isinstance(feed_forward, MoE):
                for experts in (feed_forward.gate_up, feed_forward.down):
                    StackedExperts.check(experts)
        for matrix in matrices_in(decoder):
            check_quantised(matrix)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the graph backend does not run this model: {error}") from None
