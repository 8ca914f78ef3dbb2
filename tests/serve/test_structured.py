"""vLLM's structured outputs: a regex, a choice, a grammar or a schema, in chats and completions."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_server import Running

MESSAGES = [{"role": "user", "content": "hello"}]
REGEX = r"[ab]{3}/(true|false)\n\d{2,4}"
TEXTS = ['yes "indeed"', "no/never", "ja, schön", "yes"]
LARK = 'start: "<" NAME ">" NUMBER+\nNAME: /[a-c]+/\nNUMBER: /[0-9] /'
GBNF = 'root ::= "on" | "off" digit digit\ndigit ::= [0-9]'
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}


def checked(text: str, kind: str) -> bool:
    """Whether a text follows what was asked for."""
    if kind in ("json", "json text"):
        return json.loads(text) in ({"a": 1}, {"a": 22})
    if kind == "choice":
        return text in TEXTS
    pattern = {"regex": REGEX, "grammar": r"<[a-c]+>([0-9] )+", "gbnf": "on|off[0-9]{2}"}[kind]
    return re.fullmatch(pattern, text) is not None


ASKED: dict[str, tuple[str, Any]] = {
    "regex": ("regex", REGEX),
    "choice": ("choice", TEXTS),
    "grammar": ("grammar", LARK),
    "gbnf": ("grammar", GBNF),
    "json": ("json", SCHEMA),
    "json text": ("json", json.dumps(SCHEMA)),
}


def texts(server: Running, **body: Any) -> list[str]:
    """The texts of a chat and a completion, streamed and not."""
    both = {"temperature": 1.3, "max_tokens": 300, "seed": 5, **body}
    chat = server.post("/v1/chat/completions", messages=MESSAGES, **both)
    assert chat.status_code == 200, chat.text
    completed = server.complete(prompt="add", **both)
    assert completed["choices"][0]["finish_reason"] == "stop"
    streamed = server.post("/v1/chat/completions", messages=MESSAGES, **both, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    return [chat.json()["choices"][0]["message"]["content"], completed["choices"][0]["text"], "".join(parts)]


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.thinned(1, most=2)
def test_a_reply_follows_what_it_should(json_server: Running, kind: str) -> None:
    name, value = ASKED[kind]
    found = texts(json_server, structured_outputs={name: value})
    assert all(checked(text, kind) for text in found), found
    assert found[0] == found[2]
    assert texts(json_server, **{f"guided_{name}": value}) == found
    assert texts(json_server, structured_outputs={name: value}, lookahead=False) == found


def test_any_object(json_server: Running) -> None:
    body = {"prompt": "add", "max_tokens": 20, "temperature": 0}
    assert json_server.complete(**body, structured_outputs={"json_object": True})["choices"][0]["text"].startswith("{")
    plain = json_server.complete(**body)["choices"]
    assert json_server.complete(**body, structured_outputs={"json_object": False})["choices"] == plain


def test_several_choices_and_prompts(json_server: Running) -> None:
    body = {"prompt": ["add", "true"], "n": 2, "max_tokens": 40, "temperature": 1.0, "seed": 3}
    found = json_server.complete(**body, guided_choice=TEXTS)["choices"]
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert {choice["text"] for choice in found} <= set(TEXTS)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"guided_regex": "("}, "invalid_grammar", "the grammar cannot be compiled"),
        ({"guided_regex": "a(?=b)"}, "invalid_grammar", "look-around"),
        ({"guided_grammar": "start: nothing"}, "invalid_grammar", 'unknown name: "nothing"'),
        ({"guided_grammar": "start: start"}, "invalid_grammar", "the grammar cannot be followed: no text fits it"),
        ({"guided_grammar": "root ::= ("}, "invalid_grammar", "the grammar cannot be compiled"),
        ({"guided_json": "{"}, "invalid_schema", "the schema is not JSON"),
        ({"guided_json": "3"}, "invalid_schema", "must be a JSON object"),
        ({"guided_json": r'{"const": "\ud800"}'}, "invalid_schema", "without lone surrogates"),
        ({"guided_json": '{"a":' * 70 + "1" + "}" * 70}, "too_deep", "nested more than 64"),
        ({"guided_json": {"type": "nonsense"}}, "invalid_schema", "the schema cannot be compiled"),
        ({"guided_choice": []}, None, "at least 1 item"),
        ({"guided_choice": [""]}, None, "at least 1 character"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, None, "one of choice and regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, None, "mean the same; give one"),
        ({"structured_outputs": {"structural_tag": "x"}}, None, "give tools, or a Lark grammar"),
        ({"structured_outputs": {"magic": "x"}}, "unknown", "unknown field 'structured_outputs.magic'"),
    ],
)
def test_what_cannot_be_followed_is_refused(json_server: Running, body: Any, code: str | None, says: str) -> None:
    for path, asked in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "add"})):
        answer = json_server.post(path, **asked, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert says in error["message"]
        assert "\n" not in error["message"]
        assert error["code"] == code


def test_only_one_thing_is_followed(json_server: Running) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    format = {"type": "json_object"}
    for body, says in (
        ({"response_format": format, "guided_regex": "a"}, "response_format or regex"),
        ({"tools": [tool], "guided_regex": "a"}, "does not go with tools"),
    ):
        answer = json_server.post("/v1/chat/completions", messages=MESSAGES, **body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    both = {"tools": [tool], "guided_json": SCHEMA, "tool_choice": "none", "max_tokens": 60}
    assert checked(
        json_server.post("/v1/chat/completions", messages=MESSAGES, **both).json()["choices"][0]["message"]["content"],
        "json",
    )
