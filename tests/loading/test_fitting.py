"""The cost of steps and passes on a scripted clock: timed, kept, and read back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lookahead.algorithm.budget import fit_config, weighing_curve
from lookahead.algorithm.cost import CostCurve
from lookahead.algorithm.output import StepOutput
from lookahead.backends.base import Capabilities, StepInput
from lookahead.config import LookaheadConfig
from lookahead.loading import default, timing
from lookahead.loading.fitting import ATTEMPTS, VERSION, cached_curve, cost_of_passes, pass_cost
from lookahead.loading.timing import (
    BRANCHES,
    DEPTH,
    MAX_SLOWDOWN,
    MAX_TREE_TOKENS,
    PASS_SIZES,
    QUICK_SIZES,
    TIMED_SIZES,
    is_stable,
    measure,
    measure_passes,
    timing_tree,
)

Times = Callable[[int], float]


def flat(size: int) -> float:
    return 0.01


def linear(size: int) -> float:
    return 0.01 * size


class Clock:
    """Stands still, but for what a fake step takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


class FakeBackend:
    """Counts cached tokens, refuses to pass its context, and lets every step take its time."""

    capabilities = Capabilities("fake")
    captures, most_rows, vocab_size, expert_reads = 0, 4096, 1000, 0
    most_nodes: int | None = None

    def __init__(self, clock: Clock, times: Times = flat, max_length: int | None = None) -> None:
        self.clock, self.times, self.max_length = clock, times, max_length
        self.lengths: dict[int, int] = {}
        self.sizes: list[int] = []
        self._fed = 0

    def open(self) -> int:
        self.lengths[0] = 0
        return 0

    def close(self, slot: int) -> None:
        del self.lengths[slot]

    def length(self, slot: int) -> int:
        return self.lengths[slot]

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        (item,) = inputs
        size = len(item.tree)
        assert list(item.tree.needed) == list(range(size))
        assert list(item.tree.depths) == [0, *(item.tree.depths[parent] + 1 for parent in item.tree.parents[1:])]
        assert max(item.tree.depths) <= DEPTH
        last = self.lengths[item.slot] + len(item.chunk) + size
        if self.max_length is not None and last > self.max_length:
            raise IndexError(f"{last} tokens in a context of {self.max_length}")
        self._fed = len(item.chunk) + 1
        self.sizes.append(size)
        self.clock.now += self.times(size)
        return [StepOutput([0] * size)]

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, nodes in accepted:
            self.lengths[slot] += self._fed + len(nodes)


