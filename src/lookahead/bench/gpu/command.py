"""What a step and a token cost on a CUDA GPU: parts that each end within ten minutes, and the page of what they left.

    lookahead bench --preset gpu-step,gpu-speed --model NAME --data-dir DIR --out DIR
    python -m lookahead.bench.gpu step speed --model NAME --data-dir DIR --out DIR     # needs neither typer nor rich

Every command ends with the page of all files in `--out` and its shortest table; `report` is that alone. `--device cpu`
runs all parts on the kernels' slow twins: to test them, not to time anything. From Python, `timing.step_ms` times a
step of a backend, and `PARTS["speed"]` or `PARTS["batch"]` with a `GpuBench` measures a part into its `records`.
The parts:
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lookahead.bench.gpu import page, parts
from lookahead.bench.gpu.batch import batch
from lookahead.bench.gpu.bench import GpuBench, GpuOptions
from lookahead.generate import load as load_model

PARTS: dict[str, Callable[[GpuBench], None]] = {
    part.__name__: part for part in (parts.step, parts.speed, batch, parts.bound, parts.context)
}


def run(names: Sequence[str], options: GpuOptions, load: Callable[..., Any] = load_model) -> str:
    """Measure these parts and write the page; returns the short table."""
    chosen = [name for name in names if name != "report"]
    if chosen:
        options.check()
    bench = GpuBench(options, chosen, load)
    for name in chosen:
        begin = perf_counter()
        bench.begin(name)
        with torch.inference_mode():
            PARTS[name](bench)
        bench.save()
        print(f"-- {name}: {perf_counter() - begin:.0f} s", flush=True)
    return page.write(options.out, options.page or options.out / "gpu.md")


def main(argv: Sequence[str], load: Callable[..., Any] = load_model, shape: str | None = None) -> None:
    """The command; `load` replaces `lookahead.load`, padded to `shape` where one is given."""
    listed = "\n".join(f"    {name:<12}{(part.__doc__ or '').splitlines()[0]}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        "python -m lookahead.bench.gpu",
        description=f"{__doc__}\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "report"], metavar="PART")
    parser.add_argument("--model", help="a folder, a .gguf or a name; the embedded model without it")
    parser.add_argument("--dtype")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--data-dir", type=Path, help="a folder with mt_bench.jsonl and humaneval.jsonl")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, help="new tokens of each answer")
    parser.add_argument("--out", type=Path, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, help="the page, if not gpu.md in --out; its plots go beside it")
    parser.add_argument("--invariant", choices=["on", "off", "both"], help="of step and speed")
    args = parser.parse_args(argv)
    given = {one.name: value for one in fields(GpuOptions) if (value := getattr(args, one.name, None)) is not None}
    try:
        print(run(args.parts, GpuOptions(**given, shape=shape), load))
    except ValueError as error:
        parser.error(str(error))
