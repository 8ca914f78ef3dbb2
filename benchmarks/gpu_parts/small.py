"""small: the small models' fused products against cuBLAS's and the kernels around them, and other tiles for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts.bench import Bench
from gpu_parts.measure import graphed, median_ms
from lookahead.kernels import reference

WIDTH, INNER, HEADS, KV_HEADS, DIM = 576, 1536, 9, 3, 64
"""SmolLM2-135M's."""
BYTES = 2e8
"""Weights that take turns: more than the cache holds, as in a step of all layers."""
COUNTS = (1, 16, 128)
TILES = [
    (16, 64, 4, 4), (8, 64, 4, 4), (16, 64, 8, 3), (8, 64, 8, 3), (32, 64, 4, 4), (16, 128, 4, 3), (16, 32, 8, 4),
]  # fmt: skip
"""Columns, stretch, warps, stages."""
EXTRAS = [("", {}), (" ahead", {"ahead": True}), (" ahead, early", {"ahead": True, "early": True})]
"""How a kernel begins; see `kernels.small.Tile`. The first three tiles are tried with all of them."""
EPS = 1e-5


class Case:
    """One token tree of `count` nodes behind 1024 tokens, and what the operations of a layer read and write."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)  # the first rows are the same whatever the count

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        whole = {"dtype": torch.int32, "device": device}
        self.count, total = count, (HEADS + 2 * KV_HEADS) * DIM
        self.stream, self.gain, self.active = normal(128, WIDTH)[:count], normal(WIDTH), normal(128, INNER)[:count]
        self.mixed = normal(128, HEADS * DIM)[:count]
        self.sum, self.normed, self.delta = (torch.zeros_like(self.stream) for _ in range(3))
        self.qkv, self.gate_up = (self.stream.new_zeros(count, n) for n in (total, 2 * INNER))
        self.out = torch.empty_like(self.active)
        angle = torch.rand(2048, DIM // 2, device=device, generator=generator)
        rows, lengths = torch.zeros(1, **whole), torch.full((1,), 1024, **whole)
        positions = torch.arange(1024, 1024 + count, **whole)[None]
        self.places = (angle.cos(), angle.sin(), rows, lengths, positions)
        self.q = torch.zeros(1, count, HEADS, DIM, device=device, dtype=dtype)
        self.keys, self.values = (torch.zeros(1, KV_HEADS, 2048, DIM, device=device, dtype=dtype) for _ in range(2))


def fused(case: Case, module: Any, **tile: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    """By name of the weight: the product with all that stands around it."""
    c = case
    return {
        "qkv": lambda weight: module.norm_rotate_write(
            c.stream, c.gain, weight, None, None, *c.places, c.q, c.keys, c.values, EPS, **tile
        ),
        "out": lambda weight: module.add_product(c.mixed, weight, c.delta, **tile),
        "gate_up": lambda weight: module.norm_gate(c.stream, c.gain, weight, c.out, EPS, **tile),
        "down": lambda weight: module.add_product(c.active, weight, c.delta, **tile),
    }


def apart(case: Case, module: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The same by torch.mm and one kernel each. The norms also add what `out` and `down` leave to them; they take a
    stream of their own, so that the rows stay equal in all cases."""
    c = case

    def qkv(weight: torch.Tensor) -> None:
        module.add_norm(c.sum, c.delta, c.gain, c.normed, EPS)
        torch.mm(c.normed, weight.t(), out=c.qkv)
        module.rotate_write(c.qkv, None, None, *c.places, c.q, c.keys, c.values, EPS)

    def gate_up(weight: torch.Tensor) -> None:
        module.add_norm(c.sum, c.delta, c.gain, c.normed, EPS)
        torch.mm(c.normed, weight.t(), out=c.gate_up)
        module.gate(c.gate_up, c.out)

    return {
        "qkv": qkv,
        "out": lambda weight: torch.mm(c.mixed, weight.t(), out=c.delta),
        "gate_up": gate_up,
        "down": lambda weight: torch.mm(c.active, weight.t(), out=c.delta),
    }


def weights(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By name, [layers, out, in], small so that a stream that is added to again and again stays finite."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, WIDTH), "out": (WIDTH, HEADS * DIM),
        "gate_up": (2 * INNER, WIDTH), "down": (WIDTH, INNER),
    }  # fmt: skip
    size = torch.empty(0, dtype=dtype).element_size()
    return {
        name: 1e-3 * torch.randn(int(BYTES // (n * k * size)) + 1, n, k, device=device, dtype=dtype)
        for name, (n, k) in shapes.items()
    }


def timed(run: Callable[[torch.Tensor], Any], layers: torch.Tensor) -> float:
    """Microseconds of one call, and of the gap behind it, in a graph of as many as there are weights."""

    def all_layers() -> None:
        for weight in layers:
            run(weight)

    return median_ms(graphed(all_layers), 10) / len(layers) * 1e3


def same_bits(name: str, weight: torch.Tensor, cases: dict[int, Case], module: Any, tile: dict[str, Any]) -> bool:
    """Whether the first row has the same bits alone and among the most."""
    found = []
    for case in (cases[min(cases)], cases[max(cases)]):
        case.delta.copy_(case.stream)
        fused(case, module, **tile)[name](weight)
        written = {"qkv": [case.q[0, 0], case.keys[0, :, 1024], case.values[0, :, 1024]], "gate_up": [case.out[0]]}
        found.append([x.clone() for x in written.get(name, [case.delta[0]])])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def small_part(bench: Bench) -> None:
    """One row per product and K: microseconds by torch.mm and the kernels around it, and fused, the best tile first.

    `differ` names the tiles with which the first row has other bits among 128 than alone: not to be used.
    """
    device, dtype = bench.device, getattr(torch, bench.args.dtype)
    matrices, kernels = weights(device, dtype), separate(device)
    cases = {count: Case(count, device, dtype) for count in COUNTS}
    for name, layers in matrices.items():
        for count, case in cases.items():
            row: dict[str, Any] = {"product": name, "K": count}
            row["apart_us"] = round(timed(apart(case, kernels)[name], layers), 2)
            times, row["differ"], row["failed"] = {}, [], {}
            for label, (module, tile) in choices(device.type == "cuda"):
                try:
                    times[label] = round(timed(fused(case, module, **tile)[name], layers), 2)
                    if not same_bits(name, layers[0], cases, module, tile):
                        row["differ"].append(label)
                except Exception as error:  # it cannot be compiled or finds no room: the next one is tried
                    row["failed"][label] = f"{type(error).__name__}: {error}"[:100]
            bench.add({**row, "us": dict(sorted(times.items(), key=lambda pair: pair[1]))})


def separate(device: torch.device) -> Any:
    """The kernels around a product; on a CPU their twins."""
    if device.type != "cuda":
        return reference
    from lookahead.kernels import fused as kernels

    return kernels


def choices(cuda: bool) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
    """Label -> module and options. Without a GPU there is but the twin."""
    if not cuda:
        yield "twin", (reference, {})
        return
    from lookahead.kernels import small

    yield "in use", (small, {})
    for extra, flags in EXTRAS:
        for sizes in TILES[:3] if flags else TILES:
            yield "/".join(map(str, sizes)) + extra, (small, {"tile": small.Tile(*sizes, **flags)})