def test_the_tree_that_is_timed_is_as_deep_as_a_guess_may_be() -> None:
    """Deeper would be dearer than any real step where depths are taken one by one, and flatter too cheap."""
    assert LookaheadConfig().deepest == DEPTH
    for size in (1, 2, 9, 10, 128, 129, 512):
        tree = timing_tree(size)
        assert len(tree) == size
        assert max(tree.depths) == min(DEPTH, -(-(size - 1) // BRANCHES))


# Measuring.


@pytest.mark.parametrize("max_length", [None, 2048])
def test_every_size_is_measured_where_steps_are_cheap(clock: Clock, max_length: int | None) -> None:
    backend = FakeBackend(clock, lambda size: 0.01 + 1e-4 * size, max_length)
    cost = measure(backend)
    assert cost.sizes == TIMED_SIZES
    assert cost.seconds == pytest.approx([0.01 + 1e-4 * size for size in TIMED_SIZES])
    assert backend.lengths == {}


def test_larger_than_hopeless_is_not_in_the_way(clock: Clock) -> None:
    """Where a token costs a token's time nothing pays; the curve says so whatever was measured last."""
    table = measure(FakeBackend(clock, linear)).table(128)
    assert table == pytest.approx([linear(size) for size in range(1, 129)])
    assert table[-1] > MAX_SLOWDOWN * table[0]


def test_a_disturbed_step_does_not_count(clock: Clock) -> None:
    """Every fifth step is slow, as with a busy neighbour."""
    steps = 0

    def times(size: int) -> float:
        nonlocal steps
        steps += 1
        return 0.02 if steps % 5 == 0 else 0.01

    assert measure(FakeBackend(clock, times)).seconds == pytest.approx([0.01] * len(TIMED_SIZES))


def test_the_first_step_of_a_size_does_not_count(clock: Clock) -> None:
    """It may allocate, compile or choose a kernel."""
    seen: set[int] = set()

    def times(size: int) -> float:
        first = size not in seen
        seen.add(size)
        return 0.01 + 0.09 * first

    assert measure(FakeBackend(clock, times)).seconds == pytest.approx([0.01] * len(TIMED_SIZES))


def capturing(backend: FakeBackend, captured: set[int], seconds: float = 1.4) -> Times:
    """Steps as an H200 runs them, a captured size at a time. The first of a size is captured, which takes long."""

    def times(size: int) -> float:
        padded = next(rows for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128) if rows >= size)
        if padded in captured:
            return 0.0041 + 6e-6 * padded
        captured.add(padded)
        backend.captures += 1
        return seconds

    return times


def test_a_capture_is_never_the_cost_of_a_step(clock: Clock, tmp_path: Path) -> None:
    """On a fresh machine the captures take longer than all steps may. Two loads give the same config, and a step takes
    the whole budget."""
    configs, captured = [], set[int]()
    for _ in range(2):
        backend = FakeBackend(clock)
        backend.times = capturing(backend, captured)
        cost = cached_curve(backend, IDENTITY, tmp_path)
        assert cost.sizes == TIMED_SIZES
        assert max(cost.seconds) < 0.006
        configs.append(fit_config(LookaheadConfig(), cost))
    assert configs[0] == configs[1]
    assert replace(configs[0], step_cost=None) == LookaheadConfig()
    assert weighing_curve(configs[0]) is None


def test_a_size_that_is_captured_again_and_again_has_no_cost(clock: Clock) -> None:
    """Its graph is dropped each time, say. What was captured is thrown away, and the other sizes stay."""
    backend = FakeBackend(clock)
    known = capturing(backend, {1, 2, 4, 8, 16, 32, 128})

    def times(size: int) -> float:
        if 32 < size <= 96:
            backend.captures += 1
            return 0.5
        return known(size)

    backend.times = times
    assert measure(backend).sizes == tuple(size for size in TIMED_SIZES if not 32 < size <= 96)


def test_passes_that_are_captured_do_not_count(clock: Clock) -> None:
    backend, captured = FlatBackend(clock, flat), set[int]()

    def times(size: int) -> float:
        if size not in captured and size > 1:
            captured.add(size)
            backend.captures += 1
            return 2.0
        return 0.01

    backend.times = times
    assert measure_passes(backend, rounds=1).seconds == pytest.approx([0.01] * len(PASS_SIZES))


@pytest.mark.parametrize("times", [flat, linear])
@pytest.mark.parametrize("max_length", [16, 17, 33, 64, 100])
def test_a_short_context_is_not_exceeded(clock: Clock, max_length: int, times: Times) -> None:
    backend = FakeBackend(clock, times, max_length)
    cost = measure(backend)
    assert cost.sizes == TIMED_SIZES[: len(cost.sizes)]
    assert cost.sizes[0] == 1
    assert cost.seconds == pytest.approx([times(size) for size in cost.sizes])
    assert len(cost.table(128)) == 128
    assert backend.lengths == {}


def test_the_slot_is_given_back_when_a_step_fails(clock: Clock) -> None:
    def times(size: int) -> float:
        if size > 4:
            raise RuntimeError("out of memory")
        return 0.01

    backend = FakeBackend(clock, times)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(backend)
    assert backend.lengths == {}


# Keeping it.

IDENTITY = {"model": {"hidden_size": 64}, "dtype": "float32", "device": "cpu"}


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "step-cost").iterdir())


def test_a_curve_is_measured_once_and_read_back(clock: Clock, tmp_path: Path) -> None:
    backend, said = FakeBackend(clock, linear), []
    first = cached_curve(backend, IDENTITY, tmp_path, said.append)
    assert backend.sizes
    assert len(said) == len(stored(tmp_path)) == 1
    again = FakeBackend(clock, flat)
    assert cached_curve(again, dict(reversed(IDENTITY.items())), tmp_path, said.append) == first
    assert (again.sizes, len(said)) == ([], 1)


def test_steps_that_the_default_config_never_takes_are_not_timed(clock: Clock, tmp_path: Path) -> None:
    backend = FakeBackend(clock)
    backend.capabilities = Capabilities("fake", exact_nodes=33)
    assert cached_curve(backend, IDENTITY, tmp_path).sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@pytest.mark.parametrize("version", [None, VERSION - 1, VERSION + 1])
