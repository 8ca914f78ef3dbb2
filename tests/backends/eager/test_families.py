"""One tiny random model per family, in fp32: `model.generate` gives the same tokens with and without lookahead.

Greedy and sampled, one prompt and a left-padded batch. Weights are wide, so that no two logits are within rounding of
each other; windows are shorter than the prompts. `docs/models.py` tries all classes of transformers in the same way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from marks import slow_but
from tiny import tiny

import lookahead

WINDOW, NEW_TOKENS, EOS = 7, 24, 19
LONG = [5, 9, 17, 23, 42, 9, 17, 30, 5, 9, 17, 23, 51, 8, 11, 9, 17, 23, 42, 33, 5, 9]
BATCH = (LONG, LONG[3:14], LONG[7:10])

SLIDING = {"sliding_window": WINDOW}
HYBRID = {**SLIDING, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", SLIDING),
    "Mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None}),
    "Qwen2": ("Qwen2", {**HYBRID, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 8}),
    "Qwen3Moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}),
    "Gemma": ("Gemma", {"head_dim": 8}),
    "Gemma2": ("Gemma2", {**HYBRID, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "Gemma3": ("Gemma3Text", HYBRID),
    "Phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "Phi3": ("Phi3", SLIDING),
    "GPT2": ("GPT2", {}),
    "GPTBigCode": ("GPTBigCode", {}),
    "GPTJ": ("GPTJ", {"rotary_dim": 4}),
    "GPTNeoX": ("GPTNeoX", {"rotary_pct": 0.5}),
    "OPT": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "Falcon": ("Falcon", {}),
    "Falcon, new architecture": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Starcoder2": ("Starcoder2", SLIDING),
    "Olmo2": ("Olmo2", {}),
    "Olmo3": ("Olmo3", HYBRID),
    "Olmoe": ("Olmoe", EXPERTS),
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "GraniteMoe": ("GraniteMoe", EXPERTS),
    "Cohere": ("Cohere", {}),
    "Cohere2": ("Cohere2", HYBRID),
    "DeepseekV2": ("DeepseekV2", {**LATENT, "n_shared_experts": 1}),
    "DeepseekV3": ("DeepseekV3", LATENT),
    "GptOss": ("GptOss", {**EXPERTS, **HYBRID}),
    "Glm4": ("Glm4", {"head_dim": 8}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "StableLm": ("StableLm", {}),
    "Exaone4": ("Exaone4", HYBRID),
    "Nemotron": ("Nemotron", {}),
}
WINDOWED = [name for name, (_, fields) in FAMILIES.items() if fields.get("sliding_window")]
QUICK = ("Mistral", "Mixtral", "Gemma2", "GPT2", "GPTNeoX", "DeepseekV3", "GptOss")
"""One of each idea: windows, experts, capped logits, learned and partial rotary positions, latent attention, sinks."""


def build(kind: str, fields: dict[str, Any]) -> Any:
    """Not tied: tied and this small, a model says its last token again and again."""
    return tiny(kind, stirred=False, tie_word_embeddings=False, **fields)


@cache
def model(family: str) -> Any:
    return build(*FAMILIES[family])


def generate(model: Any, prompts: tuple[list[int], ...], sample: bool, **how: Any) -> list[list[int]]:
    """New tokens per prompt, padding included; draws from torch's generator."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(3)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=sample, eos_token_id=EOS, pad_token_id=0, **how
    )
    return output[:, width:].tolist()


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", slow_but(FAMILIES, *QUICK))
@pytest.mark.thinned(1, most=3)
def test_same_tokens(family: str, sample: bool) -> None:
    steps = tokens = 0
    for prompts in ((LONG,), BATCH):
        hook = lookahead.decoding(window=3, ngram=4, guesses=4, budget=40)
        found = generate(model(family), prompts, sample, custom_generate=hook)
        assert found == generate(model(family), prompts, sample)
        steps += sum(stats.steps for stats in hook.stats)
        tokens += sum(stats.generated_tokens for stats in hook.stats)
    assert sample or steps < 0.9 * tokens  # guesses were accepted, so trees decided the output


@pytest.mark.parametrize("family", slow_but(WINDOWED, *QUICK))
@pytest.mark.thinned(1, most=2)
def test_the_window_matters(family: str) -> None:
    """Without it the tokens are others, so a window that is read wrongly would be seen."""
    kind, fields = FAMILIES[family]
    wide = build(kind, {**fields, "sliding_window": 200})
    assert generate(wide, BATCH, False) != generate(model(family), BATCH, False)
