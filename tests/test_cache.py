"""Files of the cache folder: read back as they were written, and only in the version that they were written in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead.cache import read_json, write_json


def test_a_file_is_read_back_in_its_version(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"name": "Ä", "numbers": [1, 2.5]}, 3)
    assert read_json(path, 3) == {"version": 3, "name": "Ä", "numbers": [1, 2.5]}
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("content", [{"x": 1}, {"version": 2}, {"version": None}, {"version": "3"}, {"version": True}])
@pytest.mark.parametrize("version", [1, 3])
def test_another_version_or_none_is_refused(tmp_path: Path, content: dict[str, Any], version: int) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"and this is version {version}"):
        read_json(path, version)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3"])
def test_what_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"Expecting|an object"):
        read_json(path, 1)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nothing", 1)
