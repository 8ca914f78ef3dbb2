"""Is all well on this GPU? `make test-gpu`, or `python benchmarks/gpu_check.py --only identity,figures --model FILE`.

docs/development.md describes the parts, the table that it ends with, and the baseline, `results/h200/baseline.json`.
The model is the small one in the shape of a 7B (see `inflate.py`); `--small` takes the model itself. `--device cpu`
runs everything on the kernels' slow twins, to test this file: with a model of a few layers it takes a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_tests import run_tests
from inflate import shaped_load

import lookahead
from lookahead.bench.gpu.batch import Load, steady_state
from lookahead.bench.gpu.timing import step_ms
from lookahead.bench.run.about import device_name, versions
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.config import SamplingParams, StopRules
from lookahead.generate import LookaheadModel
from lookahead.stats import Stats

HERE = Path(__file__).parent
BASELINE = HERE / "results" / "h200" / "baseline.json"
SHAPE = "7b"
TOLERANCES = {"ms": 0.05, "tok/s": 0.1}
"""By how much a figure may be worse than the baseline's, by its unit. Two machines of one kind, or two runs of one,
differ by up to 3% in the time of a step, and by more in tokens per second, which depend on the host, too."""
FAIL, OK, SHOWN = "FAIL", "ok", "not judged"


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    answers: int = 20
    tokens: int = 128
    steps: tuple[int, ...] = (1, 16, 64, 128)
    context: int = 1024
    figure_answers: int = 12
    figure_tokens: int = 256
    together: tuple[int, ...] = (8, 64)
    clients: int = 16
    again: int = 40


SLOW = Sizes(6, 12, (1, 4), 40, 3, 12, (3,), 4, 8)
"""On the kernels' slow twins."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    figure: str
    verdict: str
    baseline: str = ""
    ratio: str = ""


