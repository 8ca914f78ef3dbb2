"""One answer at a time, and many streams, on six kinds of work: `python benchmarks/answers.py --data-dir DIR`.

Through `lookahead.load` and `generate`, with prompts that do not repeat. For every set:

    plain    token by token: tokens per second of the first prompts
    warm     the default, which keeps what it learns from one answer for the next; S, and the rows of a step (K)
    cold     the default with an empty memory for every prompt
    equal    how many texts of both equal token by token, which runs all prompts as one batch
    gap %    the median share of a step of the default in which the device waits for the host (warm, and `streams`)

`--without-bigrams` adds warm and cold without the model's bigrams, `--with-window` with the default window, which a
default config leaves out where bigrams are known. `sampled` is the same at temperature 0.7. `streams`
are steady states of the engine: an answer that ends is replaced by one to a new prompt. MT-Bench, HumanEval, MBPP,
CNN/DailyMail, XSum and GSM8K are read from `--data-dir`; the prompts that ask for a translation or for a passage are
made of XSum's articles.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from device_gaps import device_gaps
from inflate_hybrids import SHAPES, load_in

import lookahead
from lookahead.bench.gpu.batch import Load, measure
from lookahead.bench.run.about import device_name, versions
from lookahead.bench.run.prompts import PAPER_SETS, Prompt
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import MAX_SEQUENCES
from lookahead.generate import Completion, LookaheadModel
from lookahead.models.quantised import weights_name
from lookahead.stats import Stats

SETS = ("mt-bench", "humaneval", "translation", "cnn-dm", "retrieval", "gsm8k")
LANGUAGES = ("German", "French", "Spanish", "Italian")
PASSAGES = 4
STREAM_SETS = ("gsm8k", "humaneval", "mt-bench", "mbpp")
TEMPERATURE = {"temperature": 0.7, "seed": 11}


def first_sentences(text: str, count: int) -> str:
    return ". ".join(text.replace("\n", " ").split(". ")[:count]) + "."


def prompts_of(name: str, folder: Path, count: int) -> list[Prompt]:
    """The prompts of a set, evenly spaced."""
    if name in PAPER_SETS:
        return load_prompts(name, folder, count, 1)
    texts = [(prompt.system or "").split("\n\n", 2)[1] for prompt in load_prompts("xsum", folder, count * PASSAGES)]
    if name == "translation":
        asked = [
            f"Translate the following text into {LANGUAGES[i % len(LANGUAGES)]}.\n\n{first_sentences(text, 3)}"
            for i, text in enumerate(texts[::PASSAGES])
        ]
    else:
        asked = []
        for i in range(count):
            own = [first_sentences(text, 4) for text in texts[PASSAGES * i : PASSAGES * (i + 1)]]
            passages = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(own, 1))
            question = f"What does passage {i % PASSAGES + 1} report, and what does it say about it?"
            asked.append(f"Use the passages to answer the question.\n\n{passages}\n\nQuestion: {question}\nAnswer:")
    return [Prompt(f"{name}-{i}", (text,)) for i, text in enumerate(asked)]


def weight_bytes(model: Any) -> int:
    """The memory of a model's parameters and buffers, each once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


