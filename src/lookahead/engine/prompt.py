"""Encodes prompts, one or a batch: text, chat messages or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from jinja2 import TemplateError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text (one user message), token ids, or chat messages."""


def encode_prompt(
    tokenizer: Any,
    name: str,
    vocab_size: int,
    prompt: Prompt,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a prompt for the model of this name. Text becomes one user message of the chat template, unless
    `raw`. `tools` are the functions that the template describes to the model. `variables` are more variables of the
    template, or the options `add_generation_prompt` and `continue_final_message` of `apply_chat_template`."""
    template = getattr(tokenizer, "chat_template", None)
    prompt = as_plain(prompt)
    if isinstance(prompt, str) and not raw and template:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    elif _all(prompt, Integral):
        return _check_ids(prompt, vocab_size)
    elif _all(prompt, Mapping):
        if not template:
            raise ValueError(f"model {name!r} has no chat template; pass the prompt as text")
        try:
            given = {"add_generation_prompt": True, **(variables or {})}
            ids = list(tokenizer.apply_chat_template(prompt, tools=tools, tokenize=True, return_dict=False, **given))
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(f"the chat template of {name!r} refuses these messages: {why}") from error
    else:
        raise ValueError(f"a prompt is text, chat messages or token ids, not {prompt!r:.60}")
    bos = getattr(tokenizer, "lookahead_bos", None)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _check_ids(ids: Sequence[Any], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token!r} is not one of the model's 0 to {vocab_size - 1}")
    return [int(token) for token in ids]


def as_plain(prompt: Any) -> Any:
    """Turn tensors and arrays of token ids into lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _all(prompt: Any, kind: type) -> bool:
    """Whether this is a sequence whose items are all of this type; an empty one is."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        return False
    return all(issubclass(found, kind) for found in set(map(type, prompt)))


def is_batch(prompt: Any) -> bool:
    """True for several prompts: texts, token lists or chats. One chat is a list of dicts, one token list of ints."""
    return bool(prompt) and _all(prompt, Sequence) and not isinstance(prompt, str)


def check_batch(prompt: Any, single: bool) -> bool:
    """Whether these are several prompts; ValueError if there may be only one."""
    many = is_batch(prompt)
    if single and many:
        raise ValueError(f"stream() takes one prompt, not {len(prompt)}; call it for each, or generate() for all")
    return many
