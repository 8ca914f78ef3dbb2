"""One rank of a test's world: `worker.py FOLDER` does what FOLDER/task.json says and writes `rank<r>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from cases import backend_of, decode
from tiny import tiny

from lookahead.parallel import ParallelBackend, join


def identity(task: dict[str, Any]) -> list[Any]:
    """Every case's outputs, steps and counters."""
    found = []
    with join(timeout=30, check=task.get("check", False)) as group:
        for case in task["cases"]:
            backend = ParallelBackend(backend_of(case, tiny("Llama")), group)
            before = group.collectives, group.sent_bytes
            result = decode(backend, case)
            counters = vars(backend.counters)
            exchanged = {"collectives": group.collectives - before[0], "bytes": group.sent_bytes - before[1]}
            found.append({**result, **counters, **exchanged})
    return found


def main(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    import os

    report = globals()[task["do"]](task)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
