"""Servers side by side: the client gets whole replies, servers are started and found ready, and the page says what was
measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import peer_commands
import peers
import peers_page
import pytest
import server_process
from http_server import running
from load import Reply, steady, summary
from peer_commands import OURS, Peer, known_peers, missing, own_peer
from server_process import connect, started

import lookahead

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ECHO = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        words = body["messages"][0]["content"].split()
        for word in ["", *(words * body["max_tokens"])[: body["max_tokens"]]]:
            event = json.dumps({"choices": [{"delta": {"content": word}}]}, separators=(",", ":"))
            line = f"data: {event}\\n\\n".encode()
            self.wfile.write(f"{len(line):x}\\r\\n".encode() + line + b"\\r\\n")
        self.wfile.write(b"0\\r\\n\\r\\n")
    def log_message(self, *_): ...

print("up", file=sys.stderr, flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_steady_part_of_a_run() -> None:
    """Of a run of four seconds the last three count: five of the events below, with two tokens or one each."""
    slow = Reply(asked=10.0, status=200, first=1.0, gaps=[1.0, 1.0, 1.0], tokens=8, steps=8)
    late = Reply(asked=12.5, status=200, first=0.25, gaps=[0.5, 3.0], tokens=3, steps=2)
    assert steady([slow, late], begin=10.0, seconds=4.0) == (3 * 2 + 2 * 1) / 3
    assert steady([], begin=10.0, seconds=4.0) == 0
    found = summary([slow, late, Reply(10.0, 429, None, [], 0, 0)], 10.0, 4.0)
    assert (found["replies"], found["refused"], found["compression"]) == (2, 1, 1.1)
    assert found["mean_seconds"] == (4.0 + 3.75) / 2
    assert found["ttft_ms"][0] == 625
    assert summary([Reply(10.0, 200, 1.0, [1.0], 2, 0)], 10.0, 4.0)["compression"] is None, "others count no steps"


def test_no_prompt_is_asked_twice_while_there_are_new_ones() -> None:
    asked = peers.Requests([str(number) for number in range(10)], tokens=5)

    def take(count: int) -> list[str]:
        return [asked.take({})["messages"][0]["content"] for _ in range(count)]

    assert take(4) == ["0", "1", "2", "3"]
    assert asked.again(0) == 0
    assert take(8) == ["4", "5", "6", "7", "8", "9", "0", "1"]
    assert asked.again(4) == 2
    take(3)
    assert asked.again(12) == 3


def test_the_tables_of_the_results_here() -> None:
    records = json.loads((RESULTS / "serve-h200.json").read_text(encoding="utf-8"))["records"]
    speed = peers_page.table(records, "tokens-per-second")
    assert speed.head == ["server", "1 streams", "8 streams", "32 streams", "64 streams"]
    assert [row[:2] for row in speed.rows] == [
        ["plain", "243.3"],
        ["lookahead", "817.1"],
        ["S of plain", "1.00"],
        ["S of lookahead", "4.47"],
    ]
    assert peers_page.table(records, "ttft-p99").rows[1][1] == "15.4"
    beside = peers_page.beside_engine(records)
    assert beside.rows[-1] == ["64", "8755", "8940", "0.979", "12406", "12469", "0.995"]


def test_several_turns_give_medians_and_a_spread() -> None:
    assert peers_page.shown([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0)"
    assert peers_page.shown([2.0], 2) == "2.00"
    assert peers_page.shown([]) == ""


@pytest.fixture
def echo(tmp_path: Path) -> Peer:
    """A server that repeats the words of its prompt, one in each event, and reports no usage."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO, encoding="utf-8")
    return own_peer(f"echo={sys.executable} {script} {{port}}")


