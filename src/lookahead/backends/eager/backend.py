"""The eager backend: any transformers causal LM whose attention takes a 4-D mask, on CPU or CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.sampling import pick, top_tokens
from lookahead.algorithm.tree import StepOutput, dense_visibility
from lookahead.backends.base import Layers, StepInput
from lookahead.backends.eager.kv import KVBuffer, StepCache
from lookahead.backends.support import (
    check_supported,
    context_length,
    input_device,
    layer_shapes,
    probe,
    sliding_windows,
)

PREFILL_CHUNK = 1024
"""Prompt tokens per forward pass, so that the mask of a long prompt stays small."""


class EagerBackend:
    """One forward pass of the model as it is, over a K/V buffer that is never copied.

    The step's tokens of every row are written at one place, behind the longest prefix of the batch; a shorter row has a
    hole there that its mask hides. Positions are given, so where a key stands does not matter. Accepted tokens move to
    their row's own end on commit.
    """

    def __init__(
        self,
        model: Any,
        *,
        verify: bool = True,
        shapes: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """`shapes` are `layer_shapes(model)`, where they are known already; `verify=False` leaves out the probe."""
        check_supported(model)
        self.model = model
        self.device = input_device(model)
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_length(config)
        self.vocab_size: int = config.vocab_size
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._windows = sliding_windows(config)
        self._prefill_chunk = prefill_chunk or PREFILL_CHUNK
        self._buffer = KVBuffer(shapes or layer_shapes(model))
        self._row: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._last: dict[int, tuple[int, int, int]] = {}  # slot -> (place in the last step, trail, length before it)
        self._next_slot = 0
        if verify:
            probe(self)

    @torch.inference_mode()
    def open(self) -> int:
        slot = self._next_slot
        self._next_slot += 1
        self._row[slot] = len(self._row)
        self._length[slot] = 0
        self._buffer.reserve(len(self._row), 1)
        return slot

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """The last row takes the freed one's place, so that a batch is always a slice of the buffer."""
        row = self._row.pop(slot)
        del self._length[slot]
        self._last.pop(slot, None)
        last = len(self._row)
        for other, other_row in self._row.items():
            if other_row == last:
                self._buffer.move_row(last, row, self._length[other])
                self._row[other] = row

    def length(self, slot: int) -> int:
        return self._length[slot]

    def prepare(self, tokens: int, budget: int) -> None:
        """Nothing is captured here, so nothing has to be prepared."""

    @torch.inference_mode()
    def launch(self, inputs: Sequence[StepInput]) -> list[tuple[StepInput, torch.Tensor, list[int]]]:
        for item in inputs:
            self._prefill(item)
        ran = {}
        for batch in self._neighbours(inputs):
            logits, rows = self._forward(batch)
            ran.update({item.slot: (item, logits[i], rows) for i, item in enumerate(batch)})
        return [ran[item.slot] for item in inputs]

    @torch.inference_mode()
    def collect(self, launched: list[tuple[StepInput, torch.Tensor, list[int]]]) -> list[StepOutput]:
        return [self._read(*one) for one in launched]

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        return self.collect(self.launch(inputs))

    @torch.inference_mode()
    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, path in accepted:
            start, trail, length = self._last.pop(slot)
            root = start + trail
            kept = [*range(start, root + 1), *(root + node for node in path)]
            placed = trail if start == length else 0  # the longest row's trail stands where it belongs
            self._buffer.move(self._row[slot], kept[placed:], length + placed)
            self._length[slot] = length + len(kept)

    @torch.inference_mode()
    def adopt(self, slot: int, length: int, layers: Layers) -> None:
        self._buffer.reserve(len(self._row), length)
        for layer, (keys, values) in enumerate(layers):
            self._buffer.write(self._row[slot], layer, length - keys.shape[1], keys, values)
        self._length[slot] = length

    def cached(self, slot: int) -> Layers:
        return [self._buffer.read(self._row[slot], layer, self._length[slot]) for layer in range(self._buffer.layers)]

    def _neighbours(self, inputs: Sequence[StepInput]) -> list[list[StepInput]]:
        """The inputs in runs of neighbouring buffer rows; nearly always one run, so one forward pass."""
        runs: list[list[StepInput]] = []
        for item in sorted(inputs, key=lambda item: self._row[item.slot]):
            if runs and self._row[runs[-1][-1].slot] + 1 == self._row[item.slot]:
                runs[-1].append(item)
            else:
                runs.append([item])
        return runs

    def _prefill(self, item: StepInput) -> None:
        """Cache a long trail chunk by chunk, leaving less than a chunk of it to the step itself."""
        size = self._prefill_chunk
        while len(item.trail) > size:
            chunk, item.trail = item.trail[:size], item.trail[size:]
            start, row = self._length[item.slot], self._row[item.slot]
            self._buffer.reserve(len(self._row), start + len(chunk))
            positions = np.arange(start, start + len(chunk))[None]
            seen = np.tri(len(chunk), dtype=np.bool_)[None]
            self._run(np.asarray(chunk)[None], positions, seen, [start], row, start, [0])
            self._length[item.slot] = start + len(chunk)

    def _forward(self, items: Sequence[StepInput]) -> tuple[torch.Tensor, list[int]]:
        """[B, R, V] logits of the union of the rows that any input needs, and those rows."""
        lengths = [self._length[item.slot] for item in items]
        sizes = [len(item.trail) + len(item.tree) for item in items]
        start, width = max(lengths), max(sizes)
        first = self._row[items[0].slot]
        self._buffer.reserve(len(self._row), start + width)

        tokens = np.zeros((len(items), width), dtype=np.int64)
        positions = np.zeros((len(items), width), dtype=np.int64)
        seen = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(items), width, width)).copy()
        rows: set[int] = set()
        for i, (item, length, size) in enumerate(zip(items, lengths, sizes, strict=True)):
            trail, tree = len(item.trail), item.tree
            tokens[i, :trail] = item.trail
            tokens[i, trail:size] = tree.tokens
            positions[i, :trail] = np.arange(length, length + trail)
            positions[i, trail:size] = np.asarray(tree.depths) + length + trail
            parents = [*range(-1, trail), *[parent + trail for parent in tree.parents[1:]]]
            seen[i, :size, :size] = dense_visibility(parents)
            rows.update(trail + row for row in tree.needed)
            self._last[item.slot] = start, trail, length
        kept = sorted(rows)
        return self._run(tokens, positions, seen, lengths, first, start, kept), kept

    def _run(
        self,
        tokens: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        seen: np.ndarray[Any, Any],
        lengths: Sequence[int],
        first: int,
        start: int,
        rows: list[int],
    ) -> torch.Tensor:
        """tokens, positions [B, T], seen [B, T, T] -> logits [B, len(rows), V]; K/V rows land at `start`."""
        cache = StepCache(self._buffer, first, len(tokens), start)
        kwargs: dict[str, Any] = {}
        if self._keeps_rows:
            kwargs["logits_to_keep"] = torch.tensor(rows, device=self.device)
        output = self.model(
            input_ids=torch.from_numpy(tokens).to(self.device),
            position_ids=torch.from_numpy(positions).to(self.device),
            attention_mask=self._masks(positions, seen, lengths, start),
            past_key_values=cache,
            use_cache=True,
            **kwargs,
        )
        logits: torch.Tensor = output.logits
        return logits if self._keeps_rows else logits[:, rows]

    def _masks(
        self, positions: np.ndarray[Any, Any], seen: np.ndarray[Any, Any], lengths: Sequence[int], start: int
    ) -> Any:
        """Additive masks [B, 1, T, start + T], one per kind of layer; None where the model's own causal mask is right.

        Row i sees its first `lengths[i]` cached tokens and, among the step's, what `seen` says; in a sliding layer only
        what stands fewer than the layer's window positions back.
        """
        batch, size = positions.shape
        if batch == 1 and size == 1:
            return None
        masks = {}
        for kind, window in self._windows.items():
            if window is not None and int(positions.max()) < window:
                window = None
            hidden = torch.finfo(self.dtype).min
            # A last dimension of whole 16s, sliced: fused attention kernels want aligned rows and would copy otherwise.
            mask = torch.zeros((batch, 1, size, (start + size + 15) // 16 * 16), dtype=self.dtype, device=self.device)
            mask = mask[..., : start + size]
            visible = seen
            if window is not None:
                visible = seen & (positions[:, :, None] - positions[:, None, :] < window)
            mask[:, 0, :, start:].masked_fill_(torch.from_numpy(~visible).to(self.device), hidden)
            for i, length in enumerate(lengths):
                mask[i, :, :, length:start] = hidden
                if window is not None:
                    back = torch.from_numpy(positions[i, :, None] - np.arange(length)[None] >= window)
                    mask[i, 0, :, :length].masked_fill_(back.to(self.device), hidden)
            masks[kind] = mask
        return masks if len(masks) > 1 or "" not in masks else masks[""]

    def _read(self, item: StepInput, logits: torch.Tensor, nodes: list[int]) -> StepOutput:
        """[len(nodes), V] logits of one input -> its targets and top tokens, in one copy to the host."""
        needed = [len(item.trail) + node for node in item.tree.needed]
        if needed != nodes:
            place = {node: i for i, node in enumerate(nodes)}
            logits = logits[[place[node] for node in needed]]
        columns = [pick(logits, item.sampling, item.uniforms)[:, None].to(torch.int32)]
        if item.top:
            columns.append(top_tokens(logits, item.top))
        packed = torch.cat(columns, dim=1).cpu().numpy()
        top = packed[:, 1:] if item.top else None
        return StepOutput(packed[:, 0].tolist(), top, logits if item.logits else None)
