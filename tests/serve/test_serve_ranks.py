"""A server on several ranks: what other ranks make a request from, and `lookahead serve --ranks` as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from http_server import Running, running, soon
from ray_bodies import requests, same, told
from worlds import environment

from lookahead import LookaheadConfig
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.text import StopStrings
from lookahead.serve.grammar import Grammars
from lookahead.serve.keys import KeyRing
from lookahead.serve.requests import RequestSpec
from lookahead.serve.serialize import GrammarText, GrammarTexts, spec_from_dict, spec_to_dict

PATIENCE = 120.0
LONG = {"prompt": "true", "max_tokens": 1500, "ignore_eos": True, "stream": True, "lookahead": False}


@pytest.fixture(scope="module")
def model(make_json_model: Callable[[], Any]) -> Any:
    return make_json_model()


def test_a_recipe_gives_the_same_ask(model: Any) -> None:
    owners = KeyRing(["a-long-secret", "another-secret"], model.memory).owners
    spec = RequestSpec(
        [5, 6, 7],
        LookaheadConfig.paper(3, 3, 2),
        SamplingParams(0.7, top_p=0.9, seed=4, logit_bias={3: 1.5, 4: float("-inf")}),
        StopRules(9, frozenset({0, 2}), 100, min_tokens=2),
        owners[1],
        StopStrings(["a", "bc"]),
        GrammarTexts(model).mask('start: "true"', 2),
        [8, 9],
        2,
        output=[4],
    )
    found = spec_from_dict(json.loads(json.dumps(spec_to_dict(spec, 1))), owners, GrammarTexts(model))
    for name in ("prompt", "config", "sampling", "rules", "owner", "mask", "prediction", "unsearched", "output"):
        assert getattr(found, name) == getattr(spec, name), name
    assert found.stops.stops == spec.stops.stops
    assert GrammarTexts(model).compiled(GrammarText('start: "true"', 2))._least == 2


def test_what_ranks_cannot_do_is_refused(model: Any) -> None:
    owner = KeyRing((), model.memory).owners[0]
    spec = RequestSpec([5], LookaheadConfig(), SamplingParams(logprobs=0), StopRules(), owner)
    with pytest.raises(ValueError, match=r"^logprobs: the ranks of this server exchange tokens"):
        spec_to_dict(spec, 0)
    spec.sampling, spec.mask = SamplingParams(), Grammars(model).mask('start: "true"')
    with pytest.raises(ValueError, match="only masks of grammars can be sent to other ranks"):
        spec_to_dict(spec, 0)


# The command.


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "tiny"
    model.model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


@contextmanager
def served_by(folder: Path, cache: Path, ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[str], str]]:
    """The command, what it says, and its address."""
    command = [sys.executable, "-m", "lookahead", "serve", "--model", str(folder), "--port", "0", "--backend", "eager"]
    process = subprocess.Popen(
        [*command, "--ranks", str(ranks), "--drain-seconds", "60"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(LOOKAHEAD_CACHE=str(cache)),
    )
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
    try:
        assert soon(lambda: any("serving" in line for line in said), PATIENCE), said
        url = re.search(r"http://[\d.]+:\d+", next(line for line in said if "serving" in line))
        assert url is not None
        yield process, said, url[0]
    finally:
        process.kill()
        process.wait()


def others(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks, rank 0 first."""
    return sorted(psutil.Process(process.pid).children(), key=lambda child: child.environ()["RANK"])


@pytest.fixture(scope="module")
def one_process(model: Any) -> Iterator[Running]:
    with running(model, model_name="tiny") as one:
        yield one


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does_and_drain(folder: Path, tmp_path: Path, one_process: Running) -> None:
    mixed = [one for one in requests(24) if "logprobs" not in one[1]]
    assert len(mixed) > 10
    with served_by(folder, tmp_path, 2) as (process, said, url), httpx.Client(base_url=url, timeout=PATIENCE) as client:

        def send(request: tuple[str, dict[str, Any]]) -> Any:
            answer = client.post(request[0], json=request[1])
            assert answer.status_code == 200, answer.text
            return told(answer.json())

        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(send, mixed))
        for (path, body), one in zip(mixed, found, strict=True):
            assert same(one, told(one_process.post(path, **body).json())), body
        refused = client.post("/v1/completions", json={"prompt": "x", "logprobs": 1})
        assert refused.status_code == 400
        assert "the ranks of this server exchange tokens" in refused.json()["error"]["message"]
        leave_early(client)
        body = {**LONG, "max_tokens": 200, "temperature": 1, "seed": 5}
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not text:
                        process.send_signal(signal.SIGTERM)
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == one_process.complete(**{**body, "stream": False})["choices"][0]["text"]
        assert process.wait(PATIENCE) == 0, said
        assert not any("Traceback" in line for line in said), said


def leave_early(client: httpx.Client) -> None:
    """A client that goes away: its sequence is cancelled on all ranks, and the next request is answered."""
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    assert client.post("/v1/completions", json={"prompt": "true"}).status_code == 200
    assert soon(lambda: 'lookahead:num_requests_running{model_name="tiny"} 0.0' in client.get("/metrics").text)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_dies_ends_the_server(folder: Path, tmp_path: Path, busy: bool) -> None:
    with served_by(folder, tmp_path, 2) as (process, said, url):
        ranks = others(process)
        assert len(ranks) == 2
        if busy:
            with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=PATIENCE) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(ranks[1].pid, signal.SIGKILL)
                try:
                    rest = [line for line in lines if line.startswith("data: ")]
                    assert any("error" in line for line in rest), rest[-3:]
                except httpx.HTTPError:  # the server was gone before it could say so
                    pass
        else:
            os.kill(ranks[1].pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == 1
        assert soon(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks))
        assert any("rank 1 was ended by SIGKILL" in line or "rank 1 has died" in line for line in said), said
