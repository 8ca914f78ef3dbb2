"""Clients that go away, servers that shut down, engines that fail: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from http_server import Running, running, soon
from serve_command import run_serve_command

from lookahead.engine.request_stream import RequestStream
from lookahead.serve import life
from lookahead.serve.errors import ApiError
from lookahead.serve.reply import Reply
from lookahead.serve.settings import ServeSettings

LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "lookahead": False}


@pytest.fixture
def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server whose steps take a while, so that requests are still running when something happens to them."""
    step = server.model.engine.step

    def slower() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(server.model.engine, "step", slower)
    return server


def test_a_client_that_leaves_a_stream_cancels_it(slow: Running) -> None:
    with slow.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response is closed when it goes
        next(lines)
        assert slow.service.replies
    assert soon(lambda: not slow.model.engine.running, 2)
    assert soon(lambda: not slow.service.replies and not slow.service._states, 2)
    assert slow.service.queue.taken == 0


def test_a_client_that_leaves_a_whole_reply_cancels_it(slow: Running) -> None:
    with pytest.raises(httpx.TimeoutException), httpx.Client(base_url=slow.url, timeout=0.3) as client:
        client.post("/v1/completions", json={**LONG, "n": 3})
    assert soon(lambda: not slow.model.engine.running, 2)
    assert soon(lambda: slow.service.queue.taken == 0, 2)


def test_a_slow_reader_gets_everything_in_fewer_chunks(server: Running) -> None:
    body = {**LONG, "max_tokens": 120}
    expected = server.complete(**body)["choices"][0]["text"]
    text, chunks = "", 0
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                time.sleep(0.002)
                text += json.loads(line[6:])["choices"][0]["text"]
                chunks += 1
    assert text == expected
    assert chunks <= 120


