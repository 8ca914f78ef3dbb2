"""Clients of replicas on this machine, and how to find the processes to kill."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import psutil
from http_server import Running
from prometheus_client.parser import text_string_to_metric_families

from lookahead.serve.ray.application import NAME

PATIENCE = 240.0


def processes(kind: str) -> list[int]:
    """The processes of a deployment, all of them children of this one."""
    return titled(f"ray::ServeReplica:{NAME}:{kind}")


def actors(kind: str) -> list[int]:
    """The processes of a class of actors."""
    return titled(f"ray::{kind}")


def titled(title: str) -> list[int]:
    """The children of this process whose title begins like this."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(title):
                found.append(child.pid)
        except psutil.Error:  # it has just ended
            continue
    return found


def samples(client: httpx.Client, name: str) -> dict[str, float]:
    """A metric of every replica."""
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if family.name == f"lookahead:{name}" and not sample.name.endswith("_created")
    }


def replicas(client: httpx.Client) -> int:
    return len(samples(client, "kv_cache_usage_perc"))


def long_bodies() -> list[dict[str, Any]]:
    """Requests that take a few seconds each, of which every step is one token."""
    common = {"max_tokens": 400, "ignore_eos": True, "stream": True, "lookahead": False}
    sampled = {"temperature": 1.0, "frequency_penalty": 0.2}
    return [
        {"prompt": f"true {number} false", **common, **(sampled if number % 2 else {"temperature": 0}), "seed": number}
        for number in range(8)
    ]


class Reader(threading.Thread):
    """Reads one stream."""

    def __init__(self, url: Any, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.text, self.chunks, self.over = url, body, "", 0, False
        self.error: Any = None
        self.longest = 0.0
        self.start()

    def run(self) -> None:
        try:
            last = 0.0
            with (
                httpx.Client(base_url=self.url, timeout=PATIENCE) as client,
                client.stream("POST", "/v1/completions", json=self.body) as answer,
            ):
                if answer.status_code != 200:
                    self.error = answer.status_code
                for line in answer.iter_lines():
                    now = time.monotonic()
                    self.longest, last = max(self.longest, now - (last or now)), now
                    self._read(line)
        except httpx.HTTPError as error:
            self.error = error

    def _read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.over = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event
            else:
                self.text += event["choices"][0]["text"]
                self.chunks += 1


def solo(one_process: Running, body: dict[str, Any]) -> str:
    found: str = one_process.complete(**{**body, "stream": False})["choices"][0]["text"]
    return found


def read_all(readers: Sequence[Reader], one_process: Running) -> None:
    """Read streams to their ends. Each must be what one process gives alone."""
    begin = time.monotonic()
    for reader in readers:
        reader.join(PATIENCE)
    print(f"over after {time.monotonic() - begin:.1f} s; pauses:", [round(reader.longest, 2) for reader in readers])
    for reader in readers:
        assert reader.error is None
        assert reader.over
        assert reader.text == solo(one_process, reader.body)
