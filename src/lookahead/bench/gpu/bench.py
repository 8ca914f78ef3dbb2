"""One command of the GPU benchmark: its options, the model and prompts, and one JSON file for each part."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.graph.backend import GraphBackend
from lookahead.bench.run.about import device_name, machine, versions
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig, StopRules
from lookahead.generate import LookaheadModel, load
from lookahead.loading.load import DTYPES

METHODS = {
    "autoregressive": LookaheadConfig.autoregressive(),
    "paper (5,15,15) + prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default": LookaheadConfig(),
}


@dataclass(frozen=True)
class GpuOptions:
    """`limit` are prompts of each set. `shape` is the one that the model was padded to, where it was."""

    model: str | None = None
    dtype: str = "bfloat16"
    device: str = "cuda"
    data_dir: Path | None = None
    limit: int = 10
    max_tokens: int = 256
    out: Path = Path("lookahead-bench")
    page: Path | None = None
    invariant: str = "on"
    shape: str | None = None

    def check(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype does not know {self.dtype!r}: choose from {', '.join(DTYPES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; --device cpu tests the parts, and times nothing")

    def shown(self, parts: Sequence[str]) -> str:
        """The command, without the folders of the machine it ran on."""
        size = f"--limit {self.limit} --max-tokens {self.max_tokens} --model FILE --data-dir DATA"
        if self.shape is not None:
            return f"python benchmarks/inflate.py {self.shape} gpu {' '.join(parts)} {size}"
        return f"lookahead bench --preset {','.join(f'gpu-{p}' for p in parts)} {size}"


class GpuBench:
    """The model, loaded when it is first needed, and what the current part has measured.

    A part adds its records one by one, and its file is written again each time: a run that is cut short leaves what it
    had. The model is made outside inference mode: `torch.compile` takes no weights made in it.
    """

    def __init__(self, options: GpuOptions, parts: Sequence[str], load: Callable[..., Any] = load) -> None:
        self.options, self.parts, self._load = options, parts, load
        self.part = ""
        self.records: list[dict[str, Any]] = []

    @cached_property
    def model(self) -> LookaheadModel:
        """On the eager backend, and with a config, so that nothing is captured or measured for it."""
        options: dict[str, Any] = {"dtype": self.options.dtype, "device": self.options.device, "backend": "eager"}
        with torch.inference_mode(False):
            found: LookaheadModel = self._load(self.options.model, config=LookaheadConfig(), log=print, **options)
            return found

    def free(self) -> None:
        """Free what the last backend held."""
        gc.collect()  # a backend and its captured steps hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def backend(self, *, invariant: bool = True, kv_tokens: int | None = None) -> GraphBackend:
        """A new backend; what the one before it held is freed."""
        self.free()
        with torch.inference_mode(False):
            return GraphBackend(self.model.model, invariant=invariant, kv_tokens=kv_tokens)

    @property
    def invariances(self) -> tuple[bool, ...]:
        return {"on": (True,), "off": (False,), "both": (True, False)}[self.options.invariant]

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        """Token ids by set: MT-Bench's first turns as chat and HumanEval's prompts as raw text; without a folder that
        has them, the builtin ones."""
        folder, limit = self.options.data_dir, self.options.limit
        names = ("builtin",) if folder is None else ("mt-bench", "humaneval")
        loaded = {name: load_prompts(name, folder, limit, 1) for name in names}
        return {name: [prompt_ids(self.model, prompt) for prompt in chosen] for name, chosen in loaded.items()}

    @property
    def rules(self) -> StopRules:
        return StopRules(self.options.max_tokens, self.model.stop_ids)

    def begin(self, part: str) -> None:
        self.part, self.records = part, []

    def add(self, record: dict[str, Any]) -> None:
        print(record, flush=True)
        self.records.append(record)
        self.save()

    def save(self) -> None:
        """One record per line, so that the files can be read and compared."""
        about = json.dumps(self.about(), indent=1)
        records = ",\n ".join(map(json.dumps, self.records))
        self.options.out.mkdir(parents=True, exist_ok=True)
        name = self.part if self.options.shape is None else f"{self.part}-{self.options.shape}"
        text = f'{{\n"about": {about},\n"records": [\n {records}\n]\n}}\n'
        (self.options.out / f"{name}.json").write_text(text, encoding="utf-8")

    def about(self) -> dict[str, Any]:
        cuda = self.options.device == "cuda"
        return {
            "part": self.part,
            "command": self.options.shown(self.parts),
            "gpu": device_name(torch.device("cuda")) if cuda else "none: run on a CPU, no times to go by",
            **machine(),
            **versions(),
            "shape": self.options.shape or Path(self.model.name).name,
            "dtype": self.options.dtype,
            "prompts": self.options.limit,
            "new_tokens": self.options.max_tokens,
        }
