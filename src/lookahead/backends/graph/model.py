"""A described model as the graph backend runs it: layers with kernels and buffers, in attention groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lookahead.backends.graph.groups import group_and_index, groups_of
from lookahead.backends.graph.layers.attention import AttentionLayer
from lookahead.backends.graph.layers.experts import MoELayer
from lookahead.backends.graph.layers.feed_forward import FeedForwardLayer
from lookahead.backends.graph.layers.head import EmbeddingLayer, HeadLayer
from lookahead.backends.graph.layers.norm import NORMED, Addition, LayerOutput, NormLayer, ScaleLayer
from lookahead.backends.graph.layers.recurrent import RecurrentLayer
from lookahead.backends.graph.layers.step import Run, StepContext
from lookahead.backends.graph.matrices.lowering import LoweredMatrix, Matrices
from lookahead.backends.graph.matrices.products import Products
from lookahead.backends.graph.matrices.quantised import check_quantised
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.states import state_and_index, state_groups_of
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.feed_forward import MoE
from lookahead.models.norm import Norm
from lookahead.models.recurrent import Recurrent
from lookahead.models.spec import Attention, Block, Decoder, Mixer, SideBySide, matrices_in

Layer = NormLayer | ScaleLayer | AttentionLayer | RecurrentLayer | FeedForwardLayer | MoELayer


class GraphBlock:
    """A block's layers in the order in which they run, and `added`, what the norm after the block adds to the stream.

    A sequential block has a norm before each of its halves, which adds the output of the layer before it. A parallel
    block has one, which writes the inputs of both halves, and the next norm adds both outputs. A block may have one
    half alone.
    """

    def __init__(
        self, spec: Block, mixer: Sequence[Layer], added: Addition, width: int, ops: Ops, matrices: Matrices
    ) -> None:
        self.attention = next((layer for layer in mixer if isinstance(layer, AttentionLayer)), None)
        self.recurrent = next((layer for layer in mixer if isinstance(layer, RecurrentLayer)), None)
        mixed = tuple(
            LayerOutput(layer.target, layer.output_bias, spec.mixer_out_norm)
            for layer in mixer
            if isinstance(layer, AttentionLayer | RecurrentLayer)
        )
        source, target = NORMED[0], "delta_2" if spec.parallel else "delta"
        norms: tuple[Norm | None, ...] = (spec.mixer_norm,)
        if spec.parallel and spec.feed_forward_norm is not spec.mixer_norm:
            norms, source = (spec.mixer_norm, spec.feed_forward_norm), NORMED[1]
        self.feed_forward: FeedForwardLayer | MoELayer | None = None
        if isinstance(spec.feed_forward, MoE):
            self.feed_forward = MoELayer(spec.feed_forward, ops, matrices, source, target)
        elif spec.feed_forward is not None:
            self.feed_forward = FeedForwardLayer(spec.feed_forward, ops, matrices, source, target)
        fed = [] if self.feed_forward is None else [self.feed_forward]
        outputs = [LayerOutput(target, layer.bias, spec.feed_forward_out_norm) for layer in fed]
        if spec.parallel or not fed:
            self.layers: list[Layer] = [NormLayer(added, norms, width, ops), *mixer, *fed]
            outputs = [*mixed, *outputs]
        elif not mixer:
            self.layers = [NormLayer(added, (spec.feed_forward_norm,), width, ops), *fed]
        else:
            between = NormLayer(Addition(mixed, spec.residual_scale), (spec.feed_forward_norm,), width, ops)
            self.layers = [NormLayer(added, norms, width, ops), *mixer, between, *fed]
        self.added = Addition(tuple(outputs), spec.residual_scale, spec.output_scale)

    @property
    def matrices(self) -> list[LoweredMatrix]:
        """In the order of their products."""
        return [matrix for layer in self.layers if not isinstance(layer, NormLayer) for matrix in layer.matrices]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Blocks of the same kind launch the same kernels, as far as the next block's norm does not matter."""
        own = self.attention
        attends = own and (
            own.group, own.spec.window, own.spec.chunk, own.spec.rope is None, own.spec.kv_layer is None
        )  # fmt: skip
        recurs = self.recurrent and self.recurrent.group
        return attends, recurs, f"{[(type(layer).__name__, layer.buffers()) for layer in self.layers]}"

    def plan(self, step: StepContext) -> list[Run]:
        """The work of the layers in every pass of one kind."""
        return [layer.plan(step) for layer in self.layers]