def test_a_curve_of_another_version_is_measured_again(clock: Clock, tmp_path: Path, version: int | None) -> None:
    expected = cached_curve(FakeBackend(clock), IDENTITY, tmp_path)
    (path,) = stored(tmp_path)
    content = {"sizes": [1], "seconds": [9.0], "stable": True, "attempts": 1}
    path.write_text(json.dumps(content if version is None else {**content, "version": version}))
    backend, said = FakeBackend(clock), []
    assert cached_curve(backend, IDENTITY, tmp_path, said.append).sizes == expected.sizes
    assert (bool(backend.sizes), len(said)) == (True, 1)
    assert json.loads(path.read_text())["version"] == VERSION


def test_another_model_or_device_is_measured_anew(clock: Clock, tmp_path: Path) -> None:
    for changed in ({}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"model": {"hidden_size": 65}}):
        backend = FakeBackend(clock)
        cached_curve(backend, {**IDENTITY, **changed}, tmp_path)
        assert backend.sizes
    assert len(stored(tmp_path)) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"sizes": [1, 2], "stable": true, "attempts": 1}',
        b'{"sizes": [1, 2], "seconds": null, "stable": true, "attempts": 1}',
        b'{"sizes": ["one"], "seconds": [1.0], "stable": true, "attempts": 1}',
        b'{"sizes": [], "seconds": [], "stable": true, "attempts": 1}',
        b'{"sizes": [1, 2, 4], "seconds": [1.0], "stable": true, "attempts": 1}',
        b'{"sizes": [1, 2], "seconds": [0.0, -1.0], "stable": true, "attempts": 1}',
        b'{"sizes": [1, 2], "seconds": [NaN, NaN], "stable": true, "attempts": 1}',
    ],
)
def test_a_damaged_file_is_measured_over(clock: Clock, tmp_path: Path, content: bytes) -> None:
    expected = cached_curve(FakeBackend(clock, linear), IDENTITY, tmp_path)
    (path,) = stored(tmp_path)
    path.write_bytes(content.replace(b'{"', b'{"version": %d, "' % VERSION))
    assert cached_curve(FakeBackend(clock, linear), IDENTITY, tmp_path).table(8) == pytest.approx(expected.table(8))
    assert json.loads(path.read_text())["sizes"] == list(expected.sizes)
    assert stored(tmp_path) == [path]


def test_a_folder_that_cannot_be_written_is_no_error(clock: Clock, tmp_path: Path) -> None:
    """A file stands where the folder should be: that stops the superuser too."""
    taken = tmp_path / "taken"
    taken.write_text("")
    for _ in range(2):
        backend = FakeBackend(clock, linear)
        assert cached_curve(backend, IDENTITY, taken).sizes[0] == 1
        assert backend.sizes
    assert taken.read_text() == ""


def test_a_file_that_cannot_be_replaced_is_no_error(clock: Clock, tmp_path: Path) -> None:
    cached_curve(FakeBackend(clock, linear), IDENTITY, tmp_path)
    (path,) = stored(tmp_path)
    path.unlink()
    path.mkdir()
    assert cached_curve(FakeBackend(clock, linear), IDENTITY, tmp_path).sizes[0] == 1
    assert path.is_dir()


def busy() -> Times:
    """Every step takes 2 to 40 times as long as on a quiet machine."""
    rng = random.Random(1)
    return lambda size: linear(size) * 2 * rng.choice((1.0, 1.5, 2.3, 4.1, 7.0, 20.0))


def test_a_busy_machine_is_measured_again(clock: Clock, tmp_path: Path) -> None:
    """Until its times are stable, and each size keeps its fastest time."""
    said: list[str] = []
    first = cached_curve(FakeBackend(clock, busy()), IDENTITY, tmp_path, said.append)
    assert not first.stable
    second = cached_curve(FakeBackend(clock, linear), IDENTITY, tmp_path, said.append)
    assert (second.stable, second.table(8)) == (True, pytest.approx([linear(size) for size in range(1, 9)]))
    assert [("not stable" in line) for line in said] == [False, True]
    third = FakeBackend(clock, flat)
    assert (cached_curve(third, IDENTITY, tmp_path), third.sizes) == (second, [])


