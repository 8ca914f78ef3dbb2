"""Schemas that compile but cannot be followed: a 400 before anything runs, and a clear end where it shows later."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from http_server import Running
from llguidance import LLMatcher, LLParserLimits
from marks import slow_but

from lookahead.algorithm.tree import TokenTree
from lookahead.serve import grammar
from lookahead.serve.errors import ApiError
from lookahead.serve.grammar import GrammarMask, Grammars, json_grammar
from lookahead.serve.service import Service

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "hello"}]
NUMBER = {"type": "integer"}


def object_of(properties: dict[str, Any], required: bool) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


def numbers(count: int, required: bool = False) -> dict[str, Any]:
    return object_of({f"p{number}": NUMBER for number in range(count)}, required)


LISTED = object_of({"v": NUMBER, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=True)
TREE = {"$defs": {"node": object_of({"c": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, required=True)}}
RECURSIVE = {"list": LISTED, "tree": {**TREE, "$ref": "#/$defs/node"}}
BAD = {
    "itself": {"$ref": "#"},
    "itself by name": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "endless objects": object_of({"a": {"$ref": "#"}}, required=True),
    "endless lists": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "2000 optional": numbers(2000),
    "2000 optional inside": object_of({"a": numbers(2000)}, required=True),
    "16000 optional": numbers(16_000),
    "5000 objects": {"anyOf": [object_of({f"p{number}": NUMBER}, required=True) for number in range(5000)]},
}
LARGE = ("2000 optional inside", "16000 optional", "5000 objects")
"""Schemas that take long; `2000 optional` is one that is quick."""


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def refused(answer: Any) -> str:
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_schema")
    message: str = error["message"]
    assert message.startswith("the schema cannot be ")
    assert len(message) < 400
    assert "\n" not in message
    assert "<" not in message
    return message


@pytest.mark.parametrize("name", slow_but(BAD, *[name for name in BAD if name not in LARGE]))
def test_what_cannot_begin_is_refused(json_server: Running, name: str) -> None:
    body = {"messages": SAID, "response_format": formatted(BAD[name]), "max_tokens": 8, "stream": len(name) % 2 > 0}
    message = refused(json_server.post(CHAT, **body))
    assert ("no text fits it" in message) == (name in ("itself", "itself by name", "each other"))
    assert json_server.client.get("/ready").status_code == 200
    assert json_server.complete(prompt="the", max_tokens=2)["choices"]


def test_a_tool_that_cannot_begin_is_refused(json_server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": BAD["itself"]}}
    refused(json_server.post(CHAT, messages=SAID, tools=[tool], tool_choice="required"))
    text = {"format": {"type": "json_schema", "name": "it", "schema": BAD["endless objects"]}}
    refused(json_server.post("/v1/responses", input="x", text=text))


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_recursion_that_can_end_works(json_server: Running, name: str) -> None:
    body = {"messages": SAID, "response_format": formatted(RECURSIVE[name]), "temperature": 1.0, "seed": 3}
    answers = [json_server.post(CHAT, **body, max_tokens=300, lookahead=way) for way in (True, False)]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert json.loads(texts[0]).keys() == ({"v", "next"} if name == "list" else {"c"})


@pytest.mark.parametrize("schema", [numbers(400), numbers(2000, required=True)], ids=["optional", "required"])
def test_a_large_schema_works(json_server: Running, schema: dict[str, Any]) -> None:
    body = {"messages": SAID, "response_format": formatted(schema), "max_tokens": 12, "seed": 1}
    answer = json_server.post(CHAT, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


def test_a_grammar_that_fails_later_ends_its_request_with_a_reason(json_server: Running) -> None:
    """The text before is longer than what is tried before the request is accepted."""
    schema = object_of({"a": {"type": "string", "minLength": 20}, "b": numbers(600)}, required=True)
    body = {"messages": SAID, "response_format": formatted(schema), "max_tokens": 500, "seed": 1}
    long = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    expected, found = json_server.complete(**long), list[Any]()
    neighbour = threading.Thread(target=lambda: found.append(json_server.complete(**long)))
    neighbour.start()
    for way in (True, False):
        message = refused(json_server.post(CHAT, **body, lookahead=way))
        assert "cannot be followed after" in message
        assert "tokens: Parser Error: Current row has 2399 items" in message
    with json_server.client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "cannot be followed after" in json.loads(events[-2])["error"]["message"]
    neighbour.join()
    assert found[0]["choices"] == expected["choices"]
    assert json_server.client.get("/ready").status_code == 200


def test_a_full_lexer_is_replaced(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of a schema share a lexer. What some have written must not end the others, nor the next ones."""
    schema = {"type": "string", "pattern": "^.*(a|b).{30}(c|d).{30}$"}
    body = {"messages": SAID, "response_format": formatted(schema), "max_tokens": 60, "temperature": 1.0, "n": 2}

    def ask(seed: int) -> Any:
        answer = json_server.post(CHAT, **body, seed=seed)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    expected = [ask(seed) for seed in range(2)]
    compiled: list[int] = []
    make = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *args: (compiled.append(args[2]), make(*args))[1])
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=2000, verbose_errors=False))
    monkeypatch.setattr(json_server.service, "grammars", Grammars(json_server.model))
    assert [ask(seed) for seed in range(2)] == expected
    assert len(compiled) > 1, "the lexer was never full"
    assert compiled == list(range(len(compiled)))
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=150, verbose_errors=False))
    monkeypatch.setattr(json_server.service, "grammars", Grammars(json_server.model))
    assert "lexer error: too many states" in refused(json_server.post(CHAT, **body, seed=1))


