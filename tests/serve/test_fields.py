"""Every field works under speculation: the reply is the same with guesses and without, and the field has its effect."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from http_server import Running

PROMPT = "the quick brown fox jumps over the lazy dog and then the"
FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "seed": 3},
    "top_k": {"temperature": 1.0, "top_k": 4, "seed": 1},
    "top_p": {"temperature": 1.2, "top_p": 0.7, "seed": 2},
    "min_p": {"temperature": 1.4, "min_p": 0.2, "seed": 2},
    "seed": {"temperature": 1.0, "seed": -7},
    "n": {"temperature": 0.9, "n": 3, "seed": 4},
    "stop": {"stop": ["o", "xyz"]},
    "logit_bias": {"logit_bias": {"30": 50, "31": -100}},
    "presence_penalty": {"presence_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 1.3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"0": 100}},
    "min_tokens": {"min_tokens": 9, "logit_bias": {"0": 100}},
    "stop after min_tokens": {"stop": ["o", "e", "a"], "min_tokens": 11},
    "all": {
        "temperature": 1.1,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 11,
        "n": 2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"25": 2.5},
        "logprobs": 5,
        "min_tokens": 5,
    },
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.thinned(1, most=8)
def test_a_field_gives_the_same_with_guesses_and_without(server: Running, name: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
    plain = server.complete(**body)["choices"]
    body.update(FIELDS[name])
    guessed = server.complete(**body)
    alone = server.complete(**body, lookahead=False)
    assert same(guessed["choices"], alone["choices"])
    assert guessed["choices"] != plain
    assert alone["usage"]["lookahead"]["tried"] == 0
    assert guessed["usage"]["lookahead"]["tried"] > 0
    assert guessed["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


def same(one: Any, other: Any) -> bool:
    """Equal, but for rounding of log-probabilities: a tree's rows are added up in another order than one row."""
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-4)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_min_tokens_and_ignore_eos_keep_the_end_away(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logit_bias": {"0": 100}}
    assert server.complete(**body)["usage"]["completion_tokens"] == 1
    assert server.complete(**body, min_tokens=7)["usage"]["completion_tokens"] == 8
    reply = server.complete(**body, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 20
    assert reply["choices"][0]["finish_reason"] == "length"


def test_each_of_n_choices_is_the_one_of_its_seed(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.0}
    choices = server.complete(**body, n=3, seed=20)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    for number, choice in enumerate(choices):
        alone = server.complete(**body, seed=20 + number)["choices"][0]
        assert (choice["index"], choice["text"]) == (number, alone["text"])


def test_several_prompts_as_text_and_as_ids(server: Running) -> None:
    texts = [PROMPT, "once more the"]
    ids = [server.post("/tokenize", prompt=text).json()["tokens"] for text in texts]
    body = {"max_tokens": 10, "temperature": 0}
    by_text = server.complete(prompt=texts, **body)
    assert [choice["text"] for choice in by_text["choices"]] == [
        choice["text"] for choice in server.complete(prompt=ids, **body)["choices"]
    ]
    assert by_text["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.complete(prompt=ids[1], **body)["choices"][0]["text"] == by_text["choices"][1]["text"]


def test_echo_puts_the_prompt_first(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain = server.complete(**body)["choices"][0]["text"]
    assert server.complete(**body, echo=True)["choices"][0]["text"] == PROMPT + plain


def test_log_probabilities_spell_the_text(server: Running) -> None:
    reply = server.complete(prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2)
    choice = reply["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert [len(top) for top in told["top_logprobs"]] == [2] * len(told["tokens"])
    columns = (told[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    for token, value, top, offset in zip(*columns, strict=True):
        assert choice["text"][offset:].startswith(token)
        assert value == max(top.values())


def test_the_lookahead_field_sets_the_config(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    options = {"window": 0, "budget": 4, "sources": ["prompt", "suffix"]}
    reply = server.complete(**body, lookahead=options)
    assert set(reply["usage"]["lookahead"]["by_source"]) <= {"prompt", "suffix"}
    assert reply["usage"]["lookahead"]["tried"] <= 3 * reply["usage"]["lookahead"]["steps"]
    answer = server.post("/v1/completions", **body, lookahead={"sources": ["magic"]})
    assert answer.status_code == 400
    assert "unknown source 'magic'" in answer.json()["error"]["message"]


def test_a_step_has_a_limit_however_it_is_asked_for(server: Running) -> None:
    for options in ({"window": 256, "ngram": 64, "guesses": 256}, {"budget": 1025}):
        answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=1, lookahead=options)
        assert answer.status_code == 400
        assert "1024" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompts_logprobs(server: Running, stream: bool) -> None:
    """They are the model's own, which one forward pass over the prompt gives; those of the answer follow them."""
    model = server.model
    prompts = [model.encode(text, raw=True) for text in (PROMPT * 4, "the")]
    prompts.append(prompts[0][:1])
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": 5, "temperature": 0, "logprobs": 2, "n": 2}
    plain = server.complete(**body)["choices"]
    if stream:
        found = joined(server, {**body, "echo": True})
    else:
        found = [one["logprobs"] for one in server.complete(**body, echo=True)["choices"]]
    for place, logprobs in enumerate(found):
        prompt = prompts[place // 2]
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt])).logits[0, :-1].float()
        expected = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].tolist()
        own = logprobs["token_logprobs"]
        assert own[0] is None
        assert own[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
        assert own[len(prompt) :] == plain[place]["logprobs"]["token_logprobs"]
        assert logprobs["top_logprobs"][0] is None
        for best, row in zip(logprobs["top_logprobs"][1:], logits.log_softmax(-1), strict=False):
            assert max(best.values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert logprobs["tokens"][len(prompt) :] == plain[place]["logprobs"]["tokens"]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def joined(server: Running, body: dict[str, Any]) -> list[dict[str, list[Any]]]:
    """The log-probabilities of a stream's choices, each put together."""
    found: dict[int, dict[str, list[Any]]] = {}
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for name, values in choice["logprobs"].items():
                        found.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


def test_a_prompt_can_be_scored_alone(server: Running) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    alone = server.complete(**body, max_tokens=0)
    longer = server.complete(**body, max_tokens=1)["choices"][0]["logprobs"]
    (choice,) = alone["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"] == {name: values[:-1] for name, values in longer.items()}
    assert alone["usage"] == {"prompt_tokens": len(choice["logprobs"]["tokens"]), "completion_tokens": 0} | {
        "total_tokens": len(choice["logprobs"]["tokens"])
    }
    for wrong in ({"echo": False}, {"logprobs": None}, {"stream": True}):
        answer = server.post("/v1/completions", **{**body, "max_tokens": 0, **wrong})
        assert answer.status_code == 400
        assert "max_tokens=0 is for echo with logprobs" in answer.json()["error"]["message"]
