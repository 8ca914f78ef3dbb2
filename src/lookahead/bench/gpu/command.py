"""What a step and a token cost on a CUDA GPU: parts that each end within ten minutes, and the page of what they left.

    lookahead bench --preset gpu-step,gpu-speed --model NAME --data-dir DIR --out DIR
    python -m lookahead.bench.gpu step speed --model NAME --data-dir DIR --out DIR     # needs neither typer nor rich

Every command ends with the page of all files in `--out` and its shortest table; `report` is that alone. `--device cpu`
runs all parts on the kernels' slow twins: to test them, not to time anything. The parts:
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lookahead.bench.gpu import page, parts
from lookahead.bench.gpu.batch import batch
from lookahead.bench.gpu.bench import GpuBench
from lookahead.generate import load as load_model
from lookahead.loading.formats import FORMATS
from lookahead.loading.load import DTYPES

PARTS: dict[str, Callable[[GpuBench], None]] = {part.__name__: part for part in (parts.step, parts.speed, batch)}


def parser() -> argparse.ArgumentParser:
    """The options, which `lookahead bench --preset gpu-...` has, too."""
    listed = "\n".join(f"    {name:<12}{(part.__doc__ or '').splitlines()[0]}" for name, part in PARTS.items())
    made = argparse.ArgumentParser(
        "python -m lookahead.bench.gpu",
        description=f"{__doc__}\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("parts", nargs="+", choices=[*PARTS, "report"], metavar="PART")
    made.add_argument("--model", help="a folder, a .gguf or a name; the embedded model without it")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--data-dir", type=Path, help="a folder with mt_bench.jsonl and humaneval.jsonl")
    made.add_argument("--limit", type=int, default=10, help="prompts of each set")
    made.add_argument("--max-tokens", type=int, default=256, help="new tokens of each answer")
    made.add_argument("--context", type=int, default=1024, help="tokens before the steps of part step")
    made.add_argument("--out", type=Path, default=Path("lookahead-bench"), help="folder of the JSON files")
    made.add_argument("--page", type=Path, help="the page, if not gpu.md in --out")
    return made


def run(options: argparse.Namespace, load: Callable[..., Any] = load_model, shape: str | None = None) -> str:
    """Measure these parts and write the page; returns the short table. `load` pads the model to `shape`, if given."""
    chosen = [name for name in options.parts if name != "report"]
    if options.dtype not in (known := (*DTYPES, *FORMATS)):
        raise ValueError(f"--dtype does not know {options.dtype!r}: choose from {', '.join(known)}")
    if chosen and options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --device cpu tests the parts, and times nothing")
    bench = GpuBench(options, load, shape)
    for name in chosen:
        begin = perf_counter()
        bench.part, bench.records = name, []
        PARTS[name](bench)
        print(f"-- {name}: {perf_counter() - begin:.0f} s", flush=True)
    return page.write(options.out, options.page or options.out / "gpu.md")


def main(argv: Sequence[str], load: Callable[..., Any] = load_model, shape: str | None = None) -> None:
    command = parser()
    try:
        print(run(command.parse_args(argv), load, shape))
    except ValueError as error:
        command.error(str(error))
