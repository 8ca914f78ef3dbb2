"""Reasoning: text between tags is a part of its own, streamed and not, and structured output comes after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from forced import saying
from http_server import Running, running
from json_model import HERMES, json_model, json_tokenizer

from lookahead import LookaheadConfig
from lookahead.serve.reasoning import ReasoningReader, Stage, Tags, find_tags, stage_of
from lookahead.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
THINK = Tags("<think>", "</think>")
OPENS = HERMES + (
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 22]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "add", "schema": ADD["function"]["parameters"]}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def thinker(settings: LookaheadConfig, template: str, tags: tuple[str, ...] = (THINK.begin, THINK.end)) -> Any:
    """A model whose vocabulary has these tags, as Qwen's has."""
    tokenizer = json_tokenizer(template)
    tokenizer.add_tokens([*tags, "<tool_call>", "</tool_call>"], special_tokens=False)
    return json_model(settings, tokenizer)


@pytest.fixture(scope="module")
def free(settings: LookaheadConfig) -> Iterator[Running]:
    """A model that begins to think or does not."""
    with running(thinker(settings, HERMES)) as server:
        yield server


@pytest.fixture(scope="module")
def opened(settings: LookaheadConfig) -> Iterator[Running]:
    """A model whose template begins the reasoning, unless `enable_thinking` is off."""
    with running(thinker(settings, OPENS)) as server:
        yield server


