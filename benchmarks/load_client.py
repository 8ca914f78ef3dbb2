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
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

NO_TEXT = (b'"text":""', b'"content":""', b'"delta":{}')


class Line:
    """A client's connection. Like those of most clients, it carries one request after the other."""

    def __init__(self, url: str, key: str | None) -> None:
        self._where = urlsplit(url)
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f" HTTP/1.1\r\nHost: {self._where.netloc}\r\nContent-Type: application/json\r\n"
            f"{authorization}Content-Length: "
        )
        self._writer: asyncio.StreamWriter | None = None
        self._ends = False  # the server closes the connection after this reply

    async def post(self, body: dict[str, Any] | bytes, path: str | None = None) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request, to another path of the server if one is given. Returns the status of its reply, and the lines
        of its content."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._where.hostname, self._where.port, limit=1 << 24
            )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._writer.write(f"POST {path or self._where.path}{self._head}{len(data)}\r\n\r\n".encode() + data)
        status = int((await self._line()).split()[1])
        length: int | None = None
        while (header := (await self._line()).lower().split(b":")) != [b"\r\n"]:
            if header[0] == b"content-length":
                length = int(header[1])
            elif header[0] == b"connection":
                self._ends = header[1].strip() == b"close"
        return status, self._lines(length)

    async def _line(self) -> bytes:
        if line := await self._reader.readline():
            return line
        raise ConnectionError("the server closed the connection within a reply")

    async def _lines(self, length: int | None) -> AsyncIterator[bytes]:
        """The lines of a reply of so many bytes, or of one in chunks. Those that begin a chunk are among them."""
        if length is not None:
            yield await self._reader.readexactly(length)
        else:
            while (line := await self._line()) != b"0\r\n":
                yield line
            await self._line()
        if self._ends:
            self.close()

    def close(self) -> None:
        """End the connection. The next request opens another."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._ends = None, False


async def ask(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed reply, with the times of its events. Only its usage is parsed: a client must not be the limit."""
    asked, times, usage = perf_counter(), list[float](), dict[str, Any]()
    status, content = await line.post({**body, "stream": True, "stream_options": {"include_usage": True}})
    async for part in content:
        if not part.startswith(b"data: {"):
            continue
        if b'"usage":{' in part:
            usage = json.loads(part[6:])["usage"]
        elif part.startswith(b'data: {"error"'):
            status = 500
            print(part.decode(), file=sys.stderr)
        elif not any(mark in part for mark in NO_TEXT):
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


async def choices(line: Line, body: dict[str, Any], leave: bool = False) -> list[dict[str, Any]]:
    """The choices of one reply of `/v1/completions`; those of a stream are put together."""
    found: dict[int, dict[str, Any]] = {}
    status, content = await line.post(body)
    async for part in content:
        if not body["stream"]:
            reply = json.loads(part)
            if status != 200:
                raise RuntimeError(f"{status}: {reply}")
            return list(reply["choices"])
        if part.startswith(b"data: {"):
            for choice in json.loads(part[6:])["choices"]:
                add(found.setdefault(choice["index"], {**choice, "text": "", "logprobs": None}), choice)
            if leave:
                line.close()
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
        line = Line(order["url"], order.get("key"))
        try:
            return await choices(line, bodies[number], leave=number >= stay)
        finally:
            line.close()

    if at is not None:
        replies = list(await asyncio.gather(*map(one, range(len(bodies)))))
    else:
        replies = [await one(number) for number in range(len(bodies))]
    return {"replies": replies[:stay]}


async def run(order: dict[str, Any]) -> dict[str, Any]:
    if order.get("kind") == "choices":
        return await run_choices(order)
    bodies, begin, replies = order["bodies"], perf_counter(), list[dict[str, Any]]()

    async def at(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        line = Line(order["url"], order.get("key"))
        replies.append(await ask(line, bodies[number % len(bodies)]))
        line.close()

    async def stream(number: int) -> None:
        line = Line(order["url"], order.get("key"))
        while perf_counter() < begin + order["seconds"]:
            replies.append(await ask(line, bodies[number % len(bodies)]))
            number += order["streams"]
        line.close()

    if order.get("at") is not None:
        await asyncio.gather(*(at(number, seconds) for number, seconds in enumerate(order["at"])))
    else:
        await asyncio.gather(*map(stream, range(order["streams"])))
    return {"begin": begin, "end": perf_counter(), "replies": replies}


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
