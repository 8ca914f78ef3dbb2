"""Who is to blame: ranks that are only watches around one store in this process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import distributed
from worlds import free_port

from lookahead.parallel import store as stores
from lookahead.parallel import watchdog
from lookahead.parallel.group import Group, join
from lookahead.parallel.rank_info import RankInfo
from lookahead.parallel.watchdog import RankError, Watchdog

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed")

TIMEOUT = 1.5


class BrokenStore:
    """A store whose keeper has died."""

    def __getattr__(self, name: str) -> Any:
        raise distributed.DistNetworkError("connection reset")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Watchdog]]]:
    """Watches of R ranks, with beats ten times as fast as they are."""
    monkeypatch.setattr(watchdog, "BEAT", 0.05)
    monkeypatch.setattr(watchdog, "SUSPECT", 0.6)
    made: list[Watchdog] = []

    def make(size: int, timeout: float = TIMEOUT) -> list[Watchdog]:
        store = distributed.HashStore()
        store.set("failure", watchdog.NONE.decode())
        for rank in range(size):
            store.set(f"beat/{rank}", "0 0 run")
        made.extend(Watchdog(store, rank, size, timeout, "rank 0", 1) for rank in range(size))
        return list(made)

    yield make
    for one in made:
        one._stop.set()


def wait(one: Watchdog) -> None:
    """As a rank that waits for the others in an exchange."""
    one.waiting = time.monotonic()


def silence(one: Watchdog) -> None:
    """As a process that was killed or stopped."""
    one._stop.set()
    one._wake.set()


def verdict(one: Watchdog, seconds: float = 10.0) -> str:
    """What the rank is told, once it is; how many seconds it took depends on the machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            one.raise_verdict()
        except RankError as error:
            return re.sub(r"for \d+ s", "for T s", str(error))
        time.sleep(0.01)
    return "nothing"


def test_nothing_is_wrong(ranks: Callable[[int], list[Watchdog]]) -> None:
    watches = ranks(3)
    time.sleep(1.2 * TIMEOUT)
    for one in reversed(watches):  # rank 0 keeps the store, and waits for the others
        one.raise_verdict()
        one.close()


def test_a_silent_rank(ranks: Callable[[int], list[Watchdog]]) -> None:
    first, second, third = ranks(3)
    first.step = second.step = 17
    silence(third)
    for one in (first, second):
        assert verdict(one) == "rank 2 has died or is stopped: no sign of life for T s, at step 17"


def test_a_broken_connection_finds_the_silent_rank_sooner(ranks: Callable[..., list[Watchdog]]) -> None:
    first, second, third = ranks(3, 100.0)
    silence(third)
    first.step = 4
    with pytest.raises(RankError, match=r"rank 2 has died or is stopped: no sign of life for \d+ s, at step 4"):
        first.broken(RuntimeError("closed"))
    assert verdict(second) == verdict(first)  # the second rank was told by the first


def test_a_broken_connection_with_all_ranks_there(ranks: Callable[[int], list[Watchdog]]) -> None:
    first, second = ranks(2)
    first.step = 4
    with pytest.raises(RankError, match=r"the exchange of step 4 broke, and all ranks still answer: reset \(1\)"):
        first.broken(RuntimeError("reset (1)\nand a trace"))
    assert verdict(second) == verdict(first)


def test_a_rank_that_does_not_come_to_the_exchange(ranks: Callable[[int], list[Watchdog]]) -> None:
    watches = ranks(4)
    for one, step in zip(watches, (17, 17, 16, 17), strict=True):
        one.step = step
        if step == 17:
            wait(one)
    for one in watches:
        assert verdict(one) == "rank 2 did not answer for T s: at step 16, and the others wait at step 17"


@pytest.mark.slow
def test_one_who_left_is_missed_when_others_wait(ranks: Callable[[int], list[Watchdog]]) -> None:
    first, second, third = ranks(3)
    third.close()
    time.sleep(2 * TIMEOUT)
    first.raise_verdict()  # nobody waits: it may leave
    first.step = 3
    wait(first)
    expected = "rank 2 left (the program has ended), and the others wait at step 3"
    assert verdict(first) == expected
    assert verdict(second) == expected


