"""Warm memory: what was learnt comes back after a restart, for its key alone, and a broken file harms nobody."""

from __future__ import annotations

import logging
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import running

import lookahead
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sources import SharedMemory
from lookahead.cache import write_arrays
from lookahead.serve.memory import MOST_BROKEN, fill_from_arrays, folder_of, read, to_arrays

KEYS = ("first-secret", "second-secret")


def filled(keys: int = 5) -> SharedMemory:
    memory = SharedMemory()
    for number in range(keys):
        memory.successors.put((number,), (1, 2, 3, 0, 1, 2))
        memory.successors.put((number, number + 1, 7), (4, 0))
    memory.calibration.record_trial(3, True)
    memory.calibration.trust.record_step(2, 1.5)
    return memory


def test_a_memory_comes_back_as_it_was(tmp_path: Path) -> None:
    memory, path = filled(), tmp_path / "one" / "key.npz"
    write_arrays(path, to_arrays(memory, 100))
    for drafter in (None, PythonDrafter()):
        again = SharedMemory(drafter)
        assert read(path, again)
        assert sorted(again.successors.items()) == sorted(memory.successors.items())
        assert again.calibration.rates == memory.calibration.rates
        assert again.calibration.trust.ratio == memory.calibration.trust.ratio != 1.0
    assert not list(path.parent.glob("*.part"))


def test_only_the_newest_keys_are_kept() -> None:
    arrays = to_arrays(filled(50), 10)
    assert len(arrays["keys"]) == 10
    again = SharedMemory()
    fill_from_arrays(again, arrays)
    assert again.successors.get((49,)) == (1, 2, 3, 0, 1, 2)
    assert again.successors.get((1,)) is None


@pytest.mark.parametrize(
    "harm", ["cut", "empty", "text", "version", "no version", "shape", "rates", "pickle", "token", "level", "trust"]
)
def test_a_broken_file_is_set_aside(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    path, arrays = tmp_path / "key.npz", to_arrays(filled(), 100)
    if harm == "version":
        arrays["version"] = np.array(99)
    elif harm == "no version":
        del arrays["version"]
    elif harm == "shape":
        arrays["keys"] = arrays["keys"][:, :4].copy()
    elif harm == "rates":
        arrays["rates"] = arrays["rates"] + 7
    elif harm == "token":
        arrays["keys"][0, 2] = -5
    elif harm == "level":
        arrays["keys"][0, 4 + arrays["keys"][0, 3] // 2] = 99
    elif harm == "trust":
        arrays["trust"] = arrays["trust"] + np.inf
    elif harm == "pickle":
        arrays["keys"] = np.array([{"a": 1}], dtype=object)
    write_arrays(path, arrays)
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


@pytest.mark.parametrize("keys", [5, 3000])
@pytest.mark.thinned(1, most=1)
def test_whatever_is_damaged_never_raises(tmp_path: Path, keys: int, caplog: pytest.LogCaptureFixture) -> None:
    """Random damage of a real file: it is set aside, or what it holds is what was saved."""
    path, rng, memory = tmp_path / "key.npz", random.Random(keys), filled(keys)
    write_arrays(path, to_arrays(memory, 10_000))
    whole, saved, aside = path.read_bytes(), sorted(memory.successors.items()), 0
    for number in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if number % 4 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        elif number % 4 == 1:  # where the headers and the directory are
            near = rng.choice((0, len(damaged) - 400)) + rng.randrange(400)
            damaged[near] = rng.randrange(256)
        path.write_bytes(damaged)
        again = SharedMemory()
        if read(path, again):
            assert sorted(again.successors.items()) == saved
        else:
            aside += 1
            assert not path.exists()
            assert len(again.successors) == 0
    assert aside > 200
    assert len(list(tmp_path.glob("*.broken*"))) <= MOST_BROKEN
    assert len(caplog.records) == aside
    write_arrays(path, to_arrays(memory, 10_000))
    assert read(path, SharedMemory())


def test_a_folder_in_place_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, memory = tmp_path / "key.npz", SharedMemory()
    for name in ("key.broken", "key.broken-2"):
        (path / "something").mkdir(parents=True)
        assert not read(path, memory)
        assert (tmp_path / name / "something").exists()
        assert f"{path} cannot be read" in caplog.text
        assert f"set aside as {tmp_path / name}" in caplog.text
    write_arrays(path, to_arrays(filled(), 100))
    assert read(path, memory)


def test_no_permission(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither reading nor renaming may be allowed: the memory is empty, and one line tells of both."""

    def forbidden(*paths: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path, memory = tmp_path / "key.npz", SharedMemory()
    write_arrays(path, to_arrays(filled(), 100))
    monkeypatch.setattr(zipfile, "ZipFile", forbidden)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", forbidden)
        assert not read(path, memory)
    assert path.exists()
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert str(path.with_suffix(".broken")) in record.getMessage()
    assert not read(path, memory)
    assert path.with_suffix(".broken").exists()


def test_a_server_starts_with_a_damaged_file_and_saves_again(
    model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings)
    path = folder_of(loaded, tmp_path) / "shared.npz"
    write_arrays(path, to_arrays(filled(), 100))
    content = bytearray(path.read_bytes())
    begin = content.index(b"keys.npy") + len(b"keys.npy")
    content[begin : begin + 40] = b"\xff" * 40  # no block of deflate begins like this
    path.write_bytes(content)
    with running(loaded, memory_folder=tmp_path) as server:
        assert not path.exists()
        assert server.complete(prompt="the", max_tokens=4)["choices"]
    assert path.with_suffix(".broken").read_bytes() == content
    assert read(path, SharedMemory())


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
