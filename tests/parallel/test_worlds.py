"""Ranks as processes, which exchange by gloo: the tokens of one process, and an end when one of them fails."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_same, decode_alone, random_cases
from worlds import World, torchrun

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch has no gloo"
)

CASES = random_cases(0, 8, tokens=16)[:3]
SHARED = [case for case in random_cases(5, 4, tokens=10) if case["backend"] == "eager"][:2]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """Four ranks of torchrun's, checked at every step; then the same four as two tensor-parallel pairs."""
    parts = [
        {"do": "identity", "cases": CASES, "check": True},
        {"do": "tensor_parallel", "cases": SHARED, "tensor_parallel": 2},
    ]
    reports = torchrun(tmp_path_factory.mktemp("four"), 4, *parts, seconds=300)
    return [report[0] for report in reports], [report[1] for report in reports]


@pytest.mark.slow
def test_four_processes(four: tuple[list[Any], list[Any]]) -> None:
    expected = decode_alone(CASES)
    for report in four[0]:
        for one, other in zip(report, expected, strict=True):
            assert_same(one, other)
            assert one["collectives"] == 2 * one["steps"]  # the check is one more


@pytest.mark.slow
def test_two_by_two(four: tuple[list[Any], list[Any]]) -> None:
    """Each pair of ranks holds one model, half of its K/V heads each; the trees are dealt to the pairs."""
    expected = decode_alone(SHARED)
    for report in four[1]:
        for one, other in zip(report, expected, strict=True):
            assert_same(one, other)
            assert one["part"] == 0.5
            assert one["heads"] == 1
            assert len(one["tokens"]) == 2


# When a rank fails


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Ranks that decode for ever; the parameters are the accident."""
    task = {"do": "fault", "accident": "none", "who": 1, "at": 6, "timeout": 3, **request.param}
    with World(tmp_path, task.get("ranks", 3), task) as made:
        yield made


def ends(world: World, ranks: list[int], message: str, seconds: float = 60) -> None:
    """All processes end, and these ranks with an error that says so."""
    codes = dict(zip(world.processes, world.wait(seconds), strict=True))
    for rank in ranks:
        assert codes[rank] == 1, world.everything()
        said = re.sub(r"for \d+ s", "for T s", world.err(rank))  # how many depends on the machine
        assert message in said, world.everything()


@pytest.mark.slow
@pytest.mark.parametrize("world", [{}], indirect=True)
def test_a_rank_is_killed(world: World) -> None:
    world.until(1, "step 20.")
    os.kill(world.processes[1].pid, signal.SIGKILL)
    ends(world, [0, 2], "RankError: rank 1 has died or is stopped: no sign of life for T s")


@pytest.mark.parametrize("world", [{"ranks": 2}], indirect=True)
@pytest.mark.slow
def test_rank_0_is_killed(world: World) -> None:
    """The store dies with it, and that is how the others know."""
    world.until(1, "step 20.")
    os.kill(world.processes[0].pid, signal.SIGKILL)
    ends(world, [1], "RankError: rank 0 has died: its store is gone")


@pytest.mark.slow
@pytest.mark.parametrize("world", [{"accident": "sleep", "ranks": 2}], indirect=True)
def test_a_rank_stalls(world: World) -> None:
    """It gives signs of life, and does not come to the exchange. The others end, and then it does."""
    ends(world, [0, 1], "rank 1 did not answer for T s: at step 6, and the others wait at step 7")


@pytest.mark.slow
@pytest.mark.parametrize("world", [{"accident": "diverge", "check": True, "ranks": 2}], indirect=True)
def test_a_rank_comes_to_another_state(world: World) -> None:
    """The check sees it before the step."""
    ends(world, [0, 1], "RankError: rank 1 has another state than rank 0 before step 7")
