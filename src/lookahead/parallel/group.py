"""The ranks of one run: how they find each other, the one exchange per step, and what they agree on before.

A group is the processes that `torchrun` or `lookahead generate --ranks` started. Between steps nothing travels but one
fixed-size tensor of integers, gathered by all (`exchange`). What is said once per run or request (facts to compare,
prompts, settings) goes through the store that the ranks met at (`agree`).
"""

from __future__ import annotations

import atexit
import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lookahead.parallel.place import Place, pick_device
from lookahead.parallel.watch import BEAT, NONE, RankError, Watch

TIMEOUT = 60.0
"""Seconds without an answer after which a rank counts as lost."""
MEETING_TIMEOUT = 60.0
"""Seconds in which all ranks must have come to the store, at least: processes that start together import torch at
different speeds, seconds apart on a busy machine."""
START = 600.0
"""The most seconds that one rank may need longer than another to load its model."""

Numbers = np.ndarray[Any, np.dtype[np.int32]]

# Made by torch's C++ part: its stubs do not name them.
TCPStore: Any = getattr(distributed, "TCPStore", None)
PrefixStore: Any = getattr(distributed, "PrefixStore", None)

# A program may join a group after another. They meet at the same store, each under its own number; who keeps a store
# keeps it to the end, as others may have joined anew before it did.
_groups = count()
_kept: dict[int, Any] = {}

