"""Anthropic's API: messages, tools and thinking over `/v1/messages`, whole and streamed, with its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from forced import saying
from http_server import Running, running
from json_model import HERMES, json_model, json_tokenizer

from lookahead import LookaheadConfig

MESSAGES = [{"role": "user", "content": "hello"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 22}}\n</tool_call>'
TEMPLATE = HERMES.replace("<|{{ message['role'] }}|>", "<|{{ message['role'] }}|>{{ message.reasoning_content }}") + (
    "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(settings: LookaheadConfig) -> Iterator[Running]:
    """A model that thinks if it is asked to."""
    tokenizer = json_tokenizer(TEMPLATE)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=False)
    with running(json_model(settings, tokenizer)) as server:
        yield server


def ask(server: Running, **body: Any) -> dict[str, Any]:
    """A message, which must be the same when it is streamed."""
    asked = {"messages": MESSAGES, "max_tokens": 100, "temperature": 0, **body}
    answer = server.post("/v1/messages", **asked)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    streamed = joined(events(server, **asked))
    names = ("content", "stop_reason", "stop_sequence", "role", "type", "model")
    assert {name: without_ids(streamed[name]) for name in names} == {name: without_ids(whole[name]) for name in names}
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


def without_ids(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


def events(server: Running, **asked: Any) -> list[dict[str, Any]]:
    text = server.post("/v1/messages", **asked, stream=True).text
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes, as Anthropic's clients put it together."""
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "message_stop"
    message, texts = found[0]["message"], list[str]()
    for one in found[1:-1]:
        if one["type"] == "content_block_start":
            assert one["index"] == len(message["content"]) == len(texts)
            message["content"].append(one["content_block"])
            texts.append("")
        elif one["type"] == "content_block_delta":
            delta = dict(one["delta"])
            assert one["index"] == len(texts) - 1
            kind = delta.pop("type").removesuffix("_delta")
            assert kind in ("text", "thinking", "input_json")
            ((_, text),) = delta.items()
            texts[-1] += text
        elif one["type"] == "content_block_stop":
            block = message["content"][one["index"]]
            text = texts[one["index"]]
            name = {"tool_use": "input"}.get(block["type"], block["type"])
            block[name] = json.loads(text) if name == "input" else text
        else:
            assert one["type"] == "message_delta"
            message |= one["delta"]
            message["usage"] |= one["usage"]
    return message


