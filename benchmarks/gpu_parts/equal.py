"""exact, drift, steady: which outputs are equal, token for token, and how near the tie was where they are not."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from gpu_parts.bench import METHODS, Bench, prompt_key
from gpu_parts.measure import CountedBackend, Decoded, decode, summary, warm_up
from gpu_parts.stock import NAMES
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.eager.backend import EagerBackend
from lookahead.config import SamplingParams

FP32 = "fp32"
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
LOOKAHEAD = tuple(name for name in METHODS if name != "autoregressive")
ROUNDS = 3
"""How often `steady` decodes every prompt with every method."""


# exact


def exact_part(bench: Bench) -> None:
    """In fp32: the graph backend against transformers' greedy and the eager backend, and sampling against itself."""
    assert not torch.backends.cuda.matmul.allow_tf32, "TF32 is on: fp32 products would have ten bits of mantissa"
    for shape in bench.args.exact_shapes:
        model = bench.small if shape == "small" else bench.shaped(shape, torch.float32)
        expected = {data: reference(bench, model, prompts) for data, prompts in bench.prompts.items()}
        plain, backend = EagerBackend(model), CountedBackend(model)
        eager = {(name, data): run(bench, plain, name, data) for name in LOOKAHEAD for data in expected}
        for (name, data), slow in eager.items():
            fast = run(bench, backend, name, data)
            prompts = bench.prompts[data]
            pairs = [(f.sequence.output, e) for f, e in zip(fast, expected[data], strict=True)]
            alone = [a == b or a == greedy(bench, model, p) for p, (a, b) in zip(prompts, pairs, strict=True)]
            same = sum(f.sequence.output == s.sequence.output for f, s in zip(fast, slow, strict=True))
            margins = [
                margin(bench, model, p, *pair)
                for p, pair, equal in zip(prompts, pairs, alone, strict=True)
                if not equal
            ]
            row = {"model": shape, "method": name, "set": data, "prompts": len(pairs), "identical": sum(alone)}
            row |= {"identical_to_eager": same, "S": compression(fast), "S_eager": compression(slow)}
            row["S_ratio"] = round(row["S"] / row["S_eager"], 5)
            bench.add(row | {"margins": [round(m, 6) for m in margins]})
        for data in expected:
            one_by_one = run(bench, backend, "autoregressive", data, SAMPLED)
            by_trees = run(bench, backend, "default", data, SAMPLED)
            pairs = [(a.sequence.output, b.sequence.output) for a, b in zip(by_trees, one_by_one, strict=True)]
            row = {"model": shape, "method": "default, T=0.8, top_p=0.9", "set": data, "prompts": len(pairs)}
            row |= {"identical_to_own": sum(a == b for a, b in pairs), "S": compression(by_trees)}
            row["unlike_greedy"] = sum(b != e for (_, b), e in zip(pairs, expected[data], strict=True))
            bench.add(row)
        del model, plain, backend
        gc.collect()


def run(bench: Bench, backend: Any, method: str, data: str, sampling: SamplingParams | None = None) -> list[Decoded]:
    """The prompts of a set one after another, on one memory."""
    memory = SharedMemory()
    return [decode(backend, p, METHODS[method], bench.stop, memory, sampling) for p in bench.prompts[data]]


def compression(done: Sequence[Decoded]) -> float:
    stats = [one.sequence.stats for one in done]
    return round(sum(s.generated_tokens for s in stats) / sum(s.steps for s in stats), 4)


def reference(bench: Bench, model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' greedy outputs, as one left-padded batch, up to the first end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=bench.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=bench.device)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=bench.args.new_tokens,
        eos_token_id=sorted(bench.lm.stop_ids), pad_token_id=0,
    )  # fmt: skip
    outputs = []
    for tokens in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(tokens) if token in bench.lm.stop_ids), len(tokens))
        outputs.append(tokens[: end + 1])
    return outputs


def greedy(bench: Bench, model: Any, prompt: Sequence[int]) -> list[int]:
    """The same of one prompt by itself: it decides where the padded batch and we differ."""
    return reference(bench, model, [prompt])[0]


