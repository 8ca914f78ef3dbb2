"""The tests marked `gpu`, in a few processes: the part `tests` of `gpu_check.py`. Needs pytest and no plugin of it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

MARK = "mark.gpu"
PROCESSES = 3
LIMIT = 360.0
"""Seconds after which the tests of a process count as failed."""
NO_TESTS = 5
"""pytest's exit code where no test has the mark."""


def marked_files(tests: Path) -> list[Path]:
    """Files that may have tests with the mark, by themselves or by a fixture of their folders."""
    fixtures = [path.parent for path in tests.rglob("conftest.py") if MARK in path.read_text(encoding="utf-8")]
    return [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if MARK in path.read_text(encoding="utf-8") or any(folder in path.parents for folder in fixtures)
    ]


def missing(path: Path, here: tuple[Path, ...]) -> list[str]:
    """Modules that a file imports at its top and that are not installed; those in the folders `here` are there."""
    return sorted({name for name in _imports(path) if not find_spec(name) and not _is_there(name, here)})


def _imports(path: Path) -> Iterator[str]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from (one.name.split(".")[0] for one in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.split(".")[0]


def _is_there(name: str, here: tuple[Path, ...]) -> bool:
    return any((folder / f"{name}.py").is_file() or (folder / name).is_dir() for folder in here)


def deal(files: list[Path], groups: int) -> list[list[Path]]:
    """The files in groups of about the same size; a long file takes long."""
    dealt: list[list[Path]] = [[] for _ in range(groups)]
    for path in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        min(dealt, key=lambda group: sum(other.stat().st_size for other in group)).append(path)
    return [group for group in dealt if group]


def run_tests(root: Path) -> tuple[bool, str]:
    """Run them; whether all passed, and how many did what. What a process that failed has printed is shown."""
    files, helpers = [], (root / "tests" / "helpers", root / "benchmarks", root / "src")
    for path in marked_files(root / "tests"):
        if lacking := missing(path, helpers):
            print(f"left out: {path.relative_to(root)} needs {', '.join(lacking)}")
        else:
            files.append(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short"]

    def run(group: list[Path]) -> tuple[bool, Counter[str]]:
        try:
            done = subprocess.run(
                [*command, *map(str, group)],
                cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            print(f"{len(group)} files of tests had not ended after {LIMIT:g} s: {str(late.stdout)[-2000:]}")
            return False, Counter({"timed out": 1})
        last = done.stdout.rstrip().splitlines()[-1:]
        if passed := done.returncode in (0, NO_TESTS):
            print(f"tests: {' '.join(last)}", flush=True)
        else:
            print(done.stdout[-6000:], flush=True)
        return passed, counted(" ".join(last))

    with ThreadPoolExecutor(PROCESSES) as threads:
        found = list(threads.map(run, deal(files, PROCESSES)))
    total = sum((counts for _, counts in found), Counter[str]())
    figure = ", ".join(f"{count} {what}" for what, count in sorted(total.items())) or "none"
    return all(passed for passed, _ in found) and total["passed"] > 0, figure


def counted(line: str) -> Counter[str]:
    """What pytest's last line counts, but what was not chosen."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)", line)
    return Counter({what.rstrip("s") if what == "errors" else what: int(count) for count, what in found})
