"""The operations of the graph backend's step: Triton kernels on a GPU, their slow twins elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lookahead.backends.graph.kernels import reference


class Ops:
    """One set of functions for a device. `compiled` is for tests: the kernels in Triton's interpreter, on a CPU."""

    def __init__(
        self,
        device: torch.device,
        *,
        compiled: bool | None = None,
        processors: int | None = None,
    ) -> None:
        self.compiled = device.type == "cuda" if compiled is None else compiled
        self._device = device
        source: Any = reference
        self.attend: Any = reference.attend
        if self.compiled:
            from lookahead.backends.graph.kernels import attention, depths, fused, tiles

            source = fused
            self.attend, self._attention, self._depths, self._tiles = attention.attend, attention, depths, tiles
            self._processors = processors or torch.cuda.get_device_properties(device).multi_processor_count
        self.embed, self.add_norm, self.rotate_write = source.embed, source.add_norm, source.rotate_write
        self.gate, self.move_accepted, self.copy_pinned = source.gate, source.move_accepted, source.copy_pinned

    def workspace(self) -> Any:
        """What `attend` leaves its partial results in. One shape's layers share it; no other shape may, as a captured
        graph goes on writing to the memory that it was captured with."""
        return self._attention.Workspace(self._device) if self.compiled else None

    def new_order(self, batch: int, count: int, tiles: Any, group: int) -> torch.Tensor:
        """Room for what `order_by_depth` finds."""
        return self._depths.new_order(batch, count, tiles, group, self._device) if self.compiled else torch.empty(0)

    def order_by_depth(
        self,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        bits: torch.Tensor,
        order: torch.Tensor,
        tiles: Any,
        group: int,
    ) -> None:
        """What `attend` needs to know of an invariant step's trees; see `kernels.attention`."""
        if self.compiled:
            self._depths.order_by_depth(positions, lengths, bits, order, tiles, group)

    def tiles(self, batch: int, count: int, heads: int, kv_heads: int, dim: int, *, invariant: bool) -> Any:
        """How `attend` cuts a step of this shape."""
        if not self.compiled:
            return None
        if invariant:
            return self._tiles.invariant_tiles(count, heads, kv_heads, dim, processors=self._processors)
        return self._tiles.tiles_for(batch, count, heads, kv_heads, dim, processors=self._processors)


class TopOut:
    """Targets and top rows of a step, [R, 1 + 2 n] integers on the device and, twice, on the host.

    Steps that run one behind the other take turns with the host's two, so that one can be read while the other is
    written. `rows[turn]` are for who has waited for the device.
    """

    def __init__(self, rows: int, vocabulary: int, top: int, device: torch.device) -> None:
        self.out = torch.zeros(rows, 1 + 2 * top, dtype=torch.int32, device=device)
        self.work: Any = None
        pinned = device.type == "cuda"
        self.hosts = [torch.zeros(self.out.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.rows = [host.numpy() for host in self.hosts]
        if pinned:
            from lookahead.backends.graph.kernels.top import TopWork

            self.work = TopWork(rows, vocabulary, top, device)

    def fill(self, logits: torch.Tensor) -> None:
        """Take the top of logits [R, V]."""
        if self.work is None:
            reference.top_tokens(logits, self.out)
            return
        from lookahead.backends.graph.kernels.top import top_tokens

        top_tokens(logits, self.out, self.work)

    def send(self, turn: int) -> None:
        """Start the copy to the host. The memory there is not given away before it is done."""
        self.hosts[turn].copy_(self.out, non_blocking=True)

    def best(self, rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        """A copy of some rows' `count` best tokens and their levels."""
        most = (rows.shape[1] - 1) // 2
        if count >= most:
            return rows[:, 1:].copy()
        return np.concatenate([rows[:, 1 : 1 + count], rows[:, 1 + most : 1 + most + count]], axis=1)
