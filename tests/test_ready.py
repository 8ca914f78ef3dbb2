"""Ready means ready: once a server is, no request waits while a step is compiled or captured. On a CPU nothing is
captured, but the kinds of steps that would be are counted alike."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from lookahead import LookaheadConfig, LookaheadModel
from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost
from lookahead.engine.engine import Engine
from lookahead.engine.settings import RequestSettings

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
STREAMS = 6
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"lookahead": False},
    {"lookahead": False, "temperature": 0.7, "seed": 4},
    {"frequency_penalty": 0.5, "logit_bias": {"30": 2}},
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.4, "logprobs": 2},
    {"lookahead": {"window": 3, "ngram": 4, "guesses": 4}},
]


@pytest.fixture(params=DEVICES)
def made(request: pytest.FixtureRequest, make_model: Any, tokenizer: Any) -> LookaheadModel:
    dtype = torch.bfloat16 if request.param == "cuda" else torch.float16  # not every CPU multiplies bf16 matrices fast
    model = make_model(max_position_embeddings=1024).to(dtype).to(request.param)
    return LookaheadModel(model, tokenizer, "ready", without_cost(LookaheadConfig()), backend="graph")


def test_nothing_is_captured_once_a_server_is_ready(made: LookaheadModel) -> None:
    for package in ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance"):
        pytest.importorskip(package, reason=f"the server needs {package}")
    from http_server import running

    rng, count = random.Random(0), (5 if made.device.type == "cuda" else 2) * len(KINDS)
    words = ["the", "quick", "fox", "and", "a", "lazy", "dog", "end"]

    def ask(number: int) -> str:
        prompt = " ".join(rng.choices(words, k=rng.choice([1, 4, 60])))
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **KINDS[number % len(KINDS)]}
        posted = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(posted, timeout=300) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with running(made, max_concurrency=STREAMS) as server:
        ready = made.backend.captures
        assert ready > 100
        with ThreadPoolExecutor(STREAMS) as pool:
            assert len(list(pool.map(ask, range(count)))) == count
        assert made.backend.captures == ready
        with urlopen(f"{server.url}/metrics", timeout=60) as answer:
            found = [
                line for line in answer.read().decode().splitlines() if line.startswith("lookahead:captures_total")
            ]
        assert [float(line.rsplit(" ", 1)[1]) for line in found] == [ready]


@pytest.mark.slow
def test_a_model_that_is_prepared_captures_nothing_for_one_answer(made: LookaheadModel) -> None:
    assert made.backend.captures < 20  # those of the probe
    said: list[str] = []
    before = made.backend.captures
    assert made.prepare(log=said.append) >= 0
    ready = made.backend.captures
    assert [line.split(" in ")[0] for line in said] == [f"captured {ready - before} parts of steps"]
    assert re.search(r" s \(so far: search \d+\.\d s, compile \d+\.\d s, capture \d+\.\d s\)$", said[0])
    for options in ({}, {"temperature": 0.8, "seed": 1}, {"logprobs": 2}, {"repetition_penalty": 1.2}):
        for prompt in ([5], [7, 8, 9] * 40):
            made.generate(prompt, max_tokens=6, **options)
            made.generate(prompt, max_tokens=6, method="autoregressive", **options)
    assert made.backend.captures == ready
    made.prepare(log=said.append)
    assert (made.backend.captures, len(said)) == (ready, 1)


def test_the_time_of_a_capture_is_not_noted(made: LookaheadModel) -> None:
    """The engine's times of passes are of passes alone."""
    cost = PassCost([0.01] * 512)
    engine = Engine(made.backend, DraftBudget(cost))
    noted: list[int] = []
    cost.record_pass = lambda rows, seconds, reads=0.0: noted.append(rows)  # type: ignore[method-assign]
    captures = list[int]()
    for _ in range(2):
        answer = made._answer([5, 6, 7] * 40, RequestSettings(max_tokens=8, method="autoregressive", logprobs=1))
        engine.submit(answer.request)
        while engine.running:
            before = made.backend.captures
            count = len(noted)
            engine.step()
            captures.append(made.backend.captures - before)
            assert (len(noted) > count) is (captures[-1] == 0)
    assert captures[0] > 0 == captures[-1]
