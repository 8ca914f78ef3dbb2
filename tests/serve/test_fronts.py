"""Front processes: the same replies as from one process, and nothing lost when one of the processes dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fronts import Behind, behind
from http_server import Running, soon

from lookahead.backends.failures import DeviceError
from lookahead.engine.request import Event, TokenLogprobs
from lookahead.serve.fronts import run as run_module
from lookahead.serve.fronts.link import LENGTH, Drain, Status, frame, packed, read, unpacked
from lookahead.serve.fronts.run import Fronts, FrontsError, default_fronts, serve
from lookahead.serve.settings import ServeSettings
from lookahead.serve.sockets import bound
from lookahead.serve.wire import Chunk
from lookahead.stats import Stats

LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "lookahead": False}
TEXT = "the fox and the dog and the fox"
CHAT = [{"role": "user", "content": "the dog"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def front(server: Running) -> Iterator[Behind]:
    with behind(server.model) as one:
        yield one


@pytest.fixture
def slow(front: Behind, monkeypatch: pytest.MonkeyPatch) -> Behind:
    """Steps take a while, so that requests are still running when something happens to them."""
    step = front.model.engine.step

    def slower() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(front.model.engine, "step", slower)
    return front


def same(answer: Any) -> Any:
    """A reply without what differs from one to the next."""
    if isinstance(answer, dict):
        return {
            key: same(value) for key, value in answer.items() if key not in ("id", "created", "created_at", "seconds")
        }
    return [same(value) for value in answer] if isinstance(answer, list) else answer


def events(one: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The joined text and the other parts of a stream: chunks may hold one step or several."""
    text, rest = "", list[Any]()
    with one.client.stream("POST", path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in same(json.loads(line[6:])).get("choices", []):
                    text += choice.pop("text", "") or choice.get("delta", {}).pop("content", "") or ""
                    if choice.get("finish_reason"):
                        rest.append(choice["finish_reason"])
    return [text, *rest]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 30, "temperature": 0}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 30, "temperature": 0.9, "seed": 3, "top_p": 0.9}),
        ("/v1/completions", {"prompt": [TEXT, "the"], "max_tokens": 12, "n": 2, "seed": 3, "temperature": 1.1}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 9, "logprobs": 2, "temperature": 0}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "logprobs": 1, "echo": True, "temperature": 0}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 40, "stop": ["dog", " the"], "temperature": 0}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 30, "temperature": 0, "prediction": TEXT}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "temperature": 0, "frequency_penalty": 0.5}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "logit_bias": {"5": 10}, "temperature": 0}),
        ("/v1/responses", {"input": "the dog", "max_output_tokens": 20, "temperature": 0}),
        ("/v1/completions", {"prompt": "", "max_tokens": 3}),
        ("/v1/completions", {"prompt": TEXT * 2000, "max_tokens": 3}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3, "logit_bias": {"99999": 1}}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 3, "model": "another"}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.rsplit("/", 1)[1],
)
@pytest.mark.thinned(1, most=7)
def test_a_reply_is_the_same(server: Running, front: Behind, path: str, body: dict[str, Any]) -> None:
    if "prediction" in body:
        body = {**body, "prediction": {"type": "content", "content": body["prediction"]}}
    expected, found = server.post(path, **body), front.post(path, **body)
    assert found.status_code == expected.status_code
    trimmed = [same(answer.json()) for answer in (found, expected)]
    for answer in trimmed:  # what is in the cache, and guessed from it, depends on what ran before
        answer.get("usage", {}).clear()
    assert trimmed[0] == trimmed[1]
    if found.status_code == 200 and path != "/v1/responses" and not body.get("echo") and body.get("n", 1) == 1:
        assert events(front, path, body) == events(server, path, body)


def test_a_grammar_is_compiled_by_the_engines_process(json_server: Running) -> None:
    body = {
        "messages": CHAT,
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    }
    with behind(json_server.model) as one:
        found, expected = (each.post("/v1/chat/completions", **body) for each in (one, json_server))
        assert found.status_code == expected.status_code == 200
        assert same(found.json())["choices"] == same(expected.json())["choices"]
        tools = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
        asked = {"messages": CHAT, "max_tokens": 60, "temperature": 0, "tools": [tools], "tool_choice": "required"}
        found, expected = (each.post("/v1/chat/completions", **asked) for each in (one, json_server))
        calls = [same(each.json())["choices"][0]["message"].get("tool_calls") for each in (found, expected)]
        assert [same(one["function"]) for one in calls[0]] == [same(one["function"]) for one in calls[1]]


