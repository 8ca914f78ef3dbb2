"""What HTTP and server-sent events cost the server per chunk: `python benchmarks/serve_cost.py`.

The server runs as it is, but its engine's steps are played back: after a pause, every stream gets a token or two of a
text, as fast as a 7B model on an H200 gives them. So all processor time but the engine's own is what serving costs.
The clients are in another process. Shown in microseconds of processor time per chunk:

    loop      the event loop's thread
    engine    the engine's thread: handing tokens over (and playing them back)
    process   all threads together
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

from serve_load import Served

from lookahead.engine.request import Event, Request
from lookahead.generate import LookaheadModel, load

TEXT = "The sky is blue because air scatters the light of the sun, and blue light more than red. " * 40


class Player:
    """Stands in for `Engine`: every running request gets 1 or 2 tokens of a text per step, and a step takes `pause`."""

    def __init__(self, model: LookaheadModel, pause: float) -> None:
        self.real, self.pause = model.engine, pause
        self.tokens = list(model.tokenizer(TEXT)["input_ids"])
        self.requests: dict[int, Request] = {}
        self.chunks = self.steps = 0
        self.seconds = 0.0  # of processor time in this thread
        self.thread = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def submit(self, request: Request) -> int:
        self.chunks += 1
        request.id = -self.chunks - 1_000_000 * self.steps
        self.requests[request.id] = request
        return request.id

    def cancel(self, id: int) -> None:
        self.requests.pop(id, None)

    def step(self) -> list[Event]:
        sleep(self.pause)
        self.thread = thread_time()
        self.steps += 1
        events = []
        for number, request in enumerate(list(self.requests.values())):
            stats, room = request.sequence.stats, request.sequence.rules.max_tokens
            first = stats.generated_tokens
            count = min(1 + (self.steps + number) % 2, room - first)
            stats.generated_tokens += count
            stats.steps += 1
            reason = "length" if stats.generated_tokens == room else None
            begin = (7 * number + first) % (len(self.tokens) - 2)
            events.append(Event(request, self.tokens[begin : begin + count], reason, (0,) * (count - 1), 3))
            if reason:
                request.sequence.finish_reason = reason
                del self.requests[request.id]
        self.chunks += len(events)
        return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds of a step")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show where the event loop's time goes")
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    if args.uvloop:
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    model = load(backend="eager")
    player = Player(model, args.pause)
    model.front._core.engine = player  # type: ignore[assignment]
    served = Served(model, args.streams, "chat/completions" if args.chat else "completions")
    loop = served.server._loop
    assert loop is not None

    def on_loop(function: Any) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), loop).result()

    content = {"messages": [{"role": "user", "content": "Why?"}]} if args.chat else {"prompt": "Why?"}
    body = {**content, "max_tokens": args.tokens, "temperature": 0}
    order = {"bodies": [body], "at": None, "streams": args.streams, "seconds": args.seconds}
    profile = cProfile.Profile(thread_time) if args.profile else None
    for _ in range(args.turns):
        before = on_loop(thread_time), player.thread, process_time(), perf_counter()
        if profile is not None:
            on_loop(profile.enable)
        found = served.run(order)
        if profile is not None:
            on_loop(profile.disable)
        after = on_loop(thread_time), player.thread, process_time(), perf_counter()
        chunks = sum(len(one["gaps"]) + 1 for one in found["replies"])
        loop_time, engine, process, seconds = (now - then for now, then in zip(after, before, strict=True))
        print(
            f"{chunks} chunks, {chunks / seconds:.0f}/s, in {len(found['replies'])} replies; us per chunk: "
            f"loop {1e6 * loop_time / chunks:.1f}, engine {1e6 * engine / chunks:.1f}, "
            f"process {1e6 * process / chunks:.1f}",
            flush=True,
        )
    served.close()
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
