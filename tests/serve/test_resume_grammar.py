"""A reply under a grammar that is continued by another engine, after any of its tokens, is the same reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lookahead.config import SamplingParams, StopRules
from lookahead.engine.text import SharedTokenizer
from lookahead.serve.grammar import Grammars, json_grammar
from lookahead.serve.keys import KeyRing
from lookahead.serve.requests import RequestSpec, RequestState

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)])
@pytest.mark.thinned(1, most=1)
def test_every_cut_gives_the_same_json(make_json_model: Callable[[], Any], sampling: SamplingParams) -> None:
    model = make_json_model()
    grammars, tokenizer = Grammars(model), SharedTokenizer(model.tokenizer)
    owner, grammar = KeyRing((), model.memory).owners[0], json_grammar(SCHEMA)

    def run(output: list[int]) -> tuple[list[int], str | None]:
        spec = RequestSpec(model.encode("a name: ", raw=True), model.default_config, sampling, StopRules(40), owner)
        spec = replace(spec, rules=replace(spec.rules, eos_ids=model.stop_ids), mask=grammars.mask(grammar, 6))
        state = RequestState(model, tokenizer, replace(spec, output=output), 0)
        tokens = [token for event in model.client.submit(state.request) for token in event.tokens]
        return [*output, *tokens], state.sequence.finish_reason

    whole = run([])
    assert len(whole[0]) > 10
    for cut in range(len(whole[0])):
        assert run(whole[0][:cut]) == whole