# torch 2.13 has another name for it, and a warning for the old one.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def join(
    *,
    ranks: int | None = None,
    timeout: float = TIMEOUT,
    meeting_timeout: float | None = None,
    tensor_parallel: int = 1,
    device: str = "auto",
    check: bool = False,
) -> Group:
    """Meet the other ranks; every one of them calls this. A process that nobody launched is a group of its own.

    `ranks` is how many there must be. `timeout` is how long a rank may be silent before the others end;
    `meeting_timeout` is how long the ranks wait for the last one to come, by default a minute or `timeout` if that is
    longer. Groups of `tensor_parallel` neighbouring ranks hold one copy of the model between them (`Group.mesh`).
    `device` is auto, cpu, cuda or cuda:N. With `check` the ranks compare a hash of what they are about to do before
    every step.
    """
    place = Place.of(os.environ)
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
    """The ranks that decode together.

    `rank` and `size` count processes; `share` of `shares` is this rank's part of the work, which the `copies` ranks of
    one tensor-parallel group have in common; `mesh` is then the device mesh of both, lookahead x tensor.
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
        self._watch: Watch | None = None
        self._store: Any = None
        self._agreed = 0
        self._owns = False
        if place is None or place.size == 1:
            return
        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        nccl = cuda and torch.cuda.device_count() >= place.local_size
        if distributed.is_initialized():
            nccl = "nccl" in distributed.get_backend()
        self._wire_device = torch.device(device if nccl else "cpu")
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._meet(place, max(timeout, MEETING_TIMEOUT) if meeting_timeout is None else meeting_timeout)
        self._connect("nccl" if nccl else "gloo")
        if copies > 1:
            shape = (self.shares, copies)
            self.mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("lookahead", "tensor"))
        atexit.register(self.close)

    # Meeting.

    def _meet(self, place: Place, within: float) -> None:
        """Find the store, and wait until every rank has. Rank 0 keeps it, unless torchrun does."""
        torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = place.port
        if distributed.is_initialized():  # by the caller, who may have taken the port: rank 0 opens another
            torchrun, port = False, self._another_port(place)
        prefix = f"lookahead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_groups)}"

        def connect(keeper: bool) -> Any:
            store = TCPStore(place.host, port, None, keeper, timedelta(seconds=within), wait_for_workers=False)
            store.set_timeout(timedelta(seconds=self.timeout))
            if keeper:
                _kept[port] = store
            return PrefixStore(prefix, store)

        try:
            self._store = connect(self.rank == 0 and not torchrun and port not in _kept)
            spoken = connect(False)
        except (distributed.DistNetworkError, distributed.DistStoreError) as error:
            raise RankError(f"rank 0 does not answer at {place.host}:{port} within {within:.0f} s") from error
        if self.rank == 0:
            self._store.set("failure", NONE.decode())
        self._store.set(f"beat/{self.rank}", "0 0 run")
        keys = {rank: f"beat/{rank}" for rank in range(self.size)}
        missing = self._wait_for(keys, within)
        if missing:
            message = f"rank {missing[0]} of {self.size} has not come within {within:.0f} s"
            if self.rank == 0:  # the store ends with this rank: let those who came read it
                self._store.set("failure", message)
                sleep(4 * BEAT)
            raise RankError(message)
        keeper = "torchrun" if torchrun else "rank 0"
        self._watch = Watch(spoken, self.rank, self.size, self.timeout, keeper, 2 if self.check else 1)

    def _another_port(self, place: Place) -> int:
        device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
        number = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                number[0] = free.getsockname()[1]
        distributed.broadcast(number, 0)
        return int(number)

    def _connect(self, backend: str) -> None:
        if distributed.is_initialized():
            return
        # The watch ends what hangs; the library's own limit is there for what nobody watches.
        limit = timedelta(seconds=START)
        store = PrefixStore("torch", self._store)
        device = self._wire_device if backend == "nccl" else None
        with self.guarded():
            distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, device_id=device
            )
        self._owns = True

    # Talking.

    def exchange(self, numbers: Numbers) -> Numbers:
        """[n] integers of every rank, [size, n]: the step's one collective. n is the same on all ranks."""
        if self._watch is None:
            return numbers[None]
        watch = self._watch
        watch.step += 1
        watch.limit, watch.waiting = self.timeout, monotonic()
        try:
            return self._gather(numbers).reshape(self.size, -1)
        finally:
            watch.waiting = None

    def _gather(self, numbers: Numbers) -> Numbers:
        own, everyone, host = self._memory(len(numbers))
        own.copy_(torch.from_numpy(numbers), non_blocking=True)
        try:
            work = _all_gather(everyone, own, async_op=True)
        except RuntimeError as error:
            self._broken(error)
        if self._wire_device.type == "cpu":
            self._wait_gloo(work)
            return everyone.numpy().copy()
        work.wait()
        host.copy_(everyone, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            self.look()
        return host.numpy().copy()

    def _wait_gloo(self, work: Any) -> None:
        """In slices, so that a failure that the watch has seen ends the wait."""
        while True:
            try:
                work.wait(timedelta(seconds=BEAT))
                return
            except RuntimeError as error:
                self.look()
                if work.is_completed():
                    self._broken(error)

    def _memory(self, count: int) -> tuple[torch.Tensor, ...]:
        """Buffers for an exchange of this size: what is sent, what is gathered, and on a GPU its copy on the host."""
        if count not in self._buffers:
            cuda = self._wire_device.type == "cuda"
            made = [torch.zeros(n, dtype=torch.int32, device=self._wire_device) for n in (count, count * self.size)]
            host = torch.zeros(count * self.size, dtype=torch.int32, pin_memory=True) if cuda else made[1]
            self._buffers[count] = (*made, host)
        return self._buffers[count]

    def agree(self, topic: str, own: bytes, limit: float | None = None) -> list[bytes]:
        """What every rank says about a topic, in the order of ranks. All ranks call it, in the same order."""
        if self._watch is None:
            return [own]
        number, limit = self._agreed, limit or self.timeout
        self._agreed += 1
        keys = {rank: f"said/{number}/{rank}" for rank in range(self.size)}
        self._store.set(keys[self.rank], own)
        self._watch.limit, self._watch.waiting = math.inf, monotonic()
        try:
            late = self._wait_for(keys, limit)
        finally:
            self._watch.waiting = None
        if late:
            self._watch.blame(late, f"did not come to {topic} within {limit:.0f} s")
        if number > 1:  # everybody has read these: they have said something since
            self._store.delete_key(f"said/{number - 2}/{self.rank}")
        return [self._store.get(key) for key in keys.values()]

    def _wait_for(self, keys: Mapping[int, str], limit: float) -> list[int]:
        """Wait until the ranks' keys are there; the ranks whose are not in time."""
        try:
            return self._poll(keys, limit)
        except distributed.DistError as error:
            if self._watch is not None:
                self._watch.broken(error)
            raise RankError("rank 0 has died: its store is gone") from error

    def _poll(self, keys: Mapping[int, str], limit: float) -> list[int]:
        end, pause = monotonic() + limit, 0.0005
        left = dict(keys)
        while left:
            rank, key = next(iter(left.items()))
            if self._store.check([key]):
                del left[rank]
                continue
            if monotonic() > end:
                return [rank for rank, key in left.items() if not self._store.check([key])]
            self.look()
            sleep(pause)
            pause = min(2 * pause, 0.02)
        return []

    # Failing and leaving.

    def look(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self._watch is not None:
            self._watch.check()
        elif self._store is not None and self._store.check(["failure"]):  # before there is a watch
            failure = self._store.get("failure")
            if failure != NONE:
                raise RankError(failure.decode())

    def suspect(self, error: BaseException) -> None:
        """Raise RankError if it was another rank that caused this error, as may be where they share a model."""
        self.look()
        if self._watch is not None and self.copies > 1 and isinstance(error, RuntimeError):
            self._watch.suspect()

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error of this rank's own."""
        if self._watch is not None:
            first = (str(error).strip().splitlines() or [""])[0]
            self._watch.fail(f"{type(error).__name__}: {first:.300}")

    def guarded(self) -> Guard:
        """A `with` in which an error of this rank's is told to the others."""
        return Guard(self)

    def _broken(self, error: Exception) -> None:
        assert self._watch is not None
        self._watch.broken(error)

    def close(self) -> None:
        """Leave the group. What runs at the end of the program by itself, too."""
        watch, self._watch, self._store = self._watch, None, None
        if watch is None:
            return
        atexit.unregister(self.close)
        watch.close()
        if self._owns and watch.verdict is None and distributed.is_initialized():
            distributed.destroy_process_group()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Guard:
    """See `Group.guarded`. Where another rank broke a connection, the error becomes one that names it."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, RankError):
            self._group.suspect(error)
            self._group.fail(error)
