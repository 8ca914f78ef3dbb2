"""The JSON of a GPU run, read back: rows by part and shape, and ratios on the prompts that two methods share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class File:
    """What one part left."""

    name: str
    part: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    outputs: list[dict[str, Any]]

    @property
    def shape(self) -> str:
        return str(self.about["shape"])


@dataclass(frozen=True)
class Results:
    """All files of a folder, by name."""

    files: tuple[File, ...]

    @classmethod
    def read(cls, folder: Path) -> Results:
        files = []
        for path in sorted(folder.glob("*.json")):
            read = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(read, dict) and "rows" in read and "shape" in read.get("about", {}):
                about = read["about"]
                part = about.get("part") or path.stem.split("-")[0]
                files.append(File(path.name, part, about, read["rows"], read.get("outputs", [])))
        if not files:
            raise ValueError(f"{folder} holds no JSON of gpu.py; give the folder that was its --out")
        return cls(tuple(files))

    @property
    def invariant(self) -> bool:
        """Whether the rows that count are the invariant ones: as the backend does it unless told."""
        return any(file.about.get("invariant_default", False) for file in self.files)

    def all(self, part: str, shape: str | None, **fields: Any) -> list[dict[str, Any]]:
        """Rows of a part that have these values; `shape` None takes any."""
        return [
            row
            for file in self.files
            if file.part == part and shape in (None, file.shape)
            for row in file.rows
            if all(row.get(name) == value for name, value in fields.items())
        ]

    def last(self, part: str, shape: str, **fields: Any) -> dict[str, Any] | None:
        return next(iter(self.all(part, shape, **fields)[::-1]), None)

    def speed(self, shape: str, method: str, data: str) -> dict[str, Any] | None:
        """A method's row: ours as the backend does it unless told, or transformers'. Not one that tells of an error."""
        if method.startswith("transformers"):
            return self.last("baselines", shape, method=method, set=data)
        return self.last("speed", shape, method=method, set=data, invariant=self.invariant)

    def outputs(self, shape: str, method: str, data: str) -> dict[str, tuple[int, float]]:
        """Tokens and seconds by prompt, where they were kept."""
        flag = None if method.startswith("transformers") else self.invariant
        found: dict[str, tuple[int, float]] = {}
        for file in self.files:
            for entry in file.outputs if file.shape == shape and file.part in ("speed", "baselines") else ():
                if (entry["method"], entry["set"], entry["invariant"]) == (method, data, flag):
                    counts = map(len, entry["tokens"])
                    found |= dict(zip(entry["prompts"], zip(counts, entry["seconds"], strict=True), strict=True))
        return found


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of one method and another, on the prompts they share if those are known."""

    one: float
    other: float
    prompts: str
    shared: bool

    @property
    def value(self) -> float:
        return self.one / self.other


def ratio(results: Results, shape: str, one: str, other: str, data: str) -> Ratio | None:
    first, second = results.outputs(shape, one, data), results.outputs(shape, other, data)
    keys = [key for key in first if key in second]
    if keys:
        rates = [sum(by[k][0] for k in keys) / sum(by[k][1] for k in keys) for by in (first, second)]
        return Ratio(*rates, prompts=f"{len(keys)} prompts", shared=True)
    rows = results.speed(shape, one, data), results.speed(shape, other, data)
    if rows[0] is None or rows[1] is None:
        return None
    own = not other.startswith("transformers")
    return Ratio(rows[0]["tok_s"], rows[1]["tok_s"], prompts="all prompts", shared=own)


def show(value: float) -> str:
    """A figure as it is worth reading: 958, 17.9, 4.37."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
