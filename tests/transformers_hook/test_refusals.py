"""What lookahead decoding cannot honour is refused: one line that names the argument, and nothing is generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import Recorder, decoding
from tiny import tiny
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from lookahead.transformers_hook.arguments import refuse_unsupported
from lookahead.transformers_hook.dropped import Dropped

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 3}, "num_beams=3"),
    "num_beams, sampled": ({"num_beams": 3, "do_sample": True}, "num_beams=3"),
    "num_beam_groups": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam_groups=2"),
    "constraints": ({"constraints": [], "num_beams": 2}, "constraints"),
    "force_words_ids": ({"force_words_ids": [[5]], "num_beams": 2}, "force_words_ids"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers=low"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "use_mtp": ({"use_mtp": True}, "use_mtp=True"),
    "use_cache": ({"use_cache": False}, "use_cache=False"),
    "cache_implementation": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "cache_implementation, static": ({"cache_implementation": "offloaded_static"}, "cache_implementation='offloaded_s"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus=True"),
}
"""Argument -> a call with it, and what the message must say."""


def refused(model: Any, inputs: dict[str, Any], says: str, **kwargs: Any) -> None:
    """One line, nothing generated, and a streamer that waits is told."""
    streamer, hook = Recorder(), decoding()
    with pytest.raises(ValueError, match=says) as caught:
        model.generate(**inputs, max_new_tokens=4, **kwargs, streamer=streamer, custom_generate=hook)
    assert "\n" not in str(caught.value)
    assert not hook.stats
    assert len(streamer.puts) <= 1


@pytest.mark.parametrize("name", REFUSED)
def test_refused(llama: Any, inputs: dict[str, Any], name: str) -> None:
    kwargs, says = REFUSED[name]
    refused(llama, inputs, says, **kwargs)


def test_assistant_model(llama: Any, prompt: dict[str, Any]) -> None:
    refused(llama, prompt, "assistant_model", assistant_model=llama)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quantized", "rounds K/V"),
        ("offloaded", "in the memory of the CPU"),
        ("offloaded_static", "in the memory of the CPU"),
        ("offloaded_hybrid", "in the memory of the CPU"),
        ("of tomorrow", "is not a cache that lookahead decoding knows"),
    ],
)
def test_cache_implementation(name: str, says: str) -> None:
    """`generate` itself wants a package for the first before it ever calls us."""
    config = GenerationConfig(use_cache=True)
    config.cache_implementation = name
    with pytest.raises(ValueError, match=f"cache_implementation='{name}' .*{says}.*; leave it out, or leave out"):
        refuse_unsupported(config, Dropped())


def test_positions_of_the_users(both: Any, llama: Any, batch: dict[str, Any], prompt: dict[str, Any]) -> None:
    """The next token's position is one more than the last one's, wherever that is."""
    usual = (batch["attention_mask"].cumsum(dim=-1) - 1).clamp_min(0)
    for positions in (usual, usual + 1, usual * 2):
        both(llama, {**batch, "position_ids": positions}, max_new_tokens=12).same()
    both(llama, {**prompt, "position_ids": torch.arange(prompt["input_ids"].shape[1])[None] * 2}).same()


def test_model_arguments(both: Any, llama: Any, gpt2: Any, prompt: dict[str, Any]) -> None:
    """Stock hands them to every forward pass; `token_type_ids` even changes what GPT-2 says. Labels go to none."""
    small = {"input_ids": prompt["input_ids"][:, :8] % 61, "attention_mask": prompt["attention_mask"][:, :8]}
    kinds = torch.ones_like(small["input_ids"])
    with_kinds = both(gpt2, {**small, "token_type_ids": kinds}, max_new_tokens=12).same()
    assert with_kinds.tokens.tolist() != both(gpt2, small, max_new_tokens=12).same().tokens.tolist()
    both(llama, {**prompt, "labels": prompt["input_ids"]}, max_new_tokens=12).same()
    with pytest.raises(ValueError, match="windows"):
        llama.generate(**prompt, windows=3, custom_generate=decoding())


def test_token_types_that_differ_between_the_rows_are_refused(gpt2: Any) -> None:
    inputs = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    both_kinds = torch.tensor([[1, 1, 1], [2, 2, 2]])
    says = r"token_type_ids ends in different values for the rows of the batch \(\[1, 2\]\)"
    refused(gpt2, inputs, says, token_type_ids=both_kinds)


def test_token_types_that_differ_before_the_end(both: Any, gpt2: Any) -> None:
    """New tokens are of the last one's type."""
    inputs = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    for kinds in ([[1, 2, 1], [2, 2, 1]], [[0, 0, 0], [3, 0, 0]]):
        both(gpt2, {**inputs, "token_type_ids": torch.tensor(kinds)}, max_new_tokens=12).same()


