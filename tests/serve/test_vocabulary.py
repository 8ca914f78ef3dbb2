"""What llguidance reads in a vocabulary, compared with what the tokenizer writes; where they differ, grammars are
refused and all else works."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Running, running
from json_model import decoder_of_5_17, json_model, json_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lookahead import LookaheadConfig
from lookahead.serve.vocabulary import read_vocabulary, sample

MISREAD = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
"""llguidance sees the first part, and takes the vocabulary for one of SentencePiece."""
SCHEMA = {"type": "object", "properties": {"title": {"enum": ["yes", "no"]}}, "required": ["title"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 60, "temperature": 0}


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's way: pieces with a mark for the space, bytes for the rest, and a first space that texts drop."""
    words = [
        "a",
        "b",
        "\u2581a",
        "\u2581the",
        "\u2581",
        "\u2581\u2581",
        "{",
        '"',
        '":',
        ",",
        "é",
        "中",
        "\u2581中",
        "b\u2581a",
    ]
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    bare = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    bare.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("made", [json_tokenizer, sentencepiece, lambda: json_tokenizer(decoder=decoder_of_5_17())])
def test_a_vocabulary_that_is_read_well(made: Any) -> None:
    tokenizer = made()
    before = tokenizer.backend_tokenizer.to_str()
    read = read_vocabulary(tokenizer, len(tokenizer) + 5, [tokenizer.eos_token_id])
    for token in sample(dict.fromkeys(range(2, len(tokenizer)), "")):
        text = tokenizer.decode([token])
        assert "\ufffd" in text or text == "" or read.decode_bytes([token]).decode().endswith(text)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_the_sample_has_tokens_of_every_kind() -> None:
    pieces = [f"w{number}" for number in range(20_000)]
    pieces[777], pieces[778], pieces[779] = "\u0120dog", '":', "ä\u00b8Ń"
    found = sample(dict(enumerate(pieces)))
    assert {777, 778, 779} <= set(found)
    assert 256 <= len(found) <= 300
    assert found == sample(dict(enumerate(pieces)))
    assert sample({}) == []


def test_a_misread_vocabulary_is_named() -> None:
    tokenizer = json_tokenizer(decoder=MISREAD)
    with pytest.raises(ValueError, match=r"llguidance reads token \d+ as b'.*', which decodes to .* is 'Sequence'"):
        read_vocabulary(tokenizer, len(tokenizer), [0])
    with pytest.raises(ValueError, match=r"it is a str, which has no tokenizer\.json"):
        read_vocabulary("not fast", 10, [0])


def test_the_server_mends_its_own_copy(settings: LookaheadConfig) -> None:
    """A tokenizer that the caller has loaded is the caller's: it keeps its decoder."""
    tokenizer = json_tokenizer(decoder=decoder_of_5_17())
    with running(json_model(settings, tokenizer)) as server:
        answer = server.post("/v1/chat/completions", response_format=FORMAT, **ASKED)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["title"] in ("yes", "no")
    assert type(tokenizer.backend_tokenizer.decoder).__name__ == "Sequence"


@pytest.fixture(scope="module")
def log_lines() -> Iterator[list[str]]:
    found: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("lookahead.serve")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


@pytest.fixture(scope="module")
def misread(settings: LookaheadConfig, log_lines: list[str]) -> Iterator[Running]:
    with running(json_model(settings, json_tokenizer(decoder=MISREAD))) as server:
        yield server


def test_the_log_says_so_once_at_the_start(misread: Running, log_lines: list[str]) -> None:
    (line,) = log_lines
    assert "\n" not in line
    assert "structured output" in line
    assert "llguidance reads token" in line


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
    ],
)
def test_what_needs_a_grammar_is_refused(misread: Running, body: dict[str, Any], stream: bool) -> None:
    answer = misread.post("/v1/chat/completions", stream=stream, **body, **ASKED)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "grammars_unavailable"
    assert "tokenizer does not work with grammars: llguidance reads token" in error["message"]
    assert "leave out response_format" in error["message"]


def test_responses_refuse_it_too(misread: Running) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    answer = misread.post("/v1/responses", input="add", max_output_tokens=20, text=text)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "grammars_unavailable"


def test_all_else_works(misread: Running) -> None:
    for body in ({}, {"tools": [TOOL]}, {"response_format": {"type": "text"}}):
        answer = misread.post("/v1/chat/completions", **{**ASKED, "max_tokens": 5}, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
    assert misread.complete(prompt="add", max_tokens=3, min_tokens=3)["usage"]["completion_tokens"] == 3
