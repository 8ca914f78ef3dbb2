"""A server under mixed load for minutes: `python benchmarks/soak.py --model NAME --seconds 160 --out FILE`.

Clients in this process ask for everything that the server does (see `mixed_requests.py`), in streams and not, one after
the other. One in five leaves mid-stream, and some requests are wrong and must be refused. The memory of the server and
of the GPU may not grow. Afterwards nothing may run, and a sample of the requests, each asked again alone, must
get the same text. Whatever is not as it must be is named, and makes the exit code 1.

It starts `lookahead serve` on loopback, with all options that are not its own (`--backend graph --max-concurrency 32`),
or takes the `--url` of a server that runs. Needs nothing but Python, besides what the server needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from load import Connection, closed_loop
from mixed_requests import KINDS, Asked, Outcome, ask, comparable, make
from server_process import Served, add_server_options, connect, memory, parse

WHATS = ("answered", "left", "refused", "busy", "failed")
SHORT = 60.0
"""Seconds below which the growth of the memory is shown, but not judged: caches still fill."""
GROWTH, SLACK = 1.1, 64 << 20
"""How much more memory there may be at the end than after a quarter of the time, as a factor and in bytes."""
SHOWN = 20
"""Problems of the report; the JSON has all."""
REST = 15.0
"""Seconds in which everything must have ended after the last client has left."""


@dataclass
class Found:
    """All that was seen."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in (*KINDS, "wrong")})
    problems: list[str] = field(default_factory=list)
    sample: list[tuple[Asked, list[Any]]] = field(default_factory=list)
    answered: int = 0
    quarter: dict[str, int | None] = field(default_factory=dict)  # the memory after a quarter of the time

    def note(self, asked: Asked, outcome: Outcome, rng: random.Random, size: int) -> None:
        """Count an outcome. Of the answered ones a sample is kept, in which each is as likely as any other."""
        self.counts[asked.kind][outcome.what] += 1
        if outcome.what == "failed":
            self.problems.append(f"{asked.kind}: {outcome.why}")
        if outcome.what == "answered":
            self.answered += 1
            if len(self.sample) < size:
                self.sample.append((asked, outcome.reply))
            elif (index := rng.randrange(self.answered)) < size:
                self.sample[index] = asked, outcome.reply


async def one(connection: Connection, asked: Asked, timeout: float) -> Outcome:
    try:
        return await asyncio.wait_for(ask(connection, asked), timeout)
    except asyncio.TimeoutError:  # before OSError, of which it is a kind from Python 3.11 on
        connection.close()
        return Outcome("failed", f"no end within {timeout:g} s")
    except (OSError, EOFError, ValueError, LookupError) as error:  # a reply that is not as it must be
        connection.close()
        return Outcome("failed", f"{type(error).__name__}: {error}"[:300])


async def soak(served: Served, args: argparse.Namespace) -> Found:
    """All clients, until the time is over."""
    found, chance = Found(), random.Random(args.seed)
    rngs = [random.Random(f"{args.seed}/{number}") for number in range(args.clients)]

    async def send(connection: Connection, number: int) -> None:
        asked = make(rngs[number], args.tokens)
        outcome = await one(connection, asked, args.timeout)
        found.note(asked, outcome, chance, args.again)
        if outcome.what in ("busy", "failed"):
            await asyncio.sleep(0.2)

    async def look() -> None:
        await asyncio.sleep(args.seconds / 4)
        found.quarter = await asyncio.to_thread(memory, served.pid)

    await asyncio.gather(look(), closed_loop(served.url, served.key, args.clients, args.seconds, send))
    return found


async def again(served: Served, found: Found, timeout: float) -> int:
    """Ask the sample's requests again, one by one. Returns how many replies are equal."""
    equal, connection = 0, Connection(served.url, served.key)
    for asked, reply in found.sample:
        outcome = await one(connection, replace(asked, leave=0), timeout)
        if outcome.what != "answered":
            found.problems.append(f"asked again alone, {asked.kind}: {outcome.what} {outcome.why}")
        elif comparable(outcome.reply) == comparable(reply):
            equal += 1
        else:
            found.problems.append(f"another reply alone: {asked.kind} {json.dumps(asked.body)[:200]}")
    connection.close()
    return equal


