"""`output_hidden_states` and `output_attentions`: per-token outputs, assembled from trees.

`generate` runs one pass per token, and returns its hidden states and attention weights. Our steps run trees. The row of
a token's node equals the row of the token's own pass: the same hidden state, and the same weights without the columns
of other nodes, which are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.eager.chains import ChainBackend
from lookahead.engine.request import Event
from lookahead.models.facts import chunks, sliding_windows
from lookahead.transformers_hook.arguments import Batch

NAMES = ("hidden_states", "attentions")
PerLayer = tuple[torch.Tensor, ...]


def requested_outputs(config: Any) -> list[str]:
    """The `NAMES` that a call requests. `config` is its GenerationConfig."""
    if not config.return_dict_in_generate:
        return []
    return [name for name in NAMES if getattr(config, f"output_{name}", None)]


def check_outputs(model: Any, names: Sequence[str]) -> None:
    """Refuse unsupported outputs: attention weights of sliding-window layers have other columns."""
    config = model.config.get_text_config(decoder=True)
    if "attentions" in names and (any(sliding_windows(config).values()) or chunks(config)):
        raise ValueError(
            "output_attentions=True cannot be given for a model with a sliding window or chunks, whose layers keep "
            "weights of different lengths; leave it out, or leave out custom_generate"
        )


class OutputCollector:
    """Collects per output position, for each of the names, one tensor per layer: [B, 1, D], or [B, H, 1, positions]."""

    def __init__(self, backend: EagerBackend | ChainBackend, batch: Batch, first: Any, names: Sequence[str]) -> None:
        """`first` is the output of the prompt's pass."""
        self.backend, self.batch = backend, batch
        self.kept: dict[str, list[PerLayer]] = {name: [getattr(first, name)] for name in names}
        self.tokens = 1  # output tokens so far

    def collect(self, events: Sequence[Event], batch_indices: Sequence[int]) -> None:
        """Collect the rows of a step. `batch_indices` are those of the events; all sequences advanced by the same
        number of tokens, or ended. Rows of ended sequences are zeros."""
        for position in range(max(len(event.tokens) for event in events)):
            for name, kept in self.kept.items():
                rows: dict[int, PerLayer] = {}
                for event, batch_index in zip(events, batch_indices, strict=True):
                    if position < len(event.tokens):
                        rows[batch_index] = getattr(self, f"_{name}")(event, batch_index, position)
                like = next(iter(rows.values()))
                full = [
                    rows.get(batch_index, tuple(map(torch.zeros_like, like)))
                    for batch_index in range(len(self.batch.mask))
                ]
                kept.append(tuple(torch.cat(layer) for layer in zip(*full, strict=True)))
            self.tokens += 1

    def _hidden_states(self, event: Event, batch_index: int, position: int) -> PerLayer:
        """One token's hidden states, [1, 1, D] per layer."""
        seen = self.backend.outputs[event.request.slot]
        token = seen.chunk + [0, *event.path][position]
        return tuple(
            layer[seen.batch_index : seen.batch_index + 1, token : token + 1] for layer in seen.output.hidden_states
        )

    def _attentions(self, event: Event, batch_index: int, position: int) -> PerLayer:
        """One token's weights, [1, H, 1, positions] per layer, with zeros where the prompt has padding."""
        seen = self.backend.outputs[event.request.slot]
        nodes = [0, *event.path][: position + 1]
        own = [seen.start + seen.chunk + node for node in nodes]
        columns = [*range(seen.length), *(seen.start + i for i in range(seen.chunk)), *own]
        attended = torch.nn.functional.pad(self.batch.mask[batch_index], (0, self.tokens), value=True)
        layers = []
        for layer in seen.output.attentions:
            weights = layer.new_zeros(1, layer.shape[1], 1, len(attended))
            row = layer[seen.batch_index, :, seen.chunk + nodes[-1], columns]
            weights[..., attended.to(layer.device)] = row[None, :, None]
            layers.append(weights)
        return tuple(layers)