def test_a_machine_that_is_always_busy_is_taken_as_it_is(clock: Clock, tmp_path: Path) -> None:
    measured = []
    for _ in range(ATTEMPTS + 2):
        backend = FakeBackend(clock, busy())
        cached_curve(backend, IDENTITY, tmp_path)
        measured.append(bool(backend.sizes))
    assert measured == [True] * ATTEMPTS + [False] * 2
    (path,) = stored(tmp_path)
    os.utime(path, (0, 0))  # long ago: the machine may be quiet today
    backend = FakeBackend(clock, linear)
    assert cached_curve(backend, IDENTITY, tmp_path).stable
    assert backend.sizes


def test_a_quick_curve_serves_quick_calls_until_it_is_measured_well(clock: Clock, tmp_path: Path) -> None:
    """Where somebody waits, one round of few sizes will do. The next load measures again, and its curve serves both."""
    backend = FakeBackend(clock, linear)
    quick = cached_curve(backend, IDENTITY, tmp_path, quick=True)
    assert not quick.stable
    assert len(backend.sizes) <= 1 + 3 * len(QUICK_SIZES)
    again = FakeBackend(clock, flat)
    assert (cached_curve(again, IDENTITY, tmp_path, quick=True), again.sizes) == (quick, [])
    (path,) = stored(tmp_path)
    assert json.loads(path.read_text())["attempts"] == 0, "a quick curve is no attempt at a stable one"
    well = cached_curve(FakeBackend(clock, lambda size: 0.009 + 0.001 * size), IDENTITY, tmp_path)
    assert (well.stable, set(quick.sizes) < set(well.sizes)) == (True, True)
    assert (cached_curve(again, IDENTITY, tmp_path, quick=True), cached_curve(again, IDENTITY, tmp_path)) == (
        well,
        well,
    )
    assert again.sizes == []


def test_long_chains_are_measured_before_patience_ends(clock: Clock) -> None:
    """Where two tokens take as long as 64, and seconds. The most telling sizes come first, and nothing is run twice."""
    backend = FakeBackend(clock, lambda size: 0.5 if size == 1 else 1.4)
    backend.capabilities = Capabilities("fake", branches=False)
    curve = measure(backend)
    assert curve.sizes == (1, 2, 4, 16, 64)
    assert backend.sizes == [1, 1, 2, 16, 64, 4]
    assert curve.seconds == pytest.approx([0.5, 1.4, 1.4, 1.4, 1.4])
    backend = FakeBackend(clock, lambda size: 0.01 * size)
    backend.capabilities = Capabilities("fake", branches=False)
    assert max(measure(backend).sizes) == 16  # more than a third of the time of single tokens: longer ones never pay
    backend = FakeBackend(clock, lambda size: 0.001 * (1 if size == 1 else 4 + size / 16))
    backend.capabilities = Capabilities("fake", branches=False)
    backend.most_nodes = 64
    assert max(measure(backend).sizes) == 64


def test_a_round_is_stable_although_one_was_disturbed() -> None:
    assert is_stable([[1.0, 1.0, 9.0], [2.0, 2.1, 9.0], [3.0, 3.0, 3.0]])
    assert not is_stable([[1.0, 2.0, 9.0], [2.0, 4.0, 9.0], [3.0, 3.0, 3.0]])
    assert is_stable([[1.0, 1.0], []])
    assert not is_stable([[1.0], [2.0]]), "no second round"
    assert not is_stable([[], []]), "nothing was timed"


# Passes of several sequences.


class FlatBackend:
    """A pass takes as long as its tokens say, whosever they are. There is room for `room` tokens of K/V."""

    capabilities = Capabilities("flat")
    captures = expert_reads = 0
    most_nodes: int | None = None
    vocab_size = 1000

    def __init__(self, clock: Clock, times: Times, most_rows: int = 2048, room: int = 1 << 20) -> None:
        self.clock, self.times, self.most_rows, self.room = clock, times, most_rows, room
        self.max_length: int | None = 2048
        self.model = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}), modules=lambda: ())
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.lengths: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.passes: list[list[int]] = []

    def open(self) -> int:
        slot = len(self.lengths)
        self.lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        del self.lengths[slot]

    def reserve(self, slot: int, tokens: int) -> bool:
        self.reserved[slot] = tokens
        return sum(self.reserved.values()) <= self.room

    def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        for item in inputs:
            assert self.lengths[item.slot] + len(item.chunk) + len(item.tree) <= self.reserved[item.slot]
        rows = sum(len(item.chunk) + len(item.tree) for item in inputs)
        assert rows <= self.most_rows
        self.passes.append([len(item.tree) for item in inputs])
        self.fed = {item.slot: len(item.chunk) + 1 for item in inputs}
        self.clock.now += self.times(rows)
        return [StepOutput([0] * len(item.tree.needed)) for item in inputs]

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        for slot, nodes in accepted:
            self.lengths[slot] += self.fed[slot] + len(nodes)


