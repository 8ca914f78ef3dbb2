"""The part batch: tokens per second of many sequences at once, in a steady state.

An answer that ends is replaced by the next one at once, so that the number of sequences stays the
same. A step that had to be captured first is left out: in a steady state all are captured. The record says how many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter
from typing import Any, ParamSpec

import torch

from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import PassCost, stairs
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.running import RunningStep
from lookahead.backends.graph.sizes import ROW_SIZES
from lookahead.bench.gpu.bench import GpuBench
from lookahead.bench.gpu.timing import bytes_read, copy_bandwidth
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.loading.timing import measure_passes

P = ParamSpec("P")

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
METHODS = {"autoregressive": LookaheadConfig.autoregressive(), "default": without_cost(LookaheadConfig())}
SAMPLINGS = {"greedy": SamplingParams(), "T=0.7": SamplingParams(temperature=0.7)}
ROUNDS, ANSWERS = 1.5, {"greedy": 12, "T=0.7": 6}
"""For how many answers of every sequence a run is timed, after the first step of all of them; and for how many answers
of all sequences together at least, because how much guessing gives depends on the text."""


@dataclass
class Clock:
    """When the device began and ended each step's work: all the rest of the time it waits for the host."""

    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _next: list[torch.cuda.Event] = field(default_factory=list)

    def watch(self, backend: GraphBackend) -> None:
        """Mark every step of this backend from now on. Without a GPU nothing is marked."""
        if backend.device.type == "cuda":
            runner = backend.runner
            runner.run = self._marked(runner.run)  # type: ignore[method-assign]
            runner.run_ahead = self._marked(runner.run_ahead)  # type: ignore[method-assign]

    def _marked(self, call: Callable[P, RunningStep]) -> Callable[P, RunningStep]:
        def run(*args: P.args, **options: P.kwargs) -> RunningStep:
            begin, end = self._next or self._new_events()
            begin.record()
            running = call(*args, **options)
            end.record()
            self.marks.append((begin, end))
            self._next = self._new_events()  # made now, so that the next step need not wait for them
            return running

        return run

    def _new_events(self) -> list[torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for event in events:
            event.record()  # only then CUDA makes it
        return events

    def read(self) -> dict[str, float]:
        """The median step and the median gap before it since the last reading, in milliseconds."""
        if not self.marks:
            return {}
        torch.cuda.synchronize()
        device = statistics.median(begin.elapsed_time(end) for begin, end in self.marks)
        gaps = [before[1].elapsed_time(after[0]) for before, after in zip(self.marks, self.marks[1:], strict=False)]
        gap = statistics.median(gaps) if gaps else 0.0
        self.marks.clear()
        return {"device_ms": round(device, 3), "gap_percent": round(100 * gap / (gap + device), 1)}


class Load:
    """A number of sequences that decode side by side, each replaced by the next when it ends.

    As in a server, the next step begins before anybody hears of the last one, and some requests wait for their turn.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        config: LookaheadConfig,
        sampling: SamplingParams,
        rules: StopRules,
    ) -> None:
        self.engine, self.config, self.sampling, self.rules = engine, config, sampling, rules
        self.memory = SharedMemory()
        self.outputs: dict[int, list[int]] = {}  # by the prompt's number
        self._prompts: Iterator[tuple[int, list[int]]] = cycle(enumerate(prompts))
        self._numbers: dict[int, int] = {}

    def add(self) -> None:
        number, prompt = next(self._prompts)
        sequence = DecodingSequence(prompt, self.config, self.sampling, self.rules, memory=self.memory)
        self._numbers[self.engine.submit(Request(sequence))] = number

    def step(self) -> tuple[int, int]:
        """Finish a step and begin the next. Returns the tokens and the tries of the one that is finished."""
        tokens = tried = 0
        finished = self.engine.finish()
        self.engine.begin()
        for event in finished.events():
            if event.error is not None:
                raise event.error
            tokens, tried = tokens + len(event.tokens), tried + event.tried
            if event.finish_reason is not None:
                self.outputs.setdefault(self._numbers[event.request.id], event.request.sequence.output)
                self.add()
        return tokens, tried

    def end(self) -> None:
        self.engine.finish()
        for id in self.engine.running:
            self.engine.cancel(id)


def batch(bench: GpuBench) -> None:
    """Total tokens per second of n sequences in a steady state, token by token and with guesses, greedy and sampled."""
    tokens = bench.options.max_tokens
    prompts = [one for pair in zip(*bench.prompts.values(), strict=True) for one in pair]
    rules = StopRules(tokens, bench.model.stop_ids)
    backend, clock = bench.backend(), Clock()
    passes = measure_passes(backend).table(512)
    cost = stairs(passes, ROW_SIZES)
    bandwidth = copy_bandwidth() if backend.device.type == "cuda" else math.nan
    clock.watch(backend)
    for label, sampling in SAMPLINGS.items():
        plain: dict[int, list[int]] = {}
        for count in SEQUENCES:
            if (len(prompts[0]) + 2 * tokens) * count > min(backend.kv.pages) * 64:
                continue
            for name, config in METHODS.items():
                measured: dict[str, Any] = {}
                for warm in (True, False):
                    engine = Engine(backend, DraftBudget(PassCost(cost)), max_sequences=count)
                    load = Load(engine, prompts, config, sampling, rules)
                    for _ in range(2 * count):
                        load.add()
                    answers = 0.5 * count if warm else max(ROUNDS * count, ANSWERS[label])
                    measured = measure(load, clock, count, answers * tokens)
                    load.end()
                for number, output in load.outputs.items():
                    plain.setdefault(number, output)
                same = sum(plain[number] == output for number, output in load.outputs.items())
                record = {"batch": count, "method": name, "sampling": label, **measured}
                if name == "autoregressive":
                    bound = count * bandwidth / bytes_read(backend.layers, count, record["context"])
                    record["of_bound"] = round(record["tok_s"] / bound, 3)
                bench.add(record | {"answers": len(load.outputs), "as_first_seen": same})


def measure(load: Load, clock: Clock, count: int, tokens: float) -> dict[str, Any]:
    """Run until this many tokens have come after the prompts; how fast they came."""
    started = 0
    while started < count:  # the prompts run, several in a pass
        load.step()
        started = sum(request.sequence.stats.steps > 0 for request in load.engine._requests.values())
    clock.read()
    backend: Any = load.engine.backend
    steps = made = tried = captures = texts = 0
    seconds = 0.0
    while made < tokens:
        begin, captured = perf_counter(), backend.captures
        given, guesses = load.step()
        if backend.captures > captured:
            captures += 1
            continue
        seconds += perf_counter() - begin
        steps, made, tried = steps + 1, made + given, tried + guesses
        requests = load.engine._requests.values()
        texts += sum(len(request.sequence.tokens) for request in requests if request.slot >= 0)
    return {
        "tok_s": round(made / seconds, 1), "ms_per_step": round(1e3 * seconds / steps, 3),
        "S": round(made / steps / count, 3), "guesses": round(tried / steps / count, 2), "captures": captures,
        "context": round(texts / steps / count), **clock.read(),
    }  # fmt: skip