def test_a_request_that_is_woken_after_its_end_ends_no_other() -> None:
    class Ended(RequestStream):
        def __init__(self) -> None:
            self.error = None
            self.events: list[Any] = [SimpleNamespace(finish_reason="length", error=None)]
            self.done = False  # as if the engine's thread had been stopped between its event and the end

        def take(self) -> list[Any]:  # `read` calls it
            events, self.events, self.done = self.events, [], True
            return events

    def state() -> Any:
        return SimpleState(stream=Ended(), over=False, read=lambda events: "piece")

    class SimpleState(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    async def run() -> list[Any]:
        states = [state(), state()]
        reply = Reply(states, 5.0, lambda reply: None)
        reply.wake(states[0])
        found, again = list[Any](), True
        while (pieces := await reply.next()) is not None:
            found += pieces
            if again:
                again = False
                reply.wake(states[0])
                asyncio.get_running_loop().call_later(0.05, reply.wake, states[1])
        return found

    assert asyncio.run(run()) == ["piece", "piece"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_waits_shorter_than_the_loop_can_tell_apart(loop: str) -> None:
    """uvloop counts whole milliseconds: a timer of less is no timer to it, and knows no time."""
    events = pytest.importorskip(loop).new_event_loop()

    async def run() -> None:
        async with Reply([SimpleNamespace()], 0.2, lambda reply: None) as reply:  # type: ignore[list-item]
            while True:  # until its time is over
                events.call_soon(reply.wake)
                assert await reply.next(4e-4) == []

    try:
        with pytest.raises(ApiError, match="no answer within"):
            events.run_until_complete(run())
    finally:
        events.close()


def test_a_request_that_takes_too_long(loaded: Any) -> None:
    with running(loaded, request_timeout=0.05) as server:
        answer = server.post("/v1/completions", **LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert json.loads(lines[-2][6:])["error"]["code"] == "timeout"
        assert lines[-1] == "data: [DONE]"
        assert soon(lambda: not server.model.engine.running, 2)


def test_a_client_that_stops_reading_keeps_no_place_beyond_the_time(loaded: Any) -> None:
    with running(loaded, request_timeout=2.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = {**LONG, "n": 8, "logprobs": 5, "temperature": 1, "stream": True}
        with socket.socket() as line, socket.socket(fileno=os.dup(server.server.servers[0].sockets[0].fileno())) as own:
            for one, size in ((line, socket.SO_RCVBUF), (own, socket.SO_SNDBUF)):
                one.setsockopt(socket.SOL_SOCKET, size, 4096)
            line.connect((host, int(port)))
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
            line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            assert soon(lambda: any(one.flow.write_paused for one in server.server.server_state.connections), 5)
            assert server.service.queue.taken == 8
            assert soon(lambda: server.service.queue.taken == 0, 5)
            assert soon(lambda: not loaded.engine.running, 2)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += line.recv(1 << 16)
        assert b'"code":"timeout"' in answer
        assert b"data: [DONE]" in answer


def test_comments_while_a_request_waits(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loaded.engine.step
    monkeypatch.setattr(loaded.engine, "step", lambda: (time.sleep(0.1), step())[1])
    with running(loaded, keep_alive=0.02) as server:
        body = {"prompt": "the", "max_tokens": 3, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = list(stream.iter_lines())
    assert lines.count(": waiting") >= 3
    assert "data: [DONE]" in lines


# The end.


def finish_in_thread(server: Running, body: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            found.append(client.post("/v1/completions", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    assert soon(lambda: bool(server.service.replies))
    return thread, found


def test_draining_finishes_what_runs_and_takes_nothing_new(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = loaded.generate("the", raw=True, max_tokens=100)
    step = loaded.engine.step
    monkeypatch.setattr(loaded.engine, "step", lambda: (time.sleep(0.005), step())[1])
    with running(loaded) as server:
        thread, found = finish_in_thread(server, {"prompt": "the", "max_tokens": 100, "temperature": 0})
        with httpx.Client(base_url=server.url, timeout=30) as other:
            assert other.get("/ready").status_code == 200
            server.server.begin_drain()
            refused = other.post("/v1/completions", json={"prompt": "the"})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert other.get("/ready").status_code == 503
            assert other.get("/health").status_code == 200
        thread.join(20)
        assert found[0].status_code == 200
        assert found[0].json()["choices"][0]["text"] == expected.text


def test_what_does_not_finish_in_time_gets_an_error(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loaded.engine.step
    monkeypatch.setattr(loaded.engine, "step", lambda: (time.sleep(0.02), step())[1])
    with running(loaded, drain_seconds=0.1) as server:
        thread, found = finish_in_thread(server, LONG)
        server.server.begin_drain()
        thread.join(20)
        assert found[0].status_code == 503
        assert "shut down" in found[0].json()["error"]["message"]
    assert soon(lambda: not loaded.engine.running, 2)


# The engine fails.


def test_a_failed_step_is_noticed_and_forgotten_when_it_works_again(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(loaded) as server:
        monkeypatch.setattr(loaded.backend, "launch", lambda inputs: 1 / 0)
        answer = server.post("/v1/completions", prompt="the", max_tokens=4)
        assert answer.status_code == 500
        ready = server.client.get("/ready")
        assert ready.status_code == 503
        assert "ZeroDivisionError" in ready.json()["error"]["message"]
        assert server.post("/v1/completions", prompt="the", max_tokens=4).status_code == 503
        monkeypatch.undo()
        assert soon(lambda: server.client.get("/ready").status_code == 200)
        assert server.complete(prompt="the", max_tokens=4)["choices"]


def test_the_death_of_the_engines_thread_is_an_error_for_all_and_no_hang(
    model: Any, tokenizer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lookahead

    doomed = lookahead.load((model, tokenizer), config=settings)
    with running(doomed) as server:
        step, count = doomed.engine.step, 0

        def dying() -> Any:
            nonlocal count
            count += 1
            if count > 5:
                raise SystemExit("gone")
            return step()

        def worse() -> None:
            raise OSError("cannot clean up")

        monkeypatch.setattr(doomed.engine, "step", dying)
        monkeypatch.setattr(doomed.engine, "abort", worse)
        assert server.post("/v1/completions", **LONG).status_code == 500
        for _ in range(2):
            assert server.client.get("/ready").status_code == 503
            assert server.post("/v1/completions", prompt="the", max_tokens=4).status_code == 503
        assert server.client.get("/health").status_code == 200
        assert server.service.queue.taken == 0


# The command, with real signals.


class Process:
    """`lookahead serve` as a process of its own, with a tiny model from a folder."""

    def __init__(self, folder: Path, cache: Path, *options: str) -> None:
        command = [sys.executable, "-m", "lookahead", "serve", "--model", str(folder), "--port", "0", *options]
        env = {**os.environ, "LOOKAHEAD_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        assert soon(lambda: any("serving" in line for line in self.lines) or self.process.poll() is not None, 180)
        assert self.process.poll() is None, self.lines
        self.url = next(line for line in self.lines if "serving" in line).split(" at ")[1].removesuffix("/v1\n")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def read_while_it_drains(url: str, end: Callable[[], None]) -> None:
    """A stream that has begun when the signal comes is finished."""
    stream = {"prompt": "the", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=stream, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        end()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_a_signal_drains(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(url: str) -> None:
        read_while_it_drains(url, lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert run_serve_command(loaded, tmp_path, ask, monkeypatch) == 0
    assert "curl" in capsys.readouterr().err
    assert list((tmp_path / "memory").glob("*/shared.npz"))


@pytest.mark.slow
def test_a_signal_ends_the_process(folder: Path, tmp_path: Path) -> None:
    with Process(folder, tmp_path) as first:
        assert any("curl" in line for line in first.lines)
        read_while_it_drains(first.url, lambda: first.process.send_signal(signal.SIGTERM))
        assert first.process.wait(20) == 0
    assert list((tmp_path / "memory").glob("*/shared.npz"))


@pytest.mark.slow
def test_a_killed_server_starts_again_beside_half_written_files(folder: Path, tmp_path: Path) -> None:
    with Process(folder, tmp_path) as first, httpx.Client(base_url=first.url, timeout=30) as client:
        text = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 40, "temperature": 0}).json()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(20) == 0
    (kept,) = (tmp_path / "memory").glob("*/shared.npz")
    kept.write_bytes(kept.read_bytes()[:200])
    kept.with_name("shared-x.part").write_bytes(b"half")
    with Process(folder, tmp_path) as second, httpx.Client(base_url=second.url, timeout=30) as client:
        assert kept.with_suffix(".broken").exists()
        assert not kept.with_name("shared-x.part").exists()
        again = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 40, "temperature": 0}).json()
        assert again["choices"] == text["choices"]
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            second.process.send_signal(signal.SIGTERM)
            second.process.send_signal(signal.SIGINT)
            assert second.process.wait(5) in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_only_the_command_freezes_what_is_loaded(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server inside of somebody's own process leaves the collector as it is."""
    done: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    threshold = gc.get_threshold()
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    with running(loaded):
        assert done == []
    monkeypatch.setattr(life.Server, "run", lambda server: done.append(f"run with {gc.get_threshold()[0]}"))
    life.serve(loaded, ServeSettings(), done.append)
    assert done == ["freeze", f"run with {life.YOUNG_OBJECTS}", "unfreeze"]
    assert gc.get_threshold() == threshold
