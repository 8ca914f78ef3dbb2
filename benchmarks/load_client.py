"""The clients of `serve_load.py`, in a process of their own so that they take nothing from the server's interpreter.

Reads one JSON object from stdin, and writes one to stdout. It needs nothing but Python.

    in    {"url", "key", "bodies": [body, ...], "at": [seconds, ...] or null, "streams": n, "seconds": s}
    out   {"begin", "end", "replies": [{"asked", "first", "last", "gaps": [s, ...], "tokens", "steps", "status"}, ...]}

With `at`, request i is sent at its time, whatever has become of the others (an open loop). Without, `streams` clients
ask one after the other until the time is over (a closed loop).
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit


async def ask(url: str, key: str | None, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed reply, with the times of its events."""
    where = urlsplit(url)
    asked = perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 22)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n{authorization}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    times: list[float] = []
    usage: dict[str, Any] = {}
    try:
        status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                usage = event["usage"]
            elif "error" in event:
                status = 500
                print(event, file=sys.stderr)
            elif any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
                times.append(perf_counter())
    finally:
        writer.close()
    return {
        "asked": asked,
        "status": status,
        "first": times[0] - asked if times else None,
        "last": times[-1] if times else asked,
        "gaps": [after - before for before, after in pairwise(times)],
        "tokens": usage.get("completion_tokens", 0),
        "steps": usage.get("lookahead", {}).get("steps", 0),
    }


async def run(order: dict[str, Any]) -> dict[str, Any]:
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
