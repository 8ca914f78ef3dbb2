"""What each kernel of a mixture's layer costs: `python benchmarks/expert_layer.py`, on a GPU.

Random weights in the shapes of `random_experts.py`, in a few layers, more than the L2 cache holds. Steps of some rows
run with the form for few rows and with the one for many (`kernels.expert_products`), in turns. Per kernel of a
layer, in the order in which they run: the median of its microseconds. `layer`: from one layer's rotation to the next
one's, waits between kernels included. Both forms must give the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from random_experts import RANDOM_SHAPES, random_mixture

from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.bench.gpu.timing import step_ms, tree_of
from lookahead.config import SamplingParams

FORMS = {"many": 0, "few": 16}
"""The most rows that have the form for few."""
ONCE_PER_LAYER = "_rotate_write"
"""The kernel at which a layer's count begins."""


class Event(NamedTuple):
    """A kernel that has run: when it began, and for how long, in microseconds."""

    start: float
    taken: float
    name: str


def layer_of(events: Iterable[Event]) -> tuple[float, list[tuple[str, float]]]:
    """The microseconds of a layer, and the name and the median of each of its kernels, in their order.

    Kernels are told apart by their name, and by how many of that name have run since the layer's rotation. Those that
    most layers do not have are left out.
    """
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    starts, seen, index, given = list[float](), dict[str, int](), 0, sorted(events)
    for event in given:
        if event.name == ONCE_PER_LAYER:
            starts.append(event.start)
            seen, index = {}, 0
        if starts:
            number = seen[event.name] = seen.get(event.name, 0) + 1
            found.setdefault((event.name, number), []).append((index, event.taken))
            index += 1
    if len(starts) < 2:
        names = ", ".join(sorted({event.name for event in given})[:20]) or "none"
        raise ValueError(f"{len(starts)} layers ran {ONCE_PER_LAYER!r}, of at least two; the kernels seen: {names}")
    whole = statistics.median(after - before for before, after in pairwise(starts))
    often = {key: list(zip(*ran, strict=True)) for key, ran in found.items() if 2 * len(ran) > len(starts)}
    ordered = sorted(often.items(), key=lambda item: statistics.median(item[1][0]))
    return whole, [(name, statistics.median(taken)) for (name, _), (_, taken) in ordered]


def start_profiler() -> None:
    """Run the profiler once. It does not see the kernels of graphs that were captured before its first run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def kernels_of_steps(backend: GraphBackend, rows: int, context: int) -> list[Event]:
    """The kernels of some captured steps of this many rows."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step_ms(backend, rows, context)  # captures
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        step_ms(backend, rows, context)
    return [
        Event(event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in watched.events()
        if event.device_type is DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]


def tokens_of(backend: GraphBackend, rows: int) -> list[int]:
    """The targets of one step of this many rows."""
    slot = backend.open()
    try:
        (output,) = backend.collect(backend.launch([StepInput(slot, (), tree_of(rows), SamplingParams(), ())]))
        backend.commit([(slot, ())])
        return list(output.targets)
    finally:
        backend.close(slot)


def measure(model: Any, sizes: Sequence[int], context: int, rounds: int, name: str) -> None:
    """Print a table for each number of rows."""
    backends = {form: GraphBackend(model, most_rows=64, kv_tokens=4096) for form in FORMS}
    for form, backend in backends.items():
        backend.runner.state.ops.experts.few_rows = FORMS[form]
    for rows in sizes:
        same = len({tuple(tokens_of(backend, rows)) for backend in backends.values()}) == 1
        found = {form: list[tuple[float, list[tuple[str, float]]]]() for form in FORMS}
        for _ in range(rounds):
            for form, backend in backends.items():
                found[form].append(layer_of(kernels_of_steps(backend, rows, context)))
        print(f"\n{name}, {rows} rows, context {context}: {'the same tokens' if same else 'OTHER TOKENS'}")
        for form, layers in found.items():
            wholes = ", ".join(f"{whole:.1f}" for whole, _ in layers)
            _, kernels = layers[-1]
            print(f"  form for {form}: layer {wholes} us, of which kernels {sum(us for _, us in kernels):.1f}")
            for kernel, us in kernels:
                print(f"    {us:7.2f}  {kernel[:90]}")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=RANDOM_SHAPES, default=list(RANDOM_SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="how often the forms take turns")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU, and on a CPU a step runs no kernels")
    start_profiler()
    for name in options.names:
        model = random_mixture(RANDOM_SHAPES[name], num_hidden_layers=options.layers)
        measure(model, options.rows, options.context, options.rounds, name)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
