"""`lookahead serve` under load: `python benchmarks/serve_load.py --out FOLDER [options of lookahead serve]`.

Measures one server, with lookahead and without in turn (by the body's `lookahead`), so that a busy machine slows both:

    closed   `--streams` clients that send one request after the other: tokens per second, S, time to the first token,
             time between the events of a stream (p50 and p99)
    open     requests at random times at given `--rates` a second, whatever has become of those before them

docs/serving.md describes the options; those that are not its own are the server's. Every closed cell has prompts of its
own, while there are new ones in the sets of `--prompts`; `again` counts requests whose prompt had been asked before.
Nothing is warmed up: the server says that it is ready. Every answer has the same length.

`--engine` runs the closed cells once more when the server has ended, by the engine alone in this process: no HTTP, no
JSON and no text, and the next request waits in its queue. What the server loses against it is what serving costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from inflate import shaped_load
from load import RISE, Connection, Reply, closed_loop, open_loop, poisson, summary, timed
from server_process import Served, add_server_options, connect, parse

import lookahead
from lookahead.bench.gpu.batch import Load
from lookahead.bench.report.sections import Section, markdown
from lookahead.bench.run import prompts
from lookahead.bench.run.about import machine, versions
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.generate import LookaheadModel

WAYS = {"plain": False, "lookahead": True}
PATH = "/v1/chat/completions"
Record = dict[str, Any]


class Requests:
    """Bodies with prompts that no request had before, until there are none left; then from the beginning again."""

    def __init__(self, texts: Sequence[str], tokens: int) -> None:
        self.texts, self.tokens, self.taken = texts, tokens, 0

    def take(self, way: bool) -> Record:
        text, self.taken = self.texts[self.taken % len(self.texts)], self.taken + 1
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": self.tokens, "ignore_eos": True}
        return {**body, "temperature": 0, "lookahead": way}

    def again(self, since: int) -> int:
        """How many of those taken since then had a prompt of an earlier one."""
        return self.taken - max(since, min(self.taken, len(self.texts)))


def cell(served: Served, asked: Requests, way: bool, seconds: float, load: int | Sequence[float]) -> Record:
    """One run with this number of streams, or with requests at these times."""
    replies, begin, before, captures = list[Reply](), perf_counter(), asked.taken, served.captures()

    async def send(connection: Connection, _: int) -> None:
        replies.append(await timed(connection, PATH, asked.take(way)))

    if isinstance(load, int):
        asyncio.run(closed_loop(served.url, served.key, load, seconds, send))
    else:
        asyncio.run(open_loop(served.url, served.key, load, send))
    after = served.captures()
    more = {"again": asked.again(before), "captures": None if after is None else after - (captures or 0)}
    return {**summary(replies, begin, seconds), **more}


def texts_of(args: argparse.Namespace) -> list[str]:
    """The prompts, in the order in which they are asked."""
    sets = [prompts.load(name, args.data_dir, args.limit) for name in args.prompts.split(",")]
    texts = [prompt.turns[0] for one in sets for prompt in one]
    random.Random(0).shuffle(texts)
    return texts


def measure(served: Served, args: argparse.Namespace) -> Record:
    """All cells; the figures are written after each."""
    asked = Requests(texts_of(args), args.tokens)
    about = {**served.info(), **machine(), **versions(), "options": args.options}
    found: Record = {"about": about, "tokens": args.tokens, "records": []}
    loads: list[tuple[str, str, Any]] = [("closed", "streams", streams) for streams in args.streams]
    loads += [("open", "rate", rate) for rate in args.rates]
    for turn in range(args.turns):
        for kind, name, load in loads:
            for label, way in WAYS.items():
                given = load if kind == "closed" else poisson(load, args.seconds, turn)
                record = {"kind": kind, "turn": turn, name: load, "way": label}
                found["records"].append(record | cell(served, asked, way, args.seconds, given))
                print(json.dumps(found["records"][-1]), flush=True)
                if args.out is not None:
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / "serve-load.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


# The engine alone.


def option(options: Sequence[str], name: str, default: Any) -> Any:
    """The value of one of the server's options."""
    return options[options.index(name) + 1] if name in options else default


def measure_engine(args: argparse.Namespace) -> list[Record]:
    """The closed cells by the engine alone, with the server's model and prompts."""
    names = {name: option(args.options, f"--{name}", "auto") for name in ("dtype", "device", "backend")}
    make: Any = shaped_load(args.inflate) if args.inflate else lookahead.load
    lm: LookaheadModel = make(option(args.options, "--model", None), **names)
    most = int(option(args.options, "--max-concurrency", 64))
    lm.engine.set_max_sequences(most)
    lm.prepare(most)
    encoded = [lm.encode([{"role": "user", "content": text}]) for text in texts_of(args)]
    found, taken = list[Record](), 0
    for turn in range(args.turns):
        for streams in args.streams:
            for label, config in (("plain", LookaheadConfig.autoregressive()), ("lookahead", lm.default_config)):
                rules = StopRules(args.tokens, frozenset(), lm.backend.max_length)
                order = encoded[taken % len(encoded) :] + encoded[: taken % len(encoded)]
                load = Load(lm.engine, order, config, SamplingParams(), rules, lm.memory)
                load.memory = lm.memory  # a server keeps what it has learned, too
                speed = lm.client.call(partial(engine_cell, load, streams, args.seconds))
                taken += len(load.outputs) + 2 * streams
                found.append({"kind": "engine", "turn": turn, "streams": streams, "way": label} | speed)
                print(json.dumps(found[-1]), flush=True)
    return found


