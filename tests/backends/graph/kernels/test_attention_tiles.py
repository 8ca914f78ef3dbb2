"""The benchmark of attention's tiles, in the interpreter and with small sizes."""

from __future__ import annotations

import sys

import attention_tiles
import pytest


def test_it_times_the_tiles_in_use_and_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "[2,1,16] --rows 1 --contexts 20 --windows 9"
    monkeypatch.setattr(sys, "argv", ["attention_tiles.py", *sizes.split(), "--tries", '{"splits": 4}'])
    monkeypatch.setattr(attention_tiles, "copy_bandwidth", lambda device: 1e12)
    attention_tiles.main()
    ours, other = capsys.readouterr().out.splitlines()
    assert ours.startswith("2 1 16    1 x 1       20     9 ")
    assert "near_keys=64" in ours
    assert other.endswith("same  {'splits': 4}")
