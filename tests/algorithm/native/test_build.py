"""Compiling and loading the C library: once, safely, and never at the price of an error."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lookahead.algorithm.native import build as native
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.native.layout import STEP, Record
from lookahead.algorithm.search import PythonDrafter

needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `library` found before a test counts for nothing in it, nor after it."""
    monkeypatch.delenv("LOOKAHEAD_NATIVE", raising=False)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def unoptimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in a third of the time."""
    monkeypatch.setattr(native, "FLAGS", tuple("-O0" if flag == "-O2" else flag for flag in native.FLAGS))


unoptimised_build = pytest.mark.usefixtures("unoptimised")


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@needs_compiler
def test_the_compiled_drafter_is_chosen() -> None:
    assert isinstance(choose_drafter(), NativeDrafter)


@needs_compiler
@unoptimised_build
def test_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    assert native.library().table_new() is not None
    made = only(tmp_path / "native").stat()
    native.library.cache_clear()
    monkeypatch.setattr(native, "build", lambda path: pytest.fail("compiled twice"))
    assert native.library() is not None
    assert only(tmp_path / "native").stat() == made


@needs_compiler
@unoptimised_build
@pytest.mark.parametrize("damage", ["not a library", "writable by others"])
@pytest.mark.thinned(1, most=1)
def test_a_library_that_cannot_be_trusted_is_compiled_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / f"{native.fingerprint()}.so"
    path.write_bytes(b"")
    if damage == "writable by others":
        path.chmod(0o777)
    assert native.load(tmp_path).table_new() is not None
    assert only(tmp_path).stat().st_size > 1000
    assert native.ours(only(tmp_path))


def test_the_name_follows_source_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [native.fingerprint()]
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    names.append(native.fingerprint())
    for source in native.SOURCES:
        other = tmp_path / source.name
        other.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        monkeypatch.setattr(native, "SOURCES", [other if one is source else one for one in native.SOURCES])
        names.append(native.fingerprint())
    assert len(set(names)) == 2 + len(native.SOURCES)
    assert native.fingerprint() == names[-1]


@needs_compiler
@unoptimised_build
@pytest.mark.slow
def test_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(native.load, [tmp_path] * 4))
    assert all(library.table_new() is not None for library in libraries)
    assert only(tmp_path).suffix == ".so"


FAILURES = {
    "no compiler": ({"CC": "", "PATH": ""}, "no C compiler was found"),
    "CC is missing": ({"CC": "no-such-compiler"}, "no-such-compiler"),
    "CC fails": ({"CC": f"{sys.executable} -c 'import sys; sys.exit(\"it broke\")'"}, "did not compile .*: it broke"),
    "CC makes nothing": ({"CC": f"{sys.executable} -c ''"}, "did not compile .*: exit code 0"),
    "CC makes no library": (
        {"CC": f'{sys.executable} -c \'import sys; open(sys.argv[sys.argv.index("-o") + 1], "w").close()\''},
        "instead of the C one: .",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_without_a_library_python_does_it_and_one_line_says_so(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment, said = FAILURES[failure]
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "lookahead"):
        assert isinstance(choose_drafter(), PythonDrafter)
        assert isinstance(choose_drafter(), PythonDrafter)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("using the Python drafter instead of the C one: ")
    assert "\n" not in caplog.messages[0]
    caplog.clear()
    with pytest.raises((OSError, RuntimeError), match=said.removeprefix("instead of the C one: ")):
        native.load(tmp_path / "again")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "native").write_text("a file where the folder should be", encoding="utf-8")
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    assert native.library() is None


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    code = "from lookahead.algorithm.native import choose_drafter; print(type(choose_drafter()).__name__)"
    environment = {**os.environ, "LOOKAHEAD_NATIVE": "0", "LOOKAHEAD_CACHE": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "PythonDrafter"
    assert list(tmp_path.iterdir()) == []


def broken_copy(folder: Path, name: str, old: str, new: str) -> list[Path]:
    """The C sources in another folder, with one change."""
    copies = [folder / source.name for source in native.SOURCES]
    for source, copy in zip(native.SOURCES, copies, strict=True):
        text = source.read_text(encoding="utf-8")
        if source.name == name:
            assert old in text
            text = text.replace(old, new)
        copy.write_text(text, encoding="utf-8")
    return copies


DRIFTS = {
    "a version": ("layout.c", "#define VERSION 1", "#define VERSION 2", "its version is 2, and Python has 1"),
    "a field that moved": ("drafter.h", "double bonus; ", "double pad, bonus; ", "layout.py has another (size|offset)"),
    "fields that swapped": (
        "layout.c", "branch, 56) FIELD(Step, text_end, 60)", "text_end, 60) FIELD(Step, branch, 56)",
        "Step.branch is 60, and Python has 56",
    ),
    "a field that is missing": (
        "layout.c", "FIELD(StepTree, nodes, 8)", "", r"has \d+ sizes and offsets, and Python \d+",
    ),
    "no table at all": ("layout.c", "*drafter_layout(", "*renamed_layout(", "has no table of its struct layouts"),
}  # fmt: skip


@needs_compiler
@unoptimised_build
@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.thinned(1, most=1)
def test_structs_that_python_packs_otherwise_are_found_out(
    drift: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the C compiler, or when the library is loaded: the Python drafter runs, and one line says why."""
    *change, said = DRIFTS[drift]
    monkeypatch.setattr(native, "SOURCES", broken_copy(tmp_path, *change))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING, "lookahead"):
        assert isinstance(choose_drafter(), PythonDrafter)
    (line,) = caplog.messages
    assert re.search(said, line)
    assert "\n" not in line


def test_records_are_laid_out_as_c_lays_them_out() -> None:
    """Against ctypes, which follows the C compiler's rules."""
    kinds = {"i": ctypes.c_int32, "d": ctypes.c_double, "P": ctypes.c_void_p}
    shapes = (
        {"a": "i", "b": "P", "c": "3i"},
        {"a": "P", "b": "i"},
        {"a": "i", "b": "2i"},
        {"a": "d", "b": "i", "c": "d"},
    )
    for fields in shapes:
        types = [(name, kinds[code[-1]] * int(code[:-1] or 1)) for name, code in fields.items()]
        twin = type("Twin", (ctypes.Structure,), {"_fields_": types})
        record = Record("Twin", **fields)
        assert record.size == ctypes.sizeof(twin)
        assert record.offsets == {name: getattr(twin, name).offset for name in fields}
    whole = STEP.pack(0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 9)
    assert STEP.with_only("branch", "root").pack(7, 9) == whole
