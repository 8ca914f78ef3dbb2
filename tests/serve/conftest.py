"""Servers around tiny models, one for all tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Running, running
from tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import lookahead
from lookahead import LookaheadConfig

HERMES = (
    "{% if tools %}<|system|>tools: {{ tools | tojson }} as <tool_call>{...}</tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def loaded(model: Any, tokenizer: Any, settings: LookaheadConfig) -> Any:
    return lookahead.load((model, tokenizer), config=settings)


@pytest.fixture(scope="module")
def server(loaded: Any) -> Iterator[Running]:
    with running(loaded) as one:
        yield one


@pytest.fixture(scope="session")
def make_json_model(settings: LookaheadConfig) -> Callable[[str], Any]:
    """A tiny model whose vocabulary has every byte, so that it can write JSON; with a chat template of one's choice."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bare.train_from_iterator(['{"name": "add", "arguments": {"a": 1, "b": 22}}', "true false null yes no"] * 4, trainer)

    def make(template: str = HERMES) -> Any:
        made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>")
        made.chat_template = template
        fields = {"vocab_size": len(made) + 3, "max_position_embeddings": 2048, "eos_token_id": made.eos_token_id}
        return lookahead.load((tiny("Llama", seed=3, stirred=False, **fields), made), config=settings)

    return make


@pytest.fixture(scope="module")
def json_server(make_json_model: Callable[[str], Any]) -> Iterator[Running]:
    with running(make_json_model()) as one:
        yield one
