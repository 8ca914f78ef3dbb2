"""What the parts share: the models and prompts, timing on the device, one counter for every method, and the JSON."""

from __future__ import annotations

import argparse
import copy
import hashlib
import inspect
import json
import os
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

import lookahead
from lookahead.backends.base import StepInput
from lookahead.backends.graph import SIZES, GraphBackend, bucket
from lookahead.bench.inflate import SHAPES, inflate
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine import Engine
from lookahead.sequence import DecodingSequence
from lookahead.sources import Warmth
from lookahead.tree import TokenTree

METHODS = {
    "autoregressive": LookaheadConfig.autoregressive(),
    "paper (5,15,15) + prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default": LookaheadConfig(),
}
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
            "invariant_default": inspect.signature(GraphBackend).parameters["invariant"].default,
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


# Timing


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median device time of a call, in milliseconds, by events; three warm-up calls. Without a GPU, wall time."""
    if not torch.cuda.is_available():
        return statistics.median(wall_ms(run, 3))
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def wall_ms(run: Callable[[], Any], repeats: int = 30) -> list[float]:
    walls = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        walls.append(1e3 * (time.perf_counter() - begin))
    return walls


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a captured graph, so that launching costs nothing."""
    if not torch.cuda.is_available():
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# A step


def tree_of(count: int, vocabulary: int = 1000) -> TokenTree:
    """A tree as the default makes it: guesses that hang from each other at random."""
    rng = random.Random(count)
    parents = [-1, *(max(0, i - rng.randrange(1, 9)) for i in range(1, count))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return TokenTree([rng.randrange(vocabulary) for _ in range(count)], parents, depths, list(range(count)))


class CountedBackend(GraphBackend):
    """The graph backend, counting the captured sizes that ran and the tokens of context they ran at.

    It, too, is made outside inference mode: the model's weights become views of what it allocates.
    """

    def __init__(self, model: Any, *, invariant: bool) -> None:
        with torch.inference_mode(False):
            super().__init__(model, invariant=invariant)
        self.forget()

    def forget(self) -> None:
        self.used: Counter[int] = Counter()
        self.contexts: list[int] = []

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        decoding = not any(item.trail for item in inputs)
        launched = super().launch(inputs)
        if decoding:
            self.used[launched.shape.count] += 1
            self.contexts += [self.length(item.slot) for item in inputs]
        return launched


def step_of(backend: GraphBackend, slot: int, count: int, context: int) -> tuple[StepInput, Any]:
    """Run a step of this size at this context once: its input, and its shape with the graph captured."""
    item = StepInput(slot, (), tree_of(count, min(1000, backend.vocab_size)), SamplingParams(), (), top=8)
    backend._length[slot] = context
    backend.step([item])
    return item, backend._shapes[1, bucket(count), True]


def replay_of(shape: Any) -> Callable[[], Any]:
    """The captured step; on a CPU, where nothing is captured, the step."""
    return shape.run if shape.graph is None else shape.graph.replay


def replay_ms(backend: GraphBackend, count: int, context: int) -> float:
    """Device time of a captured step of this size at this context."""
    slot = backend.open()
    shape = step_of(backend, slot, count, context)[1]
    device = median_ms(replay_of(shape))
    backend.close(slot)
    return device


# One counter for every method


@dataclass
class Decoded:
    """A finished sequence and the wall time of each of its steps, the first one's with the prefill."""

    sequence: DecodingSequence
    steps: list[float]


def decode(
    backend: Any,
    prompt: Sequence[int],
    config: LookaheadConfig,
    rules: StopRules,
    warmth: Warmth,
    sampling: SamplingParams | None = None,
) -> Decoded:
    """One prompt by itself, from prompt to last token."""
    sequence = DecodingSequence(prompt, config, sampling, rules, warmth=warmth)
    engine, steps = Engine(backend), []
    begin = last = time.perf_counter()
    engine.add(sequence)
    while engine.running:
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    sequence.stats.seconds = last - begin
    sequence.stats.first_token_seconds = steps[0]
    return Decoded(sequence, steps)


def warm_up(backend: GraphBackend, config: LookaheadConfig, prompts: Sequence[Sequence[int]], stop: StopRules) -> None:
    """Capture every size the method can use, and run a few tokens of each prompt: nothing is compiled while timed."""
    for count in (size for size in SIZES if size <= bucket(config.budget)):
        slot = backend.open()
        step_of(backend, slot, count, 64)
        backend.close(slot)
    for prompt in prompts:
        decode(backend, prompt, config, StopRules(min(8, stop.max_tokens), stop.eos_ids), Warmth())


def summary(done: Sequence[Decoded]) -> dict[str, Any]:
    """Totals over the prompts; tokens per second from prompt to last token, prefill included."""
    stats = [one.sequence.stats for one in done]
    tokens, steps = sum(s.generated_tokens for s in stats), sum(s.steps for s in stats)
    later = [seconds for one in done for seconds in one.steps[1:]]
    return {
        "prompts": len(done), "tokens": tokens, "steps": steps, "S": round(tokens / steps, 3),
        "tok_s": round(tokens / sum(s.seconds for s in stats), 1),
        "median_tok_s": round(statistics.median(s.tokens_per_second for s in stats), 1),
        "first_ms": round(1e3 * statistics.median(s.first_token_seconds for s in stats), 2),
        "ms_per_step": round(1e3 * sum(later) / max(1, len(later)), 3),
        "median_step_ms": round(1e3 * statistics.median(later), 3) if later else None,
        "K": round(sum(s.step_tokens for s in stats) / steps, 1),
        "propose_ms": round(1e3 * sum(s.propose_seconds for s in stats) / steps, 3),
        "absorb_ms": round(1e3 * sum(s.absorb_seconds for s in stats) / steps, 3),
        "forward_ms": round(1e3 * sum(s.forward_seconds for s in stats) / steps, 3),
    }  # fmt: skip
