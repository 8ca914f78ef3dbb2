"""The parts `hook` and `eager`: `model.generate` as a user calls it, stock and with `lookahead.decoding()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from lookahead.bench.gpu.bench import GpuBench
from lookahead.loading.load import static_generation
from lookahead.transformers_hook import decoding

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
BATCH = 8
ROOM = 128
"""Tokens of the static cache beyond the longest call's: its length must not change, or everything compiles anew."""


def hook(bench: GpuBench) -> None:
    """`model.generate` stock, hooked, and static + compiled: the first call, and later calls."""
    _calls(bench, {"stock": None, "hook": "auto", "static + compile": None})


def eager(bench: GpuBench) -> None:
    """`model.generate` stock, and hooked on the eager backend, which runs the models that the other cannot."""
    _calls(bench, {"stock": None, "hook, eager": "eager"})


def _calls(bench: GpuBench, ways: dict[str, str | None]) -> None:
    """`ways`: what each is called, and the hook's backend if it has one."""
    prompts, tokens = bench.prompts["mt-bench"], bench.options.max_tokens
    calls: dict[str, tuple[list[list[list[int]]], dict[str, Any]]] = {
        "greedy": ([[prompt] for prompt in prompts], {"do_sample": False}),
        "sampled": ([[prompt] for prompt in prompts], SAMPLED),
        f"batch of {BATCH}": (_in_batches(prompts), {"do_sample": False}),
    }
    with torch.inference_mode(False):
        for call, (batches, more) in calls.items():
            longest = max(len(prompt) for batch in batches for prompt in batch) + tokens
            said: dict[str, list[Any]] = {}
            for how, backend in ways.items():
                options = _static(bench.large, longest + ROOM) if how.startswith("static") else _hooked(backend)
                try:
                    bench.add({"call": call, "how": how, **_timed(bench, batches, tokens, more, options, said, how)})
                except Exception as error:  # one that fails leaves a record, and the others run
                    bench.add({"call": call, "how": how, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            _compare([record for record in bench.records if record["call"] == call])
    bench.save()


def _in_batches(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Whole batches of different prompts; where there are too few for two, one that is asked twice."""
    whole = [list(prompts[i : i + BATCH]) for i in range(0, len(prompts) - BATCH + 1, BATCH)]
    few = [prompts[i % len(prompts)] for i in range(BATCH)]
    return whole if len(whole) > 1 else [few, few]


def _hooked(backend: str | None) -> Callable[[], dict[str, Any]]:
    return lambda: {} if backend is None else {"custom_generate": decoding(backend=backend)}


def _static(model: Any, longest: int) -> Callable[[], dict[str, Any]]:
    made: dict[str, Any] = {}

    def options() -> dict[str, Any]:
        if not made:
            made.update(static_generation(model, longest))
        made["past_key_values"].reset()
        return made

    return options


def _timed(
    bench: GpuBench,
    batches: Sequence[Sequence[Sequence[int]]],
    tokens: int,
    more: dict[str, Any],
    options: Callable[[], dict[str, Any]],
    said: dict[str, list[Any]],
    how: str,
) -> dict[str, Any]:
    """One call per batch. The first one's time stands by itself. No prompt comes twice: the model would remember it."""
    seconds, counts, texts, compressions, backends = [], [], [], [], set[str]()
    begun = 0.0
    for number, batch in enumerate(batches):
        given = options()
        inputs = _padded(batch, bench.large.device)
        torch.manual_seed(number)
        begin = perf_counter()
        output = bench.large.generate(
            **inputs, max_new_tokens=tokens, pad_token_id=0, eos_token_id=sorted(bench.rules.eos_ids), **more, **given
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begin)
        if number == 0:
            begun = perf_counter()  # the first call, which compiles, is not counted
        answer = output[:, inputs["input_ids"].shape[1] :]
        texts.append(answer.tolist())
        counts.append(int((answer != 0).sum()))
        if "custom_generate" in given:
            stats = given["custom_generate"].stats
            compressions.append(sum(s.generated_tokens for s in stats) / max(1, sum(s.steps for s in stats)))
            backends.add(given["custom_generate"].used)
        if number > 1 and perf_counter() - begun > bench.options.seconds:
            break
    said[how] = texts
    same = sum(map(list.__eq__, texts[1:], said["stock"][1:])) if more.get("do_sample") is False else None
    record: dict[str, Any] = {"first_s": round(seconds[0], 2), "tok_s": round(sum(counts[1:]) / sum(seconds[1:]), 1)}
    record |= {"calls": len(seconds) - 1, "backend": ", ".join(sorted(backends)) or None, "same": same}
    if compressions:
        record["S"] = round(sum(compressions[1:]) / len(compressions[1:]), 2)
    return record


def _padded(batch: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(map(len, batch))
    ids = [[0] * (width - len(row)) + list(row) for row in batch]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in batch]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _compare(records: Sequence[dict[str, Any]]) -> None:
    """Add the ratios to the hook's records."""
    speeds = {record["how"]: record.get("tok_s") for record in records}
    for record in records:
        for name, other in (("over_stock", "stock"), ("over_static", "static + compile")):
            if record["how"].startswith("hook") and speeds.get(other) and record.get("tok_s"):
                record[name] = round(record["tok_s"] / speeds[other], 2)
