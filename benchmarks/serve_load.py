"""`lookahead serve` under load: `python benchmarks/serve_load.py --model NAME [--inflate 7b] --out FOLDER`.

Measures on one server, with guesses and without in turn (by the body's `lookahead`), so that a busy machine slows both:

    closed   1 to 64 clients that ask one after the other: tokens per second, S, time to the first token, time between
             the events of a stream (p50 and p99)
    engine   the same requests without HTTP, at `--engine` streams, and
    full     as many streams at once over HTTP, with a few clients more, who wait for a place: in both of these all
             places are always taken, so that the difference is what HTTP and events cost
    open     clients that come at random times at given `--rates`, whatever has become of those before them
    --crosstalk   64 mixed requests at once in a tiny page pool, against the same requests alone

Every closed cell has prompts of its own, while there are new ones in the sets of `--prompts`; `again` counts the
requests whose prompt had been asked before. Nothing is warmed up: the server says that it is ready. The other cells
share their prompts. A cell sends new requests for `--seconds`. Tokens per second are those of its last three quarters,
in which all clients have an answer under way: neither the first prompts nor the last answers take part. The clients
run in a process of their own (`load_client.py`), each on one connection. Every answer has the same length, so that both
ways make the same tokens. Needs torch, transformers and what `lookahead serve` needs (without that only `engine` is
measured). `python benchmarks/serve_load.py --report FOLDER/serve-load.json --page FILE.md` writes the table, and with
matplotlib the plot, anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from inflate import MODEL_SHAPES, shaped_load
from serve_crosstalk import crosstalk, shrink
from serve_report import report, table

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.bench.run import prompts
from lookahead.bench.run.about import about
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.front import Ticket
from lookahead.engine.request import Request
from lookahead.generate import LookaheadModel, load
from lookahead.serve import EXTRA

HERE = Path(__file__).parent
WEB = all(find_spec(name) is not None for name in EXTRA)
WAYS = {"plain": False, "lookahead": True}
WAITING = 4
"""Clients who wait for a place where the server is to be full: an answer that ends is replaced at once."""
RISE = 0.25
"""The part of a run's time that is not counted, because it is not steady yet."""


