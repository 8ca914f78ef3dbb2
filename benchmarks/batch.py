"""What several sequences at once do to lookahead's gain: total tokens per second, on one counter.

    python benchmarks/batch.py --data-dir DIR [--model NAME] [--device cpu] [--batches 1,2,4,8] [--new-tokens 48]

The model is loaded as a user would. For every batch the first turns of MT-Bench run token by token, with the default in
which sequences share a step's budget (what `load()` gives), and with the same default whole for each of them; in turns,
each three times on other prompts, nothing kept from one run to the next. Prints medians, and whether the texts are the
same.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import lookahead
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.stats import Stats

TURNS = 3


@dataclass
class Run:
    """One batch from its first prompt in to its last token out."""

    seconds: float
    outputs: list[list[int]]
    each: list[Stats]

    @property
    def stats(self) -> Stats:
        return Stats.total(self.each)

    @property
    def speed(self) -> float:
        return self.stats.generated_tokens / self.seconds


def decode(backend: Any, prompts: Sequence[Sequence[int]], config: LookaheadConfig, rules: StopRules) -> Run:
    engine, memory = Engine(backend), SharedMemory()
    sequences = [DecodingSequence(prompt, config, rules=rules, memory=memory) for prompt in prompts]
    begin = perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    while engine.running:
        engine.step()
    seconds = perf_counter() - begin
    return Run(seconds, [s.output for s in sequences], [s.stats for s in sequences])


def compare(
    backend: Any, prompts: Sequence[Sequence[int]], batch: int, config: LookaheadConfig, rules: StopRules
) -> list[dict[str, Any]]:
    """A row for each method."""
    methods = {
        "autoregressive": LookaheadConfig.autoregressive(),
        "shared": replace(config, shared=True),
        "whole for each": replace(config, shared=False),
    }
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for turn in range(TURNS):
        chosen = [prompts[(turn * batch + i) % len(prompts)] for i in range(batch)]
        for name, method in methods.items():
            runs[name].append(decode(backend, chosen, method, rules))
    rows = []
    for name, done in runs.items():
        pairs = list(zip(done, runs["autoregressive"], strict=True))
        total = Stats.total(run.stats for run in done)
        row: dict[str, Any] = {"batch": batch, "method": name}
        row |= {"tok_s": round(statistics.median(run.speed for run in done), 1), "S": round(total.compression, 2)}
        row |= {"K": round(total.tokens_per_step, 1)}
        row |= {"over": round(statistics.median(run.speed / plain.speed for run, plain in pairs), 2)}
        rows.append(row | {"same": all(run.outputs == plain.outputs for run, plain in pairs)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()

    model = lookahead.load(args.model, device=args.device, dtype=args.dtype)
    lines = (args.data_dir / "mt_bench.jsonl").read_text().splitlines()
    prompts = sorted((model.encode(json.loads(line)["turns"][0]) for line in lines), key=len)[:40]
    rules = StopRules(args.new_tokens, model.stop_ids)
    decode(model.backend, prompts[:2], model.default_config, StopRules(4))
    print("| sequences | method | tok/s | S | tokens of each per step | over autoregressive | same texts |")
    print("|---|---|---|---|---|---|---|")
    for batch in map(int, args.batches.split(",")):
        for row in compare(model.backend, prompts, batch, model.default_config, rules):
            print("|", " | ".join(map(str, row.values())), "|", flush=True)


if __name__ == "__main__":
    main()
