"""The examples, with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rollouts
import torch

from lookahead.generate import LookaheadModel


def test_rollouts_train_the_model_and_change_no_sample(
    make_model: Callable[..., Any], tokenizer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are made up, so that every group has better and worse samples. A model that was not told of its new
    weights would draw other samples than the one that is asked token by token: both are the same model here, so the
    texts of the last round are compared with those of a new model of its weights."""
    model = make_model()
    lm = LookaheadModel(model, tokenizer, "tiny", settings, "cpu")
    before = [parameter.clone() for parameter in model.parameters()]
    monkeypatch.setattr(rollouts, "score", lambda text, answer: float(len(text)))
    found = rollouts.train(lm, {"the fox": "dog", "once more": "fox"}, rounds=2, samples=3, tokens=8, rate=0.05)
    assert [one.equal for one in found] == [one.samples for one in found] == [6, 6]
    changed = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
    assert any(changed)
    assert not all(changed), "only the last layer is trained"
    fresh = LookaheadModel(model, tokenizer, "fresh", settings, "cpu")
    drawn = [rollouts.draw(one, lm.encode("the dog"), range(4), 12, "lookahead") for one in (lm, fresh)]
    assert [one.token_ids for one in drawn[0]] == [one.token_ids for one in drawn[1]]


def test_equal_scores_leave_the_weights_alone(lm_of_examples: Any) -> None:
    optimizer = torch.optim.SGD(lm_of_examples.model.parameters(), lr=1.0)
    before = lm_of_examples.model.lm_head.weight.clone()
    rollouts.update(lm_of_examples, optimizer, [1, 2], [[3, 4], [5]], [0.5, 0.5])
    assert torch.equal(before, lm_of_examples.model.lm_head.weight)
    rollouts.update(lm_of_examples, optimizer, [1, 2], [[3, 4], [5]], [0.5, 1.5])
    assert not torch.equal(before, lm_of_examples.model.lm_head.weight)


@pytest.fixture
def lm_of_examples(make_model: Callable[..., Any], tokenizer: Any, settings: Any) -> Any:
    return LookaheadModel(make_model(), tokenizer, "tiny", settings, "eager")
