"""Weights that are changed in place between two requests, as training does: the text is that of a new model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import slow_but
from toys import ToyBackend

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.engine.settings import RequestSettings
from lookahead.generate import LookaheadModel
from lookahead.models.facts import UnsupportedModelError

PROMPT = 3 * "the quick brown fox jumps over the lazy dog and then the other fox jumps too; "
"""Longer than a page of K/V."""


@torch.no_grad()
def change(model: Any, scale: float = 0.3) -> None:
    """Every weight a little, in place, and always in the same way."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=generator))


def texts(lm: LookaheadModel) -> list[list[int]]:
    """Greedy and sampled, with and without lookahead. The second request finds the first one's keys and values."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    found = []
    for settings in ({}, sampled, {"method": "autoregressive"}, {**sampled, "method": "autoregressive"}):
        found.append(lm.generate(PROMPT, max_tokens=8, **settings).token_ids)
    assert found[:2] == found[2:]
    return found[:2]


@pytest.mark.parametrize("backend", ["eager", "cpu", "graph"])
@pytest.mark.parametrize("tied", slow_but([False, True], True))
@pytest.mark.thinned(1, most=1)
def test_a_change_in_place_is_as_a_new_model(
    backend: str, tied: bool, make_model: Callable[..., Any], tokenizer: Any, settings: Any
) -> None:
    if backend == "cpu":
        pytest.importorskip("onnxruntime")
    model = make_model(tie_word_embeddings=tied)
    fresh = copy.deepcopy(model)
    change(fresh)
    expected = texts(LookaheadModel(fresh, tokenizer, "fresh", settings, backend))
    lm = LookaheadModel(model, tokenizer, "changed", settings, backend)
    before = texts(lm)
    change(lm.model)
    lm.reload_weights()
    assert texts(lm) == expected
    assert all(one != other for one, other in zip(before, expected, strict=True)), "the change must change the texts"
    change(lm.model, -0.2)
    lm.reload_weights()
    assert texts(lm) != expected, "and a second change, too"


def test_keys_and_values_of_other_weights_are_not_found(
    make_model: Callable[..., Any], tokenizer: Any, settings: Any
) -> None:
    lm = LookaheadModel(make_model(), tokenizer, "tiny", settings, "graph")

    def hits() -> int:
        before = lm.backend.cache_use().hit_tokens
        lm.generate(PROMPT, max_tokens=2)
        return int(lm.backend.cache_use().hit_tokens - before)

    def steps_hits() -> int:
        """As `hits`, by an engine of its own."""
        before = lm.backend.cache_use().hit_tokens
        for _ in lm.steps(PROMPT, RequestSettings(max_tokens=2)):
            pass
        return int(lm.backend.cache_use().hit_tokens - before)

    assert hits() == 0
    assert hits() > 0
    lm.reload_weights()
    assert steps_hits() == 0
    assert hits() > 0
    open_steps = lm.steps(PROMPT, RequestSettings(max_tokens=8))
    next(open_steps)
    with pytest.raises(RuntimeError, match="1 sequences are open; change the weights when they have ended"):
        lm.reload_weights()
    open_steps.close()
    lm.reload_weights()
    assert hits() == 0


def test_replaced_tensors_that_captured_steps_cannot_read_are_refused(
    make_model: Callable[..., Any], tokenizer: Any, settings: Any
) -> None:
    lm = LookaheadModel(make_model(), tokenizer, "tiny", settings, "graph")
    lm.model.model.norm.weight = torch.nn.Parameter(torch.ones_like(lm.model.model.norm.weight))
    with pytest.raises(UnsupportedModelError, match="change weights in place"):
        lm.reload_weights()


def test_weights_do_not_change_within_a_request() -> None:
    engine = Engine(ToyBackend())
    engine.submit(Request(DecodingSequence([1, 2, 3])))
    with pytest.raises(RuntimeError, match="1 requests run"):
        engine.reload_weights()
