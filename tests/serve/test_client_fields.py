"""Fields that ordinary clients send: those without effect, stop tokens, and variables of the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Running, running

from lookahead.machine import package_version
from lookahead.serve.protocol import NEUTRAL, Ignored

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = "the quick brown fox jumps over the lazy dog and then the"
IGNORED: dict[str, Any] = {
    "user": "someone",
    "safety_identifier": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "priority": 3,
    "request_id": "mine",
}
SWITCH = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    "{% if style is defined %}{{ style.upper() }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post(CHAT, **{"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: Running, **body: Any) -> str:
    return chat(server, **body)["choices"][0]["message"]["content"]


def test_ignored_fields_change_nothing(server: Running) -> None:
    assert IGNORED.keys() == Ignored.model_fields.keys()
    assert said(server, **IGNORED) == said(server)
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    assert server.complete(**body, **IGNORED)["choices"] == server.complete(**body)["choices"]
    streamed = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert server.post(CHAT, messages=MESSAGES, max_tokens=2, **streamed).status_code == 200
    text = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    assert said(server, messages=[{"role": "user", "content": text}]) == said(server)


def test_what_litellm_notes_on_earlier_messages_changes_nothing(make_json_model: Callable[[str], Any]) -> None:
    """Nor does it reach the template, not even as a name without a value."""
    notes = {"provider_specific_fields": {"reasoning": "so"}}
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    plain = {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]}
    blocks = [{"type": "thinking", "thinking": "so", "signature": ""}]
    noted = {**plain, **notes, "thinking_blocks": blocks, "tool_calls": [{**call, **notes, "index": 0}]}
    template = "{{ tools }}{% for message in messages %}{{ message | tojson }}{% endfor %}"
    with running(make_json_model(template)) as server:
        prompts = [prompt_of(server, messages=[*MESSAGES, message]) for message in (plain, noted)]
        assert said(server, messages=[*MESSAGES, noted]) == said(server, messages=[*MESSAGES, plain])
        answer = server.post(CHAT, messages=[{**MESSAGES[0], "provider_fields": {}}])
    assert prompts[0] == prompts[1]
    assert '"call_1"' in prompts[0]
    assert "provider_specific_fields" not in prompts[0]
    assert answer.status_code == 400
    assert "messages[0].provider_fields" in answer.json()["error"]["message"]


def test_fields_with_their_usual_values_are_accepted(server: Running) -> None:
    given = {name: NEUTRAL[name][0] for name in ("skip_special_tokens", "use_beam_search", "length_penalty")}
    assert said(server, **given) == said(server)
    for name, value in {"skip_special_tokens": False, "use_beam_search": True, "length_penalty": 2.0}.items():
        answer = server.post(CHAT, messages=MESSAGES, **{name: value})
        assert answer.status_code == 400
        assert f"{name}={value} is not supported; leave it out" in answer.json()["error"]["message"]


def test_a_field_that_is_null_counts_as_absent(server: Running) -> None:
    assert said(server, functions=None, audio=None, reasoning_effort=None, stop_token_ids=None) == said(server)


@pytest.mark.parametrize("temperature", [0.7, None])
@pytest.mark.thinned(1, most=1)
def test_top_p_0_is_greedy(server: Running, temperature: float | None) -> None:
    greedy = server.complete(prompt=PROMPT, max_tokens=20, temperature=0)["choices"]
    for seed in (1, 2):
        body = {"prompt": PROMPT, "max_tokens": 20, "seed": seed, "temperature": temperature}
        assert server.complete(**body, top_p=0)["choices"] == greedy
        assert server.complete(**body, top_p=0.0, lookahead=False)["choices"] == greedy


def test_stop_tokens_end_a_text(server: Running) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body["lookahead"] = {"steps": True}
    lines = server.client.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    steps = [
        step for line in lines if line.startswith("data: {") for step in json.loads(line[6:])["lookahead"]["steps"]
    ]
    tokens = [token for step in steps for token in step["tokens"]]
    stop = tokens[10]
    first = tokens.index(stop)
    body["lookahead"] = True
    expected = server.post("/detokenize", tokens=tokens[:first]).json()["prompt"]
    for lookahead in (True, False):
        reply = server.complete(**{**body, "lookahead": lookahead}, stop_token_ids=[stop])
        assert reply["choices"][0]["text"] == expected
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == first + 1
    later = server.complete(**body, stop_token_ids=[stop], min_tokens=first + 3)
    assert later["usage"]["completion_tokens"] > first + 3


# The chat template.


@pytest.fixture(scope="module")
def switched(make_json_model: Callable[[str], Any]) -> Any:
    with running(make_json_model(SWITCH)) as server:
        yield server


def prompt_of(server: Running, **body: Any) -> str:
    """The prompt that the chat template makes of a chat."""
    answer = server.post("/tokenize", **{"messages": MESSAGES, **body})
    assert answer.status_code == 200, answer.text
    return server.post("/detokenize", tokens=answer.json()["tokens"]).json()["prompt"]


def test_variables_reach_the_template(switched: Running) -> None:
    assert prompt_of(switched) == "<|user|>hello<|end|><|assistant|>"
    variables = {"enable_thinking": False, "style": "loud", "unknown": [1]}
    assert prompt_of(switched, chat_template_kwargs=variables) == "<|user|>hello<|end|>quickLOUD<|assistant|>"
    usage = [chat(switched, chat_template_kwargs=one)["usage"]["prompt_tokens"] for one in ({}, variables)]
    assert usage[0] < usage[1]
    answer = switched.post(CHAT, messages=MESSAGES, chat_template_kwargs={"style": 3})
    assert answer.status_code == 400
    assert "the chat template of" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("effort", "adds"), [("high", "effort=high"), ("none", "effort=nonequick")])
def test_reasoning_effort_reaches_the_template(switched: Running, effort: str, adds: str) -> None:
    longer = len(switched.post("/tokenize", prompt=adds).json()["tokens"])
    plain = chat(switched)["usage"]["prompt_tokens"]
    assert chat(switched, reasoning_effort=effort)["usage"]["prompt_tokens"] == plain + longer
    body = {"input": "hello", "max_output_tokens": 2, "reasoning": {"effort": effort}}
    used = switched.post("/v1/responses", **body).json()["usage"]
    assert used["input_tokens"] == plain + longer
    own = {"reasoning_effort": effort, "chat_template_kwargs": {"reasoning_effort": "x", "enable_thinking": True}}
    assert chat(switched, **own)["usage"]["prompt_tokens"] == plain + len(
        switched.post("/tokenize", prompt="effort=x").json()["tokens"]
    )


def test_a_last_message_is_continued(switched: Running) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    assert prompt_of(switched, messages=begun, continue_final_message=True) == "<|user|>hello<|end|><|assistant|>It is"
    open_prompt = prompt_of(switched, messages=begun, continue_final_message=True)
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    reply = switched.complete(prompt=open_prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    assert said(switched, **body) == reply
    assert said(switched, **body, lookahead=False) == reply
    assert prompt_of(switched, add_generation_prompt=False) == "<|user|>hello"
    called = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    last = {"role": "assistant", "content": None, "tool_calls": [called]}
    answer = switched.post(CHAT, messages=[*MESSAGES, last], continue_final_message=True)
    assert answer.status_code == 400
    assert "without tool calls" in answer.json()["error"]["message"]


def test_earlier_reasoning_reaches_the_template(switched: Running) -> None:
    for name in ("reasoning_content", "reasoning"):
        history = [*MESSAGES, {"role": "assistant", "content": "Hi", name: "greet"}, *MESSAGES]
        assert "<|assistant|>Hi(greet)" in prompt_of(switched, messages=history)
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "greet"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
        {"role": "user", "content": "hello"},
    ]
    used = switched.post("/v1/responses", input=items, max_output_tokens=2).json()["usage"]["input_tokens"]
    assert used == chat(switched, messages=history, max_tokens=2)["usage"]["prompt_tokens"]


def test_tools_are_tokenized(json_server: Running) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": MESSAGES, "tools": [tool]}
    count = json_server.post("/tokenize", **body).json()["count"]
    assert count == chat(json_server, **body)["usage"]["prompt_tokens"]
    assert count > json_server.post("/tokenize", messages=MESSAGES).json()["count"]


def test_the_version(server: Running) -> None:
    assert server.client.get("/version").json() == {"version": package_version("lookahead-decoding")}
