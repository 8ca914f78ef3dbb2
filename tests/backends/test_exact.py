"""Configs are fitted to the trees that a backend runs exactly, or refused: never a text that is silently inexact."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import PROMPTS, VOCABULARY, tiny

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.base import Capabilities, StepInput
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.exact import default_within, exact_config
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.engine.settings import RequestSettings

PAPER = LookaheadConfig.paper(40, 8, 40)
"""280 window nodes."""


@pytest.fixture(scope="module")
def half() -> GraphBackend:
    return GraphBackend(tiny("Llama").to(torch.bfloat16))


def test_the_limits_of_a_backend(half: GraphBackend) -> None:
    assert (half.capabilities.exact_nodes, half.capabilities.exact_depth) == (256, 64)
    for backend in (
        GraphBackend(tiny("Llama")),
        GraphBackend(tiny("Llama").to(torch.bfloat16), invariant=False),
        EagerBackend(tiny("Llama")),
    ):
        assert (backend.capabilities.exact_nodes, backend.capabilities.exact_depth) == (None, None)
        assert exact_config(PAPER, backend) is PAPER


@pytest.mark.parametrize(
    ("config", "budget", "deepest", "said"),
    [
        (LookaheadConfig(), 128, 64, None),
        (LookaheadConfig(suffix_length=16), 128, 16, None),
        (LookaheadConfig(suffix_length=80), 128, 64, "the depth of draft tokens from 80 to 64"),
        (LookaheadConfig(budget=300), 256, 64, "the budget from 300 to 256 tokens"),
        (
            LookaheadConfig(budget=300, suffix_length=80),
            256,
            64,
            "the budget from 300 to 256 tokens and the depth of draft tokens from 80",
        ),
        (LookaheadConfig.paper(15, 5, 15), 121, 64, None),
        (LookaheadConfig.paper(30, 8, 30), 256, 64, "the budget from 421 to 256"),
        (LookaheadConfig.paper(2, 70, 1), 208, 64, "the depth of draft tokens from 69 to 64"),
        (LookaheadConfig.jacobi(64), 65, 64, None),
        (
            LookaheadConfig.jacobi(80),
            65,
            64,
            "the budget from 81 to 65 tokens and the depth of draft tokens from 80 to 64",
        ),
        (LookaheadConfig(budget=300, exact=False), 300, 64, None),
    ],
)
def test_a_config_is_fitted_with_one_line(
    half: GraphBackend, config: LookaheadConfig, budget: int, deepest: int, said: str | None
) -> None:
    lines: list[str] = []
    fitted = exact_config(config, half, lines.append)
    assert (fitted.budget, fitted.deepest) == (budget, deepest)
    assert fitted == replace(config, budget=budget, max_depth=fitted.max_depth)
    assert [said in line for line in lines if said] == ([True] if said else [])
    assert len(lines) == (said is not None)
    assert exact_config(fitted, half, lines.append) is fitted


def test_a_window_that_does_not_fit_is_refused_with_the_nearest(half: GraphBackend) -> None:
    with pytest.raises(ValueError, match=r"window=40 with ngram=8 fills 280 .* exact up to 256 .* window=36"):
        exact_config(PAPER, half)
    assert exact_config(LookaheadConfig.paper(36, 8, 40), half).budget == 256
    loose = LookaheadConfig.paper(40, 8, 40, exact=False)
    assert exact_config(loose, half) is loose


@pytest.mark.parametrize("config", [LookaheadConfig(budget=300), LookaheadConfig(suffix_length=80), PAPER])
def test_the_engine_takes_no_config_that_was_not_fitted(half: GraphBackend, config: LookaheadConfig) -> None:
    """Whoever forgets to fit it."""
    with pytest.raises(ValueError, match="exact"):
        Engine(half).submit(Request(DecodingSequence(PROMPTS[0], config)))


def step_sizes(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Of all steps to come, each tree's nodes and the depth of its deepest guess."""
    sizes, launch = list[list[tuple[int, int]]](), backend.launch

    def note(inputs: Sequence[StepInput]) -> Any:
        sizes.append([(item.tree.size, max(item.tree.depths[item.tree.branch :], default=0)) for item in inputs])
        return launch(inputs)

    monkeypatch.setattr(backend, "launch", note)
    return sizes


REPEATED = [1, *random.Random(1).choices(range(VOCABULARY), k=60)] * 3
"""A long match from the first step on."""


