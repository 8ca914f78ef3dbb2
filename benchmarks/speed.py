"""Is the default faster than autoregressive here? Both on the same prompts, in turn, on one counter.

    python benchmarks/speed.py --data-dir DIR [--model NAME] [--device cpu] [--prompts 8] [--new-tokens 128]

The model is loaded as a user would (`lookahead.load()`), so the step cost measured on this machine decides how much to
speculate. Prompts run one after another, each method once per prompt, the order alternating; memory stays warm across
prompts, as it does for a user. Prints per set the ratio of total times and the median of the prompts' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

import torch
import transformers

import lookahead
from lookahead.generate import Completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = lookahead.load(args.model, device=args.device, dtype=args.dtype)
    cost = model.default_config.step_cost
    if cost is None:
        print("a step's cost is flat: the whole budget is used")
    else:
        print("t(K) / t(1):", {k: round(cost[k - 1] / cost[0], 2) for k in (1, 2, 4, 8, 16, 32, 64, 128)})
    for method in ("autoregressive", "lookahead"):
        model.generate("Say hello.", max_tokens=8, method=method)

    results = []
    for name, file, raw in (("mt-bench", "mt_bench.jsonl", False), ("humaneval", "humaneval.jsonl", True)):
        rows = [json.loads(line) for line in (args.data_dir / file).read_text().splitlines()]
        model.memory.successors.clear()
        runs = []
        for i in range(args.prompts):
            row = rows[i * len(rows) // args.prompts]
            prompt = row["prompt"].rstrip() if raw else row["turns"][0]
            done: dict[str, Completion] = {}
            methods = ("autoregressive", "lookahead")
            for method in methods if i % 2 else reversed(methods):
                done[method] = model.generate(prompt, method=method, max_tokens=args.new_tokens, raw=raw)
            plain, ours = done["autoregressive"], done["lookahead"]
            runs.append(
                {
                    "tokens": plain.stats.generated_tokens,
                    "identical": plain.token_ids == ours.token_ids,
                    "autoregressive_seconds": plain.stats.seconds,
                    "lookahead_seconds": ours.stats.seconds,
                    "S": ours.stats.compression,
                    "tokens_per_step": ours.stats.tokens_per_step,
                }
            )
        plain_seconds = sum(run["autoregressive_seconds"] for run in runs)
        our_seconds = sum(run["lookahead_seconds"] for run in runs)
        tokens = sum(run["tokens"] for run in runs)
        median = statistics.median(run["autoregressive_seconds"] / run["lookahead_seconds"] for run in runs)
        print(
            f"{name}: {tokens} tokens, identical {sum(run['identical'] for run in runs)}/{len(runs)}, "
            f"autoregressive {tokens / plain_seconds:.1f} tok/s, lookahead {tokens / our_seconds:.1f} tok/s, "
            f"ratio {plain_seconds / our_seconds:.2f}x, median {median:.2f}x, "
            f"S {statistics.mean(run['S'] for run in runs):.2f}, "
            f"K {statistics.mean(run['tokens_per_step'] for run in runs):.1f}",
            flush=True,
        )
        results.append({"set": name, "ratio": plain_seconds / our_seconds, "median_ratio": median, "runs": runs})
    if args.out:
        facts = {
            "model": model.name,
            "device": str(model.device),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "step_cost": cost,
        }
        args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
