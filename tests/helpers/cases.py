"""Random requests for the parity tests: the same decoded by one process and by worlds of several."""

from __future__ import annotations

import random
from typing import Any

from tiny import PROMPTS, run, tiny

from lookahead import LookaheadConfig
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.config import SamplingParams


def random_cases(seed: int, count: int, tokens: int = 24) -> list[dict[str, Any]]:
    """W, N, G, K, sampling, batch and backend by chance; every second case is greedy, every third the paper's."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        window, ngram, guesses = rng.choice([0, 1, 3, 5, 8]), rng.randint(2, 6), rng.randint(0, 8)
        sampling = (
            {} if number % 2 else {"temperature": rng.uniform(0.5, 1.5), "top_k": 20, "top_p": 0.95, "seed": number}
        )
        config: dict[str, Any] = {"window": window, "ngram": ngram, "guesses": guesses}
        if number % 3:
            config["budget"] = max(1, window * (ngram - 1)) + rng.randint(0, 60)
        cases.append(
            {
                "config": config,
                "sampling": sampling,
                "prompts": rng.sample(range(len(PROMPTS)), rng.choice([1, 1, 2, 4])),
                "backend": "graph" if number % 4 == 1 else "eager",
                "tokens": tokens,
            }
        )
    return cases


def backend_of(case: dict[str, Any], model: Any) -> Any:
    return GraphBackend(model) if case["backend"] == "graph" else EagerBackend(model, probed=False)


def config_of(case: dict[str, Any]) -> LookaheadConfig:
    if "budget" in case["config"]:
        return LookaheadConfig(**case["config"])
    return LookaheadConfig.paper(**case["config"], prompt=True)


def decode(backend: Any, case: dict[str, Any]) -> dict[str, Any]:
    prompts = [PROMPTS[i] for i in case["prompts"]]
    done = run(backend, prompts, config_of(case), case["tokens"], SamplingParams(**case["sampling"]))
    return {
        "outputs": [sequence.output for sequence in done],
        "steps_each": [sequence.stats.steps for sequence in done],
    }


def decode_alone(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases decoded by this process."""
    model = tiny("Llama")
    return [decode(backend_of(case, model), case) for case in cases]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """A world's tokens and steps are those of one process."""
    assert found["outputs"] == expected["outputs"]
    assert found["steps_each"] == expected["steps_each"]
