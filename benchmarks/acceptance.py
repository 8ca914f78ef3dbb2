"""Acceptance on real text: S of every source, alone and combined, each output checked against transformers.

    python benchmarks/acceptance.py --data-dir DIR [--model NAME] [--device cuda] [--out results.json]

DIR holds `mt_bench.jsonl` and `humaneval.jsonl` (FastChat's and OpenAI's files). 20 evenly spaced prompts of each,
fp32, greedy, at most 192 new tokens, ending at EOS: MT-Bench's first turns through the chat template; HumanEval's
prompts to be completed, less the line break at their end, as code harnesses do (a prompt that ends in one makes the
model begin in the middle of a token); and HumanEval's prompts as chat messages.

`identical` counts the outputs equal, token for token, to `model.generate(do_sample=False)` of transformers. S is the
paper's: all generated tokens over all steps.

Rows marked 'warm' run one prompt after another on one loaded model, so that recycled rows outlive the request. All
other rows start every prompt cold, which makes them independent of each other; they share forward passes to save time.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import lookahead
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.sources.recycle import DictMemory
from lookahead.algorithm.verify import Verdict
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.generate import LookaheadModel

Make = Callable[..., DecodingSequence]


class ShiftedWindow(DecodingSequence):
    """After a block of a tokens the columns move a - 1 to the left, so that every guess keeps its position.

    The columns that come free on the right are filled from `refill`: random prompt tokens, a stretch of the prompt, or
    a walk through the pool. The library does not do this: see `Window.roll`.
    """

    refill = "random"

    def absorb(self, tree: Any, result: Any, verdict: Verdict | None = None) -> Verdict:
        verdict = super().absorb(tree, result, verdict)
        free = len(verdict.tokens) - 1
        if tree.width and free:
            window = self._window
            window.rows = [
                (row[free:] + self.fill(row[-1], min(free, len(row))))[: window.width] for row in window.rows
            ]
        return verdict

    def fill(self, before: int, count: int) -> list[int]:
        rng = random.Random(len(self.tokens))
        prompt = self.tokens[: self.prompt_tokens]
        if self.refill == "random":
            return rng.choices(prompt, k=count)
        if self.refill == "prompt":
            start = rng.randrange(len(prompt))
            return (prompt[start : start + count] + rng.choices(prompt, k=count))[:count]
        pool = next(source.pool for source in self._sources if hasattr(source, "pool"))
        filled: list[int] = []
        while len(filled) < count:
            found = pool.lookup(filled[-1] if filled else before)
            filled += found[0] if found else [rng.choice(self.tokens)]
        return filled[:count]


class PromptRefill(ShiftedWindow):
    refill = "prompt"


class PoolRefill(ShiftedWindow):
    refill = "pool"

    def __init__(self, *args: Any, memory: SharedMemory, **options: Any) -> None:
        python = SharedMemory()  # with sources of Python, whose pool can be looked into
        python.memory, python.calibration = DictMemory(), memory.calibration
        super().__init__(*args, memory=python, **options)


class LiteralWindow(ShiftedWindow):
    """Algorithm 2, lines 7-9: every token accepted beyond the first puts a random row into the window."""

    def absorb(self, tree: Any, result: Any, verdict: Verdict | None = None) -> Verdict:
        verdict = DecodingSequence.absorb(self, tree, result, verdict)
        if tree.width:
            for _ in verdict.tokens[1:]:
                self._window.roll(self.fill(verdict.tokens[-1], self._window.width))
        return verdict


def rows() -> Iterator[tuple[str, LookaheadConfig, Make, bool]]:
    """(label, config, kind of sequence, warm)."""
    paper, prompt = LookaheadConfig.paper(15, 5, 15), LookaheadConfig.paper(15, 5, 15, prompt=True)
    default = LookaheadConfig()
    cold = replace(default, recycle_scope="request")
    yield "default, warm", default, DecodingSequence, True
    yield "paper (5,15,15)", paper, DecodingSequence, False
    yield "paper (5,15,15) + prompt", prompt, DecodingSequence, False
    yield "default, cold", cold, DecodingSequence, False
    yield "all, no window", replace(cold, window=0), DecodingSequence, False
    yield "suffix + recycle", replace(cold, window=0, sources=("suffix", "recycle")), DecodingSequence, False
    yield "recycle alone", replace(cold, window=0, sources=("recycle",)), DecodingSequence, False
    yield "suffix alone", replace(cold, window=0, sources=("suffix",)), DecodingSequence, False
    yield "prompt lookup, as transformers", LookaheadConfig.prompt_lookup(), DecodingSequence, False
    yield "jacobi decoding (Algorithm 1), block 16", LookaheadConfig.jacobi(), DecodingSequence, False
    yield "autoregressive", LookaheadConfig.autoregressive(), DecodingSequence, False
    yield "paper, shift columns, random refill", paper, ShiftedWindow, False
    yield "paper, shift columns, prompt refill", paper, PromptRefill, False
    yield "paper, shift columns, pool refill", paper, PoolRefill, False
    yield "paper, random rows (to the letter)", paper, LiteralWindow, False


def prompts(model: LookaheadModel, folder: Path, count: int) -> dict[str, list[list[int]]]:
    def read(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines() if line.strip()]
        return [lines[i * len(lines) // count] for i in range(count)]

    code = [row["prompt"] for row in read("humaneval.jsonl")]
    return {
        "mt-bench": [model.encode(row["turns"][0]) for row in read("mt_bench.jsonl")],
        "humaneval": [model.encode(text.rstrip(), raw=True) for text in code],
        "humaneval-chat": [model.encode(text) for text in code],
    }


def references(model: LookaheadModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What transformers generates for each prompt, as one left-padded batch, up to the first EOS."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, eos_token_id=list(model.stop_ids)
    )
    outputs = []
    for tokens in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(tokens) if token in model.stop_ids), len(tokens))
        outputs.append(tokens[: end + 1])
    return outputs


def run(
    model: LookaheadModel,
    prompts: Sequence[Sequence[int]],
    make: Make,
    config: LookaheadConfig,
    rules: StopRules,
    one_by_one: bool,
) -> list[DecodingSequence]:
    engine, memory = Engine(model.backend), SharedMemory()
    sequences = [make(prompt, config, rules=rules, memory=memory) for prompt in prompts]
    for sequence in sequences:
        engine.add(sequence)
        while one_by_one and engine.running:
            engine.step()
    while engine.running:
        engine.step()
    return sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--only", action="append", default=[], help="rows whose label contains this")
    parser.add_argument("--sets", default="mt-bench,humaneval,humaneval-chat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    model = lookahead.load(args.model, dtype="float32", device=args.device, config=LookaheadConfig())
    found = prompts(model, args.data_dir, args.prompts)
    begin = time.perf_counter()
    expected = {name: references(model, found[name], args.new_tokens) for name in args.sets.split(",")}
    print(f"references: {time.perf_counter() - begin:.0f} s", flush=True)
    rules = StopRules(args.new_tokens, model.stop_ids, model.backend.max_length)
    table = []
    for label, config, make, warm in rows():
        if args.only and not any(part in label for part in args.only):
            continue
        for name, outputs in expected.items():
            sequences = run(model, found[name], make, config, rules, warm)
            table.append({"row": label, "set": name, **measured(sequences, outputs)})
            print(*list(table[-1].values())[:7], flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or "CPU"
        facts = {
            "model": model.name,
            "new_tokens": args.new_tokens,
            "device": device,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        args.out.write_text(json.dumps({**facts, "table": table}, indent=1) + "\n")
    print("\n".join(markdown(table)))


def measured(sequences: Sequence[DecodingSequence], expected: Sequence[list[int]]) -> dict[str, Any]:
    stats = [sequence.stats for sequence in sequences]
    steps, tokens = sum(s.steps for s in stats), sum(s.generated_tokens for s in stats)
    by_source: dict[str, int] = {}
    for s in stats:
        for source, count in s.accepted_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    return {
        "S": round(tokens / steps, 3),
        "tokens_per_step": round(sum(s.step_tokens for s in stats) / steps, 1),
        "identical": sum(s.output == e for s, e in zip(sequences, expected, strict=True)),
        "prompts": len(sequences),
        "tokens": tokens,
        "steps": steps,
        "accepted_by_source": by_source,
        "host_ms_per_step": round(1e3 * sum(s.propose_seconds + s.absorb_seconds for s in stats) / steps, 3),
    }


def markdown(table: list[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(entry["set"] for entry in table))
    yield "| |" + "".join(f" {name} S | K | identical |" for name in names)
    yield "|---|" + "---|---|---|" * len(names)
    for label in dict.fromkeys(entry["row"] for entry in table):
        cells = {entry["set"]: entry for entry in table if entry["row"] == label}
        yield f"| {label} |" + "".join(
            f" {e['S']:.2f} | {e['tokens_per_step']:.0f} | {e['identical']}/{e['prompts']} |"
            if (e := cells.get(name))
            else " | | |"
            for name in names
        )


if __name__ == "__main__":
    main()
