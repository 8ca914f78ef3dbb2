"""Steps are planned and their kernels compiled before any is captured. On a CPU captures are counted, not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import greedy, root, tiny

from lookahead.backends.graph import runner, steps
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.forward import CapturedForward
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.planner import LAZY_CAPTURE
from lookahead.backends.graph.state import Captured, DeviceState


class Recorder:
    """What happened, in order: planned, compiled (with the number of kinds), captured."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.works: list[Callable[[], object]] = []


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()

    def compile_launched(ops: Ops, work: Callable[[], object]) -> None:
        made.events.append("compiled")
        made.works.append(work)

    def captured(state: DeviceState, work: Callable[[], None]) -> None:
        made.events.append("captured")
        state.captures += 1

    plan = steps.CapturedSteps._plan

    def planned(self: steps.CapturedSteps, kind: Any) -> Any:
        made.events.append("planned")
        return plan(self, kind)

    monkeypatch.setattr(Ops, "compile_launched", compile_launched)
    monkeypatch.setattr(DeviceState, "captured", captured)
    monkeypatch.setattr(steps.CapturedSteps, "_plan", planned)
    return made


def capturing(**settings: Any) -> GraphBackend:
    """A backend that captures on a CPU, with what `recorder` has replaced."""
    model = tiny("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1).to(torch.bfloat16)
    backend = GraphBackend(model, capture=False, kv_tokens=512, **settings)
    backend.capture = backend.runner.state.capture = True
    return backend


def test_kernels_are_compiled_once_and_before_any_capture(recorder: Recorder) -> None:
    backend = capturing()
    backend.compile_kernels()
    count = recorder.events.count("planned")
    assert recorder.events == ["planned"] * count + ["compiled"]
    assert (len(backend.runner.steps.planned), backend.captures) == (count, 0)
    planned = dict(backend.runner.steps.planned)
    recorder.events.clear()
    backend.compile_kernels()
    assert not recorder.events
    times = backend.prepare(256, 128)
    assert set(recorder.events) == {"captured"}  # nothing is planned or compiled again
    captured = {**backend.runner.steps.forwards, **backend.runner.steps.targets}
    assert captured == planned
    assert not backend.runner.steps.planned
    assert list(times) == ["search", "compile", "capture"]
    assert all(taken > 0 for taken in times.values())
    recorder.events.clear()
    backend.prepare(256, 128)
    assert not {"planned", "compiled"} & set(recorder.events)


def test_more_sequences_compile_only_what_is_new(recorder: Recorder) -> None:
    backend = capturing()
    backend.prepare(256, 128)
    recorder.events.clear()
    backend.prepare(256, 128, 4)
    new = recorder.events.count("planned")
    assert new > 0
    assert recorder.events[: new + 1] == ["planned"] * new + ["compiled"]


def test_lazy_captures_compile_the_fallback_steps(recorder: Recorder) -> None:
    backend = capturing(capture_after=LAZY_CAPTURE)
    backend.compile_kernels()
    few = len(backend.runner.steps.planned)
    assert 0 < few < 12
    recorder.events.clear()
    backend.prepare_fallbacks()
    assert recorder.events == ["captured"] * few


def test_a_model_whose_steps_are_not_captured_compiles_nothing(recorder: Recorder) -> None:
    backend = GraphBackend(tiny("Llama"), kv_tokens=512)
    backend.compile_kernels()
    assert not recorder.events


def test_without_memory_to_plan_steps_are_captured_one_by_one(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, plan, left = capturing(), steps.CapturedSteps._plan, 3

    def full(self: steps.CapturedSteps, kind: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plan(self, kind)

    monkeypatch.setattr(steps.CapturedSteps, "_plan", full)
    backend.compile_kernels()
    assert not backend.runner.steps.planned
    assert not recorder.works
    backend.prepare(256, 128)
    assert backend.captures > 20


def test_what_tables_replace_is_planned_again(recorder: Recorder) -> None:
    backend = capturing()
    backend.compile_kernels()
    every = backend.runner.steps.planned
    backend.runner.steps.drop_adjusted()
    left = backend.runner.steps.planned
    assert 0 < len(left) < len(every)
    assert not any(getattr(kind, "adjusted", False) for kind in left)
    backend.runner.steps.clear()
    assert not backend.runner.steps.planned


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any]]:
    """The operations that were called, with the windows and shapes that make them another kernel."""
    called = set[tuple[str, Any]]()

    class Noting(Ops):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for name, value in list(vars(self).items()):
                if callable(value):
                    setattr(self, name, self._noting(name, value))

        def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                shapes = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in args]
                called.add((name, str((shapes, sorted(options), options.get("window")))))
                return call(*args, **options)

            return run

    monkeypatch.setattr(runner, "Ops", Noting)
    return called


@pytest.mark.parametrize("drop_pages", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiling_pass_launches_the_kernels_of_a_real_one(launched: set[tuple[str, Any]], drop_pages: bool) -> None:
    """Also if layers with a window and others are in one attention group."""
    model = tiny("Qwen2", num_hidden_layers=6, use_sliding_window=True, sliding_window=7, max_window_layers=3)
    backend = GraphBackend(model.to(torch.bfloat16), kv_tokens=512, drop_pages=drop_pages)
    backend.prepare(64, 16)
    captured: list[Captured] = [*backend.runner.steps.forwards.values(), *backend.runner.steps.targets.values()]
    assert any(isinstance(one, CapturedForward) for one in captured)
    for one in captured:
        one.packet.write_padding()
        launched.clear()
        one._run()
        every = set(launched)
        launched.clear()
        one.launch_kernels()
        assert launched == every


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_was_compiled_in_advance_is_all_that_captures_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiling in advance changes nothing on the device: neither cached K/V nor what follows."""
    import triton

    backend = GraphBackend(tiny("Llama", max_position_embeddings=1024).to(torch.bfloat16).cuda(), kv_tokens=4096)
    slot = backend.open()
    first = backend.step([greedy(slot, list(range(2, 40)), root(7))])[0].targets
    backend.commit([(slot, ())])
    before = [part.clone() for pair in backend.cached(slot) for part in pair]
    backend.compile_kernels()
    after = [part for pair in backend.cached(slot) for part in pair]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    backend.prepare(1024, 128)
    assert not compiled
    again = backend.open()
    assert backend.step([greedy(again, list(range(2, 40)), root(7))])[0].targets == first