def test_model_argument_that_is_none(both: Any, gpt2: Any) -> None:
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    both(gpt2, {**inputs, "token_type_ids": None, "position_ids": None, "past_key_values": None}).same()


@pytest.mark.parametrize("keep", [0, 1])
def test_logits_to_keep(both: Any, llama: Any, prompt: dict[str, Any], keep: int) -> None:
    """How many rows of logits stock computes of the prompt changes nothing it says."""
    both(llama, {**prompt, "logits_to_keep": keep}, max_new_tokens=8).same()


def test_models_without_a_cache_to_read() -> None:
    """An encoder-decoder, a recurrent model: the message names the model and the reason."""
    tiny = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(**tiny, decoder_start_token_id=0)).eval()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1)).eval()
    for model, says in ((t5, "'t5'.*encoder-decoder"), (mamba, "'mamba'.*Mamba-1.*no state with several tokens")):
        with pytest.raises(ValueError, match=says):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, custom_generate=decoding())


def test_attention_without_a_mask(make_model: Any, prompt: dict[str, Any]) -> None:
    """Also where it was changed after a call that went well."""
    model = make_model(eos_token_id=None)
    model.generate(**prompt, max_new_tokens=4, custom_generate=decoding())
    model.set_attn_implementation("flex_attention")
    refused(model, prompt, "flex_attention.*sdpa")


def test_a_config_without_a_cache_hears_what_to_pass() -> None:
    model = tiny("Llama")
    model.generation_config.use_cache = False
    with pytest.raises(ValueError, match="pass use_cache=True"):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0, custom_generate=decoding())


def test_training_mode_hears_eval() -> None:
    model = tiny("Llama", attention_dropout=0.5).train()
    with pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\)"):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0, custom_generate=decoding())


def test_gradient_checkpointing(both: Any) -> None:
    """In training mode it turns the cache off, also without dropout; in eval mode it does nothing."""
    model = tiny("Llama")
    model.gradient_checkpointing_enable()
    both(model, {"input_ids": torch.tensor([[5, 9]])}, max_new_tokens=4, pad_token_id=0).same()
    model.train()
    says = r"training mode with gradient checkpointing.*model\.eval\(\) or model\.gradient_checkpointing_disable\(\)"
    with pytest.raises(ValueError, match=says):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0, custom_generate=decoding())
    model.gradient_checkpointing_disable()
    both(model, {"input_ids": torch.tensor([[5, 9]])}, max_new_tokens=4, pad_token_id=0).same()


def test_logits_that_are_not_finite_are_named() -> None:
    model = tiny("Llama")

    def forbid(module: Any, args: Any, output: Any) -> Any:
        output.logits[..., 7] = -torch.inf
        return output

    model.register_forward_hook(forbid)
    with pytest.raises(ValueError, match=r"not finite.*logits processor"):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0, custom_generate=decoding())


def test_an_assertion_of_the_model_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's own pass goes well; the probe's does not."""
    model, calls = tiny("Llama"), list[int]()
    forward = type(model).forward

    def asserting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        assert len(calls) <= 1, "only images here"
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", asserting)
    with pytest.raises(ValueError, match="only images here"):
        model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0, custom_generate=decoding())


# What was found out about a model holds as long as the model stays as it is.


def test_a_hook_that_comes_after_the_first_call_is_seen() -> None:
    """It adds the tokens up, the refused ones too: no tree can be decoded exactly with it."""
    model = tiny("Llama")
    arguments = {"max_new_tokens": 2, "pad_token_id": 0, "custom_generate": decoding()}
    model.generate(torch.tensor([[5, 9]]), **arguments)

    def add_up(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.cumsum(dim=1)

    handle = model.get_input_embeddings().register_forward_hook(add_up)
    with pytest.raises(ValueError, match="cannot be decoded exactly"):
        model.generate(torch.tensor([[5, 9]]), **arguments)
    handle.remove()
    model.generate(torch.tensor([[5, 9]]), **arguments)


def test_autocast_on_in_one_call_and_off_in_the_next() -> None:
    model = tiny("GPT2")
    prompt = torch.tensor([[5, 9, 5, 9, 5]])
    for on in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            options = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
            ours = model.generate(prompt, **options, custom_generate=decoding())
            assert on or ours.tolist() == model.generate(prompt, **options).tolist()
            assert ours.shape == (1, 13)