def test_a_guess_beyond_the_limits_ends_nothing(make_json_model: Callable[[], Any]) -> None:
    """A matcher that has failed never works again. A guess that nobody accepts must not do that to its request."""
    model = make_json_model()
    grammars, size, ends = Grammars(model), model.backend.vocab_size, model.stop_ids
    grammars.mask(json_grammar(NUMBER))  # makes the tokenizer
    text = json_grammar({"anyOf": [{"const": "yes"}, numbers(600)]})
    compiled = LLMatcher(grammars._tokenizer, text, log_level=0, limits=grammar.LIMITS)
    brace, quote = (model.tokenizer.convert_tokens_to_ids(one) for one in '{"')
    tree = TokenTree([0, brace, quote], [-1, 0, 0], [0, 1, 1], [0, 1, 2], origins=[0, 0])
    sequence: Any = SimpleNamespace(tokens=[0], prompt_tokens=1)

    def allowed(row: Any) -> set[int]:
        return {token for token in range(size) if int(row[token >> 5]) >> (token & 31) & 1}

    mask = GrammarMask(compiled, size, ends)
    rows = mask.rows(tree, sequence)
    assert {brace, quote} <= allowed(rows[0])
    after_quote = allowed(rows[2])
    assert after_quote
    assert all(model.tokenizer.decode([token]).startswith("y") for token in after_quote)
    mask.accept([quote])  # the text takes the other way
    bare = TokenTree([quote], [-1], [0], [0])
    assert allowed(mask.rows(bare, SimpleNamespace(tokens=[0, quote], prompt_tokens=1))[0]) == after_quote  # type: ignore[arg-type]
    other = GrammarMask(compiled, size, ends)
    other.rows(tree, sequence)
    with pytest.raises(ApiError, match="the schema cannot be followed after"):
        other.accept([brace])


def test_a_long_schema_is_not_read_on_the_event_loop(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    make, compile_ = grammar.LLMatcher.grammar_from_json_schema, Grammars._compile

    def noted(schema: Any, **options: Any) -> str:
        found.append(threading.current_thread().name)
        return make(schema, **options)

    def compiled(self: Grammars, text: str, full: int) -> Any:
        found.append(threading.current_thread().name)
        return compile_(self, text, full)

    monkeypatch.setattr("lookahead.serve.structured.json_grammar", lambda schema: noted(schema))
    monkeypatch.setattr(Grammars, "_compile", compiled)
    service: Service = json_server.service
    monkeypatch.setattr(service, "grammars", Grammars(service.model))
    body = {"messages": SAID, "response_format": formatted(numbers(300)), "max_tokens": 2}
    assert json_server.post(CHAT, **body).status_code == 200
    assert len(found) == 2
    assert all(name.startswith("lookahead-prepare") for name in found)
