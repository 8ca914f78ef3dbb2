"""The cells of `peers.py` by our engine alone, in this process: no HTTP, no JSON and no text."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from inflate import shaped_load
from load import RISE

import lookahead
from lookahead.bench.gpu.batch import Load
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.generate import LookaheadModel

Record = dict[str, Any]


def option(options: Sequence[str], name: str, default: Any) -> Any:
    """The value of one of the server's options."""
    return options[options.index(name) + 1] if name in options else default


def measure_engine(args: Namespace, texts: Sequence[str]) -> list[Record]:
    """The closed cells, with the server's model and prompts."""
    names = {name: option(args.options, f"--{name}", "auto") for name in ("dtype", "device", "backend")}
    make: Any = shaped_load(args.inflate) if args.inflate else lookahead.load
    lm: LookaheadModel = make(option(args.options, "--model", None), **names)
    most = int(option(args.options, "--max-concurrency", 64))
    lm.engine.set_max_sequences(most)
    lm.prepare(most)
    encoded = [lm.encode([{"role": "user", "content": text}]) for text in texts]
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
