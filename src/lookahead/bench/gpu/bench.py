"""One command of the GPU benchmark: its options, the models and prompts, and one JSON file for each part."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.graph.backend import GraphBackend
from lookahead.bench.run.about import device_name, machine, versions
from lookahead.bench.run.inflate import MODEL_SHAPES, inflate
from lookahead.bench.run.prompts import load
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig, StopRules
from lookahead.generate import LookaheadModel
from lookahead.generate import load as load_model
from lookahead.loading.load import DTYPES
from lookahead.models.read import read
from lookahead.models.spec import Decoder

SMALL = "small"
"""The shape of the model itself."""
METHODS = {
    "autoregressive": LookaheadConfig.autoregressive(),
    "paper (5,15,15) + prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default": LookaheadConfig(),
}


@dataclass(frozen=True)
class GpuOptions:
    """`limit` are prompts of each set; a baseline starts no new prompt of a set after `seconds`."""

    model: str | None = None
    inflate: str = "7b"
    dtype: str = "bfloat16"
    device: str = "cuda"
    data_dir: Path | None = None
    limit: int = 10
    max_tokens: int = 256
    out: Path = Path("lookahead-bench")
    page: Path | None = None
    invariant: str = "on"
    seconds: float = 60.0

    def check(self) -> None:
        shapes = (SMALL, *MODEL_SHAPES)
        if self.inflate not in shapes:
            raise ValueError(f"--inflate does not know {self.inflate!r}: choose from {', '.join(shapes)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype does not know {self.dtype!r}: choose from {', '.join(DTYPES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; --device cpu tests the parts, and times nothing")

    def shown(self, parts: Sequence[str]) -> str:
        """The command, without the folders of the machine it ran on."""
        size = f"--inflate {self.inflate} --limit {self.limit} --max-tokens {self.max_tokens}"
        return f"lookahead bench --preset {','.join(f'gpu-{p}' for p in parts)} {size} --model FILE --data-dir DATA"


def with_window(decoder: Decoder, window: int) -> Decoder:
    """The same model with this window in every layer."""
    blocks = [replace(block, attention=replace(block.attention, window=window)) for block in decoder.blocks]
    return replace(decoder, blocks=blocks)


class GpuBench:
    """The models, made when they are first needed, and what the current part has measured.

    A part adds its records one by one, and its file is written anew each time: a run that is cut short leaves what it
    had. Models are made outside inference mode: `torch.compile` takes no weights made in it.
    """

    def __init__(self, options: GpuOptions, parts: Sequence[str]) -> None:
        self.options, self.parts = options, parts
        self.part = ""
        self.records: list[dict[str, Any]] = []

    @cached_property
    def small(self) -> LookaheadModel:
        options: dict[str, Any] = {"dtype": "float32", "device": self.options.device, "backend": "eager"}
        with torch.inference_mode(False):
            return load_model(self.options.model, config=LookaheadConfig(), **options)

    def shaped(self, dtype: torch.dtype) -> Any:
        """The small model's function in the shape that was asked for."""
        with torch.inference_mode(False):
            if self.options.inflate == SMALL:
                return copy.deepcopy(self.small.model).to(dtype)
            return inflate(self.small.model, MODEL_SHAPES[self.options.inflate], dtype=dtype)

    @cached_property
    def large(self) -> Any:
        return self.shaped(getattr(torch, self.options.dtype))

    def free(self) -> None:
        """Give back what the last backend held."""
        gc.collect()  # a backend and its captured steps hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def backend(
        self, model: Any = None, *, invariant: bool = True, kv_tokens: int | None = None, window: int | None = None
    ) -> GraphBackend:
        """A new backend. What the one before it held is given back. `window`: every layer gets one of
        this many tokens."""
        self.free()
        model = self.large if model is None else model
        with torch.inference_mode(False):
            described = None if window is None else with_window(read(model, "graph"), window)
            return GraphBackend(model, invariant=invariant, kv_tokens=kv_tokens, description=described)

    @property
    def invariances(self) -> tuple[bool, ...]:
        return {"on": (True,), "off": (False,), "both": (True, False)}[self.options.invariant]

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        """Token ids by set: MT-Bench's first turns as chat, HumanEval's prompts as raw text."""
        if self.options.data_dir is None:
            raise ValueError("this part needs prompts: give --data-dir, a folder with mt_bench.jsonl, humaneval.jsonl")
        loaded = {name: load(name, self.options.data_dir, self.options.limit, 1) for name in ("mt-bench", "humaneval")}
        return {name: [prompt_ids(self.small, prompt) for prompt in chosen] for name, chosen in loaded.items()}

    @property
    def rules(self) -> StopRules:
        return StopRules(self.options.max_tokens, self.small.stop_ids)

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
        path = self.options.out / f"{self.part}-{self.options.inflate}.json"
        path.write_text(f'{{\n"about": {about},\n"records": [\n {records}\n]\n}}\n', encoding="utf-8")

    def about(self) -> dict[str, Any]:
        cuda = self.options.device == "cuda"
        return {
            "part": self.part,
            "command": self.options.shown(self.parts),
            "gpu": device_name(torch.device("cuda")) if cuda else "none: run on a CPU, no times to go by",
            **machine(),
            **versions(),
            "shape": self.options.inflate,
            "dtype": self.options.dtype,
            "prompts": self.options.limit,
            "new_tokens": self.options.max_tokens,
        }
