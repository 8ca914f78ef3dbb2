"""step, profile, context: what one step costs, in time and memory."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch

from gpu_parts.bench import INVARIANT, Bench
from gpu_parts.measure import CountedBackend, clock_mhz, graphed, median_ms, replay_of, step_of, wall_ms
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.captured import DeviceState
from lookahead.backends.graph.sizes import STEP_SIZES

CONTEXTS = (1024, 4096, 16384, 32768)


def ready(bench: Bench, invariant: bool, capacity: int) -> tuple[CountedBackend, int]:
    """A backend with random K/V and a slot of it. What the backend before it held is given back."""
    gc.collect()  # a backend and its shapes hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    backend = CountedBackend(bench.large, invariant=invariant)
    slot = backend.open()
    backend._reserve(1, capacity)
    backend.kv.cache.normal_()
    return backend, slot


def step_part(bench: Bench) -> None:
    for invariant in bench.args.invariant:
        backend, slot = ready(bench, invariant, 4096)
        for count in (1, 16, 32, 64, 121, 128):
            bench.add({"invariant": invariant, **step_case(backend, slot, count, 1024)})
        del backend


def step_case(backend: GraphBackend, slot: int, count: int, context: int) -> dict[str, Any]:
    """Device time of the step, of its matrix products alone, and wall time with the host's part."""
    item, shape = step_of(backend, slot, count, context)
    device = median_ms(replay_of(shape))
    clock = clock_mhz()
    w = backend.weights

    def products() -> None:
        for layer in w.layers:
            shape.products["qkv"](shape.normed, layer.qkv, shape.qkv)
            shape.products["out"](shape.mixed, layer.out, shape.delta)
            shape.products["gate_up"](shape.normed, layer.gate_up, shape.gate_up)
            shape.products["down"](shape.active, layer.down, shape.delta)
        shape.products["head"](shape.normed, w.head, shape.logits)

    gemm = median_ms(graphed(products))
    wall = statistics.median(wall_ms(lambda: backend.step([item]), 30 if torch.cuda.is_available() else 3))
    return {
        "K": count, "bucket": shape.count, "context": context, "device_ms": round(device, 3),
        "products_ms": round(gemm, 3), "step_wall_ms": round(wall, 3),
        "gap_ms": round(wall - device, 3), "gap_percent": round(100 * (wall - device) / wall, 1),
        "sm_mhz": clock,
    }  # fmt: skip


def profile_part(bench: Bench) -> None:
    """Mean microseconds of each kernel of a replayed step, and how often it runs."""
    backend, slot = ready(bench, INVARIANT, 4096)
    for count in (1, 128):
        replay = replay_of(step_of(backend, slot, count, 1024)[1])
        kind = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kind.CUDA if backend.device.type == "cuda" else kind.CPU]) as profiler:
            for _ in range(5):
                replay()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:14]:
            times = {"us": round(event.device_time, 2), "times": event.count / 5}
            bench.add({"K": count, "invariant": backend.invariant, **times, "name": event.key[:60]})


# context


def context_part(bench: Bench) -> None:
    """Step time and memory by context, with room for just the step.

    `kv_mb` is the K/V buffer, `tables_mb` the rotary tables. `step_mb` is what the captured step holds beside them, by
    what it is for, and `pool_mb` the memory of the graphs' own pool. `all_steps_mb` is `step_mb` when every size up to
    this one has been captured. `scratch_mb` is the K/V of a step's K tokens, which lies inside `kv_mb`: the buffer has
    room for the context and the step, rounded up to whole blocks, so that one token and 128 may need the same.
    """
    for context in CONTEXTS:
        for count in (1, 128):
            backend, slot = ready(bench, INVARIANT, context + count)
            before = allocated()
            row = step_case(backend, slot, count, context)
            shape = backend._steps[1, row["bucket"], True]
            kv = backend.kv.cache.numel() * backend.kv.cache.element_size()
            row |= {"slots": backend.kv.cache.shape[4], "kv_mb": mb(kv)}
            row["scratch_mb"] = mb(kv / backend.kv.cache.shape[4] * count)
            row["tables_mb"] = mb(held(backend.kv.cosine, {}) + held(backend.kv.sine, {}))
            row["step_mb"] = mb(held(shape, {}))
            row["of_step_mb"] = {"logits": mb(held(shape.logits, {})), "attention": mb(held(shape.work, {}))}
            row["of_step_mb"]["top"] = mb(held(shape.top, {}))
            if torch.cuda.is_available():
                row["allocated_by_step_mb"] = mb(allocated() - before)
                row["pool_mb"] = mb(pool_bytes(backend))
            for size in (s for s in STEP_SIZES if s < count):
                step_of(backend, slot, size, context)
            seen: dict[int, int] = {}
            row["all_steps_mb"] = mb(sum(held(one, seen) for one in backend._steps.values()))
            bench.add(row)
            del backend, shape


def mb(size: float) -> float:
    return round(size / 1e6, 2)


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def held(thing: Any, seen: dict[int, int]) -> int:
    """Bytes of the device tensors of an object and of the objects in it, each piece of memory once."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        new = storage.data_ptr() not in seen and not (torch.cuda.is_available() and thing.device.type == "cpu")
        seen[storage.data_ptr()] = storage.nbytes()
        return storage.nbytes() if new else 0
    if isinstance(thing, dict):
        return sum(held(value, seen) for value in thing.values())
    if type(thing).__module__.startswith("lookahead.") and not isinstance(thing, GraphBackend | DeviceState):
        fields = vars(thing) if hasattr(thing, "__dict__") else {}
        return sum(held(value, seen) for value in fields.values())
    return 0


def pool_bytes(backend: GraphBackend) -> int:
    """What the pool of the captured graphs has taken from the device."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(backend.state.pool))
