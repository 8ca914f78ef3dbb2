"""Counts the instructions of the loop over K of a product with a quantised matrix, compiled for an H100 or H200.

    python benchmarks/kernel_instructions.py --formats int4 int4-zeros fp8 mxfp4

Needs Triton and no GPU: its own ptxas compiles for one that is not there. These are counts, not times.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lookahead.backends.graph.kernels import quantised
from lookahead.backends.graph.kernels.quantised_tiles import (
    HOPPER_SHARED,
    QuantisedWeights,
    Tile,
    fitted,
    splits_of,
    tile_of,
)
from lookahead.backends.graph.kernels.splits import SplitMemory
from lookahead.backends.graph.matrices.quantised import fuse_quantised
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import MXFP4, Codes, Format
from lookahead.models.quantised import QuantisedLinear

SHAPES = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))
"""(out, in) of a block of a 7B Llama."""
FORMATS = {
    "int4": (Format(Codes.INT4, 128), torch.bfloat16),
    "int4-zeros": (Format(Codes.INT4, 128, zeros=True), torch.bfloat16),
    "gguf": (Format(Codes.INT4, 32, offsets=True), torch.float32),
    "int8": (Format(Codes.INT8, 0), torch.float32),
    "fp8": (Format(Codes.E4M3, 0), torch.float32),
    "fp8-blocks": (Format(Codes.E4M3, 128, rows=128), torch.float32),
    "mxfp4": (MXFP4, torch.uint8),
}
"""Number formats, and the dtypes of their scales."""
FAMILIES = ("LDG", "LDGSTS", "LDS", "LDSM", "BAR", "PRMT", "LOP3", "SHF", "HFMA2", "HADD2", "HMUL2", "FFMA", "IMAD")


class Driver:
    """As on an H100; a launch is an error, because nothing can be loaded."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} needs a GPU")


def weights_of(name: str, shape: tuple[int, int]) -> QuantisedWeights:
    """Weights of this format that are all zero, as a backend lays them out."""
    (format, scales), (out, width) = FORMATS[name], shape
    groups = -(-out // format.rows), format.groups(width)
    layer = QuantisedLinear(
        format,
        torch.zeros(out, width * format.codes.bits // 8, dtype=torch.uint8),
        torch.zeros(groups, dtype=scales),
        zeros=torch.zeros(groups, dtype=torch.uint8) if format.zeros else None,
        offsets=torch.zeros(groups, dtype=scales) if format.offsets else None,
    )
    return QuantisedWeights.of(layer, out, fuse_quantised(Matrix((layer,))))


def compiled(weights: QuantisedWeights, rows: int, tile: Tile | None = None) -> Any:
    """The kernel that a product of this many rows in bf16 launches, as `tile_of` has it or in another tile."""
    splits = splits_of(weights)
    tile = tile or fitted(tile_of(weights, rows, splits), weights, HOPPER_SHARED)
    x, out = (torch.zeros(rows, size, dtype=torch.bfloat16) for size in (weights.width, weights.out))
    kernel, made = quantised._multiply, list[Any]()
    kernel.run, run = lambda *args, **options: made.append(run(*args, **{**options, "warmup": True})), kernel.run
    try:
        quantised.multiply(x, weights, out, tile, splits, SplitMemory.new(torch.device("cpu"), 1, 1), ptx=True)
    finally:
        del kernel.run  # the class's own is found again
    return made[0]


def loop_of(sass: str) -> list[str]:
    """The instructions of the shortest loop that has a matrix instruction, from the listing of a kernel."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)]
    loops = []
    for at, text in lines:
        target = re.search(r"BRA.* (0x[0-9a-f]+)", text)
        if target is not None and (first := int(target[1], 16)) < at:
            loops.append([text for place, text in lines if first <= place <= at])
    return min((body for body in loops if any("GMMA" in text for text in body)), key=len)


def listing(cubin: bytes, *options: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, *options, file], capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128])
    parser.add_argument("--shapes", nargs="+", type=int, choices=range(len(SHAPES)), default=[0])
    given = parser.parse_args(arguments)
    driver.set_active(Driver())
    print(
        f"Triton {triton.__version__}\n\n| format | matrix | rows | loop | per code | registers | spilled | of these |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in given.formats:
        for shape in (SHAPES[number] for number in given.shapes):
            weights = weights_of(name, shape)
            for rows in given.rows:
                kernel, tile = compiled(weights, rows), tile_of(weights, rows, splits_of(weights))
                body, usage = loop_of(listing(kernel.asm["cubin"], "-sass")), listing(kernel.asm["cubin"], "-res-usage")
                operations = (re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for text in body)
                counts = Counter(operations)
                codes = tile.block_n * 64 * tile.chunks * 8 // weights.format.codes.bits / (32 * tile.warps)
                registers, stack = (int(re.findall(rf"{field}:(\d+)", usage)[0]) for field in ("REG", "STACK"))
                found = ", ".join(f"{family} {counts[family]}" for family in FAMILIES if counts[family])
                size = f"{shape[0]} x {shape[1]}"
                cells = name, size, rows, len(body), f"{len(body) / codes:.2f}", registers, stack, found
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
