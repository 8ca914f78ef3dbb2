"""Requests of every kind that the server answers, and some that it must refuse, for `soak.py`. Only Python is needed.

A request follows from its random numbers alone, and has a seed of its own or takes the likeliest tokens: asked again,
it gets the same text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from load import Connection

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LEAVING, WRONG = 0.2, 0.05
"""How many requests leave mid-stream, and how many are wrong."""
Body = dict[str, Any]

# fmt: off
OPENINGS = (
    "Write a short story about", "Explain to a child how to build", "List five facts about",
    "Write a Python function that counts", "What would happen without",
    "You are a careful assistant who answers briefly and never repeats the question. Tell me about",
)
THINGS = (
    "the moon", "bridges", "a lighthouse", "bees", "trains", "the letter e", "rain", "an old clock", "bread", "ice",
)
AGE = {"type": "integer", "maximum": 120, "minimum": 0}
PERSON = {
    "type": "object", "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": AGE},
}
CHAIN = {  # a recursion that can end
    "type": "object", "required": ["item", "next"],
    "properties": {"item": {"enum": ["a", "b"]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}
TOWN = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Lima"]}}, "required": ["town"]}
WEATHER = {
    "type": "function", "function": {"name": "weather", "description": "The weather of a town.", "parameters": TOWN},
}
# fmt: on


@dataclass
class Asked:
    """One request. Its client leaves after `leave` events, or stays; a wrong one is answered with `status`."""

    kind: str
    path: str
    body: Body | bytes
    leave: int = 0
    status: int = 200


def prompt(rng: random.Random) -> str:
    return f"{rng.choice(OPENINGS)} {rng.choice(THINGS)}."


def chat(rng: random.Random, **fields: Any) -> tuple[str, Body]:
    return CHAT, {"messages": [{"role": "user", "content": prompt(rng)}], "temperature": 0, **fields}


def text(rng: random.Random, **fields: Any) -> tuple[str, Body]:
    return TEXT, {"prompt": prompt(rng), "temperature": 0, **fields}


def sampling(rng: random.Random) -> Body:
    more = rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
    return {"temperature": rng.choice((0.5, 0.8, 1.0)), "seed": rng.randrange(1 << 30), **more}


def schema(rng: random.Random) -> Body:
    chosen = {"name": "it", "schema": rng.choice((PERSON, CHAIN))}
    return {"response_format": {"type": "json_schema", "json_schema": chosen}}


def penalties(rng: random.Random) -> Body:
    return {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": rng.choice((1.0, 1.1))}


KINDS: dict[str, Callable[[random.Random], tuple[str, Body]]] = {
    "greedy chat": chat,
    "greedy text": text,
    "sampled": lambda rng: rng.choice((chat, text))(rng, **sampling(rng)),
    "choices": lambda rng: rng.choice((chat, text))(rng, **sampling(rng), n=2),
    "penalties": lambda rng: rng.choice((chat, text))(rng, **sampling(rng), **penalties(rng)),
    "bias": lambda rng: text(rng, logit_bias={"30": 2.0, "31": -100}, min_tokens=2),
    "logprobs": lambda rng: rng.choice(
        (chat(rng, logprobs=True, top_logprobs=3), text(rng, logprobs=2), text(rng, logprobs=1, echo=True))
    ),
    "schema": lambda rng: chat(rng, **schema(rng), **rng.choice(({}, sampling(rng)))),
    "tools": lambda rng: chat(rng, tools=[WEATHER], tool_choice=rng.choice(("auto", "required"))),
    "stop strings": lambda rng: rng.choice((chat, text))(rng, stop=["\n\n", rng.choice((" the", ". ", "e"))]),
    "lookahead off": lambda rng: rng.choice((chat, text))(rng, **rng.choice(({}, sampling(rng))), lookahead=False),
    "prediction": lambda rng: chat(
        rng, prediction={"type": "content", "content": f"Here are {rng.choice(THINGS)}: 1."}
    ),
    "responses": lambda rng: (RESPONSES, {"input": prompt(rng), "temperature": 0}),
}
SAID = {"messages": [{"role": "user", "content": "hello"}]}
ITSELF = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"$ref": "#"}}}
WRONGS: tuple[tuple[str, Body | bytes, int], ...] = (
    (CHAT, {**SAID, "frobnicate": 1}, 400),
    (CHAT, {**SAID, "temperature": -1}, 400),
    (CHAT, {**SAID, "response_format": ITSELF}, 400),
    (CHAT, {**SAID, "user": "\ud83d"}, 400),
    (CHAT, {**SAID, "model": "no-such-model"}, 404),
    (CHAT, b'{"messages": [', 400),
    (TEXT, {"prompt": "x", "n": -1}, 400),
    (TEXT, {"prompt": [1 << 30]}, 400),
    (TEXT, {"prompt": []}, 400),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 400),
    ("/v1/nothing", {}, 404),
)


def make(rng: random.Random, tokens: int) -> Asked:
    """A random request of at most this many tokens."""
    if rng.random() < WRONG:
        path, wrong, status = rng.choice(WRONGS)
        return Asked("wrong", path, wrong, status=status)
    kind = rng.choice(list(KINDS))
    path, body = KINDS[kind](rng)
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = rng.randrange(max(2, tokens // 8), tokens + 1)
    leave = rng.randrange(1, 6) if rng.random() < LEAVING else 0
    body["stream"] = bool(leave) or rng.random() < 0.5
    return Asked(kind, path, body, leave)


@dataclass
class Outcome:
    """What became of a request: answered, left, refused (as it had to be), busy (429) or failed, and then why."""

    what: str
    why: str = ""
    reply: list[Any] = field(default_factory=list)


async def ask(connection: Connection, asked: Asked) -> Outcome:
    """Send a request, and read its reply until its client leaves."""
    status, content = await connection.post(asked.path, asked.body)
    found, events = Gathered(), 0
    if status != 200 or not (isinstance(asked.body, dict) and asked.body.get("stream")):
        reply = json.loads(b"".join([part async for part in content]))
        if status != asked.status:
            said = reply.get("error", {}).get("message", str(reply)[:200])
            return Outcome("busy" if status == 429 else "failed", f"{status}, not {asked.status}: {said}")
        found.add(reply)
        return Outcome("answered", reply=found.choices) if status == 200 else Outcome("refused")
    async for part in content:
        if not part.startswith(b"data: "):
            continue
        events += 1
        if part.startswith(b"data: [DONE]"):
            found.ended = True
        elif why := found.add(json.loads(part[6:])):
            connection.close()
            return Outcome("failed", f"an event in a stream: {why}")
        if events == asked.leave:
            connection.close()
            return Outcome("left")
    return Outcome("answered", reply=found.choices) if found.ended else Outcome("failed", "a stream without an end")


@dataclass
class Gathered:
    """What can be compared of a reply, whole or in events: text, calls, and how it ended, by choice."""

    ended: bool = False
    _found: dict[int, tuple[str, list[Any], str | None]] = field(default_factory=dict)

    @property
    def choices(self) -> list[Any]:
        return [self._found[index] for index in sorted(self._found)]

    def add(self, event: Body) -> str | None:
        """A whole reply, or one event. Returns what is wrong, if it reports an error."""
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            event = event["response"]
            self.ended = True
        if event.get("error"):
            return str(event["error"].get("message"))
        if event.get("object") == "response":
            texts = [part["text"] for item in event["output"] for part in item.get("content", ())]
            calls = [(item["name"], item["arguments"]) for item in event["output"] if item["type"] == "function_call"]
            self._found = {0: ("".join(texts), calls, event["status"])}
        for choice in event.get("choices", ()):
            said, calls, reason = self._found.get(choice["index"], ("", [], None))
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            made = [one["function"] for one in part.get("tool_calls") or ()]
            calls = [*calls, *((one["name"], one["arguments"]) for one in made)]
            self._found[choice["index"]] = said + (part.get("content") or ""), calls, choice["finish_reason"] or reason
        return None


def comparable(reply: list[Any]) -> list[Any]:
    """Two replies to the same request are equal in this, streamed or not: white space around calls does not count."""
    return [[said.strip() if calls else said, [list(call) for call in calls], reason] for said, calls, reason in reply]
