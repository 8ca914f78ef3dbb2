"""One command of the GPU benchmark: what was asked for, the models and prompts, and the JSON it leaves."""

from __future__ import annotations

import argparse
import copy
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

import lookahead
from lookahead.backends.graph.backend import GraphBackend
from lookahead.bench.inflate import SHAPES, inflate
from lookahead.config import LookaheadConfig, StopRules

METHODS = {
    "autoregressive": LookaheadConfig.autoregressive(),
    "paper (5,15,15) + prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default": LookaheadConfig(),
}
INVARIANT = bool(inspect.signature(GraphBackend).parameters["invariant"].default)
"""What the backend does unless told."""
PATHS = ("--model", "--data-dir", "--out", "--outputs")


class Bench:
    """One command: what was asked for, the models made when they are first needed, and what has been measured.

    Models are made outside inference mode, which the parts run in: `torch.compile` takes no weights made in it.

    A part adds its rows and outputs one by one, and the file is written anew each time, so that a run that is cut short
    leaves what it had. `known` holds the outputs (token ids) of all parts of this command.
    """

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self.args, self.argv = args, list(argv)
        self.device = torch.device(args.device)
        self.known: list[dict[str, Any]] = []
        self.begin("")

    # The models

    @cached_property
    def lm(self) -> Any:
        """The small model in fp32, with its tokenizer."""
        options = {"dtype": "float32", "device": str(self.device), "backend": "eager"}
        with torch.inference_mode(False):
            return lookahead.load(self.args.model, config=LookaheadConfig(), **options)

    @property
    def small(self) -> Any:
        return self.lm.model

    @cached_property
    def large(self) -> Any:
        """The model of the shape and dtype asked for."""
        return self.shaped(self.args.shape, getattr(torch, self.args.dtype))

    def shaped(self, shape: str, dtype: torch.dtype) -> Any:
        """The small model's function in this shape; `small` is a copy of itself."""
        with torch.inference_mode(False):
            if shape == "small":
                return copy.deepcopy(self.small).to(dtype)
            return inflate(self.small, SHAPES[shape], dtype=dtype)

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        """Token ids by set: MT-Bench's first turns as chat, HumanEval's prompts as raw text."""
        folder, count = self.args.data_dir, self.args.prompts
        if folder is None:
            raise SystemExit("this part needs prompts: give --data-dir, a folder with mt_bench.jsonl, humaneval.jsonl")

        def read(name: str) -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in (folder / name).read_text().splitlines() if line.strip()]
            return [lines[i * len(lines) // count] for i in range(count)]

        return {
            "mt-bench": [self.lm.encode(row["turns"][0]) for row in read("mt_bench.jsonl")],
            "humaneval": [self.lm.encode(row["prompt"].rstrip(), raw=True) for row in read("humaneval.jsonl")],
        }

    @property
    def stop(self) -> StopRules:
        return StopRules(self.args.new_tokens, self.lm.stop_ids)

    # What was measured

    def begin(self, part: str, label: str = "") -> None:
        self.part, self.label = part, label
        self.rows: list[dict[str, Any]] = []
        self.outputs: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        self.rows.append(row)
        self.save()

    def keep(
        self, method: str, data: str, invariant: bool | None, tokens: Sequence[Sequence[int]], seconds: Sequence[float]
    ) -> None:
        """Remember a method's outputs on the first prompts of a set, and their wall times."""
        chosen = self.prompts[data][: len(tokens)]
        made = {"method": method, "set": data, "invariant": invariant, "new_tokens": self.args.new_tokens}
        made |= {"prompts": [prompt_key(p) for p in chosen], "seconds": [round(s, 5) for s in seconds]}
        made["tokens"] = [list(t) for t in tokens]
        self.outputs.append(made)
        self.known.append(made)

    def save(self) -> None:
        if self.args.out is None:
            return
        self.args.out.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (self.part, self.args.shape, self.label)))
        write_json(self.args.out / f"{name}.json", self.about(), self.rows, self.outputs)

    def about(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "part": self.part,
            "argv": shown(self.argv),
            "gpu": torch.cuda.get_device_name() if cuda else "none: run on a CPU, no times to go by",
            "cpu": f"{processor_name()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "triton": triton_version(),
            "python": platform.python_version(),
            "lookahead": lookahead.__version__,
            "shape": self.args.shape,
            "dtype": self.args.dtype,
            "prompts": self.args.prompts,
            "new_tokens": self.args.new_tokens,
            "invariant_default": INVARIANT,
        }


def write_json(path: Path, about: Any, rows: Sequence[Any], outputs: Sequence[Any]) -> None:
    """One row per line, so that the files can be read and compared."""
    parts = [f'"about": {json.dumps(about, indent=1)}']
    for name, items in (("rows", rows), ("outputs", outputs)):
        if items or name == "rows":
            parts.append(f'"{name}": [\n ' + ",\n ".join(json.dumps(item) for item in items) + "\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def shown(argv: Sequence[str]) -> str:
    """The command line without the folders of the machine it ran on."""
    words = ["python benchmarks/gpu.py"]
    for word in argv:
        name, equals, value = word.partition("=")
        if words[-1] in PATHS:
            word = Path(word).name
        elif equals and name in PATHS:
            word = f"{name}={Path(value).name}"
        words.append(word)
    return " ".join(words)


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def prompt_key(prompt: Sequence[int]) -> str:
    """A short name for a prompt's tokens, by which outputs of several commands are brought together."""
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()[:12]
