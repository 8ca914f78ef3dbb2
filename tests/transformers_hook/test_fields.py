"""Every field of the installed `GenerationConfig` is honoured, refused, or has no say; a new one makes this fail.

When it does: find out what the field does to stock `generate`, write a test, and put it in its list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pairs import output_of
from transformers import CompileConfig, GenerationConfig

from transformers_hook.test_refusals import REFUSED

HONOURED = [
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation", "do_sample",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale",
    "is_assistant", "max_cache_len", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens",
    "min_p", "no_repeat_ngram_size", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "repetition_penalty",
    "return_dict_in_generate", "sequence_bias", "stop_strings", "suppress_tokens", "temperature", "token_healing",
    "top_h", "top_k", "top_p", "typical_p", "watermarking_config",
]  # fmt: skip
"""Tested in this folder, as the first test below makes sure."""

NO_SAY: dict[str, tuple[Any, str]] = {
    "assistant_confidence_threshold": (0.7, "of an assistant model"),
    "assistant_ensemble_weight": (0.5, "of an assistant model"),
    "assistant_lookbehind": (3, "of an assistant model"),
    "cache_config": ({"nbits": 4}, "of a quantised cache, which is refused"),
    "compile_config": (CompileConfig(), "of the forward pass that stock compiles; ours is another one"),
    "continuous_batching_config": (None, "of `generate_batch`"),
    "decoder_start_token_id": (5, "of encoder-decoder models"),
    "disable_compile": (True, "of the forward pass that stock compiles; ours is another one"),
    "diversity_penalty": (0.5, "of groups of beams"),
    "early_stopping": (True, "of beam search"),
    "length_penalty": (2.0, "of beam search"),
    "low_memory": (True, "of contrastive search"),
    "max_matching_ngram_size": (3, "of prompt lookup, which is refused"),
    "num_assistant_tokens": (5, "of an assistant model"),
    "num_assistant_tokens_schedule": ("heuristic", "of an assistant model"),
    "speculation_type": ("dflash", "of an assistant model"),
    "target_lookbehind": (3, "of an assistant model"),
    "transformers_version": ("5.0.0", "a note"),
}
"""Field -> a value that would matter elsewhere, and where."""


def names() -> set[str]:
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def test_every_field_is_in_a_list() -> None:
    refused = {name.split(",")[0] for name in REFUSED}
    known = {*HONOURED, *refused, *NO_SAY}
    assert names() - known == set(), "new in this version of transformers"
    assert known - names() - {"synced_gpus"} == set(), "gone from this version of transformers"
    # The two kinds of cache that are refused are told apart from those that are honoured by value.
    assert set(HONOURED) & refused == {"cache_implementation"}
    assert not {*HONOURED, *refused} & set(NO_SAY)


def test_what_is_called_honoured_is_tested() -> None:
    here = Path(__file__)
    text = "".join(path.read_text() for path in here.parent.glob("test_*.py") if path != here)
    used = set(re.findall(r"""\b(\w+)=|["'](\w+)["']:""", text))
    passed = {name for pair in used for name in pair}
    assert set(HONOURED) - passed == set()


@pytest.mark.parametrize("name", [name for name, (value, _) in NO_SAY.items() if value is not None])
@pytest.mark.thinned(1, most=5)
def test_field_without_a_say(both: Any, llama: Any, prompt: dict[str, Any], text: list[list[int]], name: str) -> None:
    pair = both(llama, prompt, max_new_tokens=8, **{name: NO_SAY[name][0]}).same()
    assert output_of(prompt, pair.ours)[0] == text[0][:8]


def test_all_fields_in_one_config(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    """As a model's `generation_config.json` may have it, written out with every default."""
    config = GenerationConfig(**{**GenerationConfig._get_default_generation_params(), "max_new_tokens": 12})
    both(llama, inputs, generation_config=config).same()