def test_passes_are_timed_with_several_sequences(clock: Clock) -> None:
    backend = FlatBackend(clock, lambda size: 0.01 + 1e-5 * size)
    cost = measure_passes(backend)
    assert cost.sizes == PASS_SIZES
    assert cost.seconds == pytest.approx([0.01 + 1e-5 * size for size in PASS_SIZES])
    assert max(max(trees) for trees in backend.passes) == MAX_TREE_TOKENS
    assert len(backend.passes) == 8 + 3 * len(PASS_SIZES)
    assert backend.lengths == {}


def test_no_larger_trees_are_timed_than_a_pass_has(clock: Clock) -> None:
    backend, single = FlatBackend(clock, flat), FakeBackend(clock)
    backend.most_nodes, single.most_nodes = 100, 40
    assert measure_passes(backend).sizes[-1] == 96
    assert measure(single).sizes[-1] == 32


@pytest.mark.parametrize(("most_rows", "room", "largest"), [(100, 1 << 20, 96), (2048, 500, 128), (1, 1 << 20, 1)])
def test_passes_that_do_not_fit_are_not_timed(clock: Clock, most_rows: int, room: int, largest: int) -> None:
    cost = measure_passes(FlatBackend(clock, flat, most_rows, room))
    assert cost.sizes[-1] == largest


def test_a_pass_cost_is_measured_once(clock: Clock, tmp_path: Path) -> None:
    backend, said = FlatBackend(clock, lambda size: 0.01 + 1e-5 * size), []
    cost = pass_cost(backend, tmp_path, said.append)
    assert cost is not None
    assert cost.table == pytest.approx([0.01 + 1e-5 * size for size in range(1, 513)])
    again = FlatBackend(clock, flat)
    stored_cost = pass_cost(again, tmp_path, said.append)
    assert stored_cost is not None
    assert stored_cost.table.tolist() == cost.table.tolist()
    assert (again.passes, len(said), len(stored(tmp_path))) == ([], 1, 1)
    small = pass_cost(FlatBackend(clock, flat, most_rows=40), tmp_path)
    assert small is not None
    assert len(small.table) == 40


def test_a_backend_that_pads_has_no_pass_cost(clock: Clock, tmp_path: Path) -> None:
    backend = FlatBackend(clock, flat)
    backend.capabilities = Capabilities("flat", pads=True)
    assert pass_cost(backend, tmp_path) is None
    parallel, short = FlatBackend(clock, flat), FlatBackend(clock, flat)
    parallel.capabilities, short.max_length = Capabilities("flat", ranks=2), 100
    assert pass_cost(parallel, tmp_path) is pass_cost(short, tmp_path) is None


def test_the_cost_of_a_shared_pass_follows_the_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes are measured, and cost as much as the next captured size; others cost what a step does; where a
    pass is padded, rows have no common price."""
    curve = CostCurve((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0))
    monkeypatch.setattr(default, "pass_cost", lambda backend, *_: cost_of_passes(curve, backend))

    def cost(device: str = "cuda", step_cost: tuple[float, ...] | None = None, **can: Any) -> list[float] | None:
        backend: Any = SimpleNamespace(
            capabilities=Capabilities("any", **can), device=torch.device(device), most_rows=4, max_length=None
        )
        found = default.batch_cost(backend, LookaheadConfig(step_cost=step_cost))
        return None if found is None else found.table.tolist()

    assert cost(row_sizes=(1, 4)) == [1.0, 4.0, 4.0, 4.0]
    assert cost("cpu", row_sizes=(1, 4)) is None
    assert cost(pads=True, step_cost=(1.0, 2.0)) is None
    assert cost("cpu") is None
    table = cost("cpu", step_cost=(1.0, 2.0))
    assert table is not None
    assert (table[:2], len(table)) == ([1.0, 2.0], 4)
