"""The CPU backend: models in fp32, plain or quantised, lowered to ONNX. A step is a run of the ONNX model.

A row's numbers do not depend on the other rows of its step. So lookahead's text equals that of single-token steps bit
for bit, ties included. `invariance` verifies that on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sampling import LEVELS
from lookahead.backends.base import Capabilities, Layers, StepInput
from lookahead.backends.batched import BatchedSlots
from lookahead.backends.cpu.cells import blocks_for, home
from lookahead.backends.cpu.groups import layer_groups
from lookahead.backends.cpu.head import Computed
from lookahead.backends.cpu.heads import Heads
from lookahead.backends.cpu.invariance import invariant_nodes, reduced_model
from lookahead.backends.cpu.kv import KVBuffer
from lookahead.backends.cpu.lower import check_lowers, state_scale
from lookahead.backends.cpu.onnx_model import Array
from lookahead.backends.cpu.positions import PositionTables
from lookahead.backends.cpu.products import computed_in
from lookahead.backends.cpu.rows import BatchSequence, layout
from lookahead.backends.cpu.session import KERNELS, Session, usable_threads
from lookahead.backends.probe import probe
from lookahead.backends.sampling import log_probs, pick, top_tokens
from lookahead.backends.support import check_supported, check_trees
from lookahead.models.facts import context_length
from lookahead.models.read import read
from lookahead.models.spec import Decoder

MOST_ROWS = 256
"""Maximum tokens of a pass. More would make other sequences wait longer and gain nothing: matrix products of this many
rows are compute-bound."""


class CpuBackend(BatchedSlots[KVBuffer]):
    """A `Backend` for the models whose description `check_lowers` accepts.

    A pass of several inputs is one run for all trees, and one for each input with a prompt chunk: attention pads every
    input of a run to the longest. The weights are read when the backend is created; after a change of the model's,
    call `reload_weights`. The largest tree whose rows equal single-token steps bit for bit is determined by a check.
    """

    def __init__(self, model: Any, *, probed: bool = True, description: Decoder | None = None) -> None:
        """`probed=False` skips all numerical checks; `description` replaces the model's own."""
        check_supported(model)
        check_trees(model)
        self.description = read(model, "cpu") if description is None else description
        check_lowers(self.description)
        self.model = model
        self.device = torch.device("cpu")
        self.dtype = computed_in(self.description)
        self.max_length = context_length(model.config.get_text_config(decoder=True))
        self.vocab_size = self.description.vocabulary
        self.most_rows = MOST_ROWS
        self.most_nodes: int | None = None
        self.captures = self.expert_reads = 0
        self._read_weights()
        kernels = KERNELS if self._heads.screened is None else f"{KERNELS}, screened head"
        self.capabilities = Capabilities("cpu", kernels)
        layers = layer_groups(self.description)
        shapes = {layer: (group.kv_heads, group.head_dim) for layer, group in enumerate(layers) if group.own_kv}
        super().__init__(KVBuffer(shapes))
        self._groups = list(dict.fromkeys(layers))
        self._positions = PositionTables(self.description)
        self._shift: dict[int, int] = {}  # slot -> position of its first token
        self._last: dict[int, BatchSequence] = {}
        if probed:
            probe(self)
            small = CpuBackend(model, probed=False, description=reduced_model(self.description))
            self.capabilities = replace(self.capabilities, exact_nodes=invariant_nodes(small))

    def _read_weights(self) -> None:
        """Make the sessions, which hold some weights as they are and others in a layout of their own."""
        threads = usable_threads()
        self._session = Session(self.description, threads)
        scale, cap = state_scale(self.description), self.description.logit_softcap
        self._heads = Heads(self.description.head, threads, scale=scale, cap=cap)

    def reload_weights(self) -> None:
        self.description = read(self.model, "cpu")
        self._read_weights()
        self._positions = PositionTables(self.description)

    def _forget(self, slot: int) -> None:
        self._shift.pop(slot, None)
        self._last.pop(slot, None)

    # A step

    @torch.inference_mode()
    def launch(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        outputs: dict[int, StepOutput] = {}
        for sequence in inputs:
            if sequence.chunk:
                outputs |= self._run([sequence])
        trees = [sequence for sequence in inputs if not sequence.chunk and sequence.tree.tokens]
        if trees:
            outputs |= self._run(trees)
        return [outputs.get(sequence.slot, StepOutput([])) for sequence in inputs]

    def collect(self, running: list[StepOutput]) -> list[StepOutput]:
        return running

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    @torch.inference_mode()
    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, path in accepted:
            last = self._last.pop(slot)
            before = len(last.input.chunk) + 1
            accepted_cells = np.concatenate([last.cells[:before], last.cells[[before - 1 + node for node in path]]])
            length = last.length + len(accepted_cells)
            self._buffer.move(self._index[slot], accepted_cells, home(np.arange(last.length, length)))
            self._length[slot] = length

    # Importing and exporting K/V

    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers, offset: Sequence[int] = ()) -> None:
        self._buffer.reserve(len(self._index), blocks_for(length))
        for layer, (keys, values) in zip(self._buffer.layers, layers, strict=True):
            cells = home(np.arange(length - keys.shape[1], length))
            self._buffer.write(self._index[slot], layer, cells, keys, values)
        self._length[slot], self._shift[slot] = length, offset[0] if offset else 0

    def cached(self, slot: int) -> Layers:
        cells = home(np.arange(self._length[slot]))
        return [self._buffer.read(self._index[slot], layer, cells) for layer in self._buffer.layers]

    # Runs

    def _run(self, inputs: Sequence[StepInput]) -> dict[int, StepOutput]:
        """Run these inputs in one batch. An input without a tree is cached, and has no output."""
        batch = [
            BatchSequence.of(one, self._index[one.slot], self._length[one.slot], self._shift.get(one.slot, 0))
            for one in inputs
        ]
        first = min(sequence.index for sequence in batch)
        sequences = max(sequence.index for sequence in batch) - first + 1
        blocks = max(sequence.blocks for sequence in batch)
        self._buffer.reserve(len(self._index), blocks)
        blocks = blocks if sequences == 1 else self._buffer.blocks  # several sequences are bound with all blocks
        arrays, positions, padded = layout(batch, blocks, self._groups)
        arrays |= self._positions.inputs(positions, padded, self._groups)
        hidden = self._session.run(arrays, self._buffer, first, sequences, blocks)
        trees = [one for one in inputs if one.tree.tokens]
        top = min(max([1, *(one.top for one in trees)]), self.vocab_size)
        computed = self._heads.run(hidden, top, logits=any(map(_reads_logits, trees))) if trees else None
        outputs, start = {}, 0
        for sequence in batch:
            one = sequence.input
            if computed is None or not one.tree.tokens:
                self._length[one.slot] += len(one.chunk)
                continue
            self._last[one.slot] = sequence
            outputs[one.slot] = _output(one, computed, start)
            start += len(one.tree.needed)
        return outputs


