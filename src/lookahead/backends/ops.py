"""The operations of the graph backend's step: Triton kernels on a GPU, their slow twins elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead.kernels import reference


class Ops:
    """One set of functions for a device. `compiled` is for tests: the kernels in Triton's interpreter, on a CPU."""

    def __init__(self, device: torch.device, *, compiled: bool | None = None, processors: int | None = None) -> None:
        self.compiled = device.type == "cuda" if compiled is None else compiled
        self._device = device
        source: Any = reference
        if self.compiled:
            from lookahead.kernels import attention, fused

            source = fused
            self._attention = attention
            self._processors = processors or torch.cuda.get_device_properties(device).multi_processor_count
        self.add_norm, self.rotate_write = source.add_norm, source.rotate_write
        self.gate, self.keep = source.gate, source.keep

    def workspace(self) -> Any:
        """What `attend` leaves its partial results in. One shape's layers share it; no other shape may, as a captured
        graph goes on writing to the memory that it was captured with."""
        return self._attention.Workspace(self._device) if self.compiled else None

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
        work: Any,
        *,
        scale: float,
        window: int,
    ) -> None:
        """See `kernels.attention.attend`; `work` is a `workspace`."""
        if not self.compiled:
            places = (rows, lengths, positions, bits)
            out.copy_(reference.attend(q, keys, values, *places, scale=scale, window=window))
            return
        batch, count, heads, dim = q.shape
        tiles = self._attention.tiles_for(batch, count, heads, keys.shape[1], dim, processors=self._processors)
        self._attention.attend(
            q, keys, values, rows, lengths, positions, bits, out, work,
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

    def best(self, rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        """A copy of some rows' `count` best tokens and their levels."""
        most = (rows.shape[1] - 1) // 2
        if count >= most:
            return rows[:, 1:].copy()
        return np.concatenate([rows[:, 1 : 1 + count], rows[:, 1 + most : 1 + most + count]], axis=1)
