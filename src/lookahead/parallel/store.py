"""The store that the ranks meet at: a small key-value server that every rank can read and write.

Rank 0 runs it, or torchrun does. It is where the ranks wait for each other at the start, where they say what they have
to agree on once per run or request (facts to compare, prompts, settings), and where `Watch` leaves its signs of life.
It is far too slow for a step; `Group.exchange` is for that.
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

from lookahead.parallel.place import Place
from lookahead.parallel.watch import BEAT, NONE, RankError, Watch

# torch makes these two in C++, and its type stubs do not name them.
TCPStore: Any = getattr(distributed, "TCPStore", None)
PrefixStore: Any = getattr(distributed, "PrefixStore", None)

# A program may join one group after another. They use one server, and the number of the group keeps their keys apart.
# A server is kept until the program ends, because other ranks may already have joined the next group at it.
_group_numbers = count()
_servers: dict[int, Any] = {}


class RankStore:
    """One rank's access to the store, with the watch that runs on it.

    `timeout` is how many seconds a rank may be silent, `meeting` how many the ranks wait for the last one to come.
    `per_step` is how many exchanges a step makes.
    """

    def __init__(self, place: Place, timeout: float, meeting: float, per_step: int) -> None:
        self.rank, self.size = place.rank, place.size
        self.watch: Watch | None = None
        self._said = 0
        # 1. Connect, once for this thread and once for the watch's: a connection serves one caller at a time.
        torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = place.port
        if distributed.is_initialized():  # by the caller, whose own server may have the port: rank 0 opens another
            torchrun, port = False, _another_port(self.rank)
        prefix = f"lookahead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_group_numbers)}"
        try:
            serves = self.rank == 0 and not torchrun and port not in _servers
            self.keys = _connect(place.host, port, meeting, timeout, prefix, serves)
            watched = _connect(place.host, port, meeting, timeout, prefix, False)
        except (distributed.DistNetworkError, distributed.DistStoreError) as error:
            raise RankError(f"rank 0 does not answer at {place.host}:{port} within {meeting:.0f} s") from error
        # 2. Wait until every rank has written its first sign of life.
        if self.rank == 0:
            self.keys.set("failure", NONE.decode())
        self.keys.set(f"beat/{self.rank}", "0 0 run")
        missing = self._wait_for({rank: f"beat/{rank}" for rank in range(self.size)}, meeting)
        if missing:
            message = f"rank {missing[0]} of {self.size} has not come within {meeting:.0f} s"
            if self.rank == 0:  # the store ends with this rank: let those who came read the message first
                self.keys.set("failure", message)
                sleep(4 * BEAT)
            raise RankError(message)
        # 3. From here on the watch knows of failures.
        self.watch = Watch(watched, self.rank, self.size, timeout, "torchrun" if torchrun else "rank 0", per_step)

    def agree(self, topic: str, own: bytes, limit: float) -> list[bytes]:
        """What every rank says about a topic, in the order of ranks. All ranks call it, in the same order.

        A rank that has said nothing after `limit` seconds is blamed: RankError on all ranks.
        """
        assert self.watch is not None
        number = self._said
        self._said += 1
        keys = {rank: f"said/{number}/{rank}" for rank in range(self.size)}
        self.keys.set(keys[self.rank], own)
        self.watch.limit, self.watch.waiting = math.inf, monotonic()
        try:
            late = self._wait_for(keys, limit)
        finally:
            self.watch.waiting = None
        if late:
            self.watch.blame(late, f"did not come to {topic} within {limit:.0f} s")
        if number > 1:  # all ranks have spoken since the topic before last, so all have read it
            self.keys.delete_key(f"said/{number - 2}/{self.rank}")
        return [self.keys.get(key) for key in keys.values()]

    def write_note(self, number: int, text: bytes) -> None:
        """Leave a numbered note of rank 0's for the other ranks."""
        self.keys.set(f"note/{number}", text)

    def read_note(self, number: int) -> bytes | None:
        """Wait for a note, for as long as it takes. None if rank 0 has left without writing it."""
        assert self.watch is not None
        while True:
            try:
                self.keys.wait([f"note/{number}"], timedelta(seconds=BEAT))
                return bytes(self.keys.get(f"note/{number}"))
            except distributed.DistError:  # not there yet, or the store is gone: then the watch finds out why
                if self.watch.has_left(0):
                    return None
                self.look()
                sleep(0.01)

    def erase_note(self, number: int) -> None:
        self.keys.delete_key(f"note/{number}")

    def look(self) -> None:
        """Raise RankError if another rank is known to have failed."""
        if self.watch is not None:
            self.watch.check()
        elif self.keys.check(["failure"]):
            failure = self.keys.get("failure")
            if failure != NONE:
                raise RankError(failure.decode())

    def _wait_for(self, keys: Mapping[int, str], limit: float) -> list[int]:
        """Wait until every rank's key is there. Returns the ranks whose key is still missing after `limit` seconds."""
        try:
            return self._poll(keys, limit)
        except distributed.DistError as error:
            if self.watch is not None:
                self.watch.broken(error)
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
            self.look()
            sleep(pause)
            pause = min(2 * pause, 0.02)
        return []


def _connect(host: str, port: int, meeting: float, timeout: float, prefix: str, serves: bool) -> Any:
    """A connection to the server, which this process becomes if it `serves`. Its keys begin with `prefix`."""
    store = TCPStore(host, port, None, serves, timedelta(seconds=meeting), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout))
    if serves:
        _servers[port] = store
    return PrefixStore(prefix, store)


def _another_port(rank: int) -> int:
    """A free port of rank 0's machine, told to all ranks through the process group that is there already."""
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    number = torch.zeros(1, dtype=torch.int64, device=device)
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            number[0] = free.getsockname()[1]
    distributed.broadcast(number, 0)
    return int(number)
