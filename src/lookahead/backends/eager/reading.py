"""What the eager backends share: the arguments of a pass of the model, and what is read from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import StepInput
from lookahead.backends.sampling import log_probs, pick, top_tokens

Numbers = np.ndarray[Any, Any]


def per_token(value: Any, shape: tuple[int, ...], device: torch.device) -> Any:
    """An argument for a pass of this shape [B, T]: a value for every token becomes a tensor of that shape."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.to(device).expand(shape)
    return value


def shifted(positions: Numbers, offsets: Sequence[Sequence[int] | None]) -> Numbers:
    """Indices in the sequences [B, T] -> the model's positions, [B, T], or [axes, B, T] if it has several axes."""
    known = np.asarray([offset or (0,) for offset in offsets])
    moved = positions + known if known.shape[1] == 1 else positions[None] + known.T[:, :, None]
    return np.maximum(moved, 0)  # the padding of shorter trees in a batch has index 0


def read_logits(batch: Sequence[StepInput], logits: torch.Tensor, indices: list[int]) -> dict[int, StepOutput]:
    """[B, len(indices), V] logits of a pass -> per slot, targets and top tokens, in one copy to the host."""
    row = {index: i for i, index in enumerate(indices)}
    rows = [[row[len(sequence.chunk) + node] for node in sequence.tree.needed] for sequence in batch]
    own = [logits[i] if needed == list(range(len(indices))) else logits[i][needed] for i, needed in enumerate(rows)]
    top = min(max(sequence.top for sequence in batch), logits.shape[-1])
    scores = [sequence.adjusted(own_logits) for own_logits, sequence in zip(own, batch, strict=True)]
    if all(sequence.sampling.greedy for sequence in batch):
        targets = torch.cat(scores).argmax(dim=-1)
    else:
        pairs = zip(scores, batch, strict=True)
        targets = torch.cat([pick(s, sequence.sampling, sequence.uniforms) for s, sequence in pairs])
    columns = [targets[:, None].to(torch.int32), *([top_tokens(torch.cat(scores), top)] if top else [])]
    packed = np.split(torch.cat(columns, dim=1).cpu().numpy(), np.cumsum([len(needed) for needed in rows])[:-1])
    outputs = {
        sequence.slot: StepOutput(
            part[:, 0].tolist(),
            best(part[:, 1:], min(sequence.top, top)) if sequence.top else None,
            own_logits if sequence.logits else None,
        )
        for sequence, part, own_logits in zip(batch, packed, own, strict=True)
    }
    for sequence, part, own_logits in zip(batch, packed, own, strict=True):
        if sequence.logprobs is not None:
            output, chosen = outputs[sequence.slot], torch.from_numpy(part[:, 0]).to(logits.device)
            output.likely, output.logprobs = log_probs(own_logits, chosen, sequence.logprobs)
    return outputs


def best(top: Numbers, count: int) -> Numbers:
    """Top tokens and their levels [R, 2 n] -> those of the `count` best."""
    most = top.shape[1] // 2
    return top if count == most else top[:, [*range(count), *range(most, most + count)]]
