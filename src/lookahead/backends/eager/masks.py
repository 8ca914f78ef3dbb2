"""The attention masks of the eager backend: which cached tokens and which of the step's tokens each token sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, Any]


class AttentionMasks:
    """Makes the masks of a pass, one per kind of layer. A model whose layers are all of one kind has the kind "".

    `windows` and `chunks` are how far a token of a sliding or chunked layer sees (see `support`).
    """

    def __init__(
        self,
        windows: Mapping[str, int | None],
        chunks: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.windows, self.chunks, self.dtype, self.device = windows, chunks, dtype, device

    def of(self, positions: Numbers, seen: Numbers, lengths: Sequence[int], start: int) -> Any:
        """Additive masks [B, 1, T, start + T] by kind, or the only one. None for a single token, which sees everything.

        Sequence i of the batch sees its first `lengths[i]` cached tokens and those of the step's tokens that `seen` [B,
        T, T] allows. In a sliding or chunked layer a token sees only those of them that are near.
        """
        batch, size = positions.shape
        if batch == 1 and size == 1:
            return None
        masks = {kind: self._of_kind(kind, positions, seen, lengths, start) for kind in self.windows}
        return masks if len(masks) > 1 or "" not in masks else masks[""]

    def _of_kind(
        self, kind: str, positions: Numbers, seen: Numbers, lengths: Sequence[int], start: int
    ) -> torch.Tensor:
        (batch, size), hidden = positions.shape, torch.finfo(self.dtype).min
        # The last dimension is sliced from a multiple of 16: fused attention would copy a mask that is not aligned.
        mask = torch.zeros((batch, 1, size, (start + size + 15) // 16 * 16), dtype=self.dtype, device=self.device)
        mask = mask[..., : start + size]
        near = self._near(kind, positions[:, :, None], positions[:, None, :])
        visible = seen if near is None else seen & near
        mask[:, 0, :, start:].masked_fill_(torch.from_numpy(~visible).to(self.device), hidden)
        if min(lengths) < start:
            unused = np.arange(start)[None, None] >= np.asarray(lengths)[:, None, None]
            mask[:, 0, :, :start].masked_fill_(torch.from_numpy(unused).to(self.device), hidden)
        for i, length in enumerate(lengths):
            near = self._near(kind, positions[i, :, None], np.arange(length)[None])
            if near is not None:
                mask[i, 0, :, :length].masked_fill_(torch.from_numpy(~near).to(self.device), hidden)
        return mask

    def _near(self, kind: str, own: Numbers, other: Numbers) -> Numbers | None:
        """Whether a layer of this kind lets a token at position `own` see one at `other`; None if it sees them all."""
        window, chunk = self.windows[kind], self.chunks.get(kind)
        if window is not None and int(own.max()) >= window:
            return np.asarray(own - other < window)
        if chunk is not None and int(own.max()) >= chunk:
            return np.asarray(own // chunk == other // chunk)
        return None
