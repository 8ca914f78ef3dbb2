"""Host time of a decoding step at K = 128, part by part, without a forward pass: `python benchmarks/host_time.py`.

The engine and the graph backend run as they are, on a CPU, but the model's forward is replaced by a text that is played
back: targets are its next tokens, and every row's top-8 is drawn at random around them, so that pools, suffix index
and recycled rows are as full as in real use. Medians per step, in microseconds:

    propose   the tree, and the uniforms when sampling
    fill      the packet of integers that goes to the device
    read      targets and top-8 out of the packet that comes back
    take      verify, window, counters
    learn     how good the guesses were, and new ones
    rest      commit and the engine's own
    host      all of these: what stands between two steps of a GPU (token by token, only where none runs ahead)
    later     what is done while the device runs: no part of `host`

The C library and its Python twins take turns, step by step, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead.algorithm.native import build as native
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.captured import CapturedStep
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine

VOCABULARY = 49152
PROMPT, OUTPUT = 200, 192
PARTS = ("propose", "fill", "read", "take", "learn", "rest", "host", "later")


def text(rng: random.Random, length: int) -> list[int]:
    """Tokens with a long-tailed distribution, a third of them in repeated phrases."""
    tokens: list[int] = []
    while len(tokens) < length:
        if tokens and rng.random() < 0.35:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randrange(2, 12)]
        else:
            tokens.append(int(VOCABULARY * rng.random() ** 6))
    return tokens[:length]


class Played(GraphBackend):
    """The graph backend over texts instead of a model: `texts[row of the buffer]` is what comes out."""

    def __init__(self) -> None:
        size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        super().__init__(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **size)))
        self.texts: dict[int, np.ndarray[Any, Any]] = {}
        self.rng = np.random.default_rng(1)
        self.likely = self.rng.integers(0, VOCABULARY, (VOCABULARY, 8), dtype=np.int32)
        self.forward_seconds = 0.0

    def _captured_step(self, batch: int, count: int, head: bool) -> CapturedStep:
        shape = super()._captured_step(batch, count, head)
        shape.run = lambda: self._play(shape)  # type: ignore[method-assign]
        return shape

    def _play(self, shape: CapturedStep) -> None:
        """Targets from the text; the top-8 of a token, in which a target takes a random place half of the time."""
        begin = perf_counter()
        if shape.top is not None:
            fields = shape.packet.fields
            out = shape.top.arrays[0].reshape(shape.batch, shape.count, -1)
            for place in range(shape.batch):
                played = self.texts.get(int(fields["lanes"][place]), np.zeros(1, dtype=np.int32))
                nodes = fields["needed"][place] - place * shape.count
                tokens, positions = fields["tokens"][place][nodes], fields["positions"][place][nodes]
                targets = played[np.minimum(positions + 1, len(played) - 1)]
                chosen = self.rng.random(shape.count) < 0.5
                self.likely[tokens[chosen], self.rng.integers(0, 8, int(chosen.sum()))] = targets[chosen]
                out[place, :, 0], out[place, :, 1:9] = targets, self.likely[tokens]
                out[place, :, 9:] = (0, 3, 5, 7, 8, 10, 12, 15)
        self.forward_seconds += perf_counter() - begin


class Asked(DecodingSequence):
    """A sequence none of whose steps runs ahead: token by token, too, the host's time is between two steps."""

    @property
    def continues_alone(self) -> bool:
        return False


class Clock:
    """Seconds of the step by part, noted by wrapping the functions that are a part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, part: str, thing: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(thing, name)

        def timed(*args: Any) -> Any:
            begin = perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[part] += perf_counter() - begin

        setattr(thing, name, timed)


class Run:
    """An engine that decodes one batch of texts after the other, with or without the C library."""

    def __init__(self, config: LookaheadConfig, batch: int, python: bool) -> None:
        self.config, self.batch, self.python = config, batch, python
        self.clock, self.backend, self.rng = Clock(), Played(), random.Random(0)
        for part, name in (("fill", "_fill"), ("read", "collect")):
            self.clock.time(part, self.backend, name)
        self.engine = Engine(self.backend)
        self.clock.time("later", self.engine, "_learn_while_running")
        with self._library():
            self.memory = SharedMemory()
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def _library(self) -> Iterator[None]:
        found = native.library
        if self.python:
            native.library = lambda: None  # type: ignore[assignment]
        yield
        native.library = found

    def step(self) -> None:
        with self._library():
            if len(self.engine.running) < self.batch:
                self._begin()
            self.clock.seconds.clear()
            self.backend.forward_seconds = 0.0
            begin = perf_counter()
            self.engine.step()
            host = perf_counter() - begin - self.backend.forward_seconds
        spent = {part: self.clock.seconds[part] for part in PARTS}
        spent["take"] -= spent["learn"]
        spent["host"] = host - spent["later"]
        spent["rest"] = spent["host"] - sum(spent[part] for part in PARTS[:5])
        for part in PARTS:
            self.times[part].append(1e6 * spent[part])

    def _begin(self) -> None:
        """New texts for all, and the prompts' step."""
        for sequence in self.engine.running:
            self.engine.remove(sequence)
        for row in range(self.batch):
            tokens, rules = text(self.rng, PROMPT + OUTPUT + 64), StopRules(max_tokens=OUTPUT)
            sequence = Asked(tokens[:PROMPT], self.config, rules=rules, memory=self.memory)
            for part, name in (
                ("propose", "propose"),
                ("propose", "uniforms"),
                ("take", "absorb"),
                ("learn", "_learn"),
            ):
                self.clock.time(part, sequence, name)
            self.engine.add(sequence)
            self.backend.texts[row] = np.array(tokens, dtype=np.int32)
        self.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences at once")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    if native.library() is None:
        print("no C library: both lines of a pair are Python (see lookahead.algorithm.native.build)")
    print(f"{'':36s}" + "".join(f"{part:>9s}" for part in PARTS) + f"{'p90 host':>10s}")
    for name, config in {
        "default": LookaheadConfig(),
        "paper (5,15,15), prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
        "autoregressive": LookaheadConfig.autoregressive(),
    }.items():
        runs = {"Python": Run(config, args.batch, True), "C": Run(config, args.batch, False)}
        for _ in range(args.steps):
            for run in runs.values():
                run.step()
        for kind, run in runs.items():
            medians = "".join(f"{statistics.median(run.times[part]):9.1f}" for part in PARTS)
            host = sorted(run.times["host"])
            print(f"{name + ', ' + kind:36s}{medians}{host[len(host) * 9 // 10]:10.1f}")


if __name__ == "__main__":
    main()
