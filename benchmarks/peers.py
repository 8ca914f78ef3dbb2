"""Servers side by side: `python benchmarks/peers.py --model FOLDER --out DIR [options of lookahead serve]`.

Starts one server after the other, drives all with the same client and the same prompts, and writes `peers.json`, a page
and a plot of each metric. Which servers, `--peers` says: `lookahead`, with draft tokens and without in turn, and of
vLLM (plain, n-gram, suffix decoding), `transformers serve` and `llama-server` those that are installed here. With
`--peer NAME=COMMAND` any other one that has OpenAI's chat completions; the command holds {port}, and maybe {model}.

    closed   `--streams` clients that send one request after the other: tokens per second, time to the first token, time
             between the events of a stream (p50 and p99)
    open     requests at random times at given `--rates` a second, whatever has become of those before them
    equal    how many texts are the same, asked under the largest load and then again alone

Every request has a prompt of its own, while there are new ones in the sets of `--prompts`; `again` counts requests
whose prompt had been asked before. Nothing is warmed up. Every answer has the same length. With `--turns 3` each server
is started three times, in turn with the others; with `--repeats 3` each that has started runs all cells three times.

`--engine` runs the closed cells once more when all servers have ended, by our engine alone in this process: no HTTP, no
JSON and no text, and the next request waits in its queue. What the server loses against it is what serving costs.
`--url` measures a lookahead server that runs. Options that are not listed are those of `lookahead serve`, such as
`--fronts 2`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from engine_alone import measure_engine
from load import Connection, Reply, closed_loop, open_loop, poisson, summary, text_of, timed
from peer_commands import OURS, Peer, known_peers, missing, own_peer
from peers_page import write_page
from server_process import Served, add_server_options, connect, free_port, memory, parse, started

from lookahead.bench.run import prompts
from lookahead.bench.run.about import machine, versions
from lookahead.loading.embedded import pull

PATH = "/v1/chat/completions"
Record = dict[str, Any]


class Requests:
    """Bodies with prompts that no request had before, until there are none left; then from the beginning again."""

    def __init__(self, texts: Sequence[str], tokens: int) -> None:
        self.texts, self.tokens, self.taken = texts, tokens, 0

    def take(self, fields: Record) -> Record:
        text, self.taken = self.texts[self.taken % len(self.texts)], self.taken + 1
        return {"messages": [{"role": "user", "content": text}], "max_tokens": self.tokens, "temperature": 0, **fields}

    def again(self, since: int) -> int:
        """How many of those taken since then had a prompt of an earlier one."""
        return self.taken - max(since, min(self.taken, len(self.texts)))


def cell(served: Served, asked: Requests, fields: Record, seconds: float, load: int | Sequence[float]) -> Record:
    """One run with this number of streams, or with requests at these times."""
    replies, begin, before, captures = list[Reply](), perf_counter(), asked.taken, served.captures()

    async def send(connection: Connection, _: int) -> None:
        replies.append(await timed(connection, PATH, asked.take(fields)))

    if isinstance(load, int):
        asyncio.run(closed_loop(served.url, served.key, load, seconds, send))
    else:
        asyncio.run(open_loop(served.url, served.key, load, send))
    after = served.captures()
    more = {"again": asked.again(before), "captures": None if after is None else after - (captures or 0)}
    return {**summary(replies, begin, seconds), **more}


def equal_texts(served: Served, asked: Requests, fields: Record, count: int, streams: int) -> tuple[int, int]:
    """How many of `count` texts are the same under a load of `streams` and alone, and how many were asked for."""
    bodies = [asked.take(fields) for _ in range(count)]
    waiting = list(enumerate(bodies))
    texts = dict[int, str]()

    async def client() -> None:
        connection = Connection(served.url, served.key)
        while len(texts) < count:
            if waiting:
                number, body = waiting.pop()
                texts[number] = await text_of(connection, PATH, body)
            else:  # the load stays until the last text is there
                await text_of(connection, PATH, asked.take(fields))
        connection.close()

    async def under_load() -> None:
        await asyncio.gather(*(client() for _ in range(streams)))

    async def alone() -> list[str]:
        connection = Connection(served.url, served.key)
        found = [await text_of(connection, PATH, body) for body in bodies]
        connection.close()
        return found

    asyncio.run(under_load())
    again = asyncio.run(alone())
    return sum(texts[number] == text for number, text in enumerate(again)), count


def texts_of(args: argparse.Namespace) -> list[str]:
    """The prompts, in the order in which they are asked."""
    sets = [prompts.load(name, args.data_dir, args.limit) for name in args.prompts.split(",")]
    texts = [prompt.turns[0] for one in sets for prompt in one]
    random.Random(0).shuffle(texts)
    return texts


def measure(served: Served, peer: Peer, args: argparse.Namespace, turn: int, found: Record) -> None:
    """All cells of one server that has been started; `found` gets a record of each, and one of the server itself."""
    asked = Requests(texts_of(args), args.tokens)
    ways = {way: {**peer.fields(args.model, args.tokens), **more} for way, more in peer.ways.items()}
    begin = perf_counter()
    asyncio.run(_first(served, {**asked.take(next(iter(ways.values()))), "max_tokens": 1}))
    ready = monotonic() - served.begin if args.url is None else None
    start = {"kind": "server", "turn": turn, "peer": peer.name, "command": peer.shown(args), "version": peer.version()}
    start |= {"start_seconds": ready and round(ready, 1), "first_answer_seconds": round(perf_counter() - begin, 2)}
    loads: list[tuple[str, str, Any]] = [("closed", "streams", streams) for streams in args.streams]
    loads += [("open", "rate", rate) for rate in args.rates]
    for repeat in range(args.repeats):
        for kind, name, load in loads:
            for way, fields in ways.items():
                given = load if kind == "closed" else poisson(load, args.seconds, turn * args.repeats + repeat)
                record = {"kind": kind, "turn": turn, "run": repeat, name: load, "way": way}
                _add(found, record | cell(served, asked, fields, args.seconds, given), args)
    start["memory"] = memory(served.pid)
    start["equal"] = {
        way: equal_texts(served, asked, fields, args.equal, max(args.streams)) if args.equal else None
        for way, fields in ways.items()
    }
    _add(found, start, args)


async def _first(served: Served, body: Record) -> None:
    """The first answer: whoever loads its model only now has started now."""
    connection = Connection(served.url, served.key)
    await text_of(connection, PATH, body)
    connection.close()


def _add(found: Record, record: Record, args: argparse.Namespace) -> None:
    """Print a record, and write all so far."""
    print(json.dumps(record), flush=True)
    found["records"].append(record)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> Record:
    """Start and measure all servers, turn by turn."""
    peers = chosen(args)
    about = {"date": date.today().isoformat(), "model": Path(str(args.model)).name, "dtype": args.dtype}
    found: Record = {"about": {**about, **machine(), **versions()}, "tokens": args.tokens, "records": []}
    for file in args.also:
        found["records"] += _records(file)
    found["left_out"] = {peer.name: why for peer in peers if args.url is None and (why := missing(peer))}
    for turn in range(args.turns):
        for peer in peers:
            if peer.name in found["left_out"]:
                print(f"-- {peer.name}: {found['left_out'][peer.name]}", flush=True)
                continue
            print(f"-- {peer.name}", flush=True)
            with _server(peer, args) as served:
                if peer.name == OURS:
                    found["about"] |= served.info()
                measure(served, peer, args, turn, found)
    if args.engine:
        for record in measure_engine(args, texts_of(args)):
            _add(found, record, args)
    return found


def _records(file: Path) -> list[Record]:
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["records"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--also {file}: no peers.json of an earlier run ({error})") from None


def _server(peer: Peer, args: argparse.Namespace) -> AbstractContextManager[Served]:
    if peer.name == OURS:
        return connect(args)
    port = free_port()
    return started(peer.words(args.model, args.dtype, port), args.patience, url=f"http://127.0.0.1:{port}")


def chosen(args: argparse.Namespace) -> list[Peer]:
    """The servers of the options; one that is named and not here is an error, one that is not named is left out."""
    peers = {peer.name: peer for peer in (*known_peers(), *map(own_peer, args.peer))}
    if args.url is not None:
        return [peers[OURS]]
    if args.peers is None:
        return list(peers.values())
    for name in (names := args.peers.split(",")):
        if name not in peers:
            raise SystemExit(f"--peers does not know {name!r}: choose from {', '.join(peers)}")
        if why := missing(peers[name]):
            raise SystemExit(f"--peers {name}: {why}")
    return [peers[name] for name in names]


def numbers(text: str) -> list[Any]:
    return [float(part) if "." in part else int(part) for part in text.split(",") if part]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", help="servers, such as lookahead,vllm; without it all that are here")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another one; repeatable")
    parser.add_argument("--model", help="a folder that all servers load; the embedded model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", default="builtin", help="sets of prompts; others than builtin need --data-dir")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, help="the most prompts of each set")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rates", type=numbers, default=[], help="requests per second of the open loop")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which a cell sends new requests")
    parser.add_argument("--turns", type=int, default=1, help="how often each server is started")
    parser.add_argument("--repeats", type=int, default=1, help="how often a server that has started runs its cells")
    parser.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FILE",
        help="the peers.json of an earlier run on the same machine, with other servers, for the page; repeatable",
    )  # fmt: skip
    parser.add_argument("--equal", type=int, default=24, help="texts that are compared; 0: none")
    parser.add_argument("--engine", action="store_true", help="the closed cells by our engine alone, too")
    parser.add_argument("--out", type=Path)
    add_server_options(parser)
    args = parse(parser, words)
    if args.model is None:
        args.model = str(pull())
    if args.url is None:
        place = ["--dtype", args.dtype]
        args.options = [*(["--model", args.model] if args.inflate is None else []), *place, *args.options]
    return args


def main() -> None:
    args = arguments()
    print(write_page(run(args), args.out))


if __name__ == "__main__":
    main()