def bodies(model: LookaheadModel, texts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """Requests for `/v1/completions`, as token ids of chats."""
    ids = [model.encode(prompt) for prompt in texts]
    return [{"prompt": one, "max_tokens": tokens, "ignore_eos": True, "temperature": 0} for one in ids]


class Deal:
    """Hands out prompts that nobody had before, until there are none left; then it begins again."""

    def __init__(self, asked: Sequence[dict[str, Any]]) -> None:
        self.asked, self.handed = asked, 0

    def take(self, count: int) -> list[dict[str, Any]]:
        first, self.handed = self.handed, self.handed + count
        return [self.asked[number % len(self.asked)] for number in range(first, first + count)]

    def again(self, taken: int, replies: int) -> int:
        """How many of the last `taken` prompts' replies were to a prompt that was asked before."""
        new = max(0, min(taken, len(self.asked) - (self.handed - taken)))
        return max(0, replies - new)


# Over HTTP.


class Served:
    """A server in this process, and clients in another."""

    def __init__(self, model: LookaheadModel, concurrency: int, path: str = "completions") -> None:
        from lookahead.serve.life import SWITCH_SECONDS, YOUNG_OBJECTS, make_server
        from lookahead.serve.settings import ServeSettings

        sys.setswitchinterval(SWITCH_SECONDS)
        settings = ServeSettings(port=0, max_concurrency=concurrency, max_queue=4096)
        self.path = path
        self.server = make_server(model, settings, lambda line: None)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        gc.collect()
        gc.freeze()  # as `life.serve` does
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        self.thread.start()
        while not self.server.started:
            sleep(0.01)

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        order["url"] = f"{self.server.address}/v1/{self.path}"
        command = [sys.executable, str(HERE / "load_client.py")]
        done = subprocess.run(command, input=json.dumps(order), stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    def close(self) -> None:
        self.server.begin_drain()
        self.thread.join(60)
        gc.unfreeze()


def summary(found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures of a run that sent requests for so long. Replies that were refused are counted, and take no part in
    the rest."""
    good = [one for one in found["replies"] if one["status"] == 200 and one["first"] is not None]
    if not good:
        return {"replies": 0, "refused": len(found["replies"])}
    tokens, steps = sum(one["tokens"] for one in good), sum(one["steps"] for one in good)
    firsts, gaps = [one["first"] for one in good], [gap for one in good for gap in one["gaps"]]
    return {
        "replies": len(good),
        "refused": len(found["replies"]) - len(good),
        "tokens_per_second": round(steady(good, found["begin"], seconds), 1),
        "compression": round(tokens / max(1, steps), 3),
        "ttft_ms": [round(1000 * part, 2) for part in quantiles(firsts)],
        "gap_ms": [round(1000 * part, 2) for part in quantiles(gaps)],
    }


def steady(replies: Sequence[dict[str, Any]], begin: float, seconds: float) -> float:
    """Tokens per second in the steady part of a run. The tokens of a reply are spread evenly over its events."""
    first, last, tokens = begin + RISE * seconds, begin + seconds, 0.0
    for one in replies:
        times = list(accumulate(one["gaps"], initial=one["asked"] + one["first"]))
        tokens += one["tokens"] * sum(first <= time < last for time in times) / len(times)
    return tokens / (last - first)


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


def full(model: LookaheadModel, served: Served, order: dict[str, Any], streams: int, most: int) -> dict[str, Any]:
    """A run in which so many streams have an answer under way at any time. Afterwards `most` may have one."""
    model.front.call(lambda: model.engine.limit(streams))
    try:
        return summary(served.run({**order, "streams": streams + WAITING}), order["seconds"])
    finally:
        model.front.call(lambda: model.engine.limit(most))


# Without HTTP.


def through_engine(
    model: LookaheadModel, asked: Sequence[dict[str, Any]], streams: int, guess: bool, seconds: float
) -> Any:
    """Tokens per second of so many sequences that are replaced when they end, straight through the engine's front."""
    config = model.default_config if guess else LookaheadConfig.autoregressive()
    ended = threading.Event()
    left: set[Ticket] = set()
    counts = {"number": 0, "tokens": 0}
    begin = perf_counter()

    def start() -> None:
        body = asked[counts["number"] % len(asked)]
        counts["number"] += 1
        rules = StopRules(body["max_tokens"], frozenset(), model.backend.max_length)
        sequence = DecodingSequence(body["prompt"], config, SamplingParams(), rules, memory=model.memory)
        left.add(model.front.submit(Request(sequence), told))

    def told(tickets: Sequence[Ticket]) -> None:
        now = perf_counter() - begin
        for ticket in tickets:
            tokens = sum(len(event.tokens) for event in ticket.take())
            counts["tokens"] += tokens if RISE * seconds <= now < seconds else 0
            if ticket.done:
                left.discard(ticket)
                if now < seconds:
                    start()
        if not left:
            ended.set()

    model.front.call(lambda: [start() for _ in range(streams)])
    ended.wait()
    return {"tokens_per_second": round(counts["tokens"] / ((1 - RISE) * seconds), 1)}


# All of it.


class Book:
    """The figures of a run, written to disk after each."""

    def __init__(self, about: dict[str, Any], tokens: int, out: Path | None) -> None:
        self.found: dict[str, Any] = {"about": about, "tokens": tokens, "records": [], "crosstalk": []}
        self.path = None if out is None else out / "serve-load.json"

    def note(self, record: dict[str, Any], part: str = "records") -> None:
        self.found[part].append(record)
        print(json.dumps(record), flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def measure(args: argparse.Namespace, model: LookaheadModel) -> dict[str, Any]:
    sets = [prompts.load(name, args.data_dir, args.limit) for name in args.prompts.split(",")]
    texts = [prompt.turns[0] for one in sets for prompt in one]
    random.Random(0).shuffle(texts)
    asked = bodies(model, texts, args.tokens)
    deal = Deal(asked)
    served = Served(model, max(args.streams)) if WEB else None
    if served is None:
        print(f"one of {', '.join(EXTRA)} is missing here: only the engine is measured", flush=True)
    model.engine.limit(max(args.streams))
    book, begin = Book(about(model), args.tokens, args.out), perf_counter()
    for turn in range(args.turns):
        for streams in args.streams:
            for name, way in WAYS.items():
                cell = {"turn": turn, "streams": streams, "way": name}
                order = {"bodies": with_way(asked, way), "streams": streams, "seconds": args.seconds}
                if served is not None:
                    new, before = with_way(deal.take(enough(streams, args.seconds)), way), model.backend.captures
                    found = summary(served.run({**order, "bodies": new}), args.seconds)
                    found |= {"again": deal.again(len(new), found["replies"] + found["refused"])}
                    found |= {"captures": model.backend.captures - before}
                    book.note({"kind": "closed", **cell, **found})
                for _ in range(args.repeats if streams in args.engine else served is None):
                    found = through_engine(model, asked, streams, way, args.seconds)
                    book.note({"kind": "engine", **cell, **found})
                    if served is not None:
                        book.note({"kind": "full", **cell, **full(model, served, order, streams, max(args.streams))})
        for rate in args.rates if served is not None else ():
            for name, way in WAYS.items():
                order = {"bodies": with_way(asked, way), "at": times(rate, args.seconds, turn)}
                found = summary(served.run(order), args.seconds)
                book.note({"kind": "open", "turn": turn, "rate": rate, "way": name, **found})
    if served is not None:
        served.close()
    print(f"-- measured in {perf_counter() - begin:.0f} s", flush=True)
    if args.crosstalk and WEB:
        small = shrink(model, args.pages)
        served = Served(small, 32)
        book.note(crosstalk(served, small, args.crosstalk), "crosstalk")
        served.close()
        print(f"-- all after {perf_counter() - begin:.0f} s", flush=True)
    return book.found


def enough(streams: int, seconds: float) -> int:
    """More prompts than so many streams ask for. (On an H200, 1, 8, 32 and 64 of them ask 7, 32, 80 and 100 times a
    second.)"""
    return int(seconds * (16 + 2.1 * streams)) + streams


def times(rate: float, seconds: float, seed: int) -> list[float]:
    """Random times of requests, so many a second."""
    rng, found, time = random.Random(seed), list[float](), 0.0
    while time < seconds:
        found.append(time)
        time += rng.expovariate(rate)
    return found


def with_way(asked: Sequence[dict[str, Any]], way: bool) -> list[dict[str, Any]]:
    return [{**body, "lookahead": way} for body in asked]


def numbers(text: str) -> list[float]:
    return [float(part) if "." in part else int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="as for lookahead.load; the embedded model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--inflate", choices=MODEL_SHAPES, help="the same function in this shape, such as 7b")
    parser.add_argument("--prompts", default="builtin", help="sets of prompts; others than builtin need --data-dir")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, help="the most prompts of the set")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--engine", type=numbers, default=[32], help="streams that are measured without HTTP, too")
    parser.add_argument("--repeats", type=int, default=3, help="how often those are measured, in turn")
    parser.add_argument("--rates", type=numbers, default=[], help="requests per second of the open loop")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which a cell sends new requests")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument(
        "--crosstalk", type=int, nargs="?", const=64, default=0, help="requests at once; 64 without one"
    )
    parser.add_argument("--pages", type=int, default=48, help="K/V pages for --crosstalk")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, help="write the page of this JSON, and measure nothing")
    parser.add_argument("--page", type=Path, default=HERE / "results" / "serve.md")
    args = parser.parse_args()
    if args.report is not None:
        print(report(args.report, args.page))
        return
    make = load if args.inflate is None else shaped_load(args.inflate)
    model = make(args.model, dtype=args.dtype, backend=args.backend, log=print)
    print(table(measure(args, model)["records"]))


if __name__ == "__main__":
    main()