def test_a_message_is_what_the_chat_gives(json_server: Running) -> None:
    chat = json_server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=12, temperature=0).json()
    found = ask(json_server, max_tokens=12)
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert found["stop_reason"] == "max_tokens"
    assert found["type"] == "message"
    assert found["id"].startswith("msg")
    used = found["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert used["output_tokens"] == 12
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}]
    more = {"metadata": {"user_id": None}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    assert ask(json_server, max_tokens=12, **more, messages=blocks)["content"] == found["content"]
    assert ask(json_server, max_tokens=12, temperature=1.0, top_p=0)["content"] == found["content"]
    sampled = {"max_tokens": 12, "temperature": 1.0, "top_k": 5, "seed": 1}
    assert ask(json_server, **sampled)["content"] == ask(json_server, **sampled, lookahead=False)["content"]


def test_how_a_message_ends(json_server: Running) -> None:
    with saying(json_server, "one two three"):
        found = ask(json_server)
        assert found["content"] == [{"type": "text", "text": "one two three"}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        found = ask(json_server, stop_sequences=["four", " thr"])
        assert found["content"] == [{"type": "text", "text": "one two"}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " thr")
    for text, content in (("", []), (" \n", []), (" a  b \n", [{"type": "text", "text": " a  b \n"}])):
        with saying(json_server, text):
            assert ask(json_server)["content"] == content


def prompt_of(server: Running, monkeypatch: pytest.MonkeyPatch, **body: Any) -> str:
    """The prompt that a body makes; counting it must give its length."""
    prompts = []
    encode = server.model.encode

    def noted(*given: Any, **options: Any) -> list[int]:
        prompts.append(encode(*given, **options))
        return prompts[-1]

    monkeypatch.setattr(server.model, "encode", noted)
    asked = {"messages": MESSAGES, **body}
    answer = server.post("/v1/messages", **asked, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert server.post("/v1/messages/count_tokens", **asked).json() == {"input_tokens": len(prompts[0])}
    return server.service.decode(prompts[0])


def test_turns_become_messages(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    expected = "<|system|>Be\nbrief.<|end|><|user|>a\nb\nc<|end|><|assistant|>d<|end|><|user|>e<|end|><|assistant|>"
    assert prompt_of(json_server, monkeypatch, system=system, messages=turns) == expected
    expected = "<|system|>Be<|end|><|user|>hello<|end|><|assistant|>"
    assert prompt_of(json_server, monkeypatch, system="Be") == expected


def test_a_begun_answer_is_continued(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "It is ("}]
    assert prompt_of(thinker, monkeypatch, messages=turns).endswith("<|user|>hello<|end|><|assistant|>It is (")
    with saying(thinker, "B)"):
        assert ask(thinker, messages=turns)["content"] == [{"type": "text", "text": "B)"}]


# Tools.


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
@pytest.mark.thinned(1, most=1)
def test_a_forced_call(json_server: Running, choice: dict[str, Any]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    found = ask(json_server, tools=[ADD], tool_choice=choice, max_tokens=200)
    (block,) = found["content"]
    assert block["type"] == "tool_use"
    assert block["id"].startswith("toolu_")
    assert block["name"] == "add"
    assert block["input"] in ({"a": 1}, {"a": 22})
    assert found["stop_reason"] == "tool_use"


def test_text_before_calls(json_server: Running) -> None:
    with saying(json_server, f"I add.\n{CALL}\n{CALL}"):
        text, first, second = ask(json_server, tools=[ADD], max_tokens=300)["content"]
        assert text == {"type": "text", "text": "I add."}
        assert first["input"] == second["input"] == {"a": 22}
        assert first["id"] != second["id"]
        none = ask(json_server, tools=[ADD], tool_choice={"type": "none"}, max_tokens=300)
        assert [block["type"] for block in none["content"]] == ["text"]
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        assert len(ask(json_server, tools=[ADD], tool_choice=alone, max_tokens=300)["content"]) == 2


def test_results_reach_the_template(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    turns = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    prompt = prompt_of(json_server, monkeypatch, messages=turns, tools=[ADD])
    assert prompt.endswith("<|tool|>2<|end|><|tool|>Error: no<|end|><|user|>go on<|end|><|assistant|>")
    assert '"arguments": {"a": 1}' in prompt
    assert "Adds." in prompt


def test_a_reply_follows_a_schema(json_server: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": ADD["input_schema"]}, "effort": "low"}
    (block,) = ask(json_server, output_config=config)["content"]
    assert json.loads(block["text"]) in ({"a": 1}, {"a": 22})


# Thinking.


def test_thinking_is_a_block_of_its_own(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    on: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    with saying(thinker, "Well.\n</think>\n\nYes."):
        thought, text = ask(thinker, **on)["content"]
        assert thought == {"type": "thinking", "thinking": "Well.", "signature": ""}
        assert text == {"type": "text", "text": "Yes."}
        omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
        assert ask(thinker, **omitted)["content"] == [text]
    with saying(thinker, "<think>Well.</think>Yes."):  # nobody asked for it
        assert ask(thinker)["content"] == ask(thinker, thinking={"type": "disabled"})["content"] == [text]
    turns = [*MESSAGES, {"role": "assistant", "content": [thought, text]}, *MESSAGES]
    prompt = prompt_of(thinker, monkeypatch, messages=turns, **on)
    assert prompt.endswith("<|assistant|>Well.Yes.<|end|><|user|>hello<|end|><|assistant|><think>\n")


# Errors and keys.


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": MESSAGES}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_tokens": 1, "frobnicate": 1}, "unknown field 'frobnicate'"),
        ({"max_tokens": 1, "thread": {"type": "create"}}, "nothing is stored; send all messages"),
        ({"max_tokens": 1, "messages": []}, "at least 1 item"),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "needs 'tool_use_id'",
        ),
        ({"max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"max_tokens": 1, "tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "no tool 'sub'"),
        (
            {
                "max_tokens": 1,
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
                ],
            },
            "add a user message with its 'tool_result'",
        ),
    ],
)
def test_a_mistake_is_told_in_anthropics_format(json_server: Running, body: dict[str, Any], says: str) -> None:
    answer = json_server.post("/v1/messages", **{"messages": MESSAGES, **body})
    assert answer.status_code == 400
    found = answer.json()
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"
    assert found["error"].keys() <= {"type", "message", "details"}
    assert found["error"]["type"] == "invalid_request_error"
    assert says in found["error"]["message"]


def test_other_errors_have_anthropics_types(json_server: Running) -> None:
    kinds = {
        404: json_server.post("/v1/messages", model="claude", messages=MESSAGES, max_tokens=1),
        413: json_server.post("/v1/messages", messages=[{"role": "user", "content": "x" * (5 << 20)}]),
        400: json_server.post("/v1/messages", messages=MESSAGES, max_tokens=1, thread={"type": "create"}),
        405: json_server.client.get("/v1/messages"),
        415: json_server.client.post("/v1/messages/count_tokens", content=b"x"),
    }
    names = {404: "not_found_error", 413: "request_too_large"}
    for status, answer in kinds.items():
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == names.get(status, "invalid_request_error")
        assert int(answer.headers["content-length"]) == len(answer.content)
    assert kinds[400].json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert "param" in json_server.client.get("/v1/messagesx").json()["error"]  # OpenAI's


def test_a_failing_stream_ends_with_an_error_event(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.engine import text

    push = text.TextStream.push_token

    def broken(self: Any, token: int) -> bool:
        if self._stops.stops == ("BOOM",):
            raise OSError("a secret detail")
        return push(self, token)

    monkeypatch.setattr(text.TextStream, "push_token", broken)
    found = events(json_server, messages=MESSAGES, max_tokens=5, stop_sequences=["BOOM"])
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(found)


def test_a_key_comes_in_either_header(make_json_model: Any) -> None:
    with running(make_json_model(), keys=("a-long-secret", "another-secret")) as server:
        body = {"messages": MESSAGES, "max_tokens": 2}
        for headers, status in (
            ({"x-api-key": "a-long-secret"}, 200),
            ({"Authorization": "Bearer another-secret"}, 200),
            ({"Authorization": "Bearer another-secret", "x-api-key": "wrong-secret"}, 200),
            ({"x-api-key": "wrong-secret"}, 401),
            ({}, 401),
        ):
            answer = server.client.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
            chat = server.client.post("/v1/chat/completions", json=body, headers=headers)
            assert chat.status_code == status
