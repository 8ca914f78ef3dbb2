"""The ranks of one run: how a process joins them, and the one exchange that they make per step.

A group is the processes that `torchrun` or `lookahead generate --ranks` started. During a step nothing is sent but one
fixed-size tensor of integers, which every rank gathers from every other (`exchange`). What is said once per run or
request goes through the store that the ranks met at (`agree`).
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

from lookahead.parallel.place import Place, pick_device
from lookahead.parallel.store import PrefixStore, RankStore
from lookahead.parallel.watch import BEAT, RankError, Watch

TIMEOUT = 60.0
"""A rank that has not answered for this many seconds counts as lost."""
MEETING_TIMEOUT = 60.0
"""All ranks must have come to the store within this many seconds, at least: processes that start together import torch
at different speeds, seconds apart on a busy machine."""
START = 600.0
"""One rank may take at most this many seconds longer than another to load its model."""

Numbers = np.ndarray[Any, np.dtype[np.int32]]

# torch 2.13 renamed it, and warns about the old name.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def join(
    *,
    place: Place | None = None,
    ranks: int | None = None,
    timeout: float = TIMEOUT,
    meeting_timeout: float | None = None,
    tensor_parallel: int = 1,
    device: str = "auto",
    check: bool = False,
) -> Group:
    """Join the other ranks; every rank calls this. A process that was not started as a rank is a group of one.

    `place` says which rank this is; without it, the variables that torchrun sets do. `ranks` is how many there must
    be. `timeout` is how many seconds a rank may be silent before the others end. `meeting_timeout` is how many
    seconds the ranks wait for the last one to come, by default a minute, or `timeout` if that is longer. Groups of
    `tensor_parallel` neighbouring ranks hold one copy of the model between them (`Group.mesh`). `device` is auto,
    cpu, cuda or cuda:N. With `check`, before every step the ranks compare a hash of what they are about to do.
    """
    place = place or Place.of(os.environ)
    size = place.size if place else 1
    if ranks is not None and ranks != size:
        started = f"{size} ranks were started" if place else "one process was started"
        raise ValueError(f"{ranks} ranks are asked for and {started}; make the two numbers equal")
    if not timeout >= 4 * BEAT:
        raise ValueError(f"a rank timeout of {timeout} s is too short; give at least {4 * BEAT:.0f} s")
    if meeting_timeout is not None and not meeting_timeout > 0:
        raise ValueError(f"a meeting timeout of {meeting_timeout} s leaves no time to meet; give more than 0")
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ValueError(f"{size} ranks cannot be cut into tensor-parallel groups of {tensor_parallel}")
    return Group(place, pick_device(device, place), timeout, tensor_parallel, check, meeting_timeout)


class Group:
    """The ranks that decode together, as this rank sees them.

    This process is `rank` of `size`. The work of a step is cut into `shares`, and this rank does number `share`. The
    `copies` ranks of a tensor-parallel group hold one model between them and do the same share; `mesh` is then the
    device mesh of both, lookahead x tensor.
    """

    def __init__(
        self,
        place: Place | None,
        device: str = "cpu",
        timeout: float = TIMEOUT,
        copies: int = 1,
        check: bool = False,
        meeting_timeout: float | None = None,
    ) -> None:
        self.rank, self.size = (place.rank, place.size) if place else (0, 1)
        self.copies, self.shares, self.share = copies, self.size // copies, self.rank // copies
        self.device, self.timeout, self.check = device, timeout, check
        self.mesh: Any = None
        self._store: RankStore | None = None
        self._made_process_group = False
        if place is None or place.size == 1:
            return
        # 1. NCCL needs a GPU for each rank of this machine; gloo does for all others.
        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        nccl = cuda and torch.cuda.device_count() >= place.local_size
        if distributed.is_initialized():
            nccl = "nccl" in distributed.get_backend()
        self._wire_device = torch.device(device if nccl else "cpu")
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}
        # 2. Meet at the store, then connect for the exchange.
        within = max(timeout, MEETING_TIMEOUT) if meeting_timeout is None else meeting_timeout
        self._store = RankStore(place, timeout, within, per_step=2 if check else 1)
        self._connect(self._store, "nccl" if nccl else "gloo")
        if copies > 1:
            shape = (self.shares, copies)
            self.mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("lookahead", "tensor"))
        atexit.register(self.close)

    @property
    def _watch(self) -> Watch | None:
        return self._store.watch if self._store is not None else None

    def _connect(self, met: RankStore, backend: str) -> None:
        """Make torch's process group, unless the caller has made one."""
        if distributed.is_initialized():
            return
        # The watch ends a collective that hangs. torch's own limit is for those that nobody watches.
        limit = timedelta(seconds=START)
        store = PrefixStore("torch", met.keys)
        device = self._wire_device if backend == "nccl" else None
        with self.guarded():
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, device_id=device
            )
        self._made_process_group = True

    # Talking.

    def agree(self, topic: str, own: bytes, limit: float | None = None) -> list[bytes]:
        """What every rank says about a topic, in the order of ranks. All ranks call it, in the same order."""
        if self._store is None:
            return [own]
        return self._store.agree(topic, own, limit or self.timeout)

    def write_note(self, number: int, text: bytes) -> None:
        """Leave a numbered note of rank 0's for the other ranks."""
        if self._store is not None:
            self._store.write_note(number, text)

    def read_note(self, number: int) -> bytes | None:
        """Wait for a note of rank 0's, for as long as it takes. None if rank 0 has left without writing it."""
        return None if self._store is None else self._store.read_note(number)

    def erase_note(self, number: int) -> None:
        """Forget a note that all ranks have read."""
        if self._store is not None:
            self._store.erase_note(number)

    def exchange(self, numbers: Numbers) -> Numbers:
        """The one collective of a step: integers [n] of this rank -> those of every rank, [size, n].

        n is the same on all ranks.
        """
        watch = self._watch
        if watch is None:
            return numbers[None]
        watch.step += 1
        watch.limit, watch.waiting = self.timeout, monotonic()
        try:
            return self._gather(watch, numbers).reshape(self.size, -1)
        finally:
            watch.waiting = None

    def _gather(self, watch: Watch, numbers: Numbers) -> Numbers:
        own, everyone, host = self._memory(len(numbers))
        own.copy_(torch.from_numpy(numbers), non_blocking=True)
        try:
            work = _all_gather(everyone, own, async_op=True)
        except RuntimeError as error:
            watch.broken(error)
        if self._wire_device.type == "cpu":
            self._wait_gloo(watch, work)
            return everyone.numpy().copy()
        work.wait()
        host.copy_(everyone, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            self.look()
        return host.numpy().copy()

    def _wait_gloo(self, watch: Watch, work: Any) -> None:
        """Wait a little at a time, so that a failure that the watch has seen ends the wait."""
        while True:
            try:
                work.wait(timedelta(seconds=BEAT))
                return
            except RuntimeError as error:
                self.look()
                if work.is_completed():
                    watch.broken(error)

    def _memory(self, count: int) -> tuple[torch.Tensor, ...]:
        """Buffers of an exchange of this size: what is sent, what is gathered, and on a GPU its copy on the host."""
        if count not in self._buffers:
            cuda = self._wire_device.type == "cuda"
            made = [torch.zeros(n, dtype=torch.int32, device=self._wire_device) for n in (count, count * self.size)]
            host = torch.zeros(count * self.size, dtype=torch.int32, pin_memory=True) if cuda else made[1]
            self._buffers[count] = (*made, host)
        return self._buffers[count]

    # Failing and leaving.

    def look(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self._store is not None:
            self._store.look()

    def suspect(self, error: BaseException) -> None:
        """Raise RankError if another rank caused this error, which can happen where ranks share a model."""
        self.look()
        if self._watch is not None and self.copies > 1 and isinstance(error, RuntimeError):
            self._watch.suspect()

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error of this rank's own."""
        if self._watch is not None:
            first = (str(error).strip().splitlines() or [""])[0]
            self._watch.fail(f"{type(error).__name__}: {first:.300}")

    def guarded(self) -> Guard:
        """A `with` block whose errors are told to the other ranks."""
        return Guard(self)

    def close(self) -> None:
        """Leave the group. This also runs by itself when the program ends."""
        watch, self._store = self._watch, None
        if watch is None:
            return
        atexit.unregister(self.close)
        watch.close()
        if self._made_process_group and watch.verdict is None and distributed.is_initialized():
            distributed.destroy_process_group()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Guard:
    """See `Group.guarded`. An error that another rank caused becomes a RankError that names that rank."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, RankError):
            self._group.suspect(error)
            self._group.fail(error)