def test_another_server_is_started_measured_and_ended(echo: Peer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(peers, "known_peers", lambda: [Peer("absent", "x {port}", package="no_such_package")])
    monkeypatch.setattr(peers, "own_peer", lambda given: echo)
    words = ["--peer", "echo", "--model", "m", "--streams", "1,2", "--rates", "20", "--tokens", "6", "--seconds", "0.3"]
    args = peers.arguments([*words, "--equal", "3", "--turns", "2", "--repeats", "2", "--out", str(tmp_path / "out")])
    found = peers.run(args)
    cells = [(one["kind"], one.get("streams", one.get("rate")), one["turn"]) for one in found["records"]]
    each = [*[("closed", 1), ("closed", 2), ("open", 20)] * 2, ("server", None)]
    assert cells == [(*one, turn) for turn in range(2) for one in each]
    speeds = [one["tokens_per_second"] for one in found["records"] if one["kind"] == "closed"]
    assert min(speeds) > 0
    start = found["records"][6]
    assert start["equal"] == {"echo": (3, 3)}
    assert start["start_seconds"] > 0
    assert start["memory"]["host"] > 1 << 20
    assert found["left_out"] == {"absent": "the package no_such_package is not installed"}
    page = peers_page.write_page(json.loads((tmp_path / "out" / "peers.json").read_text()), args.out)
    assert "| echo | echo 6 of 6 |" in page
    assert "absent was left out" in page
    for metric in peers_page.METRICS:
        ElementTree.parse(tmp_path / "out" / f"peers-{metric}.svg")
        assert f"peers-{metric}.svg" in page


def test_records_of_an_earlier_run_stand_beside_new_ones(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(peers, "known_peers", lambda: [])
    file = tmp_path / "peers.json"
    record = {"kind": "closed", "turn": 0, "run": 1, "way": "other", "streams": 1, "tokens_per_second": 7.0}
    file.write_text(json.dumps({"records": [record]}), encoding="utf-8")
    found = peers.run(peers.arguments(["--model", "m", "--also", str(file)]))
    assert found["records"] == [record]
    assert "runs all cells 2 times" in peers_page.write_page(found, None)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"peers.json: no peers.json of an earlier run"):
        peers.run(peers.arguments(["--model", "m", "--also", str(file)]))


def test_a_server_that_does_not_start() -> None:
    with (
        pytest.raises(SystemExit, match="did not start: no good"),
        started([sys.executable, "-c", "raise SystemExit('no good')"], 30.0, url="http://127.0.0.1:9"),
    ):
        pass


def test_the_commands_of_the_servers_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    known = {peer.name: peer for peer in known_peers()}
    assert list(known) == [OURS, "vllm", "vllm-ngram", "vllm-suffix", "transformers", "llama-server"]
    for peer in list(known.values())[1:]:
        words = peer.words(str(tmp_path), "bfloat16", 8123)
        assert "8123" in words
        assert not [word for word in words if word in ("{port}", "{model}", "{dtype}", "{python}")]
        fields = peer.fields("folder", 7)
        assert fields["model"] == "folder"
    assert "model" not in known[OURS].fields("folder", 7)
    assert json.loads(known["vllm-ngram"].words("m", "auto", 1)[-1])["method"] == "ngram"
    assert json.loads(known["transformers"].fields("m", 7)["generation_config"])["min_new_tokens"] == 7
    assert str(tmp_path / "a.gguf") in known["llama-server"].words(str(tmp_path), "auto", 1)
    assert missing(known[OURS]) is None


def test_mistakes_in_the_servers_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_commands, "find_spec", lambda name: None)
    for words, said in (
        (["--peers", "vlm"], "does not know 'vlm'"),
        (["--peers", "vllm"], "the package vllm is not installed"),
        (["--peer", "mine"], "is no NAME=COMMAND"),
        (["--peer", "mine=server"], "must hold {port}"),
    ):
        with pytest.raises(SystemExit, match=said):
            peers.chosen(peers.arguments([*words, "--model", "m"]))


@pytest.mark.slow
def test_a_short_load(model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings)
    words = ["--model", "m", "--streams", "1,2", "--rates", "20", "--tokens", "6", "--seconds", "1.5", "--limit", "4"]
    with running(loaded) as server:
        args = peers.arguments([*words, "--equal", "3", "--out", str(tmp_path), "--url", server.url])
        found = peers.run(args)
    records = found["records"]
    loads = {("closed", 1), ("closed", 2), ("open", 20)}
    cells = [one for one in records if one["kind"] != "server"]
    assert {(one["kind"], one.get("streams", one.get("rate")), one["way"]) for one in cells} == {
        (*load, way) for load in loads for way in ("plain", "lookahead")
    }
    for one in cells:
        assert one["tokens_per_second"] > 0
        assert one["refused"] == 0
        assert one["compression"] == 1 or one["way"] == "lookahead"
    assert records[-1]["equal"] == {"plain": (3, 3), "lookahead": (3, 3)}
    assert found["about"]["dtype"] == "float32"
    assert "1 streams" in peers_page.write_page(found, tmp_path)


def test_a_server_that_is_started_may_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time; print('serving x at http://127.0.0.1:9/v1', file=sys.stderr, flush=True); time.sleep(60)"
    )
    start = server_process.subprocess.Popen
    fake = lambda command, **options: start([*command[:1], "-c", script], **options)  # noqa: E731
    monkeypatch.setattr(server_process.subprocess, "Popen", fake)
    args = peers.arguments(["--api-key-file", "keys", "--patience", "30", "--key", "secret", "--model", "m"])
    assert args.options == ["--model", "m", "--dtype", "auto", "--api-key-file", "keys"]
    with connect(args) as served:
        assert (served.url, served.key) == ("http://127.0.0.1:9", "secret")
