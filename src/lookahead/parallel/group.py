"""The group of ranks: joining it, and the one collective per step.

A group is the processes that `torchrun` or `lookahead generate --ranks` started. A step communicates one fixed-size
tensor of integers, all-gathered by every rank (`exchange`). Whatever is sent once per run or request goes through the
rendezvous store (`agree`).
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lookahead.parallel.rank_info import RankInfo, pick_device
from lookahead.parallel.store import PrefixStore, RankStore
from lookahead.parallel.watchdog import BEAT, RankError, Watchdog

TIMEOUT = 60.0
"""Seconds without an answer after which a rank counts as lost."""
MEETING_TIMEOUT = 60.0
"""Minimum seconds for all ranks to reach the store: processes that start together import torch seconds apart on a busy
machine."""
START = 600.0
"""Seconds that one rank may take longer than another to load its model."""

Numbers = np.ndarray[Any, np.dtype[np.int32]]

# torch 2.13 renamed it, and warns about the old name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def join(
    *,
    rank_info: RankInfo | None = None,
    ranks: int | None = None,
    timeout: float = TIMEOUT,
    meeting_timeout: float | None = None,
    tensor_parallel: int = 1,
    device: str = "auto",
    check: bool = False,
) -> Group:
    """Join the other ranks; every rank calls this. A process that was not started as a rank is a group of one.

    `rank_info` defaults to torchrun's environment variables. `ranks` is the expected number of ranks. `timeout` is how
    many seconds a rank may be silent before the others exit. `meeting_timeout` is how many seconds the ranks wait for
    the last one to join, by default a minute, or `timeout` if that is longer. Groups of `tensor_parallel` neighbouring
    ranks share one copy of the model (`Group.mesh`). `device` is auto, cpu, cuda or cuda:N. With `check`, the ranks
    compare a hash of their state before every step.
    """
    rank_info = rank_info or RankInfo.from_env(os.environ)
    size = rank_info.size if rank_info else 1
    if ranks is not None and ranks != size:
        started = f"{size} ranks were started" if rank_info else "one process was started"
        raise ValueError(f"{ranks} ranks were requested and {started}; make the two numbers equal")
    if not timeout >= 4 * BEAT:
        raise ValueError(f"a rank timeout of {timeout} s is too short; give at least {4 * BEAT:.0f} s")
    if meeting_timeout is not None and not meeting_timeout > 0:
        raise ValueError(f"a meeting timeout of {meeting_timeout} s leaves no time to meet; give more than 0")
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ValueError(f"{size} ranks cannot be split into tensor-parallel groups of {tensor_parallel}")
    return Group(rank_info, pick_device(device, rank_info), timeout, tensor_parallel, check, meeting_timeout)


class Group:
    """The group of ranks, as seen by this rank.

    This process is `rank` of `size`. A step is split into `shares`, and this rank runs number `share`. The `copies`
    ranks of a tensor-parallel group share one model and run the same share; `mesh` is then the device mesh of both,
    lookahead x tensor.
    """

    def __init__(
        self,
        rank_info: RankInfo | None,
        device: str = "cpu",
        timeout: float = TIMEOUT,
        copies: int = 1,
        check: bool = False,
        meeting_timeout: float | None = None,
    ) -> None:
        self.rank, self.size = (rank_info.rank, rank_info.size) if rank_info else (0, 1)
        self.copies, self.shares, self.share = copies, self.size // copies, self.rank // copies
        self.device, self.timeout, self.check = device, timeout, check
        self.mesh: Any = None
        self._store: RankStore | None = None
        self._made_process_group = False
        if rank_info is None or rank_info.size == 1:
            return
        # 1. NCCL needs a GPU for each rank of this machine; otherwise use gloo.
        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        nccl = cuda and torch.cuda.device_count() >= rank_info.local_size
        if distributed.is_initialized():
            nccl = "nccl" in distributed.get_backend()
        self._wire_device = torch.device(device if nccl else "cpu")
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}
        # 2. Rendezvous at the store, then connect for the exchange.
        within = max(timeout, MEETING_TIMEOUT) if meeting_timeout is None else meeting_timeout
        self._store = RankStore(rank_info, timeout, within, per_step=2 if check else 1)
        self._connect(self._store, "nccl" if nccl else "gloo")
        if copies > 1:
            shape = (self.shares, copies)
            self.mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("lookahead", "tensor"))
        atexit.register(self.close)

    @property
    def _watchdog(self) -> Watchdog | None:
        return self._store.watchdog if self._store is not None else None

    def _connect(self, met: RankStore, backend: str) -> None:
        """Create torch's process group, unless it is initialized."""
        if distributed.is_initialized():
            return
        # The watchdog ends a collective that hangs. torch's own timeout is for those it does not cover.
        limit = timedelta(seconds=START)
        store = PrefixStore("torch", met.keys)
        device = self._wire_device if backend == "nccl" else None
        with self.guarded():
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, device_id=device
            )
        self._made_process_group = True

    # Communication.

    def agree(self, topic: str, own: bytes, limit: float | None = None) -> list[bytes]:
        """All-gather bytes by rank through the store. All ranks call it, in the same order; `topic` is for errors."""
        if self._store is None:
            return [own]
        return self._store.agree(topic, own, limit or self.timeout)

    def write_note(self, number: int, text: bytes) -> None:
        """Rank 0: write a numbered note for the other ranks."""
        if self._store is not None:
            self._store.write_note(number, text)

    def read_note(self, number: int) -> bytes | None:
        """Wait for a note of rank 0 without a time limit. None if rank 0 left without writing it."""
        return None if self._store is None else self._store.read_note(number)

    def erase_note(self, number: int) -> None:
        """Delete a note that all ranks have read."""
        if self._store is not None:
            self._store.erase_note(number)

    def exchange(self, numbers: Numbers) -> Numbers:
        """The one collective of a step, an all-gather: int32 [n] -> [size, n], with the same n on all ranks."""
        watchdog = self._watchdog
        if watchdog is None:
            return numbers[None]
        watchdog.step += 1
        watchdog.limit, watchdog.waiting = self.timeout, monotonic()
        try:
            return self._gather(watchdog, numbers).reshape(self.size, -1)
        finally:
            watchdog.waiting = None

    def _gather(self, watchdog: Watchdog, numbers: Numbers) -> Numbers:
        own, everyone, host = self._memory(len(numbers))
        own.copy_(torch.from_numpy(numbers), non_blocking=True)
        try:
            work = _all_gather(everyone, own, async_op=True)
        except RuntimeError as error:
            watchdog.broken(error)
        if self._wire_device.type == "cpu":
            self._wait_gloo(watchdog, work)
            return everyone.numpy().copy()
        work.wait()
        host.copy_(everyone, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            self.raise_failure()
        return host.numpy().copy()

    def _wait_gloo(self, watchdog: Watchdog, work: Any) -> None:
        """Wait in short intervals, so that a failure found by the watchdog ends the wait."""
        while True:
            try:
                work.wait(timedelta(seconds=BEAT))
                return
            except RuntimeError as error:
                self.raise_failure()
                if work.is_completed():
                    watchdog.broken(error)

    def _memory(self, count: int) -> tuple[torch.Tensor, ...]:
        """Buffers of an exchange of this size: to send, to gather, and on a GPU the host copy."""
        if count not in self._buffers:
            cuda = self._wire_device.type == "cuda"
            made = [torch.zeros(n, dtype=torch.int32, device=self._wire_device) for n in (count, count * self.size)]
            host = torch.zeros(count * self.size, dtype=torch.int32, pin_memory=True) if cuda else made[1]
            self._buffers[count] = (*made, host)
        return self._buffers[count]

    # Failures and leaving.

    def raise_failure(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self._store is not None:
            self._store.raise_failure()

    def suspect(self, error: BaseException) -> None:
        """Raise RankError if another rank caused this error, as tensor-parallel ranks can."""
        self.raise_failure()
        if self._watchdog is not None and self.copies > 1 and isinstance(error, RuntimeError):
            self._watchdog.suspect()

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank to the others."""
        if self._watchdog is not None:
            first = (str(error).strip().splitlines() or [""])[0]
            self._watchdog.fail(f"{type(error).__name__}: {first:.300}")

    def guarded(self) -> Guard:
        """A `with` block whose errors are reported to the other ranks."""
        return Guard(self)

    def close(self) -> None:
        """Leave the group. Also called at exit."""
        watchdog, self._store = self._watchdog, None
        if watchdog is None:
            return
        atexit.unregister(self.close)
        watchdog.close()
        if self._made_process_group and watchdog.verdict is None and distributed.is_initialized():
            distributed.destroy_process_group()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Guard:
    """See `Group.guarded`. An error caused by another rank becomes a RankError that names it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, RankError):
            self._group.suspect(error)
            self._group.fail(error)
