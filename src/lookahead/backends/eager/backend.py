"""The eager backend: any transformers causal LM whose attention takes a 4-D mask, on CPU or CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.tree import below_chunk
from lookahead.algorithm.visibility import dense_visibility
from lookahead.backends.base import NO_LIMIT, Capabilities, Layers, StepInput
from lookahead.backends.batched import BatchedSlots
from lookahead.backends.eager.kv import KVBuffer, StepCache
from lookahead.backends.eager.masks import AttentionMasks
from lookahead.backends.eager.reading import per_token, read_logits, shifted
from lookahead.backends.failures import memory_error
from lookahead.backends.probe import probe
from lookahead.backends.support import check_own_forward, check_supported, check_trees, input_device, layer_shapes
from lookahead.models.facts import chunks, context_length, sliding_windows, tensor_parallel_ranks

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels that torch may use on CUDA. cuDNN's takes tens of milliseconds to plan a new shape, and with a mask
every step has a new one."""
PREFILL_CHUNK = 1024
"""Maximum prompt tokens per forward pass, to keep the mask of a long prompt small."""


@dataclass(frozen=True)
class Launched:
    """A launched step: its slots, and for each forward pass its inputs, its logits [B, R, V] and their R indices in the
    pass."""

    slots: list[int]
    passes: list[tuple[list[StepInput], torch.Tensor, list[int]]]


@dataclass(frozen=True)
class PassOutput:
    """The output of a pass for one input: the model's output, the input's index in the batch, the lengths of its prompt
    chunk and of its prefix, and the index from which the pass wrote its K/V."""

    output: Any
    batch_index: int
    chunk: int
    length: int
    start: int


