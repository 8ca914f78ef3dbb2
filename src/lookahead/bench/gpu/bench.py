"""One command of the GPU benchmark: the model and prompts of its options, and one JSON file for each part."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lookahead.bench.run.about import device_name, machine, versions
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel


class GpuBench:
    """The model, loaded when it is first needed, and what the current part has measured.

    A part adds its records one by one, and its file is written again each time: a run that is cut short leaves what it
    had. `shape` is the one that `load` pads the model to, if it does.
    """

    def __init__(self, options: Namespace, load: Callable[..., Any], shape: str | None = None) -> None:
        self.options, self.shape, self._load = options, shape, load
        self.part = ""
        self.records: list[dict[str, Any]] = []

    @cached_property
    def model(self) -> LookaheadModel:
        """On the graph backend, and with a config, so that no cost is measured for it."""
        options: dict[str, Any] = {"dtype": self.options.dtype, "device": self.options.device, "backend": "graph"}
        found: LookaheadModel = self._load(self.options.model, config=LookaheadConfig(), log=print, **options)
        return found

    @cached_property
    def prompts(self) -> dict[str, list[Prompt]]:
        """MT-Bench's first turns and HumanEval's prompts; without a folder that has them, the builtin ones."""
        folder, limit = self.options.data_dir, self.options.limit
        names = ("builtin",) if folder is None else ("mt-bench", "humaneval")
        return {name: load_prompts(name, folder, limit, 1) for name in names}

    def add(self, record: dict[str, Any]) -> None:
        print(record, flush=True)
        self.records.append(record)
        self.save()

    def save(self) -> None:
        """One record per line, so that the files can be read and compared."""
        about = json.dumps(self.about(), indent=1)
        records = ",\n ".join(map(json.dumps, self.records))
        self.options.out.mkdir(parents=True, exist_ok=True)
        name = self.part if self.shape is None else f"{self.part}-{self.shape}"
        text = f'{{\n"about": {about},\n"records": [\n {records}\n]\n}}\n'
        (self.options.out / f"{name}.json").write_text(text, encoding="utf-8")

    def about(self) -> dict[str, Any]:
        options, cuda = self.options, self.options.device == "cuda"
        return {
            "part": self.part,
            "command": self._command(),
            "gpu": device_name(torch.device("cuda")) if cuda else "none: run on a CPU, no times to go by",
            **machine(),
            **versions(),
            "shape": self.shape or Path(self.model.name).name,
            "dtype": options.dtype,
            "prompts": options.limit,
            "new_tokens": options.max_tokens,
        }

    def _command(self) -> str:
        """Without the folders of the machine that it ran on."""
        parts = [part for part in self.options.parts if part != "report"]
        size = f"--limit {self.options.limit} --max-tokens {self.options.max_tokens} --model FILE --data-dir DATA"
        if self.shape is not None:
            return f"python benchmarks/inflate.py {self.shape} gpu {' '.join(parts)} {size}"
        return f"lookahead bench --preset {','.join(f'gpu-{part}' for part in parts)} {size}"
