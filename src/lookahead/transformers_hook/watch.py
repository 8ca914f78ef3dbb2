"""`output_hidden_states` and `output_attentions`: what `generate` returns of every pass, put together from trees.

`generate` runs one pass per token, and returns its hidden states and attention weights. A step of ours runs a tree. The
row of the node from which a token was taken is the row that the token's own pass would have had: the same hidden state,
and the same weights once the columns of other nodes, which are zero, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.eager.backend import EagerBackend
from lookahead.engine.request import Event
from lookahead.models.facts import chunks, sliding_windows
from lookahead.transformers_hook.arguments import Batch

NAMES = ("hidden_states", "attentions")
PerLayer = tuple[torch.Tensor, ...]


def asked(config: Any) -> list[str]:
    """Which of `NAMES` a call wants returned. `config` is its GenerationConfig."""
    if not config.return_dict_in_generate:
        return []
    return [name for name in NAMES if getattr(config, f"output_{name}", None)]


def check(model: Any, names: Sequence[str]) -> None:
    """Refuse what cannot be put together: the weights of a layer that forgets old tokens have other columns."""
    config = model.config.get_text_config(decoder=True)
    if "attentions" in names and (any(sliding_windows(config).values()) or chunks(config)):
        raise ValueError(
            "output_attentions=True cannot be given for a model with a sliding window or chunks, whose layers keep "
            "weights of different lengths; leave it out, or leave out custom_generate"
        )


class Watch:
    """Collects per output position, for each of the names, one tensor per layer: [B, 1, D], or [B, H, 1, positions]."""

    def __init__(self, backend: EagerBackend, batch: Batch, first: Any, names: Sequence[str]) -> None:
        """`first` is the output of the prompt's pass."""
        self.backend, self.batch = backend, batch
        self.kept: dict[str, list[PerLayer]] = {name: [getattr(first, name)] for name in names}
        self.tokens = 1  # output tokens so far

    def collect(self, events: Sequence[Event], entries: Sequence[int]) -> None:
        """Take the rows of a step. `entries` are the batch entries of the events; all moved by the same tokens, or
        ended. What has ended is filled with zeros."""
        for place in range(max(len(event.tokens) for event in events)):
            for name, kept in self.kept.items():
                rows: dict[int, PerLayer] = {}
                for event, entry in zip(events, entries, strict=True):
                    if place < len(event.tokens):
                        rows[entry] = getattr(self, f"_{name}")(event, entry, place)
                like = next(iter(rows.values()))
                full = [rows.get(entry, tuple(map(torch.zeros_like, like))) for entry in range(len(self.batch.mask))]
                kept.append(tuple(torch.cat(parts) for parts in zip(*full, strict=True)))
            self.tokens += 1

    def _hidden_states(self, event: Event, entry: int, place: int) -> PerLayer:
        """One token's hidden states, [1, 1, D] per layer."""
        seen = self.backend.outputs[event.request.slot]
        token = seen.chunk + [0, *event.path][place]
        return tuple(layer[seen.entry : seen.entry + 1, token : token + 1] for layer in seen.output.hidden_states)

    def _attentions(self, event: Event, entry: int, place: int) -> PerLayer:
        """One token's weights, [1, H, 1, positions] per layer, with zeros where the prompt has padding."""
        seen = self.backend.outputs[event.request.slot]
        nodes = [0, *event.path][: place + 1]
        own = [seen.start + seen.chunk + node for node in nodes]
        columns = [*range(seen.length), *(seen.start + i for i in range(seen.chunk)), *own]
        told = torch.nn.functional.pad(self.batch.mask[entry], (0, self.tokens), value=True)
        layers = []
        for layer in seen.output.attentions:
            weights = layer.new_zeros(1, layer.shape[1], 1, len(told))
            weights[..., told.to(layer.device)] = layer[seen.entry, :, seen.chunk + nodes[-1], columns][None, :, None]
            layers.append(weights)
        return tuple(layers)