def _reads_logits(sequence: StepInput) -> bool:
    """Whether an input needs more than the argmax and the top tokens of its rows."""
    if sequence.logprobs is not None or sequence.adjustment is not None:
        return True
    return sequence.logits or not sequence.sampling.greedy


def _output(sequence: StepInput, computed: Computed, start: int) -> StepOutput:
    """The output of one input, whose needed rows start at row `start` of what the head computed."""
    rows = slice(start, start + len(sequence.tree.needed))
    ids, values, total = computed.ids[rows], computed.values[rows], computed.total[rows]
    if not _reads_logits(sequence) or computed.logits is None:
        return StepOutput(ids[:, 0].tolist(), _levels(ids, values, total, sequence.top))
    logits = computed.logits[rows]
    scores = sequence.adjusted(logits)
    if sequence.adjustment is None:
        drawn = ids[:, 0] if sequence.sampling.greedy else pick(logits, sequence.sampling, sequence.uniforms)
        top = _levels(ids, values, total, sequence.top)
    else:
        drawn = pick(scores, sequence.sampling, sequence.uniforms)
        top = top_tokens(scores, sequence.top).numpy() if sequence.top else None
    targets = drawn.tolist()
    output = StepOutput(targets, top, logits.clone() if sequence.logits else None)
    if sequence.logprobs is not None:
        output.likely, output.logprobs = log_probs(logits, torch.tensor(targets), sequence.logprobs)
    return output


def _levels(ids: np.ndarray[Any, Any], values: Array, total: Array, top: int) -> np.ndarray[Any, Any] | None:
    """The first `top` tokens of each row and their probability levels, as `sampling.top_tokens` has them."""
    if not top:
        return None
    log2 = (values[:, :top] - values[:, :1] - np.log(total)) / np.float32(np.log(2))
    return np.concatenate([ids[:, :top], np.clip(-2 * log2, 0, LEVELS - 1)], axis=1).astype(np.int32)