def message(server: Running, **body: Any) -> dict[str, Any]:
    """The message of a reply, which must be the same when it is streamed."""
    asked = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, **body}
    answer = server.post(CHAT, **asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    streamed = server.post(CHAT, **asked, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (choice["message"].get(name) or "")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["message"] | {"usage": answer.json()["usage"], "finish_reason": choice["finish_reason"]}


TEXTS = [
    ("<think>\nWell, <b>.\n</think>\n\nYes < no.", "Well, <b>.", "Yes < no."),
    ("<think></think>Yes.", "", "Yes."),
    ("\n<think> a </thinkx </think>\n", "a </thinkx", ""),
    ("Yes <think>no</think>.", "", "Yes <think>no</think>."),
    (" <thin", "", " <thin"),
    ("<think>never done \n", "never done", ""),
    ("", "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(("text", "reasoning", "answer"), TEXTS)
def test_reasoning_is_split_off_pieces_of_any_size(text: str, reasoning: str, answer: str, size: int) -> None:
    for stage in (Stage.UNDECIDED, Stage.THINKING):
        if stage is Stage.THINKING:
            if "<think>" not in text.lstrip()[:7]:
                continue
            text = text.lstrip().removeprefix("<think>")
        reader = ReasoningReader(THINK, stage)
        parts = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
        parts.append(reader.finish())
        assert "".join(part for part, _ in parts) == reasoning
        assert "".join(part for _, part in parts) == answer


@pytest.mark.parametrize(("text", "reasoning", "answer"), [one for one in TEXTS if one[0]])
@pytest.mark.thinned(1, most=3)
def test_a_reply_has_its_reasoning_apart(free: Running, text: str, reasoning: str, answer: str) -> None:
    with saying(free, text):
        found = message(free)
        assert found.get("reasoning_content", "") == found.get("reasoning", "") == reasoning
        assert (found["content"] or "") == answer
        assert found["finish_reason"] == "stop"
        assert message(free, separate_reasoning=False)["content"] == text
        left_out = message(free, include_reasoning=False)
        assert "reasoning_content" not in left_out
        assert (left_out["content"] or "") == answer


def test_reasoning_tokens_are_counted(free: Running) -> None:
    tokenizer = free.model.tokenizer
    for thought, answer in (("<think>\nWell.\n</think>", "\n\nYes."), ("", "Yes.")):
        with saying(free, thought + answer):
            count = len(tokenizer(thought)["input_ids"])
            usage = message(free)["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == count
            assert usage["completion_tokens"] == len(tokenizer(thought + answer)["input_ids"]) + 1


def test_a_template_may_begin_the_reasoning(opened: Running) -> None:
    with saying(opened, "Well.\n</think>\n\nYes."):
        found = message(opened)
        assert (found["reasoning"], found["content"]) == ("Well.", "Yes.")
    with saying(opened, "Well"):
        found = message(opened)
        assert (found["reasoning"], found["content"]) == ("Well", None)
    with saying(opened, "Yes."):
        for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            found = message(opened, **off)
            assert found["content"] == "Yes."
            assert "reasoning" not in found


@pytest.mark.parametrize(
    ("begun", "stage"),
    [("<think>Well", Stage.THINKING), ("<think>a</think>Yes", Stage.ANSWER), ("Yes", Stage.ANSWER), (" ", None)],
)
def test_a_begun_message_says_where_it_is(begun: str, stage: Stage | None) -> None:
    assert stage_of(THINK, "<|assistant|>", begun) is (stage or Stage.UNDECIDED)
    assert stage_of(THINK, "<|assistant|><think>\n", " ") is Stage.THINKING
    assert stage_of(THINK, "<|assistant|><think>\n\n</think>\n\n") is Stage.ANSWER
    assert stage_of(None, "<think>") is Stage.ANSWER


def test_several_choices_and_logprobs(free: Running) -> None:
    with saying(free, "<think>a</think>b"):
        body = {"messages": MESSAGES, "n": 2, "logprobs": True, "max_tokens": 50}
        for choice in free.post(CHAT, **body).json()["choices"]:
            assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")
            spelled = "".join(token["token"] for token in choice["logprobs"]["content"])
            assert spelled == "<think>a</think>b"
        assert message(free, logprobs=True)["content"] == "b"


# Structured output and tools.


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.thinned(1, most=1)
def test_a_schema_holds_after_the_reasoning(opened: Running, free: Running, seed: int) -> None:
    for server in (opened, free):
        end = str(server.model.tokenizer.convert_tokens_to_ids("</think>"))
        body = {"response_format": FORMAT, "logit_bias": {end: 4}, "temperature": 1.0, "seed": seed}
        found = message(server, **body, max_tokens=400)
        assert found == message(server, **body, max_tokens=400, lookahead=False) | {"usage": found["usage"]}
        assert found["finish_reason"] == "stop"
        assert json.loads(found["content"]) in ({"a": 1}, {"a": 22})
        if server is opened:
            assert found["reasoning"]


def test_without_reasoning_a_schema_holds_at_once(opened: Running) -> None:
    found = message(opened, response_format=FORMAT, chat_template_kwargs={"enable_thinking": False})
    assert json.loads(found["content"]) in ({"a": 1}, {"a": 22})
    assert "reasoning" not in found


def test_other_structured_outputs_come_after_the_reasoning(opened: Running) -> None:
    end = str(opened.model.tokenizer.convert_tokens_to_ids("</think>"))
    for body in (
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'start: "yes" | "no"'},
    ):
        found = message(opened, **body, logit_bias={end: 4}, temperature=1.0, seed=4)
        assert found["content"] in ("yes", "no")
        assert found["reasoning"]
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    assert opened.post(CHAT, messages=MESSAGES, response_format=bad).status_code == 400


def test_a_call_inside_of_the_reasoning_is_no_call(free: Running) -> None:
    with saying(free, f"<think>{CALL}</think>\n{CALL}"):
        found = message(free, tools=[ADD])
        assert found["reasoning"] == CALL
        assert len(found["tool_calls"]) == 1
        assert found["content"] is None
        assert found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.thinned(1, most=1)
def test_a_forced_call_comes_after_the_reasoning(opened: Running, choice: str) -> None:
    """Its tags are tokens of their own, as models are trained to write them."""
    vocabulary = opened.model.tokenizer.get_vocab()
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    bias = {str(vocabulary["</think>"]): 4, str(vocabulary["<tool_call>"]): 30}
    body = {"tools": [strict], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.0, "seed": 3}
    found = message(opened, **body, logit_bias=bias, max_tokens=300)
    calls = found["tool_calls"]
    assert all(json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 22}) for call in calls)
    raw = opened.post(CHAT, messages=MESSAGES, **body, logit_bias=bias, max_tokens=300, logprobs=True).json()
    spelled = [token["token"] for token in raw["choices"][0]["logprobs"]["content"]]
    assert "<tool_call>" in spelled
    assert "</tool_call>" in spelled


# Responses.


def test_responses_have_a_reasoning_item(opened: Running) -> None:
    asked = {"input": "hello", "max_output_tokens": 100, "temperature": 0}
    with saying(opened, "Well.\n</think>\n\nYes."):
        whole = opened.post("/v1/responses", **asked).json()
        lines = opened.post("/v1/responses", **asked, stream=True).text.splitlines()
    thought, said = whole["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "Well."}]
    assert thought["status"] == "completed"
    assert said["content"][0]["text"] == "Yes."
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = list(dict.fromkeys(one["type"] for one in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_item.done",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.completed",
    ]
    indices = {one["item_id"].split("-")[0]: one["output_index"] for one in events if "item_id" in one}
    assert indices == {"rs": 0, "msg": 1}
    last = events[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["reasoning", "message"]
    assert last[0]["content"] == thought["content"]
    with saying(opened, f"Well.\n</think>\n\n{CALL}"):
        tool = {"type": "function", **ADD["function"]}
        called = opened.post("/v1/responses", **asked, tools=[tool]).json()["output"]
        assert [item["type"] for item in called] == ["reasoning", "function_call"]
        again = [{"role": "user", "content": "hello"}, *called]
        again.append({"type": "function_call_output", "call_id": called[1]["call_id"], "output": "2"})
        assert opened.post("/v1/responses", **{**asked, "input": again}, tools=[tool]).status_code == 200


# The tags.


def test_tags_are_found_or_named(settings: LookaheadConfig) -> None:
    plain = json_tokenizer()
    assert find_tags("auto", plain, HERMES) is None
    assert find_tags("auto", plain, HERMES + "{# <think></think> #}") == THINK
    assert find_tags("<a> </a>", plain, HERMES) == Tags("<a>", "</a>")
    own = thinker(settings, HERMES, ("[THINK]", "[/THINK]")).tokenizer
    found = find_tags("auto", own, HERMES)
    assert found == Tags("[THINK]", "[/THINK]", own.convert_tokens_to_ids("[/THINK]"))
    assert find_tags("none", own, HERMES) is None
    control = json_tokenizer()
    control.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert find_tags("auto", control, HERMES) is None  # they are not in the text
    with pytest.raises(ValueError, match="the tokenizer leaves '<think>' out of texts"):
        find_tags("<think> </think>", control, HERMES)


@pytest.mark.parametrize("tags", ["<a>", "<a> <a>", "", "a b c"])
def test_other_settings_are_refused(tags: str) -> None:
    with pytest.raises(ValueError, match="must be auto, none, or two tags"):
        ServeSettings(reasoning_tags=tags)


def test_a_server_with_other_tags_and_with_none(make_json_model: Any) -> None:
    model = make_json_model()
    with running(model, reasoning_tags="<a> </a>") as server, saying(server, "<a>b</a>c"):
        assert message(server)["reasoning"] == "b"
    with running(model) as server, saying(server, "<think>b</think>c"):
        assert message(server)["content"] == "<think>b</think>c"
