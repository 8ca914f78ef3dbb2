"""Streams that tell of their steps: they add up to the reply, are bounded, need a right, and cost others nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Running, running

import lookahead
from lookahead import LookaheadConfig
from lookahead.serve import steps

PROMPT = "the quick brown fox jumps over the lazy dog and then the"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
KEYS = ("plain-secret", "trace-secret")
LINES = (KEYS[0], f"{KEYS[1]} rights=trace")


@pytest.fixture(scope="module")
def loaded(model: Any, tokenizer: Any, settings: LookaheadConfig) -> Any:
    """A model of this file's own: how many guesses a step accepts depends on what was learnt before."""
    return lookahead.load((model, tokenizer), config=settings)


def stream(server: Running, path: str, body: dict[str, Any], key: str = "") -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.client.post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def steps_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for chunk in chunks for step in chunk.get("lookahead", {}).get("steps", ())]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_steps_add_up_to_the_reply(server: Running, sampling: dict[str, Any]) -> None:
    body = {**BODY, **sampling, "stream_options": {"include_usage": True}}
    plain = stream(server, "/v1/completions", body)
    asked = stream(server, "/v1/completions", {**body, "lookahead": {"steps": True}})
    text = "".join(choice["text"] for chunk in plain for choice in chunk["choices"])
    found = steps_of(asked)
    assert steps_of(plain) == []
    assert "".join(step["text"] for step in found) == text
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    usage = asked[-1]["usage"]
    assert sum(len(step["tokens"]) for step in found) == usage["completion_tokens"]
    assert len(found) == usage["lookahead"]["steps"]
    assert sum(step["tried"] for step in found) == usage["lookahead"]["tried"]
    assert sum(step["accepted"] for step in found) == usage["lookahead"]["accepted"] > 0
    for step in found:
        assert len(step["sources"]) == step["accepted"] <= len(step["tokens"])
        assert "tree" not in step
    seconds = [step["seconds"] for step in found]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_plain_decoding_tells_the_same_tokens(server: Running) -> None:
    guessed = steps_of(stream(server, "/v1/chat/completions", {**CHAT, "lookahead": {"steps": True}}))
    plain = steps_of(stream(server, "/v1/chat/completions", {**CHAT, "lookahead": {"steps": True, "sources": []}}))
    assert [token for step in guessed for token in step["tokens"]] == [step["tokens"][0] for step in plain]
    assert all(step["tried"] == 0 and len(step["tokens"]) == 1 for step in plain)
    assert len(guessed) < len(plain)


def test_a_trace_shows_each_tree_and_its_accepted_path(server: Running) -> None:
    options = {"trace": True, "window": 3, "ngram": 4, "guesses": 4, "budget": 40}
    found = steps_of(stream(server, "/v1/chat/completions", {**CHAT, "lookahead": options}))
    plain = server.post("/v1/chat/completions", **CHAT, lookahead=False).json()
    assert "".join(step["text"] for step in found) == plain["choices"][0]["message"]["content"]
    assert any(step["accepted"] > 1 for step in found)
    assert any(step["tree"]["window"] == {"columns": 3, "rows": 3} for step in found)
    for step in found:
        tree = step["tree"]
        window = tree["window"]["columns"] * tree["window"]["rows"] or 1
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["sources"])
        assert tree["sources"][:window] == ["root", *["window"] * (window - 1)]
        assert len(tree["tokens"]) == window + step["tried"]
        assert all(parent < node for node, parent in enumerate(tree["parents"]))
        # The accepted path goes down from the root, and its tokens are the step's own but for the last.
        assert [tree["parents"][node] for node in tree["path"]] == [0, *tree["path"]][: len(tree["path"])]
        assert [tree["sources"][node] for node in tree["path"]] == step["sources"]
        spelled = [server.service.token_formatter.text_and_bytes(token)[0] for token in step["tokens"]]
        assert [tree["tokens"][node] for node in tree["path"]] == spelled[: step["accepted"]]


def test_a_trace_is_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_TREES", 6)
    monkeypatch.setattr(steps, "MOST_NODES", 5)
    body = {**CHAT, "n": 2, "seed": 1, "lookahead": {"trace": True}}
    found = steps_of(stream(server, "/v1/chat/completions", body))
    trees = [step for step in found if "tree" in step]
    assert len(trees) == 6
    assert len(found) > 6
    for step in trees:
        tree = step["tree"]
        assert len(tree["tokens"]) <= 5 + step["accepted"]
        assert len(tree["path"]) == step["accepted"]
        assert [tree["parents"][node] for node in tree["path"]] == [0, *tree["path"]][: len(tree["path"])]
    assert any(step["tree"]["left_out"] > 0 for step in trees)


def test_steps_belong_to_streams_of_chats_and_completions(server: Running) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {**BODY, "stream": False})):
        answer = server.post(path, **body, lookahead={"steps": True})
        assert answer.status_code == 400
        assert "belong to stream=true" in answer.json()["error"]["message"]
    answer = server.post("/v1/responses", input="x", stream=True, lookahead={"trace": True})
    assert answer.status_code == 400
    assert "unknown field 'lookahead.trace'" in answer.json()["error"]["message"]
    answer = server.post("/v1/responses", input="x", max_output_tokens=4, lookahead={"sources": []})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**BODY, "n": 2, "seed": 3, "temperature": 0.8}),
        ("/v1/completions", {**BODY, "echo": True, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "min_tokens": 8}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "look"}}]}),
    ],
)
@pytest.mark.thinned(1, most=2)
def test_telling_steps_changes_nothing_else(server: Running, path: str, body: dict[str, Any]) -> None:
    plain = stream(server, path, body)
    asked = stream(server, path, {**body, "lookahead": {"trace": True}})
    assert contents(asked) == contents(plain)
    assert len(steps_of(asked)) > 1
    assert all(set(chunk) - {"lookahead"} == set(plain[0]) for chunk in asked)


def contents(chunks: list[dict[str, Any]]) -> dict[int, Any]:
    """Every choice's text, tokens and end. Two streams of one reply may be cut in different places."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice["logprobs"] or {}
            one["logprobs"] += logprobs.get("content") or list(
                zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
            )
            one["end"] = choice["finish_reason"] or one["end"]
    return found


@pytest.fixture(scope="module")
def guarded(loaded: Any) -> Iterator[Running]:
    with running(loaded, keys=LINES) as one:
        yield one


def test_only_keys_with_the_right_may_trace(guarded: Running) -> None:
    body = {**BODY, "lookahead": {"trace": True}}
    answer = guarded.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "no_right")
    assert steps_of(stream(guarded, "/v1/completions", body, KEYS[1]))[0]["tree"]
    facts = {**BODY, "lookahead": {"steps": True}}
    assert steps_of(stream(guarded, "/v1/completions", facts, KEYS[0]))


@pytest.mark.parametrize(("public", "status"), [(True, 403), (False, 200)])
def test_without_keys_only_a_server_for_this_machine_traces(loaded: Any, public: bool, status: int) -> None:
    with running(loaded, public=public) as one:
        assert one.post("/v1/completions", **{**BODY, "lookahead": {"trace": True}}).status_code == status


def test_shared_memory_keeps_the_right_apart(loaded: Any) -> None:
    with running(loaded, keys=LINES, share_memory=True) as one:
        first, second = one.service.keys.owners
        assert (first.rights, second.rights) == (set(), {"trace"})
        assert first.memory is second.memory
