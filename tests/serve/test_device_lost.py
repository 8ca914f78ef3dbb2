"""A server whose device is lost or full: clients are told in one line, and a lost device ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
import torch
from http_server import Running, soon
from serve_command import run_serve_command

import lookahead
from lookahead.backends.failures import DeviceError, DeviceMemoryError
from lookahead.cli.common import DEVICE_LOST
from lookahead.serve import life
from lookahead.serve.errors import ApiError
from lookahead.serve.settings import ServeSettings
from lookahead.serve.tokens import health

LOST = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' ...\n"
LINE = "is lost (CUDA error: an illegal memory access was encountered); no call of this process can use it"
REQUEST = " lookahead.serve INFO: request "
READY = ("serving ", "see it in ", "try: ")
"""How the lines of a server that is ready begin."""
LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "lookahead": False}


@pytest.fixture
def doomed(model: Any, tokenizer: Any, settings: Any) -> Any:
    return lookahead.load((model, tokenizer), config=settings)


@pytest.fixture
def server(doomed: Any) -> Iterator[Running]:
    """A server that may end by itself."""
    one = Running(doomed)
    yield one
    if one.thread.is_alive():
        one.stop()


def lose(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its next step on, the model's device is lost."""

    def lost(*args: Any) -> Any:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(model.backend, "launch", lost)


def asked_health(server: Running) -> Any:
    return asyncio.run(health(SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=server.service)))))


def test_a_lost_device_ends_all_replies_and_the_server(
    server: Running, doomed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked_health(server).status_code == 200
    with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        lose(doomed, monkeypatch)
        rest = [line for line in lines if line.startswith("data: ")]
    told = json.loads(rest[-2][6:])["error"]
    assert LINE in told["message"]
    assert told["code"] == "unavailable"
    server.thread.join(20)
    assert not server.thread.is_alive()
    assert server.service.queue.taken == 0
    answer = asked_health(server)
    assert answer.status_code == 503
    assert LINE in json.loads(answer.body)["error"]["message"]
    for check in (server.service.check_ready, server.service.check_open):
        with pytest.raises(ApiError, match="illegal memory access") as refused:
            check()
        assert refused.value.status == 503
    assert not any(record.exc_info for record in caplog.records), "one line, and no traceback"


def test_a_server_that_drains_does_not_wait_for_a_lost_device(
    server: Running, doomed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", **LONG)))
    thread.start()
    assert soon(lambda: bool(doomed.engine.running))
    server.server.begin_drain()
    lose(doomed, monkeypatch)
    server.thread.join(20)
    thread.join(20)
    assert not server.thread.is_alive()
    assert found[0].status_code == 503


def test_serving_in_a_program_of_ones_own_raises(doomed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(doomed, monkeypatch)
    with pytest.raises(DeviceError):
        doomed.generate("the fox", max_tokens=4)
    monkeypatch.setattr(life.Server, "run", lambda server: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(doomed, "prepare", lambda *args: 0.0)
    with pytest.raises(DeviceError, match="illegal memory access"):
        life.serve(doomed, ServeSettings(port=0), lambda line: None)


def test_a_request_without_memory_is_refused_in_one_line_and_the_others_go_on(
    server: Running, doomed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = doomed.backend.launch

    def limited(inputs: Any) -> Any:
        if any(len(item.chunk) > 20 for item in inputs):
            raise DeviceMemoryError("a step of 64 tokens needs 2.00 GiB of memory; lower kv_tokens")
        return launch(inputs)

    monkeypatch.setattr(doomed.backend, "launch", limited)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(server.post("/v1/completions", **LONG)))
    other.start()
    assert soon(lambda: bool(doomed.engine.running))
    answer = server.post("/v1/completions", prompt="the fox " * 30, max_tokens=4)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["message"] == "a step of 64 tokens needs 2.00 GiB of memory; lower kv_tokens"
    assert error["code"] == "out_of_memory"
    other.join(60)
    assert found[0].status_code == 200
    assert server.client.get("/ready").status_code == 200
    assert server.complete(prompt="the", max_tokens=4)["choices"]
    assert not any(record.exc_info for record in caplog.records)


def test_the_command_ends_with_one_line_and_a_code_of_its_own(
    doomed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In this process; the next test starts one."""
    found: list[str] = []

    def ask(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            lose(doomed, monkeypatch)
            found.extend(line for line in lines if line.startswith("data: "))

    assert run_serve_command(doomed, tmp_path, ask, monkeypatch) == DEVICE_LOST == 70
    assert LINE in json.loads(found[-2][6:])["error"]["message"]
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(READY)]
    said = [line for line in lines if REQUEST not in line]
    assert sum(" status=503 " in line for line in lines) == 1
    assert len(said) == 1, said
    assert said[0].startswith("error: the device cpu is lost (CUDA error: an illegal memory access")
    assert list((tmp_path / "memory").glob("*/shared.npz"))


SCRIPT = """
import os, sys
import torch
import lookahead
from lookahead.cli import main

real = lookahead.load

def load(*args, **options):
    model = real(*args, **options)
    launch = model.backend.launch

    def faulty(inputs):
        if os.path.exists(sys.argv[-1]):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nSearch for ...")
        return launch(inputs)

    model.backend.launch = faulty
    return model

lookahead.load = load
main(sys.argv[1:-1])
"""


@pytest.mark.slow
def test_the_process_of_the_command_ends(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder, flag = tmp_path / "model", tmp_path / "lost"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = [sys.executable, "-c", SCRIPT, "serve", "--model", str(folder), "--port", "0", str(flag)]
    env = {**os.environ, "LOOKAHEAD_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if "serving" in line).split(" at ")[1].removesuffix("/v1\n")
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            flag.touch()
            rest = [line for line in lines if line.startswith("data: ")]
        assert LINE in json.loads(rest[-2][6:])["error"]["message"]
        assert process.wait(30) == DEVICE_LOST == 70
        said = [line for line in process.stderr if not line.startswith(READY) and REQUEST not in line]
    finally:
        process.kill()
        process.wait(10)
    assert len(said) == 1, said
    assert list((tmp_path / "memory").glob("*/shared.npz"))
    assert said[0].startswith("error: the device cpu is lost (CUDA error: an illegal memory access")
