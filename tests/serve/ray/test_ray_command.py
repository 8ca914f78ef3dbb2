"""`lookahead serve --replicas` as a process: it serves, drains after SIGTERM, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from http_server import soon

pytestmark = pytest.mark.slow
PATIENCE = 240.0


def test_the_command_serves_drains_and_ends(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lookahead", "serve", "--model", str(folder), "--replicas", "2", "--port", "0"]
    keys = tmp_path / "keys"
    keys.write_text("a-long-secret\n")
    options = ["--backend", "eager", "--api-key-file", str(keys), "--drain-seconds", "60"]
    environment = {**os.environ, "LOOKAHEAD_CACHE": str(tmp_path)}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        assert soon(lambda: any("serving 2 replicas at" in line for line in said), PATIENCE), said
        line = next(line for line in said if "serving 2 replicas at" in line)
        url = line.split(" at ")[1].split("/v1")[0].strip()
        with httpx.Client(base_url=url, timeout=PATIENCE, headers={"Authorization": "Bearer a-long-secret"}) as client:
            assert client.get("/ready", headers={"Authorization": "Bearer wrong"}).status_code == 401
            check_drain(client, process)
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        assert process.wait(PATIENCE) == 0, said
        assert soon(lambda: not any(child.is_running() for child in children))
        assert not any("Traceback" in line for line in said), said
        assert list((tmp_path / "memory").glob("replica-*/*/*.npz"))  # the replicas have kept what they learnt
    finally:
        process.kill()


def check_drain(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    """A stream that runs when SIGTERM comes gets its end."""
    body: dict[str, Any] = {"prompt": "true", "max_tokens": 300, "ignore_eos": True, "stream": True, "lookahead": False}
    tokens, over = 0, False
    with client.stream("POST", "/v1/completions", json={**body, "logprobs": 0}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                before, tokens = tokens, tokens + len(event["choices"][0]["logprobs"]["tokens"])
                if before < 20 <= tokens:
                    process.send_signal(signal.SIGTERM)
            over = over or line == "data: [DONE]"
    assert over
    assert tokens == 300