class GraphModel:
    """The layers of a described model. Creating it fuses the model's matrices, whose parameters become views.

    `groups` are its attention groups, `shapes` the distinct head shapes of its layers, and `state_groups` those of its
    recurrent layers.
    """

    def __init__(self, decoder: Decoder, ops: Ops, products: Products, *, drop_pages: bool = True) -> None:
        check_lowered(decoder)
        self.groups = groups_of(decoder, drop_pages=drop_pages)
        self.shapes = tuple(dict.fromkeys(group.shape for group in self.groups))
        self.state_groups = state_groups_of(decoder)
        caches, states = group_and_index(decoder, self.groups), state_and_index(self.state_groups)
        matrices = Matrices(products, ops)
        self.embedding, self.residual_fp32 = EmbeddingLayer(decoder, ops), decoder.residual_fp32
        self.blocks: list[GraphBlock] = []
        added = Addition()
        for number, block in enumerate(decoder.blocks):
            mixer = mixer_layers(block.mixer, caches.get(number), states.get(number), decoder.hidden, ops, matrices)
            self.blocks.append(GraphBlock(block, mixer, added, decoder.hidden, ops, matrices))
            added = self.blocks[-1].added
        self.head = HeadLayer(decoder, added, ops, matrices)

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """The layers with recurrent states."""
        return [block.recurrent for block in self.blocks if block.recurrent is not None]

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
        return [*(matrix for block in self.blocks for matrix in block.matrices), self.head.head]

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
        layers = (block.feed_forward for block in self.blocks)
        return [layer.spec.constants for layer in layers if layer is not None]

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


def mixer_layers(
    spec: Mixer | None,
    cache: tuple[int, int] | None,
    state: tuple[int, int] | None,
    width: int,
    ops: Ops,
    matrices: Matrices,
) -> list[Layer]:
    """The layers of a block's mixer: attention with the K/V of group and index `cache`, a recurrent mixer with the
    states of group and index `state`, or one after the other, whose outputs are both added to the stream."""
    if spec is None:
        return []
    if isinstance(spec, SideBySide):
        layers: list[Layer] = []
        for branch, own, target in ((spec.attention, cache, "delta"), (spec.recurrent, state, "delta_2")):
            scaled, after = branch.input_scale != 1.0, branch.output_scale != 1.0
            source = "scaled" if scaled else NORMED[0]
            layer = _mixer_layer(branch.mixer, own, ops, matrices, source, target, scales_output=after)
            layers += [ScaleLayer(NORMED[0], None, source, branch.input_scale, width, ops)] if scaled else []
            layers.append(layer)
            layers += [ScaleLayer(target, layer.out.bias, target, branch.output_scale, width, ops)] if after else []
        return layers
    return [_mixer_layer(spec, cache if isinstance(spec, Attention) else state, ops, matrices)]


def _mixer_layer(
    spec: Attention | Recurrent,
    own: tuple[int, int] | None,
    ops: Ops,
    matrices: Matrices,
    source: str = NORMED[0],
    target: str = "delta",
    *,
    scales_output: bool = False,
) -> AttentionLayer | RecurrentLayer:
    assert own is not None
    if isinstance(spec, Attention):
        return AttentionLayer(spec, *own, ops, matrices, source, target, adds_bias=not scales_output)
    return RecurrentLayer(spec, *own, ops, matrices, source, target, adds_bias=not scales_output)


def check_lowered(decoder: Decoder) -> None:
    """Raise UnsupportedModelError, with the reason, for a model that the kernels cannot run. Changes no weights."""
    try:
        groups_of(decoder)
        for block in decoder.blocks:
            if block.attention is not None:
                AttentionLayer.check_attention(block.attention)
            if block.recurrent is not None:
                RecurrentLayer.check_recurrent(block.recurrent)
            if isinstance(block.mixer, SideBySide) and (block.parallel or block.mixer_out_norm is not None):
                raise UnsupportedModelError("attention and recurrence beside each other share a norm of what they add")
            if block.parallel and (block.mixer is None or block.feed_forward is None):
                raise UnsupportedModelError("a parallel block of it has one half")
            if isinstance(block.feed_forward, MoE):
                MoELayer.check_experts(block.feed_forward)
        for matrix in matrices_in(decoder):
            check_quantised(matrix)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the graph backend does not run this model: {error}") from None
