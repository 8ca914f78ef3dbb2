"""Requests of many kinds, for comparing replicas with one process."""

from __future__ import annotations

from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
TEXT = "true false null yes no"
CHAT = [{"role": "user", "content": "a name and a count"}]
SAMPLED = {"temperature": 1.1, "seed": 11}

COMPLETIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {**SAMPLED},
    {**SAMPLED, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "frequency_penalty": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {**SAMPLED, "frequency_penalty": 0.8, "logit_bias": {"40": 3}},
    {**SAMPLED, "logprobs": 2},
    {**SAMPLED, "n": 2},
    {"temperature": 0, "stop": ["al"], "min_tokens": 3, "ignore_eos": True},
    {**SAMPLED, "stop": ["e", "}"]},
    {**SAMPLED, "lookahead": False, "ignore_eos": True},
    {**SAMPLED, "echo": True, "logprobs": 1},
]
CHATS: list[dict[str, Any]] = [
    {"temperature": 0},
    {**SAMPLED, "logprobs": True, "top_logprobs": 2},
    {**SAMPLED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"temperature": 0, "response_format": {"type": "json_object"}, "min_tokens": 5},
    {**SAMPLED, "prediction": {"type": "content", "content": '{"name": "add"}'}},
]


def requests(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of every kind, with at most so many tokens."""
    found: list[tuple[str, dict[str, Any]]] = []
    for body in COMPLETIONS:
        found.append(("/v1/completions", {"prompt": TEXT, "max_tokens": tokens, **body}))
    for body in CHATS:
        found.append(("/v1/chat/completions", {"messages": CHAT, "max_tokens": tokens, **body}))
    found.append(("/v1/responses", {"input": "a name", "max_output_tokens": max(16, tokens), **SAMPLED}))
    return found


def told(reply: dict[str, Any]) -> Any:
    """What a reply says, without its id, its time and its speed."""
    usage = {name: value for name, value in reply["usage"].items() if isinstance(value, int)}
    if "output" in reply:
        return [item["content"] for item in reply["output"]], usage
    return reply["choices"], usage


def same(one: Any, other: Any) -> bool:
    """Whether two replies say the same. The last bits of a log-probability depend on how many guesses its step had."""
    if isinstance(one, float):
        return isinstance(other, float) and abs(one - other) < 1e-3
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
