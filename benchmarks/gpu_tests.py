"""The tests marked `gpu`, in a few processes: the part `tests` of `gpu_check.py`. Needs pytest and no plugin of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

MARK = "mark.gpu"
PROCESSES = 6
LIMIT = 900.0
"""Seconds after which the tests of a process count as failed. Most of the time kernels are compiled, on the host: among
eight processes on an H200's 16 cores `test_graph_quantised.py` took over 400."""
PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")


def marked_files(tests: Path) -> list[Path]:
    """Files that may have tests with the mark, by themselves or by a fixture of their folders."""
    fixtures = [path.parent for path in tests.rglob("conftest.py") if MARK in path.read_text(encoding="utf-8")]
    return [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if MARK in path.read_text(encoding="utf-8") or any(folder in path.parents for folder in fixtures)
    ]


def collect(root: Path, files: Sequence[Path]) -> tuple[Counter[str], list[str], str]:
    """Tests by file; files that need a package which is not here, and which; and what else cannot be collected."""
    told = run_pytest(root, ["--collect-only", "--continue-on-collection-errors", *map(str, files)])
    counts = Counter(line.split("::")[0] for line in told.stdout.splitlines() if re.match(r"\S+\.py::", line))
    left_out, broken = [], []
    for name, error in re.findall(r"ERROR collecting (\S+) _+\n(.*?)(?=\n_{3,} |\n=+ )", told.stdout, re.DOTALL):
        package = re.search(r"No module named '(\w+)", error)
        if package is not None and find_spec(package[1]) is None:
            left_out.append(f"{name} needs {package[1]}")
        else:
            broken.append(f"{name}: {error[-600:]}")
    if not counts and not left_out and not broken:
        broken.append(told.stdout[-2000:])
    return counts, left_out, "\n".join(broken)


def run_pytest(root: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    paths = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *PYTEST, *options],
        cwd=root, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def deal(counts: Mapping[str, int], groups: int) -> list[list[str]]:
    """The files in groups with about the same number of tests."""
    dealt: list[list[str]] = [[] for _ in range(groups)]
    for name in sorted(counts, key=lambda name: -counts[name]):
        min(dealt, key=lambda group: sum(counts[other] for other in group)).append(name)
    return [group for group in dealt if group]


def run_tests(root: Path) -> tuple[bool, str]:
    """Run them; whether all passed, and how many did what. What a process that failed has printed is shown."""
    counts, left_out, broken = collect(root, marked_files(root / "tests"))
    for line in left_out:
        print(f"left out: {line}")
    if broken:
        print(broken)

    def run(group: list[str]) -> tuple[bool, Counter[str]]:
        try:
            done = run_pytest(root, group)
        except subprocess.TimeoutExpired:
            print(f"not ended after {LIMIT:g} s: {' '.join(group)}", flush=True)
            return False, Counter({"timed out": 1})
        last = " ".join(done.stdout.rstrip().splitlines()[-1:])
        print(f"tests: {last}" if done.returncode == 0 else done.stdout[-6000:], flush=True)
        return done.returncode == 0, counted(last)

    with ThreadPoolExecutor(PROCESSES) as threads:
        found = list(threads.map(run, deal(counts, PROCESSES)))
    total = sum((one for _, one in found), Counter[str]())
    figure = ", ".join(f"{count} {what}" for what, count in sorted(total.items())) or "none"
    return not broken and all(passed for passed, _ in found) and total["passed"] > 0, figure


def counted(line: str) -> Counter[str]:
    """What pytest's last line counts, but tests that were not chosen."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)", line)
    return Counter({"error" if what == "errors" else what: int(count) for count, what in found})
