"""Does `lookahead tune` predict what is then measured? Both in one run, in turns, on the same prompts.

    python benchmarks/tune.py [--model NAME] [--inflate 7b] [--device cpu] [--prompts 3] [--repeats 2] [--out FILE]

After t(K), each prompt is run as `tune` runs it (one round of its anchors), then by `model.generate` with each setting
that is checked, REPEATS times, the order turning, and plain decoding before and after every one: its seconds are
compared with the mean of those two, of the repeats the median counts. The predictions rest on tune's own runs only; of
the settings marked 'law' tune has run none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import median

import torch
import transformers

import lookahead
from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.costs import in_shape
from lookahead.bench.inflate import SHAPES
from lookahead.loading.step_cost import processor
from lookahead.tune.candidates import Candidate
from lookahead.tune.prompts import PROMPTS
from lookahead.tune.tuner import Tuner, row

CHECKED = (
    "autoregressive",
    "default K<=128, fitted",
    "default K=16",
    "prompt lookup",
    "paper W=4 N=3 G=4",
    "default K=8",
    "default K=32",
    "paper W=5 N=5 G=5",
)
ON_A_GPU = (
    "autoregressive",
    "prompt lookup",
    "paper W=4 N=3 G=4",
    "paper W=7 N=5 G=7",
    "paper W=15 N=5 G=15",
    "default K=16",
    "default K=64",
    "default K=128",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--inflate", choices=SHAPES, help="the model's function in a larger shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = lookahead.load(args.model, device=args.device, dtype=args.dtype, config=lookahead.LookaheadConfig())
    if args.inflate:
        model = in_shape(model, args.inflate, "auto", print)
    tuner = Tuner(model, say=print, max_tokens=args.new_tokens)
    anchors = tuner.anchors()
    names = ON_A_GPU if model.device.type == "cuda" else CHECKED
    checked = [one for one in tuner.candidates if one.name in names]
    print("tune runs:", ", ".join(one.name for one in anchors), flush=True)
    tuner.warm_up(PROMPTS[0], anchors)
    for one in checked:  # what happens once per shape of a step happens here
        model.generate(PROMPTS[0], config=one.config, max_tokens=min(32, args.new_tokens))
    plain, others = checked[0], checked[1:]
    memory = {(one, i): SharedMemory() for one in others for i in range(args.repeats)}
    plain_seconds: dict[int, list[float]] = {}
    relative: dict[tuple[str, int], list[float]] = {}
    counted = {one.name: [0, 0] for one in checked}

    def timed(prompt: str, one: Candidate, memory: SharedMemory) -> float:
        model.memory = memory
        stats = model.generate(prompt, config=one.config, max_tokens=args.new_tokens).stats
        counted[one.name][0] += stats.generated_tokens
        counted[one.name][1] += stats.steps
        return stats.seconds

    for number, prompt in enumerate(PROMPTS[: args.prompts]):
        tuner.round(prompt, anchors)
        for repeat in range(args.repeats):
            turn = (number + repeat) % len(others)
            before = timed(prompt, plain, SharedMemory())
            for one in [*others[turn:], *others[:turn]]:
                taken = timed(prompt, one, memory[one, repeat])
                after = timed(prompt, plain, SharedMemory())
                relative.setdefault((one.name, number), []).append(2 * taken / (before + after))
                plain_seconds.setdefault(number, []).append(after)
                before = after
        print(f"prompt {number + 1} done", flush=True)

    base = [median(plain_seconds[n]) for n in range(args.prompts)]
    found = {p.candidate.name: p for p in tuner.predictions()}
    print("| setting | S from | S predicted | S measured | speedup predicted | measured | off by |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for one in others:
        p = found[one.name]
        measured = sum(base) / sum(base[n] * median(relative[one.name, n]) for n in range(args.prompts))
        s = counted[one.name][0] / counted[one.name][1]
        off = p.speedup / measured - 1
        cells = f"{p.basis} | {p.compression:.2f} | {s:.2f} | {p.speedup:.2f} | {measured:.2f} | {off:+.0%}"
        print(f"| {one.name} | {cells} |")
        rows.append({**row(p), "measured_compression": s, "measured_speedup": measured, "off": off})
    if args.out:
        facts = {
            "model": model.name,
            "backend": type(model.backend).__name__,
            "device": processor() if model.device.type == "cpu" else torch.cuda.get_device_name(model.device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "dtype": str(model.dtype),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "prompts": args.prompts,
            "new_tokens": args.new_tokens,
            "repeats": args.repeats,
            "load_average": os.getloadavg(),
            "law": {"alpha": tuner.result(0).laws.paper.alpha, "f": tuner.result(0).laws.paper.f},
            "step_cost": {"sizes": tuner.cost.sizes, "seconds": tuner.cost.seconds},
        }
        times = {f"{name}, prompt {n + 1}": ratios for (name, n), ratios in relative.items()}
        made = {**facts, "rows": rows, "plain_seconds": list(plain_seconds.values()), "relative_seconds": times}
        args.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
