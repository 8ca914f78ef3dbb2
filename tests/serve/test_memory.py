"""Warm memory: what was learnt comes back after a restart, for its key alone, and a broken file harms nobody."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import running

import lookahead
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sources import SharedMemory
from lookahead.serve.memory import folder_of, give, read, take, write

KEYS = ("first-secret", "second-secret")


def filled(keys: int = 5) -> SharedMemory:
    memory = SharedMemory()
    for number in range(keys):
        memory.successors.put((number,), (1, 2, 3, 0, 1, 2))
        memory.successors.put((number, number + 1, 7), (4, 0))
    memory.calibration.count(3, True)
    memory.calibration.trust.learn(2, 1.5)
    return memory


def test_a_memory_comes_back_as_it_was(tmp_path: Path) -> None:
    memory, path = filled(), tmp_path / "one" / "key.npz"
    write(path, take(memory, 100))
    for drafter in (None, PythonDrafter()):
        again = SharedMemory(drafter)
        assert read(path, again)
        assert sorted(again.successors.items()) == sorted(memory.successors.items())
        assert again.calibration.rates == memory.calibration.rates
        assert again.calibration.trust.ratio == memory.calibration.trust.ratio != 1.0
    assert not list(path.parent.glob("*.part"))


def test_only_the_newest_keys_are_kept() -> None:
    arrays = take(filled(50), 10)
    assert len(arrays["keys"]) == 10
    again = SharedMemory()
    give(again, arrays)
    assert again.successors.get((49,)) == (1, 2, 3, 0, 1, 2)
    assert again.successors.get((1,)) is None


@pytest.mark.parametrize("harm", ["cut", "empty", "text", "version", "shape", "rates", "pickle"])
def test_a_broken_file_is_set_aside(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    path, arrays = tmp_path / "key.npz", take(filled(), 100)
    if harm == "version":
        arrays["version"] = np.array(99)
    elif harm == "shape":
        arrays["keys"] = arrays["keys"][:, :4].copy()
    elif harm == "rates":
        arrays["rates"] = arrays["rates"] + 7
    elif harm == "pickle":
        arrays["keys"] = np.array([{"a": 1}], dtype=object)
    write(path, arrays)
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:150])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "text":
        path.write_text("nonsense")
    memory = SharedMemory()
    with caplog.at_level(logging.WARNING):
        assert not read(path, memory)
    assert "set aside" in caplog.text
    assert path.with_suffix(".broken").exists()
    assert not path.exists()
    assert len(memory.successors) == 0
    assert not read(path, memory)  # there is none any more


def test_every_key_has_a_file_of_its_own(model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    def start() -> Any:
        loaded = lookahead.load((model, tokenizer), config=settings)
        return running(loaded, keys=KEYS, memory_folder=tmp_path)

    def steps(server: Any, key: str) -> int:
        body: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 40, "temperature": 0}
        body["lookahead"] = {"window": 0, "budget": 24, "sources": ["recycle"]}
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        return int(answer.json()["usage"]["lookahead"]["steps"])

    with start() as first:
        cold = steps(first, KEYS[0])
        folder = folder_of(first.model, tmp_path)
    files = sorted(folder.glob("*.npz"))
    assert len(files) == 2
    assert not any(key in str(path) for path in files for key in KEYS)
    with start() as second:
        assert steps(second, KEYS[1]) == cold  # the second key has learnt nothing
        assert steps(second, KEYS[0]) < cold
