"""Cross-talk over HTTP: mixed requests at once, in little memory, against the same requests alone."""

from __future__ import annotations

import random
from typing import Any

from lookahead.engine.engine import Engine
from lookahead.engine.front import Front
from lookahead.generate import LookaheadModel
from lookahead.kv.pages import PagePool, PagePools

STEMS = (
    "Once upon a time, in a village by the sea, there lived a fisherman who had three daughters. " * 3,
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The three largest planets of the solar system are",
)


def shrink(model: LookaheadModel, pages: int) -> LookaheadModel:
    """The same model with so few pages that sequences must make room for each other."""
    backend: Any = model.backend
    if (name := backend.capabilities.name) != "graph":
        raise SystemExit(f"--crosstalk needs the graph backend, not {name}; give --backend graph")
    rows = backend.most_rows
    backend._slots.pool = PagePools(
        [PagePool(min(pages, pool.pages), pool.page_size, pool.window, rows) for pool in backend.pool.pools]
    )
    times = model.engine.times
    model.front.close()
    model.engine = Engine(backend, cost=None if times is None else times.table)
    model.front = Front(model.engine)
    return model


def mixed(count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of requests of all kinds. Each has a seed of its own, so that it can be asked again."""
    rng, bodies = random.Random(seed), list[dict[str, Any]]()
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": rng.choice(STEMS) + rng.choice((" Then", " It", " 1", "\n")) * rng.randrange(1, 4),
            "max_tokens": rng.choice((3, 16, 60, 120)),
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.2)),
            "seed": number,
            "logprobs": rng.choice((None, 0, 3)),
            "stream": rng.random() < 0.5,
        }
        for name, values in {
            "stop": (["the"], ["\n\n", "and a"]),
            "top_k": (5, 40),
            "top_p": (0.8,),
            "presence_penalty": (0.9,),
            "repetition_penalty": (1.2,),
            "logit_bias": ({"30": 3.0},),
            "n": (2,),
            "lookahead": (False, {"window": 0, "budget": 12}),
            "ignore_eos": (True,),
        }.items():
            if rng.random() < 0.25:
                body[name] = rng.choice(values)
        bodies.append(body)
    return bodies


def crosstalk(served: Any, model: LookaheadModel, count: int, seed: int = 1) -> dict[str, Any]:
    """Ask all at once, at random times, with some clients that leave; then one by one. Compare the replies."""
    bodies, rng = mixed(count, seed), random.Random(seed)
    engine, pool = model.engine, model.backend.pool  # type: ignore[attr-defined]
    leaving = [{**rng.choice(bodies), "stream": True, "n": 1, "max_tokens": 120} for _ in range(count // 8)]
    at = [rng.random() * 0.5 for _ in range(count + len(leaving))]
    together = served.run({"kind": "choices", "bodies": bodies + leaving, "at": at, "leave": len(leaving)})["replies"]
    preemptions, hits = engine.preemptions, pool.hit_tokens
    solo = [{**body, "stream": False} for body in bodies]
    alone = served.run({"kind": "choices", "bodies": solo, "at": None})["replies"]
    equal, apart, wrong = 0, 0.0, []
    for number, (one, other) in enumerate(zip(together[:count], alone, strict=True)):
        same = [without_numbers(choice) for choice in one] == [without_numbers(choice) for choice in other]
        equal += same
        if not same:
            wrong.append(number)
        for pair in zip(values(one), values(other), strict=True) if same else ():
            apart = max(apart, abs(pair[0] - pair[1]))
    return {
        "requests": count,
        "equal": equal,
        "wrong": wrong,
        "apart": apart,
        "pages": pool.pages,
        "preemptions": preemptions,
        "hit_tokens": hits,
        "left_in_use": pool.used,
    }


def without_numbers(choice: dict[str, Any]) -> list[Any]:
    told = choice["logprobs"] or {}
    return [choice[name] for name in ("index", "text", "finish_reason")] + [told.get("tokens"), told.get("text_offset")]


def values(choices: list[dict[str, Any]]) -> list[float]:
    """All log-probabilities of a reply."""
    return [value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", ())]
