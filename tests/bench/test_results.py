"""Results on disk: nothing that was measured is lost, and nothing broken is taken for a result."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lookahead.bench.run.about import plain_name
from lookahead.bench.run.results import Results, compact, key_of, outputs, same

ABOUT = {"model": "tiny", "dtype": "float32", "device": "cpu: x", "torch": "1", "code": "abc"}


def made(path: Path, count: int = 2) -> Results:
    results = Results(path)
    results.begin(ABOUT)
    for i in range(count):
        results.add({"kind": "answer", "key": f"k{i}", "value": i})
    return results


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    made(path)
    again = Results(path)
    assert (again.about, again.dropped) == (ABOUT, False)
    assert [row["value"] for row in again.records.values()] == [0, 1]
    again.begin(ABOUT)
    assert len(path.read_text().splitlines()) == 3, "the same facts are written once"
    again.add({"kind": "answer", "key": "k0", "value": 7})
    assert Results(path).records["k0"]["value"] == 7, "the later one counts"


def test_a_cut_last_line_is_dropped_and_the_file_mended(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    made(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "answer", "key": "k9", "val')
    again = Results(path)
    assert again.dropped
    assert list(again.records) == ["k0", "k1"]
    assert path.read_bytes() == whole
    again.add({"kind": "answer", "key": "k2"})
    assert list(Results(path).records) == ["k0", "k1", "k2"]


@pytest.mark.parametrize("line", ["{broken", "[]", '{"kind": "answer"}', "\x00\x00\x00"])
def test_a_corrupt_line_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    made(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 3 is no result .* remove that line"):
        Results(path)


@pytest.mark.parametrize("name", ["model", "torch", "code"])
def test_another_model_or_version_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    made(path)
    with pytest.raises(ValueError, match=rf"holds results with {name} .* give another --out"):
        Results(path).begin({**ABOUT, name: "other"})


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results = made(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device; what was measured before is kept"):
        results.add({"kind": "answer", "key": "k9", "value": 9})
    assert path.read_bytes() == before
    assert "k9" not in results


def test_ctrl_c_while_writing_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results = made(path)
    before = path.read_bytes()

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        results.add({"kind": "answer", "key": "k9"})
    assert path.read_bytes() == before


def test_keys_depend_on_every_fact_and_not_on_their_order() -> None:
    assert key_of({"a": 1, "b": (2, 3)}) == key_of({"b": [2, 3], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
    assert json.loads(json.dumps(key_of({"a": 1}))) == key_of({"a": 1})


def test_merging_keeps_what_was_measured_where(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a.jsonl", 1), Results(tmp_path / "b.jsonl")
    second.begin({**ABOUT, "cpu": "another host"})
    for key, tokens in (("k1", [[1]]), ("k2", [[2, 3]])):
        second.add({"kind": "answer", "key": key, "tokens": tokens})
    third = Results(tmp_path / "c.jsonl")
    third.begin(ABOUT)
    third.add(compact({"kind": "answer", "key": "k1", "tokens": [[1]], "texts": ["a"]}, texts=False))
    third.add({"kind": "answer", "key": "k2", "tokens": [[2, 4]]})
    merged = Results(tmp_path / "all.jsonl")
    assert merged.merge([first.path, second.path, third.path]) == ["k2"], "measured twice, with another text"
    again = Results(merged.path)
    assert list(again.records) == ["k0", "k1", "k2"]
    assert again.runs == [ABOUT, {**ABOUT, "cpu": "another host"}]
    assert [again.run_of[key] for key in again.records] == [0, 1, 1]
    assert again.merge([first.path, second.path]) == []
    assert Results(merged.path).records == again.records


@pytest.mark.parametrize("name", ["model", "dtype", "code"])
def test_what_does_not_belong_together_is_not_merged(name: str, tmp_path: Path) -> None:
    first, other = made(tmp_path / "a.jsonl"), Results(tmp_path / "b.jsonl")
    other.begin({**ABOUT, name: "other"})
    other.add({"kind": "answer", "key": "k9"})
    before = first.path.read_bytes()
    with pytest.raises(ValueError, match=rf"b\.jsonl does not belong to .*a\.jsonl: its {name} is 'other'"):
        first.merge([other.path])
    assert first.path.read_bytes() == before
    with pytest.raises(ValueError, match="has no results to merge"):
        first.merge([tmp_path / "nothing.jsonl"])


def test_a_brief_record_says_as_much_about_equality() -> None:
    whole = {"key": "a", "tokens": [[1, 2], [3]], "texts": ["x", "y"], "seconds": 1.0}
    brief = compact(whole, texts=False)
    assert set(brief) == {"key", "hashes", "seconds"}
    assert compact(whole, texts=True)["texts"] == ["x", "y"]
    other = {**whole, "tokens": [[1, 2], [4]]}
    for one in (whole, brief):
        assert same(one, whole)
        assert [ours == theirs for ours, theirs in outputs(one, other)] == [True, False]
        assert not same(compact(other, texts=False), one)


def test_a_model_is_called_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").touch()
    names = ("models/tiny.gguf", str(tmp_path / "models" / "tiny.gguf"), "/elsewhere/tiny.gguf", "../x/tiny.gguf")
    assert {plain_name(name) for name in names} == {"tiny.gguf"}
    assert plain_name("models/tiny.gguf in 7b shape") == "tiny.gguf in 7b shape"
    assert plain_name("meta-llama/Llama-2-7b-chat-hf") == "meta-llama/Llama-2-7b-chat-hf"