def margin(bench: Bench, model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> float:
    """How far apart the two best logits are where two outputs first part."""
    ids = torch.tensor([[*prompt, *a[: parting(a, b)]]], device=bench.device)
    best = model(input_ids=ids).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


# drift


def pairs() -> list[tuple[str, str, bool | None]]:
    """Who is compared with whom. The paper's appendix E compares with fp32; lookahead with its own autoregressive."""
    eager, static, lookup = NAMES["eager"], NAMES["static"], NAMES["prompt-lookup"]
    found: list[tuple[str, str, bool | None]] = [(eager, FP32, None), (static, FP32, None), (lookup, FP32, None)]
    for invariant in (True, False):
        found += [(name, FP32, invariant) for name in METHODS]
        found += [(name, "autoregressive", invariant) for name in LOOKAHEAD]
    return [*found, (static, eager, None), (lookup, eager, None)]


def drift_part(bench: Bench) -> None:
    """Outputs that are equal, pair by pair, and the fp32 margin of the two best logits where they first part.

    The fp32 reference is the small model itself, which computes the same function. The outputs are those of `speed` and
    `baselines`: of this command, and of the files in `--outputs` or `--out`.
    """
    known = gather(bench)
    if not known:
        raise SystemExit("drift has no outputs to compare: run speed and baselines, or give --outputs, their --out")
    prompts = {prompt_key(p): p for chosen in bench.prompts.values() for p in chosen}
    for data, chosen in bench.prompts.items():
        expected = reference(bench, bench.small, chosen)
        known[FP32, None] = known.get((FP32, None), {}) | dict(zip(map(prompt_key, chosen), expected, strict=True))
        bench.keep(FP32, data, None, expected, [])
    for one, other, invariant in pairs():
        first = known.get((one, invariant), {})
        second = known.get((other, None if other == FP32 else invariant), {})
        shared = [key for key in prompts if key in first and key in second]
        if not shared:
            continue
        apart = [key for key in shared if first[key] != second[key]]
        margins = sorted(margin(bench, bench.small, prompts[key], first[key], second[key]) for key in apart)
        row = {"of": one, "against": other, "invariant": invariant, "prompts": len(shared)}
        row |= {"equal": len(shared) - len(apart), "differ": len(apart)}
        row["margin_median"] = round(statistics.median(margins), 4) if margins else None
        row["margin_max"] = round(max(margins), 4) if margins else None
        bench.add(row | {"margins": [round(m, 4) for m in margins]})


def gather(bench: Bench) -> dict[tuple[str, bool | None], dict[str, list[int]]]:
    """Outputs by (method, invariant) and prompt. Files of other shapes or lengths are left alone."""
    kept = []
    for folder in dict.fromkeys(filter(None, (bench.args.outputs, bench.args.out))):
        for path in sorted(folder.glob("*.json")):
            read = json.loads(path.read_text())
            about = read.get("about", {}) if isinstance(read, dict) else {}
            alike = (about.get("shape"), about.get("dtype")) == (bench.args.shape, bench.args.dtype)
            if alike and about.get("part") in ("speed", "baselines"):
                kept += read.get("outputs", [])
    found: dict[tuple[str, bool | None], dict[str, list[int]]] = {}
    for entry in [*kept, *bench.known]:
        if entry["new_tokens"] == bench.args.new_tokens:
            outputs = dict(zip(entry["prompts"], entry["tokens"], strict=True))
            found.setdefault((entry["method"], entry["invariant"]), {}).update(outputs)
    return found


# steady


def steady_part(bench: Bench) -> None:
    """The same prompts in several rounds: does a text change?

    All are compared with the first, which is made token by token. `at` tells where the texts part that do.
    """
    everything = [prompt for prompts in bench.prompts.values() for prompt in prompts]
    backend = CountedBackend(bench.large)
    backend._reserve(1, max(map(len, everything)) + bench.args.new_tokens + 256)
    first: list[list[int]] = []
    for turn in range(ROUNDS):
        for name, config in METHODS.items():
            if not turn:
                warm_up(backend, config, everything, bench.stop)
            memory = SharedMemory()
            done = [decode(backend, prompt, config, bench.stop, memory) for prompt in everything]
            texts = [one.sequence.output for one in done]
            first = first or texts
            at = [parting(ours, its) for ours, its in zip(texts, first, strict=True) if ours != its]
            row = {"method": name, "round": turn + 1, "prompts": len(texts), "differ": len(at), "at": at}
            bench.add(row | {"median_step_ms": summary(done)["median_step_ms"]})


def parting(a: Sequence[int], b: Sequence[int]) -> int:
    """The first place where two outputs are not the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
