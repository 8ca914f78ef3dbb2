"""How much a guess should count for what it teaches: S and speed for the step times of a machine that is not there.

    python benchmarks/taught.py --data-dir DIR --curve 1.3 --taught 0 0.008

Tokens and steps do not depend on how long a step takes, only on how many guesses it is given. So the embedded model
runs here, on the eager backend, its draft told that a step costs what it costs elsewhere, and those times are added
up. The curve is an H200's for a 7B shape (K = 1 4.10, 16 4.46, 32 4.53, 64 4.75, 128 5.35 ms, each for all K up to
it), stretched so that 128 tokens cost `--curve` times one; `--curve cpu` is a steep one. Speed is over one token per
step.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

import lookahead
from lookahead.algorithm import draft
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.loading import step_cost as costs
from lookahead.loading.step_cost import StepCost, suited

SIZES, TIMES = (1, 16, 32, 64, 128), (4.10, 4.46, 4.53, 4.75, 5.35)
CPU = StepCost(
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    (1.0, 1.1, 1.16, 1.5, 1.6, 1.8, 2.2, 2.25, 2.7, 2.9, 3.8, 4.6, 6.2, 7.0),
)


def stairs(ratio: float) -> StepCost:
    """An H200's curve, 128 tokens costing `ratio` times one."""
    scale = (ratio - 1) / (TIMES[-1] / TIMES[0] - 1)
    sizes = range(1, SIZES[-1] + 1)
    times = [TIMES[bisect_left(SIZES, size)] / TIMES[0] - 1 for size in sizes]
    return StepCost(tuple(sizes), tuple(1 + scale * time for time in times))


def run(lm: Any, prompts: list[list[int]], config: LookaheadConfig, table: tuple[float, ...], warm: bool) -> str:
    """All prompts one after another; each forgets the one before, unless `warm`."""
    tokens, steps, size, taken, memory = 0, 0, 0, 0.0, SharedMemory()
    for prompt in prompts:
        memory = memory if warm else SharedMemory()
        sequence = DecodingSequence(prompt, config, None, StopRules(96, lm.stop_ids), memory=memory)
        engine = Engine(lm.backend)
        engine.add(sequence)
        while engine.running:
            before = sequence.stats.step_tokens
            engine.step()
            taken += table[sequence.stats.step_tokens - before - 1]
        tokens, steps = tokens + sequence.stats.generated_tokens, steps + sequence.stats.steps
        size += sequence.stats.step_tokens
    return f"| {'warm' if warm else 'cold'} | {tokens / steps:.2f} | {size / steps:.0f} | {tokens / taken:.2f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="with mt_bench.jsonl and humaneval.jsonl")
    parser.add_argument("--curve", default="1.3", help="a ratio, or cpu")
    parser.add_argument("--taught", type=float, nargs="+", default=[0.0, draft.LEARNED])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    args = parser.parse_args()
    costs.FLAT = 1.0  # the curve counts, however flat it is
    cost = CPU if args.curve == "cpu" else stairs(float(args.curve))
    whole = LookaheadConfig()
    table = cost.table(whole.budget)
    lm = lookahead.load(dtype="float32", backend="eager", config=whole)

    def some(name: str) -> list[Any]:
        lines = (args.data_dir / name).read_text().splitlines()
        return [json.loads(lines[i * len(lines) // args.prompts]) for i in range(args.prompts)]

    prompts = [lm.encode(row["turns"][0]) for row in some("mt_bench.jsonl")]
    prompts += [lm.encode(row["prompt"].rstrip(), raw=True) for row in some("humaneval.jsonl")]
    print("| a guess teaches | | S | K | speed |\n| --- | --- | --- | --- | --- |", flush=True)
    for taught in (*args.taught, None):
        draft.LEARNED = taught or 0.0
        config = whole if taught is None else suited(whole, cost)
        for warm in (False, True):
            name = "the whole budget" if taught is None else taught
            print(f"| {name} {run(lm, prompts, config, table, warm)}", flush=True)


if __name__ == "__main__":
    main()
