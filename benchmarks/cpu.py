"""Speed on a CPU: `python benchmarks/cpu.py --data-dir DIR` (humaneval.jsonl and mt_bench.jsonl), about 10 minutes.

For 8 HumanEval and 8 MT-Bench prompts, 128 tokens each, the methods take turns on every prompt:

    transformers    the model's own `generate`, greedy
    token by token  our CPU backend, one token a step
    default         the default config on it
    int8 ...        the same two on the model quantised to int8 (leave out with --no-int8)

Medians over prompts of tokens per second, of the ratios, and the least ratio; whether the texts are the same. Then
batches of 2 and 4 prompts. The step's cost by its tokens stands before it. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lookahead
from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.run import prompts
from lookahead.bench.run.runner import prompt_ids
from lookahead.bench.run.stock import Stock
from lookahead.loading.timing import measure

SETS = ("humaneval", "mt-bench")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--data-dir", type=Path, required=True)
    asked.add_argument("--limit", type=int, default=8, help="prompts of each set")
    asked.add_argument("--max-tokens", type=int, default=128)
    asked.add_argument("--no-int8", action="store_true")
    asked.add_argument("--no-stock", action="store_true", help="leave out transformers' generate")
    options = asked.parse_args()

    models = {"": loaded("float32")}
    if not options.no_int8:
        models["int8 "] = loaded("int8")
    stock = None if options.no_stock else Stock(models[""])
    ids = {name: read(models[""], name, options.data_dir, options.limit) for name in SETS}
    speeds: dict[str, dict[str, list[float]]] = {}
    same = dict.fromkeys(models, 0)
    for name in SETS:
        for lm in models.values():
            lm.memory = SharedMemory()
        found = speeds.setdefault(name, {})
        for prompt in ids[name]:
            if stock is not None:
                _, stats = stock.run("hf-greedy", prompt, options.max_tokens, len(prompt) + options.max_tokens)
                found.setdefault("transformers", []).append(stats.tokens_per_second)
            for prefix, lm in models.items():
                plain = lm.generate(prompt, max_tokens=options.max_tokens, method="autoregressive")
                ours = lm.generate(prompt, max_tokens=options.max_tokens)
                found.setdefault(f"{prefix}token by token", []).append(plain.stats.tokens_per_second)
                found.setdefault(f"{prefix}default", []).append(ours.stats.tokens_per_second)
                same[prefix] += plain.token_ids == ours.token_ids
        print(f"\n{name}: medians of {len(ids[name])} prompts")
        show(found)
    together = {method: [x for name in SETS for x in speeds[name][method]] for method in speeds[SETS[0]]}
    print("\nboth")
    show(together)
    total = sum(map(len, ids.values()))
    for prefix in models:
        print(f"{prefix}default has the text of {prefix}token by token on {same[prefix]} of {total} prompts")
    everything = [prompt for name in SETS for prompt in ids[name]]
    for size in (2, 4):
        batches(models[""], everything, size, options.max_tokens)


def loaded(dtype: str) -> Any:
    begin = perf_counter()
    lm = lookahead.load(dtype=dtype, backend="cpu", log=print)
    took, can = perf_counter() - begin, lm.backend.capabilities
    print(f"{dtype}: loaded in {took:.1f} s, {can.kernels}, exact up to {can.exact_nodes} nodes")
    cost = measure(lm.backend, SIZES, rounds=8)
    times = zip(cost.sizes, cost.seconds, strict=True)
    print("  ms by tokens of a step:", ", ".join(f"{size}: {1e3 * taken:.1f}" for size, taken in times))
    print(f"  memory: {memory()}")
    lm.generate("Hello", max_tokens=4)
    return lm


def memory() -> str:
    """The process's memory as the system counts it; file pages are those of the weights' file, which it can drop."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return "unknown"
    names = {"RssAnon": "own", "RssFile": "file pages", "VmHWM": "peak of both"}
    found = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith(tuple(names))}
    return ", ".join(f"{label} {found[name]} MB" for name, label in names.items() if name in found)


def read(lm: Any, name: str, folder: Path, limit: int) -> list[list[int]]:
    return [prompt_ids(lm, prompt) for prompt in prompts.load(name, folder, limit, turns=1)]


def show(found: dict[str, list[float]]) -> None:
    """Each method's median speed, and its median and least ratio to those before it."""
    for method, own in found.items():
        ratios = []
        for other in ("transformers", "token by token", "default", "int8 token by token"):
            if other in found and other != method and list(found).index(other) < list(found).index(method):
                each = [a / b for a, b in zip(own, found[other], strict=True)]
                ratios.append(f"{statistics.median(each):.2f}x {other} (least {min(each):.2f})")
        print(f"  {method:<20} {statistics.median(own):6.1f} tok/s  {', '.join(ratios)}")


def batches(lm: Any, everything: Sequence[list[int]], size: int, max_tokens: int) -> None:
    """Batches of this many prompts, lookahead against token by token."""
    speeds: dict[str, list[float]] = {"autoregressive": [], "lookahead": []}
    for start in range(0, min(len(everything), 4 * size), size):
        for method, found in speeds.items():
            begin = perf_counter()
            done = lm.generate(list(everything[start : start + size]), max_tokens=max_tokens, method=method)
            found.append(sum(len(one.token_ids) for one in done) / (perf_counter() - begin))
    each = [a / b for a, b in zip(speeds["lookahead"], speeds["autoregressive"], strict=True)]
    plain, ours = (statistics.median(speeds[method]) for method in ("autoregressive", "lookahead"))
    print(
        f"batches of {size}: {plain:.1f} and {ours:.1f} tok/s, {statistics.median(each):.2f}x (least {min(each):.2f})"
    )


if __name__ == "__main__":
    main()