def test_a_rank_that_fails_tells_the_others(ranks: Callable[[int], list[Watchdog]]) -> None:
    first, second = ranks(2)
    second.step = 8
    second.fail("OutOfMemoryError: no memory")
    assert verdict(first) == "rank 1 failed after step 8: OutOfMemoryError: no memory"


def test_a_store_that_is_gone(ranks: Callable[[int], list[Watchdog]]) -> None:
    _, second = ranks(2)
    second._store = BrokenStore()
    assert verdict(second) == "rank 0 has died: its store is gone"


def test_a_store_that_is_silent(ranks: Callable[[int], list[Watchdog]]) -> None:
    """A stopped keeper answers nothing; what waits for the store waits for ever, and the judge does not."""
    _, second = ranks(2)

    class Silent:
        def __getattr__(self, name: str) -> Any:
            time.sleep(1000)

    second._store = Silent()
    time.sleep(4 * watchdog.BEAT)
    second._changed[0] -= 1.0  # its last beat was old already, as it is on a busy machine
    assert verdict(second) == "rank 0 has given no sign of life for T s"


# Meeting


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BEAT", 0.05)
    rank_info = RankInfo(0, 3, 0, 3, "127.0.0.1", free_port())
    with pytest.raises(RankError, match="rank 1 of 3 has not joined within 1 s"):
        Group(rank_info, meeting_timeout=1)


def test_a_rank_may_come_later_than_it_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for meeting is not the one for signs of life: processes start at different speeds."""
    monkeypatch.setattr(watchdog, "BEAT", 0.05)
    monkeypatch.setattr(stores, "_group_numbers", repeat(0))  # both ranks are in this process, and in the same group
    monkeypatch.setattr(Group, "_connect", lambda *_: None)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(Group, RankInfo(0, 2, 0, 2, "127.0.0.1", port), timeout=0.5)
        time.sleep(1.0)
        second = Group(RankInfo(1, 2, 1, 2, "127.0.0.1", port), timeout=0.5)
        met = [second, first.result(timeout=30)]
    assert [one.rank for one in met] == [1, 0]
    for one in met:  # rank 0 keeps the store: it leaves last
        one.close()


def test_rank_0_never_comes() -> None:
    port = free_port()
    with pytest.raises(RankError, match=rf"rank 0 does not answer at 127.0.0.1:{port} within 1 s"):
        Group(RankInfo(1, 3, 1, 3, "127.0.0.1", port), meeting_timeout=1)


RUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "5"}


def test_torchruns_variables() -> None:
    assert RankInfo.from_env({}) is None
    assert RankInfo.from_env(RUN) == RankInfo(1, 2, 1, 2, "here", 5)
    assert RankInfo.from_env({**RUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == RankInfo(1, 2, 0, 1, "here", 5)
    with pytest.raises(ValueError, match="RANK is set and MASTER_ADDR is not"):
        RankInfo.from_env({"RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK=2 is not one of the 2 ranks that WORLD_SIZE=2 names: 0 to 1"):
        RankInfo.from_env({**RUN, "RANK": "2"})


def test_what_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="4 ranks were requested and one process was started; make the two"):
        join(ranks=4)
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="4 ranks were requested and 2 ranks were started; make the two"):
        join(ranks=4)
    with pytest.raises(ValueError, match=r"a rank timeout of 0.5 s is too short; give at least 2 s"):
        join(timeout=0.5)
    with pytest.raises(ValueError, match="a meeting timeout of 0 s leaves no time to meet; give more than 0"):
        join(meeting_timeout=0)
    with pytest.raises(ValueError, match="2 ranks cannot be split into tensor-parallel groups of 3"):
        join(tensor_parallel=3)


def test_a_process_by_itself_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RUN:
        monkeypatch.delenv(name, raising=False)
    with join() as alone:
        assert (alone.rank, alone.size) == (0, 1)
        assert alone.agree("nothing", b"x") == [b"x"]
