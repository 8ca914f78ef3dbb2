"""The operations of the graph backend's step: Triton kernels on a GPU, their slow twins elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead.kernels import reference


class Ops:
    """One set of functions for a device; `attend` keeps the workspace that all layers share."""

    def __init__(self, device: torch.device) -> None:
        self.compiled = device.type == "cuda"
        source: Any = reference
        if self.compiled:
            from lookahead.kernels import attention, fused

            source = fused
            self._attention = attention
            self._work = attention.Workspace(device)
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.add_norm, self.rotate_write = source.add_norm, source.rotate_write
        self.gate, self.keep = source.gate, source.keep

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        positions: torch.Tensor,
        bits: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int,
    ) -> None:
        """See `kernels.attention.attend`."""
        if not self.compiled:
            places = (rows, lengths, positions, bits)
            out.copy_(reference.attend(q, keys, values, *places, scale=scale, window=window))
            return
        batch, count, heads, dim = q.shape
        tiles = self._attention.tiles_for(batch, count, heads, keys.shape[1], dim, processors=self._processors)
        self._attention.attend(
            q, keys, values, rows, lengths, positions, bits, out, self._work,
            scale=scale, window=window, tiles=tiles,
        )  # fmt: skip


class TopOut:
    """Targets and top rows of a step, [R, 1 + 2 n] integers on the device and in pinned memory."""

    def __init__(self, rows: int, vocabulary: int, top: int, device: torch.device) -> None:
        self.out = torch.zeros(rows, 1 + 2 * top, dtype=torch.int32, device=device)
        self.work: Any = None
        self.host = self.out
        if device.type == "cuda":
            from lookahead.kernels.top import TopWork

            self.work = TopWork(rows, vocabulary, top, device)
            self.host = torch.zeros_like(self.out, device="cpu").pin_memory()

    def fill(self, logits: torch.Tensor) -> None:
        """Take the top of logits [R, V] and start the copy to the host."""
        if self.work is None:
            reference.top_tokens(logits, self.out)
            return
        from lookahead.kernels.top import top_tokens

        top_tokens(logits, self.out, self.work)
        self.host.copy_(self.out, non_blocking=True)

    def read(self) -> np.ndarray[Any, Any]:
        """Wait for the device, and look."""
        if self.work is not None:
            torch.cuda.current_stream().synchronize()
        return self.host.numpy()
