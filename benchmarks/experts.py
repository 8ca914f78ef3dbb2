"""Mixtures of experts on one GPU: `python benchmarks/experts.py texts edit rule --data-dir DIR`.

    speed   token by token, in the shapes of published models with random weights: tokens per second of one answer and
            of 16, as a share of what reading their weights as fast as a copy would allow; time of passes by rows
    texts   a mixture that speaks (see `inflate_experts.py`): token by token against the default, one answer at a time
            and many streams, at several temperatures; every text is compared
    edit    the same, with the model's own answer, of which three lines are changed, as the prediction
    rule    the rule that knows what experts cost, against the same rule without, and fixed numbers of rows

Several verbs measure one loaded model. `speed` has models of its own, and comes first. The last lines are a table: of
tokens per second token by token and with the default, their ratio (the median of the prompts, and the least), equal
texts, S, the rows of a median pass, and how many experts it read, as a multiple of what a pass of one row reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answers import Answers, prompts_of, stream_prompts, weight_bytes
from inflate_experts import MIXTURE_SHAPES, load_in
from random_experts import PASS_ROWS, PLAIN, RANDOM_SHAPES, random_mixture, speed, watched

import lookahead
from lookahead.algorithm.cost import PassCost
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.bench.run.about import device_name, versions
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.request import Request
from lookahead.generate import Completion, LookaheadModel

VERBS = ("speed", "texts", "edit", "rule")
SETS = ("mt-bench", "humaneval")
LEAST = 0.98
"""What the default should never be slower than, as a share of token by token."""
FIXED_ROWS = (8, 32, 128)
COLUMNS = ("verb", "what", "T", "plain", "tok/s", "ratio", "least", "equal", "S", "rows", "experts")
EDITED = "Write a Python module of 200 lines that manages the books, members and loans of a library."


class Records:
    """What was measured: each record is printed, and written to a file, as it comes."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.about, self.all = path, dict[str, Any](), list[dict[str, Any]]()

    def add(self, verb: str, what: str, **values: Any) -> None:
        record = {"verb": verb, "what": what, **{name: short(value) for name, value in values.items()}}
        self.all.append(record)
        print(json.dumps(record), flush=True)
        if self.path is not None:
            content = {"about": self.about | versions(), "records": self.all}
            self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        lines = [COLUMNS, *([str(record.get(name, "")) for name in COLUMNS] for record in self.all)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        made = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        rated = [record for record in self.all if record["verb"] == "texts"]
        if rated:
            worst = min(rated, key=lambda record: record["ratio"])
            verdict = "as claimed" if worst["ratio"] >= LEAST else "against the claim"
            made.append(
                f"least ratio of texts: {worst['ratio']} ({worst['what']}, T={worst['T']}), {verdict} of {LEAST}"
            )
        return "\n".join(line.rstrip() for line in made)


def short(value: Any) -> Any:
    return round(value, 3 if abs(value) < 100 else 1) if isinstance(value, float) else value


class Speaking:
    """Measures a loaded mixture that speaks."""

    def __init__(self, lm: LookaheadModel, records: Records, options: argparse.Namespace) -> None:
        self.lm, self.records, self.options = lm, records, options
        self.answers = Answers(lm, options)
        self._plain: dict[tuple[Any, ...], Completion] = {}
        config = lm.model.config
        self.one = config.num_hidden_layers * config.num_experts_per_tok
        self.sets = {
            name: [prompt_ids(lm, one) for one in prompts_of(name, options.data_dir, options.limit)] for name in SETS
        }
        for settings in ({}, {"temperature": 0.7}):  # what happens once per kind of step happens here
            lm.generate(self.sets[SETS[0]][0], max_tokens=16, **settings)

    def passes(self, passes: Sequence[tuple[int, float, float, float]]) -> dict[str, Any]:
        if not passes:
            return {}
        rows, _, _, reads = zip(*passes, strict=True)
        return {"rows": statistics.median(rows), "experts": statistics.median(reads) / self.one}

    def texts(self) -> None:
        lm, options = self.lm, self.options
        others = stream_prompts(lm, options.data_dir) if options.streams else []
        if options.streams:
            lm.prepare(max(options.streams))
        for temperature in options.temperatures:
            settings = sampled(temperature)
            for name, prompts in self.sets.items():
                self.compare("texts", name, prompts, settings)
            for count in options.streams:
                used = others[: 5 * count]
                lm.generate(used, max_tokens=1)  # both then find the prompts' K/V in the cache
                rates, outputs = list[dict[str, Any]](), list[dict[int, list[int]]]()
                for config in (PLAIN, lm.default_config):
                    run = partial(self.answers.streams, count, used, config, SamplingParams(**settings))
                    with watched(self.lm) as passes:
                        rate, output = lm.client.call(run)
                    rates.append(rate)
                    outputs.append(output)
                both = outputs[0].keys() & outputs[1].keys()
                equal = sum(outputs[0][number] == outputs[1][number] for number in both)
                plain, found = (rate["tok_s"] for rate in rates)
                values = {"plain": plain, "tok/s": found, "ratio": found / plain, "equal": f"{equal} of {len(both)}"}
                values |= {"S": rates[1]["S"], **self.passes(passes)}
                self.records.add("texts", f"{count} streams", T=temperature, **values)

    def compare(self, verb: str, what: str, prompts: Sequence[list[int]], settings: dict[str, Any], **how: Any) -> None:
        """One answer at a time, token by token and with the default, which keeps what it learns."""
        before = [self.plain(prompt, settings) for prompt in prompts]
        with watched(self.lm) as passes:
            after, stats = self.answers.answer(prompts, **settings, **how)
        pairs = list(zip(before, after, strict=True))
        ratios = [b.stats.tokens_per_second / a.stats.tokens_per_second for a, b in pairs]
        equal = sum(a.token_ids == b.token_ids for a, b in pairs)
        values = {
            "plain": statistics.median(a.stats.tokens_per_second for a in before),
            "tok/s": statistics.median(b.stats.tokens_per_second for b in after),
            "ratio": statistics.median(ratios), "least": min(ratios),
            "equal": f"{equal} of {len(pairs)}", "S": stats.compression, **self.passes(passes),
        }  # fmt: skip
        self.records.add(verb, what, T=settings.get("temperature", 0.0), **values)

    def plain(self, prompt: list[int], settings: dict[str, Any]) -> Completion:
        """An answer token by token, once per prompt and temperature. It and all others find the prompt's K/V cached."""
        key = (settings.get("temperature", 0.0), *prompt)
        if key not in self._plain:
            self.lm.generate(prompt, max_tokens=1)
            (self._plain[key],), _ = self.answers.answer([prompt], method="autoregressive", **settings)
        return self._plain[key]

    def edit(self) -> None:
        prompt = self.lm.encode(EDITED)
        for temperature in self.options.temperatures:
            sampling = SamplingParams(**sampled(temperature))
            self.answer_at_once(prompt, PLAIN, sampling, 1)
            plain = self.answer_at_once(prompt, PLAIN, sampling, self.options.edit_tokens)
            prediction = self.lm.encode(with_changed_lines(self.lm.tokenizer.decode(plain.output)), raw=True)
            for what, given in (("without a prediction", []), ("three lines changed", prediction)):
                with watched(self.lm) as passes:
                    found = self.answer_at_once(
                        prompt, self.lm.default_config, sampling, self.options.edit_tokens, given
                    )
                rates = [one.stats.tokens_per_second for one in (plain, found)]
                values = {"plain": rates[0], "tok/s": rates[1], "ratio": rates[1] / rates[0]}
                values |= {"equal": f"{int(plain.output == found.output)} of 1", "S": found.stats.compression}
                self.records.add("edit", what, T=temperature, **values, **self.passes(passes))

    def answer_at_once(
        self,
        prompt: list[int],
        config: LookaheadConfig,
        sampling: SamplingParams,
        tokens: int,
        prediction: Sequence[int] = (),
    ) -> DecodingSequence:
        """One answer of this many tokens, after an empty memory."""
        lm = self.lm
        rules, memory = StopRules(tokens, frozenset(), lm.backend.max_length), lm.memory.new()
        memory.bigrams = lm.memory.bigrams
        sequence = DecodingSequence(
            prompt, lm.exact_config(config), sampling, rules, memory=memory, prediction=prediction
        )
        lm.client.submit(Request(sequence)).wait()
        return sequence

    def rule(self) -> None:
        """Greedy answers of all sets by each rule; then, for the default, expected and measured times by rows."""
        lm, own = self.lm, self.lm.engine.budget.cost
        prompts = [prompt for given in self.sets.values() for prompt in given]
        default = lm.default_config
        if own is not None:
            lm.engine.budget.cost = PassCost(own._measured)  # the same table, whatever experts the text's rows share
            self.compare("rule", "time by rows alone", prompts, {})
            lm.engine.budget.cost = own
        for rows in FIXED_ROWS:
            if rows <= default.budget:
                fixed = replace(default, budget=rows, window=0, step_cost=None)
                self.compare("rule", f"{rows} rows", prompts, {}, config=fixed)
        with watched(self.lm) as passes:
            self.compare("rule", "default", prompts, {})
        largest = max((rows for rows, *_ in passes), default=0)
        for size in [size for size in PASS_ROWS if size <= largest]:
            group = [one for one in passes if size <= one[0] < 2 * size]
            if group:
                rows, expected, seconds, reads = (statistics.median(column) for column in zip(*group, strict=True))
                values = {"rows": rows, "experts": reads / self.one, "passes": len(group)}
                values |= {"expected ms": 1e3 * expected, "ms": 1e3 * seconds, "ratio": seconds / expected}
                self.records.add("rule", f"time of {size} to {2 * size - 1} rows", **values)


def tokenizer_of(model: str | None) -> Any:
    return lookahead.load(model, device="cpu", backend="eager", config=PLAIN).tokenizer


def sampled(temperature: float) -> dict[str, Any]:
    return {"temperature": temperature, "seed": 11} if temperature else {}


def with_changed_lines(text: str) -> str:
    """The text with three of its lines changed: at a quarter, the middle, and three quarters."""
    lines = text.split("\n")
    for part in (1, 2, 3):
        index = part * len(lines) // 4
        lines[index] = f"{lines[index]}  # changed {part}"
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options. One line, and exit 2, for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verbs", nargs="+", metavar="VERB", help=f"of {', '.join(VERBS)}")
    parser.add_argument("--shape", choices=MIXTURE_SHAPES, default="moe-qwen3", help="the mixture that speaks")
    parser.add_argument("--names", nargs="*", choices=RANDOM_SHAPES, default=list(RANDOM_SHAPES), help="for speed")
    parser.add_argument("--model", help="the small model; the embedded one without it")
    parser.add_argument("--data-dir", type=Path, help="a folder with mt_bench.jsonl and the others")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each set")
    parser.add_argument("--max-tokens", dest="tokens", type=int, default=96, help="new tokens of each answer")
    parser.add_argument("--edit-tokens", type=int, default=1024, help="new tokens of the edited text")
    parser.add_argument("--streams", type=int, nargs="*", default=[4, 16, 64], help="numbers of streams")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--json", type=Path, help="a JSON file, written after each record")
    options = parser.parse_args(arguments)
    if unknown := set(options.verbs) - set(VERBS):
        parser.error(f"unknown verb {unknown.pop()!r}; choose from {', '.join(VERBS)}")
    for name in ("limit", "tokens", "edit_tokens"):
        least = 2 if name == "tokens" else 1
        if getattr(options, name) < least:
            shown = {"tokens": "max-tokens"}.get(name, name.replace("_", "-"))
            parser.error(f"--{shown} {getattr(options, name)}: give at least {least}")
    if bad := [value for value in options.streams if value < 1]:
        parser.error(f"--streams {bad[0]}: give numbers from 1 on, or none")
    if bad := [value for value in options.temperatures if not 0 <= value < math.inf]:
        parser.error(f"--temperatures {bad[0]}: give numbers from 0 on")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    if set(options.verbs) - {"speed"} and (options.data_dir is None or not options.data_dir.is_dir()):
        parser.error(f"--data-dir {options.data_dir}: give the folder with the prompts, for {', '.join(SETS)}")
    options.out = None  # of `Answers`, whose records these are not
    return options


def main(
    arguments: Sequence[str] | None = None,
    make: Callable[..., Any] = random_mixture,
    load: Callable[..., Any] = load_in,
) -> Records:
    """Measure the verbs of the command line. `make` and `load` give the models."""
    options = parsed(arguments)
    records = Records(options.json)
    if "speed" in options.verbs:
        tokenizer = tokenizer_of(options.model)
        for name in options.names:
            model = make(RANDOM_SHAPES[name], "cuda" if options.device == "auto" else options.device)
            records.about["gpu"] = device_name(model.device)
            speed(records, model, tokenizer, name, options)
            del model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if set(options.verbs) - {"speed"}:
        place = {"dtype": options.dtype, "device": options.device, "backend": options.backend}
        seen: Any = lambda found: records.about.update(unions=found)  # noqa: E731
        lm = load(options.shape, seen=seen)(options.model, log=print, **place)
        records.about |= {"gpu": device_name(lm.device), "model": lm.name, "bytes": weight_bytes(lm.model)}
        speaking = Speaking(lm, records, options)
        for verb in VERBS[1:]:
            if verb in options.verbs:
                getattr(speaking, verb)()
    print(f"\n{json.dumps(records.about)}\n{records.table()}")
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
