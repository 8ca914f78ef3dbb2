"""The clients of `serve_load.py`, in a process of their own so that they take nothing from the server's interpreter.

Reads one JSON object from stdin, and writes one to stdout. It needs nothing but Python.

    in    {"url", "key", "bodies": [body, ...], "at": [seconds, ...] or null, "streams": n, "seconds": s}
    out   {"begin", "end", "replies": [{"asked", "first", "last", "gaps": [s, ...], "tokens", "steps", "status"}, ...]}

With `at`, request i is sent at its time, whatever has become of the others (an open loop). Without, `streams` clients
ask one after the other until the time is over (a closed loop).

With "kind": "choices" a reply is the list of its choices, whole, in the order of the bodies. With `at` null they are
asked one after the other. The last `leave` of them leave after their first event, and get no reply.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

NO_TEXT = (b'"text":""', b'"content":""', b'"delta":{}')


@asynccontextmanager
async def posted(url: str, key: str | None, body: dict[str, Any]) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """A request that was sent: the status of its reply, and where the rest of it comes."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
    data = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n{authorization}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + data)
        yield int((await reader.readline()).split()[1]), reader
    finally:
        writer.close()


async def ask(url: str, key: str | None, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed reply, with the times of its events. Only its usage is parsed: a client must not be the limit."""
    asked, times, usage = perf_counter(), list[float](), dict[str, Any]()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with posted(url, key, body) as (status, reader):
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
            elif line.startswith(b'data: {"error"'):
                status = 500
                print(line.decode(), file=sys.stderr)
            elif not any(mark in line for mark in NO_TEXT):
                times.append(perf_counter())
    return {
        "asked": asked,
        "status": status,
        "first": times[0] - asked if times else None,
        "last": times[-1] if times else asked,
        "gaps": [after - before for before, after in pairwise(times)],
        "tokens": usage.get("completion_tokens", 0),
        "steps": usage.get("lookahead", {}).get("steps", 0),
    }


async def choices(url: str, key: str | None, body: dict[str, Any], leave: bool = False) -> list[dict[str, Any]]:
    """The choices of one reply of `/v1/completions`; those of a stream are put together."""
    found: dict[int, dict[str, Any]] = {}
    async with posted(url, key, body) as (status, reader):
        while not body["stream"] and await reader.readline() != b"\r\n":
            pass
        if not body["stream"]:
            reply = json.loads(await reader.read())
            if status != 200:
                raise RuntimeError(f"{status}: {reply}")
            return list(reply["choices"])
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for part in event["choices"]:
                    add(found.setdefault(part["index"], {**part, "text": "", "logprobs": None}), part)
                if leave:
                    break
    return [found[index] for index in sorted(found)]


def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a chunk's part of a choice to what came before."""
    whole["text"] += part["text"]
    whole["finish_reason"] = part["finish_reason"]
    if part["logprobs"]:
        whole["logprobs"] = whole["logprobs"] or {name: [] for name in part["logprobs"]}
        for name, values in part["logprobs"].items():
            whole["logprobs"][name] += values


async def run_choices(order: dict[str, Any]) -> dict[str, Any]:
    bodies, at = order["bodies"], order.get("at")
    stay = len(bodies) - order.get("leave", 0)

    async def one(number: int) -> list[dict[str, Any]]:
        if at is not None:
            await asyncio.sleep(at[number])
        return await choices(order["url"], order.get("key"), bodies[number], leave=number >= stay)

    if at is not None:
        replies = list(await asyncio.gather(*map(one, range(len(bodies)))))
    else:
        replies = [await one(number) for number in range(len(bodies))]
    return {"replies": replies[:stay]}


async def run(order: dict[str, Any]) -> dict[str, Any]:
    if order.get("kind") == "choices":
        return await run_choices(order)
    bodies, begin, replies = order["bodies"], perf_counter(), list[dict[str, Any]]()

    async def once(number: int) -> None:
        replies.append(await ask(order["url"], order.get("key"), bodies[number % len(bodies)]))

    async def at(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await once(number)

    async def stream(first: int) -> None:
        number = first
        while perf_counter() < begin + order["seconds"]:
            await once(number)
            number += order["streams"]

    if order.get("at") is not None:
        await asyncio.gather(*(at(number, seconds) for number, seconds in enumerate(order["at"])))
    else:
        await asyncio.gather(*map(stream, range(order["streams"])))
    return {"begin": begin, "end": perf_counter(), "replies": replies}


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
