"""The part batch: tokens per second of many sequences at once, in a steady state.

An answer that ends is replaced by the next one at once, so that the number of sequences stays the
same. A step that had to be captured first is left out: in a steady state all are captured. The record says how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

from lookahead.algorithm.budget import without_cost
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.gpu.bench import GpuBench
from lookahead.bench.gpu.timing import bytes_read, copy_bandwidth
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.loading.fitting import cost_of_passes
from lookahead.loading.timing import measure_passes

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
METHODS = {"autoregressive": LookaheadConfig.autoregressive(), "default": without_cost(LookaheadConfig())}
SAMPLINGS = {"greedy": SamplingParams(), "T=0.7": SamplingParams(temperature=0.7)}
ROUNDS, ANSWERS = 1.5, {"greedy": 12, "T=0.7": 6}
"""For how many answers of every sequence a run is timed, after the first step of all of them; and for how many answers
of all sequences together at least, because how much guessing gives depends on the text."""


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
        memory: SharedMemory,
    ) -> None:
        self.engine, self.config, self.sampling, self.rules = engine, config, sampling, rules
        self.memory = memory.new()
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
    lm, tokens = bench.model, bench.options.max_tokens
    pairs = zip(*bench.prompts.values(), strict=True)
    prompts = [prompt_ids(lm, prompt) for pair in pairs for prompt in pair]
    rules, call = StopRules(tokens, lm.stop_ids), lm.client.call
    backend: Any = lm.backend
    curve = call(partial(measure_passes, backend))
    bandwidth = call(copy_bandwidth) if backend.device.type == "cuda" else math.nan
    for label, sampling in SAMPLINGS.items():
        plain: dict[int, list[int]] = {}
        for count in SEQUENCES:
            if (len(prompts[0]) + 2 * tokens) * count > min(backend.kv.pages) * 64:
                continue
            for name, config in METHODS.items():
                load = partial(Load, prompts=prompts, config=config, sampling=sampling, rules=rules, memory=lm.memory)
                answers = max(ROUNDS * count, ANSWERS[label])
                run = partial(
                    steady_state, load, backend, lambda: DraftBudget(cost_of_passes(curve, backend)), count, answers
                )
                measured, outputs = call(run)
                for number, output in outputs.items():
                    plain.setdefault(number, output)
                same = sum(plain[number] == output for number, output in outputs.items())
                record = {"batch": count, "method": name, "sampling": label, **measured}
                if name == "autoregressive":
                    bound = count * bandwidth / bytes_read(backend.layers, count, record["context"])
                    record["of_bound"] = round(record["tok_s"] / bound, 3)
                bench.add(record | {"answers": len(outputs), "as_first_seen": same})


def steady_state(
    make_load: Callable[[Engine], Load],
    backend: Any,
    make_budget: Callable[[], DraftBudget],
    count: int,
    answers: float,
) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """How fast `count` sequences decode for this many answers, and the outputs; a shorter run first captures."""
    for length in (0.5 * count, answers):
        load = make_load(Engine(backend, make_budget(), max_sequences=count))
        for _ in range(2 * count):
            load.add()
        measured = measure(load, count, length * load.rules.max_tokens)
        load.end()
    return measured, load.outputs


def measure(load: Load, count: int, tokens: float) -> dict[str, Any]:
    """Run until this many tokens have come after the prompts; how fast they came."""
    started = 0
    while started < count:  # the prompts run, several in a pass
        load.step()
        started = sum(request.sequence.stats.steps > 0 for request in load.engine._requests.values())
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
        "context": round(texts / steps / count),
    }  # fmt: skip
