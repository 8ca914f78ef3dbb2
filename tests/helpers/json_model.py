"""A tiny model whose vocabulary has every byte, so that it can write JSON."""

from __future__ import annotations

from typing import Any

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


def json_tokenizer(template: str = HERMES, decoder: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a chat template; with another decoder than its own, if one is given."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoder or decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bare.train_from_iterator(['{"name": "add", "arguments": {"a": 1, "b": 22}}', "true false null yes no"] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>")
    made.chat_template = template
    return made


def json_network(tokenizer: Any) -> Any:
    """A tiny Llama for this tokenizer, the same in every run."""
    fields = {"vocab_size": len(tokenizer) + 3, "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    return tiny("Llama", seed=3, stirred=False, **fields)


def json_model(settings: LookaheadConfig, tokenizer: Any = None, device: str = "cpu") -> Any:
    """The two together, loaded."""
    tokenizer = tokenizer or json_tokenizer()
    return lookahead.load((json_network(tokenizer).to(device), tokenizer), config=settings)


def decoder_of_5_17(*, strips: bool = False) -> Any:
    """The decoder that transformers 5.17 gives the byte-level tokenizers of GGUF files."""
    parts: list[Any] = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
