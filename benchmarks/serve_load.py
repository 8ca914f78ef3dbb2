"""`lookahead serve` under load: `python benchmarks/serve_load.py --model NAME [--inflate 7b] --out FOLDER`.

Measures, with guesses and without in turn, so that a busy machine slows both:

    closed   1 to 64 clients that ask one after the other: tokens per second, S, time to the first token, time between
             the events of a stream (p50 and p99)
    open     clients that come at random times at given rates, whatever has become of those before them
    engine   the same number of sequences without HTTP: what HTTP and events cost

The clients run in a process of their own (`load_client.py`). Without fastapi and uvicorn only `engine` is measured.
Every answer has the same length, so that both ways make the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.bench.run import prompts
from lookahead.bench.run.models import in_shape
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.front import Ticket
from lookahead.engine.request import Request
from lookahead.generate import LookaheadModel, load
from lookahead.loading.default import batch_cost

HERE = Path(__file__).parent
WEB = all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "prometheus_client", "llguidance"))
WAYS = {"plain": False, "lookahead": True}


def bodies(model: LookaheadModel, texts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """Requests for `/v1/completions`, as token ids of chats."""
    ids = [model.encode(prompt) for prompt in texts]
    return [{"prompt": one, "max_tokens": tokens, "ignore_eos": True, "temperature": 0} for one in ids]


# Over HTTP.


class Served:
    """A server in this process, and clients in another."""

    def __init__(self, model: LookaheadModel, concurrency: int, path: str = "completions") -> None:
        from lookahead.serve.life import SWITCH_SECONDS, make_server
        from lookahead.serve.settings import ServeSettings

        sys.setswitchinterval(SWITCH_SECONDS)
        settings = ServeSettings(port=0, max_concurrency=concurrency, max_queue=4096)
        self.path = path
        self.server = make_server(model, settings, lambda line: None)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
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


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run. Replies that were refused are counted, and take no part in the rest."""
    good = [one for one in found["replies"] if one["status"] == 200 and one["first"] is not None]
    if not good:
        return {"replies": 0, "refused": len(found["replies"])}
    seconds = max(one["last"] for one in good) - min(one["asked"] for one in good)
    tokens, steps = sum(one["tokens"] for one in good), sum(one["steps"] for one in good)
    firsts, gaps = [one["first"] for one in good], [gap for one in good for gap in one["gaps"]]
    return {
        "replies": len(good),
        "refused": len(found["replies"]) - len(good),
        "tokens_per_second": round(tokens / seconds, 1),
        "compression": round(tokens / max(1, steps), 3),
        "ttft_ms": [round(1000 * part, 2) for part in quantiles(firsts)],
        "gap_ms": [round(1000 * part, 2) for part in quantiles(gaps)],
    }


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]


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
        for ticket in tickets:
            counts["tokens"] += sum(len(event.tokens) for event in ticket.take())
            if ticket.done:
                left.discard(ticket)
                if perf_counter() < begin + seconds:
                    start()
        if not left:
            ended.set()

    model.front.call(lambda: [start() for _ in range(streams)])
    ended.wait()
    return {"tokens_per_second": round(counts["tokens"] / (perf_counter() - begin), 1)}


# All of it.


def measure(args: argparse.Namespace, model: LookaheadModel) -> list[dict[str, Any]]:
    asked, records = (
        bodies(model, [prompt.turns[0] for prompt in prompts.load("builtin")], args.tokens),
        list[dict[str, Any]](),
    )
    served = Served(model, max(args.streams)) if WEB else None
    if served is None:
        print("no fastapi, uvicorn, prometheus-client or llguidance here: only the engine is measured", flush=True)
    model.engine.limit(max(args.streams))

    def note(record: dict[str, Any]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "serve-load.json").write_text(json.dumps(records, indent=1) + "\n")

    for way in WAYS.values():  # everything is captured and compiled before it is timed
        through_engine(model, asked, max(args.streams), way, args.warm)
    for turn in range(args.turns):
        for streams in args.streams:
            for name, way in WAYS.items():
                about = {"turn": turn, "streams": streams, "way": name}
                found = through_engine(model, asked, streams, way, args.seconds)
                note({"kind": "engine", **about, **found})
                if served is not None:
                    order = {"bodies": with_way(asked, way), "at": None, "streams": streams, "seconds": args.seconds}
                    note({"kind": "closed", **about, **summary(served.run(order))})
        for rate in args.rates if served is not None else ():
            for name, way in WAYS.items():
                rng, at, time = random.Random(turn), list[float](), 0.0
                while time < args.seconds:
                    at.append(time)
                    time += rng.expovariate(rate)
                order = {"bodies": with_way(asked, way), "at": at, "streams": 0, "seconds": args.seconds}
                note({"kind": "open", "turn": turn, "rate": rate, "way": name, **summary(served.run(order))})
    if served is not None:
        served.close()
    return records


def with_way(asked: Sequence[dict[str, Any]], way: bool) -> list[dict[str, Any]]:
    return [{**body, "lookahead": way} for body in asked]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Medians over the turns, as a table. The times are those with guesses."""
    lines = [
        "| load | plain tok/s | lookahead tok/s | ratio | S | TTFT p50, p99 ms | gap p50, p99 ms | HTTP costs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        load_of = record["rate"] if record["kind"] == "open" else record["streams"]
        groups.setdefault((record["kind"], load_of), {}).setdefault(record["way"], []).append(record)
    for (kind, size), ways in sorted(groups.items()):
        if kind == "engine" and any(other == "closed" for other, _ in groups):
            continue
        plain, ours = (statistics.median(one["tokens_per_second"] for one in ways[way]) for way in WAYS)
        cells = [f"{size:g} a second" if kind == "open" else f"{size:g} streams", f"{plain:g}", f"{ours:g}"]
        cells.append(f"{ours / plain:.2f}")
        if kind == "engine":
            cells += ["", "", "", ""]
        else:
            cells.append(f"{statistics.median(one['compression'] for one in ways['lookahead']):.2f}")
            for what in ("ttft_ms", "gap_ms"):
                pairs = zip(*(one[what] for one in ways["lookahead"]), strict=True)
                cells.append(", ".join(f"{statistics.median(values):.1f}" for values in pairs))
            cells.append("")
        if kind == "closed":
            bare = statistics.median(one["tokens_per_second"] for one in groups["engine", size]["lookahead"])
            cells[-1] = f"{100 * (1 - ours / bare):.1f}%"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def numbers(text: str) -> list[float]:
    return [float(part) if "." in part else int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for lookahead.load; the embedded model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--inflate", help="the same function in this shape, such as 7b")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rates", type=numbers, default=[], help="requests per second of the open loop")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which new requests are sent")
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load(args.model, dtype=args.dtype, backend=args.backend, log=print)
    if args.inflate:
        model = in_shape(model, args.inflate, args.backend, print)
        model.engine.cost = batch_cost(model.backend, print)
    records = measure(args, model)
    text = table(records)
    print(text)
    if args.out is not None:
        (args.out / "serve-load.md").write_text(text)


if __name__ == "__main__":
    main()
