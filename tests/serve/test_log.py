"""The log: a line per request when it ends, ids on every response, and nothing in a line that a client could forge."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from http_server import Running, running, soon
from serve_command import run_serve_command

from lookahead.serve.logs import JsonFormatter, TextFormatter, escaped, fields_of, logging_to_stderr
from lookahead.serve.records import request_id, shown_path

BODY: dict[str, Any] = {"prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
FIELDS = {
    "method",
    "path",
    "status",
    "ms",
    "ttft_ms",
    "prompt_tokens",
    "output_tokens",
    "steps",
    "key",
    "request_id",
}
FORGED = "x\n2026-01-01 00:00:00 lookahead.serve INFO: request \x1b[31m \u2028\x85 status=200"


@pytest.fixture(scope="module")
def one(loaded: Any) -> Iterator[Running]:
    with running(loaded, keys=("first-secret name=shop", "second-secret"), log_prompts=True) as server:
        server.client.headers["Authorization"] = "Bearer first-secret"
        yield server


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, "lookahead")

    def wait(count: int) -> list[dict[str, Any]]:
        """The fields of the lines of `count` requests, and no more."""

        def found() -> list[dict[str, Any]]:
            return [dict(fields_of(record)) for record in caplog.records if record.getMessage() == "request"]

        assert soon(lambda: len(found()) >= count, 5)
        assert len(found()) == count
        return found()

    return wait


def test_a_whole_answer_is_one_line(one: Running, lines: Any) -> None:
    answer = one.post("/v1/completions", **BODY, n=2)
    (line,) = lines(1)
    usage = answer.json()["usage"]
    assert line.keys() == FIELDS
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"] == 24
    assert line["steps"] == usage["lookahead"]["steps"]
    assert line["key"] == "shop"
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert answer.headers["x-request-id"] == line["request_id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_stream_is_one_line_after_its_end(one: Running, lines: Any, path: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "stream": True}
    body |= {
        "/v1/completions": {"prompt": "the", "max_tokens": 30},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 30},
        "/v1/responses": {"input": "the", "max_output_tokens": 30},
    }[path]
    with one.client.stream("POST", path, json=body, headers={"X-Request-Id": "my-own_1"}) as answer:
        assert answer.headers.get_list("x-request-id") == ["my-own_1"]
        for _ in answer.iter_lines():
            pass
    (line,) = lines(1)
    assert (line["path"], line["status"], line["request_id"]) == (path, 200, "my-own_1")
    assert 0 < line["output_tokens"] <= 30
    assert line["steps"] >= 1
    assert 0 < line["ttft_ms"] <= line["ms"]


def test_a_scored_prompt_counts_as_prompt(one: Running, lines: Any) -> None:
    body = {"prompt": "the quick brown fox", "echo": True, "logprobs": 1, "temperature": 0}
    usage = [one.post("/v1/completions", **body, max_tokens=most).json()["usage"] for most in (0, 5)]
    for found, line in zip(usage, lines(2), strict=True):
        assert (line["prompt_tokens"], line["output_tokens"]) == (found["prompt_tokens"], found["completion_tokens"])
        assert line["steps"] >= 1


def test_refusals_and_other_paths_are_lines_too(one: Running, lines: Any) -> None:
    asked = [
        one.client.get("/health"),
        one.post("/v1/completions", prompt="x", max_tokens=-1),
        one.client.get("/no%0athing?secret=1"),
        one.client.get("/v1/models", headers={"Authorization": "Bearer wrong-secret"}),
        one.client.post("/v1/completions", content=b"x", headers={"Content-Type": "text/plain"}),
    ]
    found = lines(5)
    assert [line["status"] for line in found] == [200, 400, 404, 401, 415]
    assert [line["key"] for line in found] == [None, "shop", "shop", None, "shop"]
    assert [line["request_id"] for line in found] == [answer.headers["x-request-id"] for answer in asked]
    assert found[2]["path"] == "/no%0Athing"
    assert all(line["steps"] is line["ttft_ms"] is line["output_tokens"] is None for line in found)


def test_an_exception_is_a_500_with_an_id(one: Running, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str | None) -> None:
        raise OSError("a secret detail")

    monkeypatch.setattr(one.service, "check_model", broken)
    answer = one.post("/v1/completions", **BODY)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal"
    (line,) = lines(1)
    assert (line["status"], line["request_id"]) == (500, answer.headers["x-request-id"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_a_499(one: Running, lines: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    step = one.model.engine.step
    monkeypatch.setattr(one.model.engine, "step", lambda: (time.sleep(0.01), step())[1])
    content = json.dumps({**BODY, "max_tokens": 400, "lookahead": False, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer second-secret\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    host, port = one.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(head.encode() + content)
        assert soon(lambda: bool(one.model.engine.running))
        time.sleep(0.1)
    (found,) = lines(1)
    assert (found["status"], found["key"]) == (499, "key-2")
    assert 0 < found["output_tokens"] < 400
    assert one.service.metrics.refused["503"] == 0


def test_a_stream_that_fails_has_the_status_of_its_error(loaded: Any, lines: Any) -> None:
    with running(loaded, request_timeout=0.05) as server:
        body = {**BODY, "max_tokens": 400, "lookahead": False, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for _ in answer.iter_lines():
                pass
        (line,) = lines(1)
        assert (line["status"], line["key"]) == (504, "everybody")


# Ids.


def test_openai_clients_read_the_id(one: Running) -> None:
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="first-secret", max_retries=0) as client:
        made = client.completions.create(model=one.service.name, prompt="the", max_tokens=2)
        assert re.fullmatch("req_[0-9a-f]{32}", made._request_id or "")
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(
                model=one.service.name, prompt="the", max_tokens=-1, extra_headers={"X-Request-Id": "abc"}
            )
        assert raised.value.request_id == "abc"


@pytest.mark.parametrize("given", [b"a", b"x" * 128, b"9f1e-A_b.c:/+=", b'"quoted"'])
def test_a_sane_id_is_taken_over(given: bytes) -> None:
    assert request_id(given) == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"two words", b"a\tb", b"a\nb", b"\xc3\xa4", b"\x1b[31m", b"\x7f"])
def test_any_other_id_is_made_anew(given: bytes) -> None:
    assert re.fullmatch("req_[0-9a-f]{32}", request_id(given))
    assert request_id(given) != request_id(given)


# What a client can write into the log.


def test_prompts_cannot_forge_a_line(make_json_model: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lookahead")
    with running(make_json_model(), log_prompts=True, keys=("first-secret name=shop",)) as server:
        server.client.headers["Authorization"] = "Bearer first-secret"
        server.post("/v1/completions", prompt=FORGED, max_tokens=1)
    (record,) = [record for record in caplog.records if record.getMessage() == "prompt"]
    assert fields_of(record)["prompt"] == FORGED
    assert fields_of(record)["key"] == "shop"
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert r"prompt=" in line
    assert r"x\n2026-01-01" in line
    again = json.loads(JsonFormatter().format(record))
    assert again["prompt"] == FORGED
    assert again["request_id"] == fields_of(record)["request_id"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 日本 🦊", "plain ä 日本 🦊"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x00\x1b\x7f\x9b", r"\x00\x1b\x7f\x9b"),
        ("\u2028\u202e\ud800\U000e0001", r"\u2028\u202e\ud800\U000e0001"),
    ],
)
def test_what_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_path_is_quoted_and_cut() -> None:
    assert shown_path("/a b\n\x1b\u2028") == "/a%20b%0A%1B%E2%80%A8"
    assert shown_path("/v1/models/org:name") == "/v1/models/org:name"
    assert len(shown_path("/" + "x" * 100_000)) < 300


def record_of(message: str, *, error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("lookahead.serve", logging.ERROR, "file", 1, message, None, info)
    record.fields = fields
    return record


def test_formats() -> None:
    try:
        raise OSError(FORGED)
    except OSError as error:
        record = record_of("it failed", error=error, path="/x", ttft_ms=None, text='a "b"', ms=1.5)
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith('lookahead.serve ERROR: it failed path=/x ttft_ms=- text="a \\"b\\"" ms=1.5')
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    text = JsonFormatter().format(record)
    assert text.isprintable()
    found = json.loads(text)
    assert (found["level"], found["path"], found["ttft_ms"]) == ("error", "/x", None)
    assert found["exception"].endswith(FORGED)


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_levels(monkeypatch: pytest.MonkeyPatch, level: str, format: str) -> None:
    own, other, out = logging.getLogger("lookahead.serve"), logging.getLogger("uvicorn.other"), io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    before = list(logging.getLogger().handlers)
    with logging_to_stderr(level, format):
        for log in (own, other):
            log.debug("debug")
            log.info("info")
            log.warning("warning")
    own.warning("afterwards")
    assert logging.getLogger().handlers == before
    lines = out.getvalue().splitlines()
    if format == "json":
        found = [json.loads(line)["message"] for line in lines]
    else:
        found = [line.rsplit(": ", 1)[1] for line in lines]
    kept = ["debug", "info", "warning"]
    assert found == [*kept[kept.index(level) :], "warning"]


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.thinned(1, most=1)
def test_the_command_writes_one_record_a_line(
    loaded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
) -> None:
    def ask(url: str) -> None:
        httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": "abc"}, timeout=30)
        os.kill(os.getpid(), signal.SIGTERM)

    options = ("--log-format", format, "--log-prompts", "--no-memory")
    assert run_serve_command(loaded, tmp_path, ask, monkeypatch, *options) == 0
    lines = capsys.readouterr().err.splitlines()
    if format == "text":
        (line,) = [line for line in lines if "lookahead.serve INFO: request" in line]
        assert re.search(r" method=POST path=/v1/completions status=200 ms=[\d.]+ ttft_ms=[\d.]+ prompt_tokens", line)
        assert line.endswith(" key=everybody request_id=abc")
        assert any("see it in a browser" in line for line in lines)
        return
    found = [json.loads(line) for line in lines]
    (line,) = [one for one in found if one["message"] == "request"]
    assert line.keys() == FIELDS | {"time", "level", "logger", "message"}
    assert (line["status"], line["request_id"], line["logger"]) == (200, "abc", "lookahead.serve")
    (line,) = [one for one in found if one["message"] == "prompt"]
    assert line["request_id"] == "abc"
    assert any("see it in a browser" in one["message"] for one in found)