class EagerBackend(BatchedSlots[KVBuffer]):
    """Runs the model's own forward pass over a K/V buffer that is never copied.

    A step's tokens are written from the same index on for every sequence: after the longest prefix of the batch. A
    shorter prefix leaves a gap before them, which the mask hides. Positions are passed to the model, so it does not
    matter where in the buffer a key is. On commit the accepted tokens move to the end of their own prefix.
    """

    def __init__(
        self,
        model: Any,
        *,
        probed: bool = True,
        shapes: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`shapes` are `layer_shapes(model)`, if the caller has them already. `probed=False` skips the probe.

        `arguments` are passed to every forward pass, besides our own. A 0-dimensional tensor among them is
        expanded to a tensor [B, T] with this value for every token. If they request hidden states or attention weights,
        `outputs` has each slot's part of the last pass.
        """
        check_supported(model)
        check_trees(model)
        check_own_forward(model)
        self.model = model
        self.device = input_device(model)
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_length(config)
        self.vocab_size: int = config.vocab_size
        self.capabilities = Capabilities(
            "eager",
            pads=True,
            prompt_chunk=PREFILL_CHUNK,
            overlaps=self.device.type == "cuda",
            ranks=tensor_parallel_ranks(model),
        )
        self.most_rows = NO_LIMIT
        self.most_nodes: int | None = None
        self.captures = self.expert_reads = 0
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._masks = AttentionMasks(sliding_windows(config), chunks(config), self.dtype, self.device)
        self._arguments = dict(arguments or {})
        self._keeps_outputs = any(self._arguments.get(f"output_{name}") for name in ("hidden_states", "attentions"))
        self.outputs: dict[int, PassOutput] = {}
        super().__init__(KVBuffer(shapes or layer_shapes(model)))
        self._offset: dict[int, Sequence[int]] = {}  # slot -> position of its first token, per axis
        self._last: dict[
            int, tuple[int, int, int]
        ] = {}  # slot -> (first index of its K/V, chunk length, prefix length)
        if probed:
            probe(self)

    def _forget(self, slot: int) -> None:
        self._offset.pop(slot, None)
        self._last.pop(slot, None)

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        try:
            return super().open(tokens, salt)
        except torch.OutOfMemoryError as error:
            raise memory_error(error, "the K/V of one more sequence", self.device) from error

    def reload_weights(self) -> None:
        """Every pass reads them."""

    @torch.inference_mode()
    def launch(self, inputs: Sequence[StepInput]) -> Launched:
        trees = [sequence for sequence in inputs if sequence.tree.size]
        try:
            for sequence in inputs:
                if not sequence.tree.size:
                    self._cache_chunk(sequence)
            passes = [(batch, *self._forward(batch)) for batch in self._neighbours(trees)]
        except torch.OutOfMemoryError as error:  # K/V written by a pass counts only after its commit
            raise memory_error(error, f"a step of {len(inputs)} sequences", self.device) from error
        return Launched([sequence.slot for sequence in inputs], passes)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[StepOutput]:
        outputs: dict[int, StepOutput] = {}
        for batch, logits, indices in launched.passes:
            outputs.update(read_logits(batch, logits, indices))
        return [outputs.get(slot, StepOutput([])) for slot in launched.slots]

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    @torch.inference_mode()
    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        moves = []
        for slot, path in accepted:
            start, chunk, length = self._last.pop(slot)
            root = start + chunk
            committed = [*range(start, root + 1), *(root + node for node in path)]
            in_place = chunk if start == length else 0  # after the longest prefix, the chunk is already in place
            moves.append((self._index[slot], committed[in_place:], length + in_place))
            self._length[slot] = length + len(committed)
        self._buffer.move(moves)

    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        self._buffer.reserve(len(self._index), length)
        for layer, (keys, values) in enumerate(layers):
            self._buffer.write(self._index[slot], layer, length - keys.shape[1], keys, values)
        self._length[slot], self._offset[slot] = length, offset

    def cached(self, slot: int) -> Layers:
        return [self._buffer.read(self._index[slot], layer, self._length[slot]) for layer in range(self._buffer.layers)]

    def _neighbours(self, inputs: Sequence[StepInput]) -> list[list[StepInput]]:
        """Split the inputs into runs of adjacent indices, one forward pass each. Nearly always it is one run."""
        runs: list[list[StepInput]] = []
        for sequence in sorted(inputs, key=lambda sequence: self._index[sequence.slot]):
            if runs and self._index[runs[-1][-1].slot] + 1 == self._index[sequence.slot]:
                runs[-1].append(sequence)
            else:
                runs.append([sequence])
        return runs

    def _cache_chunk(self, sequence: StepInput) -> None:
        """Run a prompt chunk without a tree."""
        start, index, chunk = self._length[sequence.slot], self._index[sequence.slot], np.asarray(sequence.chunk)
        self._buffer.reserve(len(self._index), start + len(chunk))
        positions = np.arange(start, start + len(chunk))[None]
        seen = np.tri(len(chunk), dtype=np.bool_)[None]
        self._run(chunk[None], positions, seen, [sequence], [start], index, start, [0])
        self._length[sequence.slot] = start + len(chunk)

    def _forward(self, inputs: Sequence[StepInput]) -> tuple[torch.Tensor, list[int]]:
        """Run one batch. Returns logits [B, R, V] at every index that one of its inputs needs, and these R indices."""
        lengths = [self._length[sequence.slot] for sequence in inputs]
        sizes = [len(sequence.chunk) + len(sequence.tree) for sequence in inputs]
        start, width = max(lengths), max(sizes)
        first = self._index[inputs[0].slot]
        self._buffer.reserve(len(self._index), start + width)

        tokens = np.zeros((len(inputs), width), dtype=np.int64)
        positions = np.zeros((len(inputs), width), dtype=np.int64)
        seen = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(inputs), width, width)).copy()
        needed: set[int] = set()
        for i, (sequence, length, size) in enumerate(zip(inputs, lengths, sizes, strict=True)):
            tree = below_chunk(sequence.chunk, sequence.tree)
            tokens[i, :size] = tree.tokens
            positions[i, :size] = np.asarray(tree.depths) + length
            seen[i, :size, :size] = dense_visibility(tree.parents)
            needed.update(tree.needed)
            self._last[sequence.slot] = start, len(sequence.chunk), length
        indices = sorted(needed)
        output = self._run(tokens, positions, seen, inputs, lengths, first, start, indices)
        if self._keeps_outputs:
            for i, (sequence, length) in enumerate(zip(inputs, lengths, strict=True)):
                self.outputs[sequence.slot] = PassOutput(output, i, len(sequence.chunk), length, start)
        logits: torch.Tensor = output.logits
        return logits if self._selects_logits else logits[:, indices], indices

    def _run(
        self,
        tokens: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        seen: np.ndarray[Any, Any],
        inputs: Sequence[StepInput],
        lengths: Sequence[int],
        first: int,
        start: int,
        indices: list[int],
    ) -> Any:
        """tokens, positions [B, T], seen [B, T, T] -> the model's output, with logits at these indices at least.

        K/V are written from `start` on.
        """
        cache = StepCache(self._buffer, first, len(tokens), start)
        offsets = [self._offset.get(sequence.slot) for sequence in inputs]
        kwargs = {name: per_token(value, tokens.shape, self.device) for name, value in self._arguments.items()}
        if self._selects_logits:
            kwargs["logits_to_keep"] = torch.tensor(indices, device=self.device)
        with sdpa_kernel(KERNELS) if self.device.type == "cuda" else nullcontext():
            return self.model(
                input_ids=torch.from_numpy(tokens).to(self.device),
                position_ids=torch.from_numpy(shifted(positions, offsets)).to(self.device),
                attention_mask=self._masks.of(positions, seen, lengths, start),
                past_key_values=cache,
                use_cache=True,
                **kwargs,
            )
