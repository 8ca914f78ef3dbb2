"""The rendezvous store: a small key-value server that every rank can read and write.

Rank 0 or torchrun runs it. The ranks wait for each other there at the start, exchange what they must agree on once per
run or request (facts to compare, prompts, settings), and write the heartbeats of `Watchdog`. It is far too slow for a
step; `Group.exchange` is for that.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any

import torch
from torch import distributed

from lookahead.parallel.rank_info import RankInfo
from lookahead.parallel.watchdog import BEAT, NONE, RankError, Watchdog

# torch makes these two in C++, and its type stubs do not name them.
TCPStore: Any = getattr(distributed, "TCPStore", None)
PrefixStore: Any = getattr(distributed, "PrefixStore", None)

# A program may join several groups in turn. They share one server, with the group number as a key prefix. The server
# lives until the program ends, because other ranks may already have joined the next group.
_group_numbers = count()
_servers: dict[int, Any] = {}


class RankStore:
    """One rank's connection to the store, with its watchdog.

    A rank may be silent for `timeout` seconds, and all ranks must join within `meeting` seconds. A step makes
    `per_step` exchanges.
    """

    def __init__(self, rank_info: RankInfo, timeout: float, meeting: float, per_step: int) -> None:
        self.rank, self.size = rank_info.rank, rank_info.size
        self.watchdog: Watchdog | None = None
        self._said = 0
        # 1. Connect, once for this thread and once for the watchdog's: a connection serves one caller at a time.
        torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = rank_info.port
        if distributed.is_initialized():  # by the caller, whose server may use the port: rank 0 opens another
            torchrun, port = False, _another_port(self.rank)
        prefix = f"lookahead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_group_numbers)}"
        try:
            serves = self.rank == 0 and not torchrun and port not in _servers
            self.keys = _connect(rank_info.host, port, meeting, timeout, prefix, serves)
            watched = _connect(rank_info.host, port, meeting, timeout, prefix, False)
        except (distributed.DistNetworkError, distributed.DistStoreError) as error:
            raise RankError(f"rank 0 does not answer at {rank_info.host}:{port} within {meeting:.0f} s") from error
        # 2. Wait for the first heartbeat of every rank.
        if self.rank == 0:
            self.keys.set("failure", NONE.decode())
        self.keys.set(f"beat/{self.rank}", "0 0 run")
        missing = self._wait_for({rank: f"beat/{rank}" for rank in range(self.size)}, meeting)
        if missing:
            message = f"rank {missing[0]} of {self.size} has not joined within {meeting:.0f} s"
            if self.rank == 0:  # the store ends with this rank: let the others read the message first
                self.keys.set("failure", message)
                sleep(4 * BEAT)
            raise RankError(message)
        # 3. From here on the watchdog detects failures.
        self.watchdog = Watchdog(watched, self.rank, self.size, timeout, "torchrun" if torchrun else "rank 0", per_step)

    def agree(self, topic: str, own: bytes, limit: float) -> list[bytes]:
        """All-gather bytes by rank. All ranks call it, in the same order.

        If a rank sends nothing within `limit` seconds, all ranks raise a RankError that names it and the `topic`.
        """
        assert self.watchdog is not None
        number = self._said
        self._said += 1
        keys = {rank: f"said/{number}/{rank}" for rank in range(self.size)}
        self.keys.set(keys[self.rank], own)
        self.watchdog.limit, self.watchdog.waiting = math.inf, monotonic()
        try:
            late = self._wait_for(keys, limit)
        finally:
            self.watchdog.waiting = None
        if late:
            self.watchdog.blame(late, f"did not come to {topic} within {limit:.0f} s")
        if number > 1:  # all ranks have called this since, so all have read it
            self.keys.delete_key(f"said/{number - 2}/{self.rank}")
        return [self.keys.get(key) for key in keys.values()]

    def write_note(self, number: int, text: bytes) -> None:
        """Rank 0: write a numbered note for the other ranks."""
        self.keys.set(f"note/{number}", text)

    def read_note(self, number: int) -> bytes | None:
        """Wait for a note without a time limit. None if rank 0 left without writing it."""
        assert self.watchdog is not None
        while True:
            try:
                self.keys.wait([f"note/{number}"], timedelta(seconds=BEAT))
                return bytes(self.keys.get(f"note/{number}"))
            except distributed.DistError:  # missing, or the store is gone: then the watchdog finds out why
                if self.watchdog.has_left(0):
                    return None
                self.raise_failure()
                sleep(0.01)

    def erase_note(self, number: int) -> None:
        self.keys.delete_key(f"note/{number}")

    def raise_failure(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self.watchdog is not None:
            self.watchdog.raise_verdict()
        elif self.keys.check(["failure"]):
            failure = self.keys.get("failure")
            if failure != NONE:
                raise RankError(failure.decode())

    def _wait_for(self, keys: Mapping[int, str], limit: float) -> list[int]:
        """Wait for every rank's key. Returns the ranks whose key is still missing after `limit` seconds."""
        try:
            return self._poll(keys, limit)
        except distributed.DistError as error:
            if self.watchdog is not None:
                self.watchdog.broken(error)
            raise RankError("rank 0 has died: its store is gone") from error

    def _poll(self, keys: Mapping[int, str], limit: float) -> list[int]:
        end, pause = monotonic() + limit, 0.0005
        left = dict(keys)
        while left:
            rank, key = next(iter(left.items()))
            if self.keys.check([key]):
                del left[rank]
                continue
            if monotonic() > end:
                return [rank for rank, key in left.items() if not self.keys.check([key])]
            self.raise_failure()
            sleep(pause)
            pause = min(2 * pause, 0.02)
        return []


def _connect(host: str, port: int, meeting: float, timeout: float, prefix: str, serves: bool) -> Any:
    """A connection to the server, which this process starts if it `serves`. `prefix` starts all keys."""
    store = TCPStore(host, port, None, serves, timedelta(seconds=meeting), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout))
    if serves:
        _servers[port] = store
    return PrefixStore(prefix, store)


def _another_port(rank: int) -> int:
    """A free port on rank 0's machine, broadcast through the existing process group."""
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    number = torch.zeros(1, dtype=torch.int64, device=device)
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            number[0] = free.getsockname()[1]
    distributed.broadcast(number, 0)
    return int(number)
