"""What a step and a token cost on a GPU: one command, in parts that each end within ten minutes.

    python benchmarks/gpu.py PART [PART ...] --model smollm2.gguf --data-dir DIR --out DIR
    python benchmarks/gpu_report.py DIR --out DIR    the page and its plots, on any machine

    attention   the kernel against SDPA with a dense mask, and against the device's copy bandwidth
    profile     device time by kernel of a step of 1 and of 128 tokens
    step        time of a step by K: the matrix products alone, the device, the host around it
    speed       tokens per second, S and the host's gap of our methods on MT-Bench and HumanEval
    baselines   transformers' own on the same counter: eager, static cache + compile, prompt lookup
    drift       outputs that differ between half-precision paths, and from fp32, and by how much
    steady      texts that are not the same in every run
    exact       fp32: the graph backend against transformers' greedy and the eager backend; seeded sampling
    context     step time and memory from 1k to 32k tokens of context
    batch       total tokens per second for 1 to 16 sequences

The model is the embedded one, inflated to a larger shape (`--shape 7b`; `small` is itself): real text at a real cost.
Every row is saved as it is made, so that a command that is cut short leaves what it had. `drift` compares the outputs
that `speed` and `baselines` made in the same command or left in `--outputs`. `--device cpu` runs all parts but
attention on the kernels' slow twins: to test this script, not to time anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_parts.bench import Bench
from gpu_parts.equal import drift_part, exact_part, steady_part
from gpu_parts.speed import batch_part, speed_part
from gpu_parts.steps import context_part, profile_part, step_part
from gpu_parts.stock import STOCK, baselines_part

from lookahead.bench.inflate import SHAPES


def attention_part(bench: Bench) -> None:
    from gpu_parts import attention  # needs triton and CUDA

    attention.attention_part(bench)


PARTS: dict[str, tuple[Callable[[Bench], None], str]] = {
    "attention": (attention_part, "1 min, 4 min with --sweep"),
    "profile": (profile_part, "10 s"),
    "step": (step_part, "30 s"),
    "speed": (speed_part, "2 min with 10 prompts of each set"),
    "baselines": (
        baselines_part,
        "with 10 prompts of each set 3 min, 2 min (prompt lookup), 1 min + compiling (static)",
    ),
    "drift": (drift_part, "1 min"),
    "steady": (steady_part, "2 min with 10 prompts of each set"),
    "exact": (exact_part, "3 min for each of --exact-shapes with 10 prompts of each set"),
    "context": (context_part, "30 s"),
    "batch": (batch_part, "1 min"),
}
"""Each part, and how long it is expected to take with the 7b shape on one H200, its model loaded (25 s from a GGUF)."""
INVARIANT = {"both": (True, False), "on": (True,), "off": (False,)}


def names(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """An option's type: some of these names, with commas between them."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        for name in chosen:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; choose from {', '.join(choices)}")
        return chosen

    return parse


def parse(argv: Sequence[str]) -> argparse.Namespace:
    times = "\n".join(f"  {name:<10} {expected}" for name, (_, expected) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"expected times, 7b on one H200, the model loaded:\n{times}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--model", help="the embedded model, or another small Llama, as lookahead.load() takes it")
    parser.add_argument("--shape", default="7b", choices=["small", *SHAPES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data-dir", type=Path, help="a folder with mt_bench.jsonl and humaneval.jsonl")
    parser.add_argument("--prompts", type=int, default=10, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--invariant", default="both", choices=INVARIANT, help="for step and speed")
    parser.add_argument(
        "--methods", type=names(STOCK), default=list(STOCK), help=f"of baselines, with commas: {', '.join(STOCK)}"
    )
    parser.add_argument("--baseline-prompts", type=int, default=4, help="of each set, for transformers' own methods")
    parser.add_argument(
        "--method-seconds", type=float, default=120, help="a baseline starts no new prompt of a set after so long"
    )
    parser.add_argument("--compile-mode", default="reduce-overhead", help="torch.compile's mode for the static cache")
    parser.add_argument("--compile-backend", default="inductor", help="and its backend; 'eager' only traces: for tests")
    parser.add_argument("--exact-shapes", type=names(["small", *SHAPES]), default=["small", "1.5b"], help="of exact")
    parser.add_argument("--outputs", type=Path, help="folder with the JSON of earlier speed and baselines, for drift")
    parser.add_argument("--sweep", action="store_true", help="try other tiles for the attention kernel")
    args = parser.parse_args(argv)
    args.invariant = INVARIANT[args.invariant]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu tests the script without one")
    if args.outputs is not None and not args.outputs.is_dir():
        parser.error(f"--outputs {args.outputs} is no folder; give the --out of an earlier speed or baselines")
    return args


def main(argv: Sequence[str]) -> None:
    bench = Bench(parse(argv), argv)
    for part in bench.args.parts:
        run, expected = PARTS[part]
        print(f"-- {part}: expected {expected}", flush=True)
        some = part == "baselines" and set(bench.args.methods) != set(STOCK)
        bench.begin(part, "-".join(bench.args.methods) if some else "")
        begin = time.perf_counter()
        with torch.inference_mode():
            run(bench)
        bench.save()
        print(f"-- {part}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
