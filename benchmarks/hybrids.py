"""Hybrids at the shapes of published ones, with random weights: `python benchmarks/hybrids.py qwen3.5-9b`.

Without names all of them are measured, one after the other. Random weights say nothing of acceptance, so what is timed
is the work:

    plain     token by token through `generate`: tokens per second of one answer, and of 16 at once
    share     of what reading a token's weights, and reading and writing its states, as fast as a copy would allow
    ms        device time of a step by its shape: tokens of a sequence x sequences
    64 / 1    a step of 64 tokens, as a multiple of one of one
    states    MiB of a sequence's states, which a step reads, and writes for the accepted tokens
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from answers import weight_bytes
from random_hybrids import RANDOM_HYBRIDS, random_hybrid

import lookahead
from lookahead.bench.gpu.timing import copy_bandwidth, step_ms
from lookahead.bench.run.about import device_name, versions
from lookahead.config import LookaheadConfig
from lookahead.models.quantised_experts import is_experts

CONTEXT = 512
STEPS = ((1, 1), (1, 16), (16, 1), (64, 1), (128, 1))
"""Tokens of a sequence, and sequences."""
PLAIN = LookaheadConfig.autoregressive()


def token_bytes(model: Any) -> float:
    """The bytes of weights that a token reads: all but those of embeddings, and of experts those that it chooses."""
    experts = [module for module in model.modules() if is_experts(module)]
    stacked, count = sum(map(weight_bytes, experts)), sum(module.num_experts for module in experts)
    chosen = len(experts) * getattr(model.config, "num_experts_per_tok", 0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if head is embedding else embedding.nbytes
    return weight_bytes(model) - stacked - unread + (stacked / count * chosen if count else 0)


def rate(lm: lookahead.LookaheadModel, count: int, tokens: int, prompt: int) -> float:
    """Tokens per second of all answers together after their first ones; the median of three runs after another."""
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(min(1000, lm.backend.vocab_size), (count, prompt), generator=generator).tolist()
    seconds = list[float]()
    for _ in range(4):
        found = lm.generate(prompts, max_tokens=tokens)
        seconds.append(max(done.stats.seconds - done.stats.first_token_seconds for done in found))
    return count * (tokens - 1) / statistics.median(seconds[1:])


def measure(model: Any, tokenizer: Any, backend: str = "auto", tokens: int = 128, prompt: int = 64) -> dict[str, Any]:
    """The figures of a model, for prompts and answers of this many tokens."""
    read = token_bytes(model)
    lm = lookahead.load((model, tokenizer), backend=backend, config=PLAIN, log=print)
    lm.stop_ids = frozenset()
    graph: Any = lm.backend
    groups = [states.group for states in graph.runner.state.states.groups]
    states = sum(group.slot_bytes(model.dtype.itemsize) for group in groups)
    bandwidth = copy_bandwidth(lm.device)
    found: dict[str, Any] = {"GB per token": read / 1e9, "states MiB": states / 2**20, "copy TB/s": bandwidth / 1e12}
    for count in (1, 16):
        found[f"plain {count}"] = rate(lm, count, tokens, prompt)
    context = CONTEXT if lm.device.type == "cuda" else 16
    for rows, sequences in STEPS:
        found[f"ms {rows} x {sequences}"] = lm.client.call(lambda at=(rows, context, sequences): step_ms(graph, *at)[0])
    bound = 1e3 * (read + 2 * states) / bandwidth
    found["share of plain"] = found["plain 1"] * bound / 1e3
    found["share of a step"] = bound / found["ms 1 x 1"]
    found["64 / 1"] = found["ms 64 x 1"] / found["ms 1 x 1"]
    return {name: round(value, 3) for name, value in found.items()}


def main(
    arguments: Sequence[str] | None = None, make: Callable[..., Any] = random_hybrid, **how: Any
) -> dict[str, dict[str, Any]]:
    """Measure the shapes of the command line, whose models `make` makes. `how`: see `measure`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RANDOM_HYBRIDS)}; default: all")
    parser.add_argument("--model", help="the model whose tokenizer is used; the embedded one without it")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each shape")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(RANDOM_HYBRIDS):
        parser.error(f"unknown shape {unknown.pop()!r}; choose from {', '.join(RANDOM_HYBRIDS)}")
    tokenizer = lookahead.load(options.model, device="cpu", backend="eager", config=PLAIN).tokenizer
    found: dict[str, dict[str, Any]] = {}
    for name in options.names or RANDOM_HYBRIDS:
        model = make(RANDOM_HYBRIDS[name])
        about = {"device": device_name(model.device), **versions()}
        found[name] = measure(model, tokenizer, **how)
        print(name, json.dumps(found[name]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"about": about, "shapes": found}, indent=1) + "\n", encoding="utf-8")
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