class Answers:
    """Measures a loaded model, and prints a record for each set."""

    def __init__(self, lm: LookaheadModel, options: argparse.Namespace) -> None:
        self.lm, self.options, self.records = lm, options, dict[str, dict[str, Any]]()

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Print a record, and write all so far."""
        print(name, json.dumps(record), flush=True)
        self.records[name] = record
        if self.options.out is not None:
            about = {
                "gpu": device_name(self.lm.device),
                "model": self.lm.name,
                "weights": weights_name(self.lm.model, self.lm.dtype),
                "weight_bytes": weight_bytes(self.lm.model),
                "tokens": self.options.tokens,
                **versions(),
            }
            content = json.dumps({"about": about, "records": self.records}, indent=1)
            self.options.out.write_text(content + "\n", encoding="utf-8")

    def answer(
        self, prompts: Sequence[list[int]], *, cold: bool = False, bigrams: bool = True, **settings: Any
    ) -> tuple[list[Completion], Stats]:
        """Answer one prompt after the other, beginning with an empty memory; `cold` empties it for every prompt."""
        own, done = self.lm.memory, list[Completion]()
        for number, prompt in enumerate(prompts):
            if cold or not number:
                self.lm.memory = own.new()
                self.lm.memory.bigrams = own.bigrams if bigrams else None
            done.append(self.lm.generate(prompt, max_tokens=self.options.tokens, **settings))
        self.lm.memory = own
        return done, Stats.total(one.stats for one in done)

    def compare(self, name: str, prompts: Sequence[list[int]], **settings: Any) -> None:
        """The record of one set."""
        _, plain = self.answer(prompts[:3], method="autoregressive", **settings)
        expected = self.lm.generate(prompts, max_tokens=self.options.tokens, method="autoregressive", **settings)
        record: dict[str, Any] = {"prompts": len(prompts), "plain": round(plain.tokens_per_second, 1)}
        equal = texts = 0
        variants: list[tuple[str, bool, LookaheadConfig]] = [("", True, self.lm.default_config)]
        if self.options.without_bigrams:
            variants.append((" without bigrams", False, self.lm.default_config))
        if self.options.with_window:
            variants.append((" with window", True, replace(self.lm.default_config, window=LookaheadConfig.window)))
        for variant, bigrams, config in variants:
            for how in ("warm", "cold"):
                with device_gaps() as gaps:
                    found, stats = self.answer(prompts, cold=how == "cold", bigrams=bigrams, config=config, **settings)
                label = how + variant
                record[label] = round(stats.tokens_per_second, 1)
                record[f"S {label}"] = round(stats.compression, 3)
                if label == "warm":
                    record["K"] = round(stats.tokens_per_step, 1)
                    record["gap %"] = gaps.percent()
                texts += len(found)
                equal += sum(one.token_ids == other.token_ids for one, other in zip(expected, found, strict=True))
        self.add(name, record | {"equal": f"{equal} of {texts}"})

    def streams(
        self,
        count: int,
        prompts: Sequence[list[int]],
        config: LookaheadConfig,
        sampling: SamplingParams | None = None,
    ) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """Tokens per second of this many sequences in a steady state, after a part that is not measured; and the
        outputs by the prompt's number."""
        tokens, lm = self.options.tokens, self.lm
        rules = StopRules(tokens, frozenset(), lm.backend.max_length)
        lm.engine.set_max_sequences(count)
        load = Load(lm.engine, prompts, config, sampling or SamplingParams(), rules, lm.memory)
        for _ in range(2 * count):
            load.add()
        measure(load, count, 0.7 * count * tokens)
        with device_gaps() as gaps:
            found = measure(load, count, max(1.3 * count, 24) * tokens)
        load.end()
        lm.engine.set_max_sequences(MAX_SEQUENCES)
        return found | {"gap %": gaps.percent()}, load.outputs


def stream_prompts(lm: LookaheadModel, folder: Path) -> list[list[int]]:
    """Prompts of STREAM_SETS, shuffled."""
    found = [prompt for name in STREAM_SETS for prompt in load_prompts(name, folder, 400, 1)]
    random.Random(1).shuffle(found)
    return [prompt_ids(lm, prompt) for prompt in found]


def run(lm: LookaheadModel, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the sets and streams of the options."""
    answers, sets = Answers(lm, options), dict[str, list[list[int]]]()
    for name in options.sets:
        sets[name] = [prompt_ids(lm, prompt) for prompt in prompts_of(name, options.data_dir, options.limit)]
    for settings in ({}, TEMPERATURE):  # what happens once per kind of step happens here
        lm.generate(next(iter(sets.values()))[0], max_tokens=16, **settings)
    for name, prompts in sets.items():
        answers.compare(name, prompts)
    if {"mt-bench", "humaneval"} <= set(sets):
        pairs = zip(sets["mt-bench"], sets["humaneval"], strict=True)
        answers.compare("sampled", [prompt for pair in pairs for prompt in pair][: options.limit], **TEMPERATURE)
    if options.streams:
        lm.prepare(max(options.streams))
        encoded, used = stream_prompts(lm, options.data_dir), 0
        for count in options.streams:
            for name, config in (("plain", LookaheadConfig.autoregressive()), ("default", lm.default_config)):
                rest = encoded[used:] + encoded[:used]
                found, _ = lm.client.call(partial(answers.streams, count, rest, config))
                answers.add(f"{count} streams, {name}", found)
                used = (used + 5 * count) % len(encoded)
    return answers.records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with mt_bench.jsonl and the others")
    parser.add_argument("--model", help="a folder, a .gguf or a name; the embedded model without it")
    parser.add_argument("--shape", choices=SHAPES, help="the model's function in a larger shape")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sets", nargs="*", choices=SETS, default=SETS)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens of each answer")
    parser.add_argument(
        "--streams", type=int, nargs="*", default=[8, 32, 64], help="numbers of streams; none: no streams"
    )
    parser.add_argument("--without-bigrams", action="store_true")
    parser.add_argument("--with-window", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each record")
    options = parser.parse_args()
    make: Any = load_in(options.shape) if options.shape else lookahead.load
    place = {"dtype": options.dtype, "device": options.device, "backend": options.backend}
    run(make(options.model, log=print, **place), options)


if __name__ == "__main__":
    main()