def at_rest(served: Served, found: Found) -> dict[str, float | None]:
    """What still runs, as the server reports. It gets some seconds to notice who has left."""
    names, end = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), time.monotonic() + REST
    while any(left := {name: served.metric(name) for name in names}.values()) and time.monotonic() < end:
        time.sleep(0.2)
    rest = dict(zip(names, left, strict=True))
    found.problems += [f"{name} is {value:g} at the end" for name, value in rest.items() if value]
    if (status := served.get("/ready")[0]) != 200:
        found.problems.append(f"/ready is {status or 'not answered'} at the end")
    return rest


def run(served: Served, args: argparse.Namespace) -> dict[str, Any]:
    """The soak of a server that is ready. `problems` of what it returns is empty if all is well."""
    captures, begin = served.captures(), time.monotonic()
    found = asyncio.run(soak(served, args))
    sizes, seconds, rest = memory(served.pid), time.monotonic() - begin, at_rest(served, found)
    equal = asyncio.run(again(served, found, args.timeout))
    after = served.captures()
    for name, end in sizes.items():
        quarter = found.quarter[name]
        if quarter and end and args.seconds >= SHORT and end > GROWTH * quarter + SLACK:
            found.problems.append(f"the {name}'s memory grew from {quarter >> 20} to {end >> 20} MiB")
    if not found.answered:
        found.problems.append("nothing was answered")
    return {
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "seed": args.seed,
        "counts": {kind: dict(counts) for kind, counts in found.counts.items()},
        "totals": {what: sum(counts[what] for counts in found.counts.values()) for what in WHATS},
        "again": {"asked": len(found.sample), "equal": equal},
        "memory": {name: end and {"quarter": found.quarter[name], "end": end} for name, end in sizes.items()},
        "at_rest": rest,
        "captures_after_ready": None if captures is None or after is None else after - captures,
        "problems": found.problems,
    }


def check_end(served: Served, problems: list[str]) -> None:
    """Note how a server that was started here has ended, and the errors in its log."""
    if served.code != 0:
        problems.append(f"the server ended with exit code {served.code}")
    problems += [f"in the log: {line}" for line in served.lines if " ERROR" in line or line.startswith("Traceback")]


def report(found: dict[str, Any]) -> str:
    """A table by kind, and what else was seen."""
    lines = ["| kind | " + " | ".join(WHATS) + " |", "|---" * (len(WHATS) + 1) + "|"]
    for kind, counts in [*found["counts"].items(), ("all", found["totals"])]:
        lines.append(f"| {kind} | " + " | ".join(str(counts.get(what, 0)) for what in WHATS) + " |")
    lines += ["", f"{found['clients']} clients, {found['seconds']} s, seed {found['seed']}"]
    for name, sizes in found["memory"].items():
        if sizes:
            lines.append(
                f"memory of the {name}: {sizes['quarter'] / 1e9:.2f} GB at 25%, {sizes['end'] / 1e9:.2f} at the end"
            )
    rest = ", ".join(f"{name} {value:g}" for name, value in found["at_rest"].items() if value is not None)
    lines.append(f"afterwards: {rest or 'the server shows no metrics'}")
    if found["captures_after_ready"] is not None:
        lines.append(f"captures after ready: {found['captures_after_ready']:g}")
    lines.append(f"asked again alone: {found['again']['equal']} of {found['again']['asked']} replies are equal")
    problems = found["problems"]
    lines.append(f"{len(problems)} problems" if problems else "no problems")
    lines += [f"  {line}" for line in problems[:SHOWN]] + (["  ..."] if len(problems) > SHOWN else [])
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=160.0, help="for which clients send new requests")
    parser.add_argument("--tokens", type=int, default=128, help="the most tokens of an answer")
    parser.add_argument("--again", type=int, default=40, help="replies that are asked for again, alone")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other requests")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds in which a request must have ended")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    add_server_options(parser)
    args = parse(parser)
    with connect(args) as served:
        found = run(served, args)
    if args.url is None:
        check_end(served, found["problems"])
    print(report(found))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