class GpuCheck:
    """The parts that need a loaded model."""

    def __init__(self, lm: LookaheadModel, sizes: Sizes, seconds: float) -> None:
        self.lm, self.sizes, self.seconds = lm, sizes, seconds
        self.prompts = [prompt.turns[0] for prompt in load_prompts("builtin")]
        # What clients of the soak got: (prompt, settings, tokens, whether it was cancelled), and what went wrong.
        self.answers: list[tuple[str, dict[str, Any], list[int], bool]] = []
        self.problems: list[str] = []

    def identity(self) -> list[Row]:
        """The default's tokens are those of token-by-token decoding."""
        prompts, tokens = self.prompts[: self.sizes.answers], self.sizes.tokens

        def answer(prompt: str, method: str = "lookahead") -> list[int]:
            return self.lm.generate(prompt, max_tokens=tokens, method=method).token_ids

        plain = [answer(prompt, "autoregressive") for prompt in prompts]
        with ThreadPoolExecutor(8) as threads:
            found = {"one at a time": list(map(answer, prompts)), "8 at once": list(threads.map(answer, prompts))}
        return [same_row(f"identity, {how}", list(map(list.__eq__, plain, texts))) for how, texts in found.items()]

    def soak(self) -> list[Row]:
        """Answers among others are those alone, and nothing is left behind."""
        end = time.monotonic() + self.seconds
        clients = [threading.Thread(target=self._client, args=(number, end)) for number in range(self.sizes.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        sample = random.Random(0).sample(self.answers, min(self.sizes.again, len(self.answers)))
        same = []
        for prompt, settings, tokens, cancelled in sample:
            alone = self.lm.generate(prompt, **{**settings, "method": "autoregressive"}).token_ids
            same.append((alone[: len(tokens)] if cancelled else alone) == tokens)
        for problem in self.problems[:5]:
            print(f"soak: {problem}")
        pool = self.lm.client.call(lambda: (self.lm.backend.pool.used, len(self.lm.engine.running)))
        cancelled = sum(answer[3] for answer in self.answers)
        asked = f"{len(self.answers)} answers, {cancelled} cancelled"
        return [
            Row("soak, errors", f"{len(self.problems)} of {asked}", FAIL if self.problems else OK),
            same_row("soak, as alone", same),
            Row("soak, pages and requests left", f"{pool[0]} and {pool[1]}", FAIL if any(pool) else OK),
        ]

    def _client(self, number: int, end: float) -> None:
        """Ask for one answer after the other. One in four is cancelled."""
        rng = random.Random(number)
        while time.monotonic() < end:
            prompt, settings = random_request(rng, self.prompts, self.sizes.tokens)
            cancelled, pieces = rng.random() < 0.25, rng.randrange(4)
            try:
                stream = self.lm.stream(prompt, **settings)
                for count, _ in enumerate(stream):
                    if cancelled and count >= pieces:
                        break
                stream.close()
                done = stream.completion
                self.answers.append((prompt, settings, done.token_ids, done.finish_reason == "interrupted"))
            except Exception as error:  # whatever it is, it is what the soak looks for
                self.problems.append(f"{type(error).__name__}: {error} ({settings})"[:300])

    def figures(self) -> dict[str, float]:
        """By name; the unit comes first."""
        lm, sizes, found = self.lm, self.sizes, dict[str, float]()
        for count in sizes.steps:
            device, _ = lm.client.call(partial(step_ms, lm.backend, count, sizes.context))
            found[f"ms of a step, K={count}"] = round(device, 3)
        for name, method in (("token by token", "autoregressive"), ("default", "lookahead")):
            prompts = self.prompts[: sizes.figure_answers]
            lm.generate(prompts[0], max_tokens=sizes.figure_tokens, method=method)  # warms up
            done = [lm.generate(prompt, max_tokens=sizes.figure_tokens, method=method) for prompt in prompts]
            found[f"tok/s, {name}"] = round(Stats.total(one.stats for one in done).tokens_per_second, 1)
        for count in sizes.together:
            found[f"tok/s, {count} at once"] = lm.client.call(partial(self._together, count))
        return found

    def _together(self, count: int) -> float:
        """Tokens per second of the default in a steady state."""
        lm, rules = self.lm, StopRules(self.sizes.figure_tokens, self.lm.stop_ids)
        prompts = [lm.encode(prompt) for prompt in self.prompts]
        load = partial(
            Load, prompts=prompts, config=lm.default_config, sampling=SamplingParams(), rules=rules, memory=lm.memory
        )
        answers = max(1.5 * count, self.sizes.figure_answers)
        return float(steady_state(load, lm.backend, lambda: lm.engine.budget, count, answers)[0]["tok_s"])


def random_request(rng: random.Random, prompts: Sequence[str], tokens: int) -> tuple[str, dict[str, Any]]:
    """A prompt, some of which begin alike, and settings of any kind. There is a seed, so that it can be repeated."""
    words = rng.choice(prompts).split()
    prompt = " ".join(words[: rng.randrange(1, len(words) + 1)] if rng.random() < 0.5 else words)
    settings: dict[str, Any] = {"max_tokens": rng.randint(1, tokens), "seed": rng.randrange(1000)}
    if rng.random() < 0.6:
        settings |= {"temperature": rng.choice((0.3, 0.7, 1.0))}
        settings |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}))
    if rng.random() < 0.3:
        settings |= rng.choice(({"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.3}))
    settings |= rng.choice(({}, {}, {"logprobs": 2}, {"stop": [".", "\n\n"]}, {"logit_bias": {11: -2.0, 30: 1.5}}))
    settings |= rng.choice(({}, {}, {}, {"min_tokens": 1}, {"raw": True}, {"method": "autoregressive"}))
    return prompt, settings


def same_row(check: str, same: Sequence[bool]) -> Row:
    return Row(check, f"{sum(same)} of {len(same)}", OK if all(same) and same else FAIL)


def figure_rows(figures: dict[str, float], baseline: dict[str, Any], judged: bool) -> list[Row]:
    """Each figure beside the baseline's: a time may not be longer and a speed not lower, but for the tolerance."""
    rows = []
    for name, value in figures.items():
        before = baseline.get("figures", {}).get(name)
        if before is None:
            rows.append(Row(name, f"{value:g}", SHOWN))
            continue
        ratio, unit = value / before, name.split()[0].rstrip(",")
        tolerance = baseline.get("tolerances", TOLERANCES)[unit]
        worse = ratio > 1 + tolerance if unit == "ms" else ratio < 1 - tolerance
        verdict = SHOWN if not judged else FAIL if worse else OK
        rows.append(Row(name, f"{value:g}", verdict, f"{before:g}", f"{ratio:.3f}"))
    return rows


def table(rows: Sequence[Row]) -> str:
    cells = [("check", "figure", "baseline", "ratio", "")]
    cells += [(row.check, row.figure, row.baseline, row.ratio, row.verdict) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def facts(lm: LookaheadModel) -> dict[str, str]:
    """What figures depend on: those of another GPU or model cannot be compared."""
    config, dtype = lm.model.config, str(lm.dtype).removeprefix("torch.")
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads} heads"
    model = f"hidden {config.hidden_size}, {config.num_hidden_layers} layers, {heads}, {dtype}"
    return {"gpu": device_name(lm.device), "model": model}


def load(args: argparse.Namespace) -> LookaheadModel:
    make: Callable[..., Any] = lookahead.load if args.small else shaped_load(SHAPE)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    loaded: LookaheadModel = make(args.model, dtype=dtype, device=args.device, backend="graph", log=print)
    return loaded


def run(args: argparse.Namespace, sizes: Sizes) -> list[Row]:
    """The parts that were chosen, and a row for each thing that was checked."""
    rows: list[Row] = []
    if "tests" in args.only:
        passed, figure = run_tests(HERE.parent)
        rows.append(Row("tests", figure, OK if passed else FAIL))
    if args.only == ["tests"]:
        return rows
    check = GpuCheck(load(args), sizes, args.seconds)
    for part, rows_of in (("identity", check.identity), ("soak", check.soak)):
        if part in args.only:
            begin = time.monotonic()
            rows += rows_of()
            print(f"-- {part}: {time.monotonic() - begin:.0f} s", flush=True)
    if "figures" in args.only:
        figures, here = check.figures(), facts(check.lm)
        baseline = json.loads(args.baseline.read_text(encoding="utf-8")) if args.baseline.is_file() else {}
        other = [f"{name} is {here[name]!r}, and {baseline.get(name)!r} in the baseline"
                 for name in here if here[name] != baseline.get(name)]  # fmt: skip
        if other:
            print("figures are not judged: " + "; ".join(other))
        rows += figure_rows(figures, baseline, judged=not other and not args.update)
        if args.update:
            about = {"command": "make test-gpu ARGS=--update", **here, **versions(), "tolerances": TOLERANCES}
            args.baseline.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n", encoding="utf-8")
            print(f"wrote {args.baseline.name}")
    return rows


PARTS = ("tests", "identity", "soak", "figures")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a small Llama: a folder, a .gguf or a name; the embedded one without it")
    parser.add_argument("--small", action="store_true", help=f"the model itself, not in the {SHAPE} shape")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the soak sends requests")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--update", action="store_true", help="write the figures to the baseline")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args(argv)
    args.only = [part.strip() for part in args.only.split(",")]
    if unknown := [part for part in args.only if part not in PARTS]:
        parser.error(f"--only does not know {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("test-gpu: there is no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    rows = run(args, Sizes() if args.device == "cuda" else SLOW)
    print(table(rows))
    return int(any(row.verdict == FAIL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