def engine_cell(load: Load, streams: int, seconds: float) -> Record:
    """Tokens per second of the last three quarters of a run, as the clients count them."""
    load.engine.set_max_sequences(streams)
    for _ in range(2 * streams):
        load.add()
    begin, counted, steps = perf_counter(), 0, 0
    while (now := perf_counter() - begin) < seconds:
        tokens, _ = load.step()
        counted, steps = counted + (tokens if now >= RISE * seconds else 0), steps + 1
    load.end()
    return {"tokens_per_second": round(counted / ((1 - RISE) * seconds), 1), "steps": steps}


# The page of a run's figures.


def median(records: Sequence[Record], kind: str, load: float, way: str, what: str, part: int | None = None) -> Any:
    """The median of one figure over all runs of a cell; None if it was not measured."""
    name = "rate" if kind == "open" else "streams"
    found = [one for one in records if one["kind"] == kind and one["way"] == way and one.get(name) == load]
    values = [one[what] if part is None else one[what][part] for one in found if what in one]
    return statistics.median(values) if values else None


def page(found: Record) -> Section:
    """One row per load; times in ms, p50 / p99."""
    about, records = found["about"], found["records"]
    head = ["load", "plain tok/s", "lookahead tok/s", "ratio", "S"]
    head += [f"{what} {label}" for what in ("TTFT", "steady TTFT", "gap") for label in WAYS]
    section = Section("Measured", head)
    for kind, name in (("closed", "streams"), ("open", "rate")):
        for load in sorted({one[name] for one in records if one["kind"] == kind}):
            plain, ours = (median(records, kind, load, way, "tokens_per_second") for way in WAYS)
            shown = [plain, ours, ours / plain if plain and ours else None]
            shown.append(median(records, kind, load, "lookahead", "compression"))
            cells = ["" if value is None else f"{value:.{1 + (i > 1)}f}" for i, value in enumerate(shown)]
            for what in ("ttft_ms", "ttft_steady_ms", "gap_ms"):
                pairs = [[median(records, kind, load, way, what, part) for part in (0, 1)] for way in WAYS]
                cells += ["" if None in pair else f"{pair[0]:.1f} / {pair[1]:.1f}" for pair in pairs]
            section.rows.append([f"{load:g} {'streams' if kind == 'closed' else 'a second'}", *cells])
    again, captures = (sum(one.get(what) or 0 for one in records) for what in ("again", "captures"))
    section.notes = [
        f"{about['model']}, {about['dtype']}, on {about['device']}; {about['cores']} CPU cores, Python "
        f"{about['python']}, torch {about['torch']}. Written by `python benchmarks/serve_load.py`.",
        f"Clients stream greedy answers of {found['tokens']} tokens from one server, each asking again when its answer "
        "has ended. With lookahead and without take turns, by the body's `lookahead`. "
        f"{again or 'No'} requests had the prompt of an earlier one. Nothing was warmed up; {captures:g} steps were "
        "captured after the server was ready. Tokens per second are those of a run's last three quarters; all else is "
        "counted from the beginning, when all clients come at once, but for the steady TTFT. TTFT (the time to the "
        "first token) and gap (the time between two events of a stream) in ms, p50 / p99.",
    ]
    return section


def beside_engine(records: Sequence[Record]) -> Section:
    """What serving costs: tokens per second over HTTP beside the engine's own, and their ratio."""
    columns = [f"{label}, {what}" for label in WAYS for what in ("HTTP", "engine", "ratio")]
    section = Section("Over HTTP and by the engine alone", ["streams", *columns])
    for load in sorted({one["streams"] for one in records if one["kind"] == "engine"}):
        cells = [str(load)]
        for way in WAYS:
            http, own = (median(records, kind, load, way, "tokens_per_second") for kind in ("closed", "engine"))
            cells += [f"{http:.0f}", f"{own:.0f}", f"{http / own:.3f}"]
        section.rows.append(cells)
    section.notes = [
        "The engine ran the same cells after the server had ended, in the same run, with prompts of the same sets, "
        "each asked once: no HTTP, no JSON and no text, and the next request waits in its queue."
    ]
    return section


def numbers(text: str) -> list[Any]:
    return [float(part) if "." in part else int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", default="builtin", help="sets of prompts; others than builtin need --data-dir")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, help="the most prompts of each set")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rates", type=numbers, default=[], help="requests per second of the open loop")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which a cell sends new requests")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--engine", action="store_true", help="the closed cells by the engine alone, too")
    parser.add_argument("--out", type=Path)
    add_server_options(parser)
    args = parse(parser)
    with connect(args) as served:
        found = measure(served, args)
    if args.engine:
        found["records"] += measure_engine(args)
        if args.out is not None:
            (args.out / "serve-load.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sections = [page(found), *([beside_engine(found["records"])] if args.engine else [])]
    written = markdown("`lookahead serve` under load", sections)
    print(written)
    if args.out is not None:
        (args.out / "serve.md").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
