"""How many replicas an arrival rate needs: a queueing simulation. `python benchmarks/queueing.py --rates 1,10,100`.

A replica runs up to `slots` sequences at once. A step of n sequences takes `base + each * n` seconds and gives every
one of them S tokens, so each gets slower as more join. Requests come at random times (Poisson). Of two replicas taken
at random the one with fewer sequences gets the next request, as Ray's router does; when all are full, requests wait in
the order in which they came, and beyond `queue` they are refused.

With `--measured FOLDER/serve-load.json` the times of steps are those of the replica that `serve_load.py` has measured
without lookahead, by its number of streams; they replace `base` and `each`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from load import poisson


@dataclass(frozen=True)
class Load:
    """What a replica is, and what is asked of it. Times are seconds. `points`, pairs of sequences and seconds of a step
    in order, replace `base` and `each` where they were measured."""

    base: float
    each: float
    compression: float = 1.0
    tokens: float = 128
    exactly: bool = True  # every answer has this number of tokens; else it is the mean of an exponential law
    slots: int = 64
    queue: int = 256
    points: tuple[tuple[int, float], ...] = ()

    def step(self, sequences: int) -> float:
        """Seconds of a step. Between two points, and behind the last one, it is a line."""
        if len(self.points) < 2:
            return self.base + self.each * sequences
        pairs = list(pairwise(self.points))
        (few, short), (many, long) = next((pair for pair in pairs if sequences <= pair[1][0]), pairs[-1])
        return short + (long - short) * (sequences - few) / (many - few)

    def speed(self, sequences: int) -> float:
        """Tokens per second of each of this many sequences."""
        return self.compression / self.step(sequences)

    @property
    def capacity(self) -> float:
        """Requests per second of a replica that is full."""
        return self.slots * self.speed(self.slots) / self.tokens


@dataclass
class Replica:
    """Sequences that share a replica. `work` is how many tokens each sequence has got that was there from the start,
    and `end` the time at which the next of them ends."""

    load: Load
    now: float = 0.0
    work: float = 0.0
    end: float = math.inf
    running: list[tuple[float, float]] = field(default_factory=list)  # (work at its end, when it came)

    def change(self, time: float, new: tuple[float, float] | None = None) -> float:
        """At this time a sequence of (tokens, arrival) begins, or else the first one ends; returns its arrival."""
        if self.running:
            self.work += (time - self.now) * self.load.speed(len(self.running))
        self.now = time
        if new is not None:
            heapq.heappush(self.running, (self.work + new[0], new[1]))
        came = heapq.heappop(self.running)[1] if new is None else new[1]
        self.end = math.inf
        if self.running:
            self.end = time + max(0.0, self.running[0][0] - self.work) / self.load.speed(len(self.running))
        return came


def simulate(load: Load, replicas: int, arrivals: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The times of these requests on this many replicas."""
    rng, group, waiting = random.Random(seed), [Replica(load) for _ in range(replicas)], deque[float]()
    latencies, waits, refused, last = list[float](), list[float](), 0, 0.0

    def start(replica: Replica, came: float, time: float) -> None:
        replica.change(time, (load.tokens if load.exactly else rng.expovariate(1 / load.tokens), came))
        waits.append(time - came)

    for time in (*sorted(arrivals), math.inf):
        while (first := min(group, key=lambda one: one.end)).end <= time and first.running:
            last = first.end
            latencies.append(last - first.change(last))
            if waiting:
                start(first, waiting.popleft(), last)
        free = [one for one in group if len(one.running) < load.slots]
        if time == math.inf:
            break
        if free:
            start(min(rng.sample(free, min(2, len(free))), key=lambda one: len(one.running)), time, time)
        elif len(waiting) < load.queue:
            waiting.append(time)
        else:
            refused += 1
    ordered = sorted(latencies)
    return {
        "replies": len(latencies),
        "refused": refused,
        "tokens_per_second": round(len(latencies) * load.tokens / last, 1) if last else 0.0,
        "mean": round(statistics.fmean(latencies), 4) if latencies else 0.0,
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4) if ordered else 0.0,
        "mean_wait": round(statistics.fmean(waits), 4) if waits else 0.0,
    }


def enough(load: Load, rate: float, p95: float, seconds: float = 120.0) -> int:
    """The least replicas with which 95% of the requests are answered within `p95` seconds, and none is refused."""
    replicas = max(1, int(rate / load.capacity))
    while (found := simulate(load, replicas, poisson(rate, seconds)))["refused"] or found["p95"] > p95:
        replicas += max(1, replicas // 20)
    return replicas


def measured(path: Path) -> tuple[tuple[int, float], ...]:
    """Seconds of a step by the number of sequences, from the closed runs of `serve_load.py` without lookahead."""
    found = json.loads(path.read_text(encoding="utf-8"))
    plain = [one for one in found["records"] if (one["kind"], one["way"]) == ("closed", "plain")]
    return tuple(sorted((one["streams"], one["mean_seconds"] / found["tokens"]) for one in plain))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="1,10,100,1000", help="requests per second")
    parser.add_argument("--base", type=float, default=0.0042, help="seconds of a step, apart from its sequences")
    parser.add_argument("--each", type=float, default=0.00005, help="seconds that each sequence adds to a step")
    parser.add_argument("--measured", type=Path, help="a serve-load.json; replaces --base and --each")
    parser.add_argument("--compression", type=float, default=1.0, help="tokens per step, S")
    parser.add_argument("--tokens", type=float, default=256.0, help="of an answer, in the mean")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--p95", type=float, default=6.0, help="seconds within which 95%% are to be answered")
    args = parser.parse_args()
    points = () if args.measured is None else measured(args.measured)
    load = Load(args.base, args.each, args.compression, args.tokens, exactly=False, slots=args.slots, points=points)
    print(f"a full replica answers {load.capacity:.2f} requests/s, {load.capacity * load.tokens:.0f} tokens/s")
    if load.tokens * 3 / load.speed(1) > args.p95:
        raise SystemExit(f"even alone, 5% of the answers take more than {args.p95:g} s; raise --p95")
    for rate in map(float, args.rates.split(",")):
        replicas = enough(load, rate, args.p95)
        print(json.dumps({"rate": rate, "replicas": replicas, **simulate(load, replicas, poisson(rate, 120.0))}))


if __name__ == "__main__":
    main()