def test_generate_keeps_to_the_limits(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every answer of a config that asks for more, and one line in the log for each such config."""
    lm = lookahead.LookaheadModel(tiny("Llama").to(torch.bfloat16), tokenizer, "tiny", backend="graph")
    sizes, config = step_sizes(lm.backend, monkeypatch), LookaheadConfig(window=0, budget=300, suffix_length=80)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="lookahead"):
        for _ in range(3):
            out = lm._answer(REPEATED, RequestSettings(config=config, max_tokens=90))
            lm.run([out])
            assert out.request.sequence.config.budget == 256
        with pytest.raises(ValueError, match="window=36"):
            lm.generate(REPEATED, config=PAPER)
    assert max(nodes for step in sizes for nodes, _ in step) <= 256
    assert max(depth for step in sizes for _, depth in step) == 64
    assert [record.message for record in caplog.records if record.name.startswith("lookahead")] == [
        "note: lowered the budget from 300 to 256 tokens and the depth of draft tokens from 80 to 64: "
        "more is not exact in bfloat16 on this backend (exact=False allows it)"
    ]
    out = lm._answer(REPEATED, RequestSettings(config=replace(config, exact=False), max_tokens=90))
    lm.run([out])
    assert (out.request.sequence.config.budget, out.request.sequence.config.deepest) == (300, 80)


def test_inexact_requests_have_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that is too large takes the exactness of its pass, so no exact request is in it, nor shares its K/V."""
    backend = GraphBackend(tiny("Llama").to(torch.float16))
    kinds, choose = list[tuple[bool, list[int]]](), backend.planner.choose_kind

    def note(inputs: Sequence[StepInput], lengths: Sequence[int]) -> Any:
        kind = choose(inputs, lengths)
        kinds.append((kind.forward.invariant, [sequence.slot for sequence in inputs]))
        return kind

    monkeypatch.setattr(backend.planner, "choose_kind", note)
    engine, loose = Engine(backend), LookaheadConfig(window=0, budget=300, exact=False)
    requests = [
        Request(DecodingSequence(REPEATED, config, rules=StopRules(24)))
        for config in (loose, LookaheadConfig(), loose, without_cost(LookaheadConfig()))
    ]
    slots: dict[bool, set[int]] = {True: set(), False: set()}
    for request in requests:
        engine.submit(request)
    while engine.running:
        engine.step()
        for request in requests:
            if request.slot >= 0:
                slots[request.sequence.config.exact].add(request.slot)
    assert all(invariant or set(used) <= slots[False] for invariant, used in kinds)
    assert all(not (set(used) & slots[True] and set(used) & slots[False]) for _, used in kinds)
    assert any(not invariant for invariant, _ in kinds)
    assert requests[1].salt == requests[3].salt == ""
    assert requests[0].salt == requests[2].salt != ""


def test_deep_guesses_leave_nothing_for_others_either() -> None:
    """K/V of accepted guesses that are deeper than exact ones are, are shared with inexact requests alone."""
    engine = Engine(GraphBackend(tiny("Llama").to(torch.float16)))
    configs = (LookaheadConfig(suffix_length=80, exact=False), LookaheadConfig(exact=False), LookaheadConfig())
    requests = [Request(DecodingSequence(REPEATED, config)) for config in configs]
    for request in requests:
        engine.submit(request)
    assert [request.salt != "" for request in requests] == [True, False, False]
    assert [len(one.requests) + len(one.prefilling) for one in engine._scheduler.schedule()] == [2, 1]
    exact_anyway = Engine(GraphBackend(tiny("Llama")))  # fp32
    request = Request(DecodingSequence(REPEATED, configs[0]))
    exact_anyway.submit(request)
    assert request.salt == ""


@pytest.mark.parametrize(
    ("nodes", "budget", "window"), [(1, 1, 0), (8, 8, 0), (33, 33, 0), (128, 128, 5), (None, 128, 5)]
)
def test_the_default_fits_any_backend(nodes: int | None, budget: int, window: int) -> None:
    """A CPU whose kernels pass for small trees only, say: in int8 the window alone would be too large."""
    backend: Any = SimpleNamespace(dtype=torch.int8, capabilities=Capabilities("any", exact_nodes=nodes))
    config = default_within(backend)
    assert (config.budget, config.window) == (budget, window)


def test_the_hook_keeps_to_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("Llama").to(torch.float16)
    ids, options = torch.tensor([REPEATED]), {"max_new_tokens": 20, "do_sample": False}
    with caplog.at_level(logging.WARNING, logger="lookahead"):
        for _ in range(2):
            deep = lookahead.decoding(suffix_length=80, backend="graph")
            model.generate(ids, custom_generate=deep, **options)
    assert [("the depth of draft tokens from 80 to 64" in record.message) for record in caplog.records] == [True]
    with pytest.raises(ValueError, match="window=36"):
        model.generate(ids, custom_generate=lookahead.decoding(PAPER, backend="graph"), **options)
    loose = lookahead.decoding(PAPER, exact=False, backend="graph")
    assert model.generate(ids, custom_generate=loose, **options).shape[1] > len(REPEATED)
