"""The load generator of `peers.py` and `soak.py`: clients that send requests to a server, timed.

A *closed loop* has a number of clients, each of which sends its next request when the last one has its reply. In an
*open loop* requests are sent at given times, whether or not earlier ones have been answered. Only Python is needed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

NO_TEXT = (b'"text":""', b'"content":""', b'"content":null', b'"delta":{}', b'"delta":{"role":"assistant"}')
RISE = 0.25
"""The part of a run's time that is not counted, because it is not steady yet."""


class Connection:
    """A client's connection, which carries one request after the other."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._where = urlsplit(url)
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f" HTTP/1.1\r\nHost: {self._where.netloc}\r\nContent-Type: application/json\r\n"
            f"{authorization}Content-Length: "
        )
        self._writer: asyncio.StreamWriter | None = None
        self._ends = False  # the server closes the connection after this reply

    async def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request; the status of its reply, and the lines of its content."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._where.hostname, self._where.port, limit=1 << 24
            )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._writer.write(f"POST {path}{self._head}{len(data)}\r\n\r\n".encode() + data)
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
        """The lines of a reply of this length, or of one in chunks. Those that begin a chunk are among them."""
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


async def closed_loop(
    url: str, key: str | None, clients: int, seconds: float, send: Callable[[Connection, int], Awaitable[None]]
) -> None:
    """Each client calls `send` with its connection and number, until the time is over."""
    end = perf_counter() + seconds

    async def client(number: int) -> None:
        connection = Connection(url, key)
        while perf_counter() < end:
            await send(connection, number)
        connection.close()

    await asyncio.gather(*map(client, range(clients)))


async def open_loop(
    url: str, key: str | None, at: Sequence[float], send: Callable[[Connection, int], Awaitable[None]]
) -> None:
    """Request i is sent at its time, on a connection of its own."""

    async def one(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        connection = Connection(url, key)
        await send(connection, number)
        connection.close()

    await asyncio.gather(*(one(number, seconds) for number, seconds in enumerate(at)))


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Random times of requests at this rate per second."""
    rng, found, time = random.Random(seed), list[float](), 0.0
    while (time := time + rng.expovariate(rate)) < seconds:
        found.append(time)
    return found


@dataclass
class Reply:
    """A streamed reply: when it was requested, seconds to its first event and between its events, and its usage."""

    asked: float
    status: int
    first: float | None
    gaps: list[float]
    tokens: int
    steps: int

    @property
    def seconds(self) -> float:
        """From the request to the last event."""
        return (self.first or 0.0) + sum(self.gaps)


async def timed(connection: Connection, path: str, body: dict[str, Any]) -> Reply:
    """Send a request as a stream. Only its usage is parsed: a client must not be the limit."""
    asked, times, usage = perf_counter(), list[float](), dict[str, Any]()
    status, content = await connection.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
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
    gaps = [after - before for before, after in pairwise(times)]
    steps = (usage.get("lookahead") or {}).get("steps", 0)
    tokens = usage.get("completion_tokens") or len(times)
    return Reply(asked, status, times[0] - asked if times else None, gaps, tokens, steps)


async def text_of(connection: Connection, path: str, body: dict[str, Any]) -> str:
    """The text of a streamed reply."""
    status, content = await connection.post(path, {**body, "stream": True})
    found, lines = "", list[bytes]()
    async for part in content:
        lines.append(part)
        if part.startswith(b"data: {"):
            for choice in json.loads(part[6:]).get("choices") or ():
                found += (choice.get("delta") or {}).get("content") or ""
    if status != 200:
        raise ValueError(f"{status}: {b' '.join(lines).decode(errors='replace')[:300]}")
    return found


def summary(replies: Sequence[Reply], begin: float, seconds: float) -> dict[str, Any]:
    """The figures of a run that sent requests from `begin` on. Refused ones are counted, and take no part in the rest.

    `ttft_ms` (time to the first token) and `gap_ms` (time between two events of a stream) are p50 and p99;
    `ttft_steady_ms` is of the requests that came when the run was steady, not with all others at its beginning.
    """
    good = [one for one in replies if one.status == 200 and one.first is not None]
    if not good:
        return {"replies": 0, "refused": len(replies)}
    steps = sum(one.steps for one in good)
    return {
        "replies": len(good),
        "refused": len(replies) - len(good),
        "tokens_per_second": round(steady(good, begin, seconds), 1),
        "compression": round(sum(one.tokens for one in good) / steps, 3) if steps else None,
        "mean_seconds": round(statistics.fmean(one.seconds for one in good), 4),
        "ttft_ms": quantiles([one.first or 0.0 for one in good]),
        "ttft_steady_ms": quantiles([one.first or 0.0 for one in good if one.asked >= begin + RISE * seconds]),
        "gap_ms": quantiles([gap for one in good for gap in one.gaps]),
    }


def steady(replies: Sequence[Reply], begin: float, seconds: float) -> float:
    """Tokens per second in the steady part of a run. The tokens of a reply are spread evenly over its events."""
    first, last, tokens = begin + RISE * seconds, begin + seconds, 0.0
    for one in replies:
        times = list(accumulate(one.gaps, initial=one.asked + (one.first or 0.0)))
        tokens += one.tokens * sum(first <= time < last for time in times) / len(times)
    return tokens / (last - first)


def quantiles(seconds: Sequence[float]) -> list[float]:
    """p50 and p99, in milliseconds."""
    if len(seconds) < 2:
        return [round(1e3 * one, 2) for one in (*seconds, *seconds)] or [0.0, 0.0]
    found = statistics.median(seconds), statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return [round(1e3 * one, 2) for one in found]
