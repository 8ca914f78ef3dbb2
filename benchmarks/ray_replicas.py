"""What replicas give and what their hops cost: `python benchmarks/ray_replicas.py --model NAME --out FILE.json`.

    closed   the same number of clients against one process, one replica and two: tokens per second, time to the first
             token, time between events. One process against one replica is the cost of the hops.
    open     requests at random times against two replicas, beside the simulation of `queueing.py` for the same times

The simulation's step times are those of the closed runs. `apart` takes those of one replica, and two of it. Replicas on
one machine share its cores, or its GPU with --gpus 0.5, so two of them are not twice one: `shared` takes the times of
both together, as of one replica with twice the slots.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from queueing import Load, poisson, simulate
from serve_load import Served, numbers, summary

import lookahead
from lookahead.serve.ray.local import cluster
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.settings import ServeSettings

HERE = Path(__file__).parent


def run(url: str, order: dict[str, Any]) -> dict[str, Any]:
    order = {**order, "url": f"{url}/v1/completions"}
    command = [sys.executable, str(HERE / "load_client.py")]
    done = subprocess.run(command, input=json.dumps(order), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def mean_latency(found: dict[str, Any]) -> float:
    return statistics.fmean(one["last"] - one["asked"] for one in found["replies"] if one["status"] == 200)


class Note:
    """Collects records, and writes them after each."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.records = out, list[dict[str, Any]]()

    def add(self, **record: Any) -> None:
        self.records.append(record)
        print(json.dumps(record), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.records, indent=1) + "\n")


@contextmanager
def one_process(settings: RaySettings) -> Iterator[str]:
    model = lookahead.load(settings.model, dtype=settings.dtype, backend=settings.backend)
    served = Served(model, settings.serve.max_concurrency)
    yield served.server.address
    served.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    own = ServeSettings(port=0, max_concurrency=args.slots)
    wanted = RaySettings(args.model, args.dtype, args.device, args.backend, replicas=1, gpus=args.gpus, serve=own)
    note = Note(args.out)
    body = {"max_tokens": args.tokens, "ignore_eos": True, "temperature": 0, "lookahead": args.lookahead}
    bodies = [{**body, "prompt": f"Number {number}: once upon a time"} for number in range(64)]
    warm = {"bodies": bodies, "streams": args.slots, "seconds": args.warm}

    def closed(url: str, kind: str, streams: int) -> dict[str, Any]:
        found = run(url, {"bodies": bodies, "streams": streams, "seconds": args.seconds})
        # Chunks are counted over the whole run, tokens per second in its steady part.
        chunks = sum(len(one["gaps"]) + 1 for one in found["replies"] if one["status"] == 200)
        told = {**summary(found, args.seconds), "chunks_per_second": round(chunks / (found["end"] - found["begin"]), 1)}
        note.add(kind=kind, streams=streams, mean_latency=round(mean_latency(found), 4), **told)
        return found

    with one_process(wanted) as url:
        run(url, warm)
        for streams in args.streams:
            closed(url, "one process", streams)

    def fitted(url: str, kind: str, slots: int) -> Load:
        found = {streams: mean_latency(closed(url, kind, streams)) for streams in args.streams}
        points = tuple((streams, seconds / args.tokens) for streams, seconds in sorted(found.items()))
        load = Load(0.0, 0.0, tokens=args.tokens, slots=slots, queue=own.max_queue, points=points)
        note.add(kind=f"fit of {kind}", points=points, per_second=round(load.capacity, 2))
        return load

    with cluster(wanted, print) as url:
        run(url, warm)
        apart = fitted(url, "1 replica", args.slots)
    with cluster(replace(wanted, replicas=2), print) as url:
        run(url, warm)
        shared = fitted(url, "2 replicas", 2 * args.slots)
        for part in args.loads:
            arrivals = poisson(part * shared.capacity, args.seconds)
            found = run(url, {"bodies": bodies, "at": arrivals})
            simulated = {"apart": simulate(apart, 2, arrivals)["mean"], "shared": simulate(shared, 1, arrivals)["mean"]}
            note.add(
                kind="open", load=part, requests=len(arrivals), measured=round(mean_latency(found), 4), **simulated
            )
    return note.records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="as for lookahead.load; the embedded model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of a replica; 0.5 lets two share one")
    parser.add_argument("--lookahead", action="store_true", help="with guesses; without, a step is one token")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 16])
    parser.add_argument("--slots", type=int, default=16, help="sequences that run at once in a replica")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--seconds", type=float, default=8.0, help="of every measurement")
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--loads", type=numbers, default=[0.3, 0.6], help="parts of what two full replicas do")
    parser.add_argument("--out", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