def test_steps_and_trees_arrive(front: Behind) -> None:
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "lookahead": {"steps": True, "trace": True}}
    steps = list[Any]()
    with front.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                steps += json.loads(line[6:]).get("lookahead", {}).get("steps", [])
    assert sum(len(step["tokens"]) for step in steps) == 20
    assert any(len(step["tree"]["tokens"]) > 1 for step in steps)
    assert all(step["seconds"] > 0 for step in steps)


def test_usage_has_the_engines_numbers(front: Behind) -> None:
    usage = front.complete(prompt=TEXT, max_tokens=30, temperature=0)["usage"]
    ours = usage["lookahead"]
    assert usage["completion_tokens"] == 30
    assert ours["steps"] + ours["accepted"] == 30
    assert sum(ours["by_source"].values()) == ours["accepted"]


def test_a_client_that_leaves_cancels_its_request(slow: Behind) -> None:
    with slow.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(lines := answer.iter_lines())
        assert slow.engine is not None
        assert slow.engine.running
    del lines
    assert soon(lambda: not slow.model.engine.running and not slow.engine.running, 4)
    assert soon(lambda: slow.engine.queue.taken == 0 and slow.service.queue.taken == 0, 4)


def test_all_fronts_share_one_queue(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with behind(server.model, max_concurrency=1, max_queue=0) as one, behind(server.model, one.engine) as two:
        step = one.model.engine.step
        monkeypatch.setattr(one.model.engine, "step", lambda: (time.sleep(0.01), step())[1])
        with one.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(lines := answer.iter_lines())  # kept: the response is closed when it goes
            for each in (one, two):
                refused = each.post("/v1/completions", **{**LONG, "max_tokens": 2})
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                assert int(refused.headers["retry-after"]) >= 1
            streamed = two.post("/v1/completions", **{**LONG, "max_tokens": 2, "stream": True})
            assert streamed.status_code == 429, "a stream that is refused has not begun"
            del lines
        assert soon(lambda: one.engine is not None and one.engine.queue.taken == 0)
        assert len(two.complete(prompt="the", max_tokens=2)["choices"]) == 1
        assert soon(lambda: 'status="429"} 3.0' in two.client.get("/metrics").text), "one reports twice a second"


def test_metrics_count_each_request_once(server: Running) -> None:
    with behind(server.model) as one:
        for _ in range(3):
            one.complete(prompt="the", max_tokens=4, ignore_eos=True, temperature=0)
        text = one.client.get("/metrics").text
        assert one.engine is not None
        name = one.service.name
        assert f'lookahead:generation_tokens_total{{model_name="{name}"}} 12.0' in text
        assert f'lookahead:request_success_total{{finished_reason="length",model_name="{name}"}} 3.0' in text
        assert f'lookahead:time_to_first_token_seconds_count{{model_name="{name}"}} 3.0' in text


def test_a_failed_step_fails_its_requests_alone(front: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    step, failures = front.model.engine.step, [RuntimeError("a broken step")]

    def fails() -> Any:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(front.model.engine, "step", fails)
    answer = front.post("/v1/completions", **{**LONG, "max_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert soon(lambda: front.post("/v1/completions", **{**LONG, "max_tokens": 2}).status_code == 200)


def test_a_bug_ends_one_request_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the threads of a link, where nobody would see it."""
    with behind(server.model) as one:
        assert one.engine is not None
        body = {**LONG, "max_tokens": 4}
        with monkeypatch.context() as broken:
            broken.setattr(one.engine.metrics, "observe_end", lambda *_: 1 / 0)
            answer = one.post("/v1/completions", **body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
            assert one.engine.queue.taken == 0
        with monkeypatch.context() as broken:
            broken.setattr(type(one.engine.metrics), "text", lambda *_: 1 / 0)
            assert one.client.get("/metrics").status_code == 500
        assert one.post("/v1/completions", **body).status_code == 200
        assert one.client.get("/metrics").status_code == 200
        assert not one.engine.running


def test_a_drain_that_comes_before_the_front_listens(server: Running) -> None:
    with behind(server.model) as one:
        one.link.send(Drain())
        one.thread.join(20)
        assert not one.thread.is_alive()

    class Early(Behind):
        def make(self, settings: Any) -> Any:
            made = super().make(settings)
            self.link.send(Drain())
            return made

    early = Early.__new__(Early)
    with contextlib.suppress(AssertionError):  # it may end before it has been seen to listen
        early.__init__(server.model)  # type: ignore[misc]
    early.thread.join(20)
    assert not early.thread.is_alive()
    early.link.close()


def test_a_front_that_is_gone_leaves_nothing_behind(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = server.model.engine.step
    monkeypatch.setattr(server.model.engine, "step", lambda: (time.sleep(0.01), step())[1])
    with behind(server.model) as one:
        with one.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(lines := answer.iter_lines())
            one.theirs.shutdown(socket.SHUT_RDWR)
            rest = "".join(lines)
        assert "the engine's process has ended" in rest  # as the front sees it
        assert soon(lambda: not server.model.engine.running)
        assert one.engine is not None
        assert soon(lambda: one.engine is not None and not one.engine.running and one.engine.queue.taken == 0)
        assert soon(lambda: one.link.ended.is_set())
        one.thread.join(20)
        assert not one.thread.is_alive(), "a front without an engine ends"


def test_a_lost_device_is_said_to_every_client(make_json_model: Any) -> None:
    model = make_json_model()
    with behind(model) as one:
        step = model.engine.step

        def lost() -> Any:
            raise DeviceError("the device is lost: a test")

        model.engine.step = lost
        try:
            answer = one.post("/v1/completions", **{**LONG, "max_tokens": 2})
        finally:
            model.engine.step = step
        assert answer.status_code == 503
        assert "the device is lost: a test" in answer.json()["error"]["message"]
        assert one.engine is not None
        assert isinstance(one.engine.lost, DeviceError)


def test_messages_arrive_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    data = frame({"numbers": list(range(5000))}) + frame("end")

    def write() -> None:
        for start in range(0, len(data), 777):
            ours.sendall(data[start : start + 777])
        ours.close()

    thread = threading.Thread(target=write)
    thread.start()
    assert read(theirs) == {"numbers": list(range(5000))}
    assert read(theirs) == "end"
    with pytest.raises(EOFError):
        read(theirs)
    thread.join()
    assert LENGTH.unpack(data[:4])[0] < len(data)


def test_chunks_survive_the_link() -> None:
    request: Any = object()
    logprobs = [TokenLogprobs(-0.5, [(3, -0.5)])]
    plain = Event(request, [1, 2], None, [4], 7)
    rich = Event(request, [3], "length", (), 0, None, logprobs, 0.25, ["suffix"])
    for chunk in (
        Chunk(5, [plain]),
        Chunk(0, [plain, rich], "", 3, 2, Stats(prompt_tokens=4)),
        Chunk(9, [], error={"status": 503}),
    ):
        found = unpacked(packed(chunk), request)
        assert found.at == chunk.at
        assert (found.cached, found.predicted, found.stats, found.error) == (
            chunk.cached,
            chunk.predicted,
            chunk.stats,
            chunk.error,
        )
        for one, other in zip(found.events, chunk.events, strict=True):
            assert (one.tokens, one.finish_reason, list(one.path), one.tried) == (
                other.tokens,
                other.finish_reason,
                list(other.path),
                other.tried,
            )
            assert (one.logprobs, one.seconds, list(one.sources)) == (other.logprobs, other.seconds, [*other.sources])


def test_the_number_of_fronts_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, fronts in ((2, 0), (7, 0), (8, 1), (192, 1)):
        monkeypatch.setattr("lookahead.serve.fronts.run.cores", lambda cores=cores: cores)
        assert default_fronts() == fronts
    with pytest.raises(ValueError, match="fronts=99 must be from 0"):
        Fronts(99, [])


class FakeFront:
    """In place of a process."""

    def __init__(self, sockets: Any) -> None:
        self.process, self.sent, self.is_ready = SimpleNamespace(returncode=3, poll=lambda: 3), list[Any](), False

    def connect(self, service: Any, facts: Any) -> None:
        self.sent.append("facts")

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def end(self) -> None:
        self.sent.append("end")


def test_fronts_that_keep_dying_end_the_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "Front", FakeFront)
    fronts = Fronts(1, [])
    fronts.connect(server.service)  # type: ignore[arg-type]
    status = Status("the engine has failed (a test)")
    for _ in range(run_module.MOST_RESTARTS):
        (front,) = fronts.ended
        fronts.restart(front, status)
        (new,) = fronts.fronts
        assert new is not front
        assert new.sent == ["facts", status]  # type: ignore[attr-defined]
    with pytest.raises(FrontsError, match=r"have died 6 times in a minute \(exit code 3\)"):
        fronts.restart(fronts.fronts[0], status)


@pytest.mark.slow
def test_a_front_imports_nothing_from_the_folder_it_starts_in(tmp_path: Path) -> None:
    for name in ("secrets", "queue", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the current folder')\n")
    program = run_module.START.replace("main(sys.argv[2:])", "print(main.__module__)")
    source = str(Path(run_module.__file__).resolve().parents[3])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program, source], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "lookahead.serve.fronts.front"), done.stderr


SERVER = """
import signal, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from json_model import HERMES, json_model, json_tokenizer
from lookahead import LookaheadConfig
from lookahead.serve.fronts.run import Fronts, serve
from lookahead.serve.settings import ServeSettings
from lookahead.serve.sockets import bound
settings = ServeSettings(port=0, drain_seconds=20)
with bound(settings.host, settings.port) as sockets, Fronts(1, sockets) as fronts:
    model = json_model(LookaheadConfig(window=3, ngram=4, guesses=4, budget=40), json_tokenizer(HERMES))
    serve(model, settings, lambda line: print(line, flush=True), fronts)
print("the end", flush=True)
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a front in processes of their own, and its address."""
    helpers = str(Path(__file__).parents[1] / "helpers")
    command = [sys.executable, "-c", SERVER.format(helpers=helpers)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        line = started.stdout.readline()
        assert line.startswith("serving "), line
        yield started, line.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        for pid in fronts_of(started.pid):
            os.kill(pid, signal.SIGKILL)
        started.kill()
        started.wait()
        started.stdout.close()


def fronts_of(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in found.split()]


def complete(url: str, **body: Any) -> dict[str, Any]:
    data = json.dumps({"prompt": "{", "temperature": 0, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_a_front_process_serves_and_drains(make_json_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is in this process: its start would take as long as the front's."""
    model, lines, replies = make_json_model(), list[str](), list[Any]()
    expected = model.generate(model.encode("{", raw=True), max_tokens=20).text
    monkeypatch.setattr(run_module, "serving_process", contextlib.nullcontext)  # the tests' process goes on
    monkeypatch.setattr(run_module, "keep_from_collection", lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def use() -> None:
        try:
            if soon(lambda: lines, 60):
                url = lines[0].splitlines()[0].split(" at ")[1].strip().removesuffix("/v1")
                replies.append(complete(url, max_tokens=20, ignore_eos=False))
        finally:
            if lines:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                fronts.fronts[0].process.kill()

    try:
        with bound("127.0.0.1", 0) as sockets, Fronts(1, sockets) as fronts:
            thread = threading.Thread(target=use)
            thread.start()
            serve(model, ServeSettings(port=0, drain_seconds=20), lines.append, fronts)
            thread.join(20)
            assert fronts.fronts[0].process.wait(20) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert replies[0]["choices"][0]["text"] == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_front_that_dies_is_replaced_and_the_server_drains(process: tuple[Any, str]) -> None:
    server, url = process
    expected = complete(url, max_tokens=20)["choices"]
    (front,) = fronts_of(server.pid)
    os.kill(front, signal.SIGKILL)
    assert soon(lambda: fronts_of(server.pid) not in ([], [front]))
    assert complete(url, max_tokens=20)["choices"] == expected  # it waits until the new front listens
    replies = list[Any]()
    thread = threading.Thread(target=lambda: replies.append(complete(url, max_tokens=150)))
    thread.start()
    time.sleep(0.2)
    for pid in (*fronts_of(server.pid), server.pid):  # a supervisor may send it to all
        os.kill(pid, signal.SIGTERM)
    thread.join(30)
    assert replies[0]["usage"]["completion_tokens"] == 150, "a reply in progress is finished"
    assert server.wait(30) == 0
    assert "the end" in server.stdout.read()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_an_engine_that_dies_ends_its_fronts(process: tuple[Any, str]) -> None:
    server, url = process
    (front,) = fronts_of(server.pid)
    data = json.dumps({"prompt": "{", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        server.kill()
        assert "the engine's process has ended" in answer.read().decode()
    assert soon(lambda: not Path(f"/proc/{front}").exists() or "Z" in Path(f"/proc/{front}/stat").read_text())
