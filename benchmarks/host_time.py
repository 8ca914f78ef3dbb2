"""Host time of a decoding step at K = 128, part by part, without a forward pass: `python benchmarks/host_time.py`.

The engine and the graph backend run as they are, on a CPU, but the model's forward is replaced by a text that is played
back: targets are its next tokens, and every row's top-8 is drawn at random around them, so that pools, suffix index
and successors are as full as in real use. Medians per step, in microseconds:

    propose   the tree, and the uniforms when sampling
    fill      the packet of integers that goes to the device
    read      targets and top-8 out of the packet that comes back
    absorb    verify, window, counters, how good the guesses were, and new ones
    rest      commit and the engine's own
    host      all of these, from a step's results to the launch of the next one: what stands between two steps of a GPU
              (token by token, only where none runs ahead)
    later     what is done while the device runs, such as events: no part of `host`

Steps overlap as in a server: the next one begins before the events of the last one are made. The C library and its
Python twins take turns, step by step, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from lookahead.algorithm.budget import for_bigrams, without_cost
from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kinds import StepKind
from lookahead.backends.graph.steps import CapturedStep, CapturedSteps
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request, raise_errors
from lookahead.stats import Stats

VOCABULARY = 49152
PROMPT, OUTPUT = 200, 192
PARTS = ("propose", "fill", "read", "absorb", "rest", "host", "later")


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
    """The graph backend over texts instead of a model: what a sequence generates is what follows in its text.

    It times its own parts in `seconds`. No step runs ahead, so that token by token, too, the host's time is counted.
    """

    def __init__(self) -> None:
        size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        super().__init__(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **size)))
        self.texts: list[np.ndarray[Any, Any]] = []
        self.played: dict[int, np.ndarray[Any, Any]] = {}  # by the sequence's slot in the page tables
        self.rng = np.random.default_rng(1)
        self.likely = self.rng.integers(0, VOCABULARY, (VOCABULARY, 8), dtype=np.int32)
        self.seconds: dict[str, float] = defaultdict(float)
        self._arrived = self._filling = self._launched = 0.0
        self.runner.steps.get = self._get  # type: ignore[method-assign]

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        for item in inputs:
            item.continues_alone = False
        self._filling = perf_counter()
        return super().launch(inputs)

    def collect(self, launched: Any) -> Any:
        self._arrived = perf_counter()
        self.seconds["later"] = self._arrived - self._launched
        results = super().collect(launched)
        self.seconds["read"] = perf_counter() - self._arrived
        return results

    def open(self, tokens: Sequence[int] = (), salt: str = "") -> int:
        """A sequence begins as its text does. Nothing is shared, so that every prompt is as long as it says."""
        slot = super().open()
        text = next(t for t in self.texts if t[: len(tokens)].tolist() == list(tokens))
        self.played[self.slots[slot].table_index] = text
        return slot

    def _get(self, kind: StepKind) -> CapturedStep:
        """The captured step of this kind, which plays the texts."""
        step = CapturedSteps.get(self.runner.steps, kind)
        step.run = lambda: self._play(step)  # type: ignore[method-assign]
        return step

    def _play(self, step: CapturedStep) -> None:
        """Targets from the text; the top-8 of a token, in which a target takes a random rank half of the time."""
        begin, start = perf_counter(), 0
        self.seconds["fill"], self.seconds["host"] = begin - self._filling, begin - self._arrived
        fields, out = step.packet.forward.fields, step.top.host_copies[0].numpy()
        needed = fields["needed"][: step.packet.forward.needed].astype(np.int64)
        for table_slot, length, first, chunk, nodes in fields["sequences"][: fields["sequence_of"].max() + 1].tolist():
            root, depths = first + chunk, [-1]
            for parent in fields["parents"][root : root + nodes].tolist():  # parents stand before their children
                depths.append(depths[parent + 1] + 1)
            end = start + int(((needed >= root) & (needed < root + nodes)).sum())
            rows = needed[start:end]
            tokens, played = fields["tokens"][rows], self.played[table_slot]
            positions = length + chunk + np.array(depths[1:], dtype=np.int64)[rows - root]
            targets = played[np.minimum(positions + 1, len(played) - 1)]
            chosen = self.rng.random(len(rows)) < 0.5
            self.likely[tokens[chosen], self.rng.integers(0, 8, int(chosen.sum()))] = targets[chosen]
            out[start:end, 0], out[start:end, 1:9] = targets, self.likely[tokens]
            out[start:end, 9:] = (0, 3, 5, 7, 8, 10, 12, 15)
            start = end
        self._launched = perf_counter()  # what `launch` still does is done while the device runs


class Run:
    """Decodes one batch of texts after the other with one drafter."""

    def __init__(self, config: LookaheadConfig, batch: int, drafter: Drafter, temperature: float = 0.0) -> None:
        self.config, self.batch, self.memory = config, batch, SharedMemory(drafter)
        self.sampling = SamplingParams(temperature=temperature, seed=1)
        self.backend, self.rng = Played(), random.Random(0)
        self.engine = Engine(self.backend)
        self.sequences: list[DecodingSequence] = []
        self.times: dict[str, list[float]] = defaultdict(list)

    @property
    def stats(self) -> Stats:
        return Stats.total(sequence.stats for sequence in self.sequences)

    def step(self) -> None:
        """Finish the running step, begin the next one, and make the events of the first. Prompts begin a batch."""
        if not self.engine.running:
            self._submit()
            self.engine.begin()
            return
        seconds, before = self.backend.seconds, self.stats
        finished = self.engine.finish()
        self.engine.begin()
        raise_errors(finished.events())
        if not self.engine.running:
            return
        after = self.stats
        spent = {part: getattr(after, f"{part}_seconds") - getattr(before, f"{part}_seconds")
                 for part in ("propose", "absorb")}  # fmt: skip
        spent |= {part: seconds[part] for part in ("fill", "read", "host", "later")}
        spent["rest"] = spent["host"] - sum(spent[part] for part in PARTS[:4])
        for part in PARTS:
            self.times[part].append(1e6 * spent[part])

    def _submit(self) -> None:
        texts = [text(self.rng, PROMPT + OUTPUT + 64) for _ in range(self.batch)]
        self.backend.texts = [np.array(tokens, dtype=np.int32) for tokens in texts]
        rules = StopRules(max_tokens=OUTPUT)
        self.sequences = [
            DecodingSequence(tokens[:PROMPT], self.config, self.sampling, rules, memory=self.memory) for tokens in texts
        ]
        for sequence in self.sequences:
            self.engine.submit(Request(sequence))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences at once")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0: targets are drawn")
    parser.add_argument("--default-in-c", action="store_true", help="time the default method with the C drafter alone")
    args = parser.parse_args()
    print(f"{'':42s}" + "".join(f"{part:>9s}" for part in PARTS) + f"{'p90 host':>10s}")
    methods = {
        "default": for_bigrams(without_cost(LookaheadConfig())),
        "default with window": without_cost(LookaheadConfig()),
        "paper (5,15,15), prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
        "autoregressive": LookaheadConfig.autoregressive(),
    }
    drafters = {type(drafter).__name__: drafter for drafter in (PythonDrafter(), choose_drafter())}
    if args.default_in_c:
        methods, drafters = {"default": methods["default"]}, {"NativeDrafter": choose_drafter()}
    for name, config in methods.items():
        runs = {kind: Run(config, args.batch, drafter, args.temperature) for kind, drafter in drafters.items()}
        for _ in range(args.steps):
            for run in runs.values():
                run.step()
        for kind, run in runs.items():
            medians = "".join(f"{statistics.median(run.times[part]):9.1f}" for part in PARTS)
            host = sorted(run.times["host"])
            print(f"{name + ', ' + kind:42s}{medians}{host[len(host) * 9 // 10]:10.1f}")


if __name__ == "__main__":
    main()
