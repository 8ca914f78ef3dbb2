"""Tokens per simulated second: the engine on a machine with a known text and known times, with right and wrong curves.

The speeds are relative to plain decoding. `live` is what `load()` gives an engine, `guarded` what `model.generate`
gives one, and `fixed` weighs by the measured curve alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from replay import Clock, Replay, ReplayBackend, unguessable, words_of

from lookahead.algorithm.budget import fit_config, weighing_curve
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import CostCurve, PassCost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine import engine as engine_module
from lookahead.engine.engine import Engine
from lookahead.engine.plain_run import PlainRun
from lookahead.engine.request import Request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CURVES = {
    "gpu": (4.1, 4.1, 4.1, 4.15, 4.2, 4.3, 4.5, 4.9),
    "eager gpu": (1.0, 1.0, 1.0, 1.02, 1.05, 1.1, 1.25, 1.6),
    "soft": (1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.2, 7.5),
    "cpu": (53.0, 105.0, 107.0, 121.0, 209.0, 267.0, 408.0, 713.0),
}
"""The seconds of passes of these sizes: an H200, the same without captured steps, a fast and a slow CPU."""
MIXTURE, HOST = (3.5, 3.94, 4.08, 4.56, 4.86, 5.44, 6.5, 9.09), 0.35
"""The same of a mixture of experts in the shape of Qwen3-30B-A3B on an H200, and of the host between two steps."""
WRONG = {"right": 1.0, "too cheap": 0.5, "too dear": 2.0}
"""How the curve was measured that the engine gets: passes of more than one row by this factor."""
TOKENS = 400
CONFIG = LookaheadConfig(suffix_length=16)
"""Longer chains hardly change the speed of a text this short, but by chance more than the margins tested here."""


@cache
def model_of(text: str) -> Replay:
    if text == "unguessable":
        return Replay(unguessable(2000), forgetful=True)
    return Replay(words_of(Path(__file__).parents[2] / "LICENSE"))


def speed(
    name: str,
    measured: str,
    text: str,
    budget: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int = 1,
    pads: bool = False,
    times: tuple[float, ...] = (),
    host: float = 0.0,
) -> float:
    """Tokens per simulated second, relative to plain steps that do not wait for the host."""
    clock, model, times = Clock(), model_of(text), times or CURVES[name]
    monkeypatch.setattr(engine_module, "perf_counter", clock)
    table = CostCurve(SIZES, times).table(1024)
    given = [seconds * (WRONG[measured] if size > 1 else 1.0) for size, seconds in zip(SIZES, times, strict=True)]
    curve = CostCurve(SIZES, tuple(given))
    config = fit_config(CONFIG, curve)
    begins = [100 * number for number in range(count)]
    decides = DraftBudget(None if budget == "fixed" else PassCost(curve.table(512)), guarded=budget == "guarded")
    backend = ReplayBackend(model, begins, clock, table, pads=pads, host=host)
    engine = Engine(backend, decides)  # type: ignore[arg-type]
    memory = SharedMemory()
    for begin in begins:
        prompt, rules = model.stream[begin : begin + 100], StopRules(TOKENS)
        engine.submit(Request(DecodingSequence(prompt, config, rules=rules, memory=memory)))
    while engine.running:
        engine.step()
    assert backend.lost <= count  # steps ahead of sequences that have ended
    return TOKENS * count / clock.now * table[0]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.thinned(1, most=1)
def test_a_right_curve_is_left_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, live = (speed(name, "right", "license", budget, monkeypatch) for budget in ("fixed", "live"))
    assert live == pytest.approx(fixed, rel=0.01)
    assert live > (1.6 if "gpu" in name else 0.95)


@pytest.mark.parametrize("measured", ["too cheap", "too dear"])
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.thinned(1, most=1)
def test_a_wrong_curve_is_corrected_and_never_made_worse(
    name: str, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that the correction makes negative once had a CPU fill every step: 0.1 times plain decoding's speed."""
    fixed, live = (speed(name, measured, "license", budget, monkeypatch) for budget in ("fixed", "live"))
    assert live > 0.98 * fixed
    if (name, measured) == ("eager gpu", "too dear"):
        assert live > 1.2 * fixed


@pytest.mark.parametrize(
    ("name", "measured", "unguarded", "guarded"),
    [("eager gpu", "right", 0.75, 0.92), ("cpu", "too cheap", 0.55, 0.82), ("soft", "too cheap", 0.91, 0.95)],
)
@pytest.mark.thinned(1, most=1)
def test_a_guard_stops_drafting_in_a_text_that_accepts_nothing(
    name: str, measured: str, unguarded: float, guarded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speed(name, measured, "unguessable", "live", monkeypatch) < unguarded
    assert speed(name, measured, "unguessable", "guarded", monkeypatch) > guarded


@pytest.mark.parametrize("name", ["gpu", "eager gpu", "soft"])
@pytest.mark.thinned(1, most=1)
def test_a_guard_costs_little_where_drafting_pays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live, guarded = (speed(name, "right", "license", budget, monkeypatch) for budget in ("live", "guarded"))
    assert guarded > 0.97 * live


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.thinned(1, most=2)
def test_a_padded_batch_drafts_only_what_is_nearly_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of four sequences, relative to four that decode plainly. On a CPU there is nothing to draft."""
    table = CostCurve(SIZES, CURVES[name]).table(4)
    found = speed(name, "right", "license", "live", monkeypatch, count=4, pads=True) / (4 * table[0] / table[3])
    assert found > 1.4 if "gpu" in name else found == pytest.approx(1.0, abs=0.08)


def test_the_curves_cover_both_kinds_of_machines() -> None:
    fills = {name: weighing_curve(fit_config(CONFIG, CostCurve(SIZES, CURVES[name]))) is None for name in CURVES}
    assert fills == {"gpu": True, "eager gpu": False, "soft": False, "cpu": False}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("measured", WRONG)
@pytest.mark.thinned(1, most=1)
def test_plain_steps_run_ahead_where_drafts_gain_less_than_the_host_takes(
    measured: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts, whose drafts cost more, was slower with the default than token by token."""

    def ratio(text: str) -> float:
        """Relative to plain steps of as many sequences."""
        found = speed("gpu", measured, text, "live", monkeypatch, count=count, times=MIXTURE, host=HOST)
        table = CostCurve(SIZES, MIXTURE).table(count)
        return found / (count * table[0] / table[count - 1])

    ahead = {text: ratio(text) for text in ("unguessable", "license")}
    monkeypatch.setattr(PlainRun, "is_possible", lambda *given, **named: False)
    waits = {text: ratio(text) for text in ("unguessable", "license")}
    assert ahead["unguessable"] > max(0.93, waits["unguessable"] + 0.06)
    assert ahead["license"] > 0.96 * waits["license"]
