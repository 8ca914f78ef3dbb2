"""PEFT adapters under the hook: those in the layers, those before the prompt, and those switched between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import slow_but
from pairs import decoding, ids
from tiny import tiny

peft = pytest.importorskip("peft")

PROMPT = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9])
ROWS = ids([5, 9, 17, 23, 5, 9, 17, 23, 5, 9], [4, 8, 4, 8], [3])
TASK = {"task_type": "CAUSAL_LM"}
TARGETS = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **TASK}
CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(**TARGETS),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, **TARGETS),
    "rsLoRA": lambda: peft.LoraConfig(use_rslora=True, **TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **TASK),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **TASK),
    "P-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, **TASK),
}
MORE = pytest.mark.parametrize(
    "more", [{}, {"do_sample": True}, pytest.param({"repetition_penalty": 1.3}, marks=pytest.mark.slow)], ids=str
)
INPUTS = pytest.mark.parametrize("inputs", [PROMPT, ROWS], ids=["one row", "three rows"])


def stir(model: Any, seed: int) -> None:
    """Give every weight of an adapter a random value: a fresh one says nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(mark in name for mark in ("lora_", "ia3_", "prompt_encoder")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if "prompt" not in name else 1.0))


def adapted(name: str, base: str = "Llama") -> Any:
    model = peft.get_peft_model(tiny(base, seed=0), CONFIGS[name]())
    stir(model, 3)
    return model.eval()


@INPUTS
@MORE
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.thinned(1, most=2)
def test_same_as_stock(both: Any, name: str, inputs: dict[str, Any], more: dict[str, Any]) -> None:
    model = adapted(name)
    found = both(model, inputs, max_new_tokens=24, pad_token_id=0, **more).same()
    assert found.compression > 1 or more
    if not more:  # and not what the model says without its adapter
        base = tiny("Llama", seed=0).generate(**inputs, max_new_tokens=24, pad_token_id=0, do_sample=False)
        assert base.tolist() != found.ours.tolist()


@pytest.mark.parametrize("name", ["prompt tuning", "prefix tuning", "P-tuning"])
@pytest.mark.thinned(1, most=1)
def test_learned_positions(both: Any, name: str) -> None:
    """Virtual tokens take positions, too."""
    for inputs in (PROMPT, ROWS):
        both(adapted(name, "GPT2"), inputs, max_new_tokens=24, pad_token_id=0).same()


@pytest.mark.parametrize("name", slow_but(CONFIGS, "LoRA", "prefix tuning"))
def test_a_returned_cache(both: Any, name: str) -> None:
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    found = both(adapted(name), PROMPT, **options).same()
    stock, ours = found.stock.past_key_values, found.ours.past_key_values
    assert ours.get_seq_length() == stock.get_seq_length()
    for one, other in zip(stock.layers, ours.layers, strict=True):
        torch.testing.assert_close(other.keys, one.keys, rtol=1e-4, atol=1e-4)


def test_adapters_switched_between_calls(both: Any) -> None:
    """What was found out about the model with one adapter says nothing about it with another, or with none."""
    model = adapted("LoRA")
    model.add_adapter("second", CONFIGS["LoRA"]())
    model.set_adapter("second")
    stir(model, 8)
    said = []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        said.append(both(model, PROMPT, max_new_tokens=16).same().ours.tolist())
    with model.disable_adapter():
        said.append(both(model, PROMPT, max_new_tokens=16).same().ours.tolist())
    assert said[0] == said[2]
    assert said[0] != said[3]


def test_an_adapter_that_comes_after_the_first_call(both: Any) -> None:
    base = tiny("Llama", seed=0)
    before = both(base, PROMPT, max_new_tokens=16).same().ours.tolist()
    model = peft.get_peft_model(base, CONFIGS["LoRA"]())
    stir(model, 3)
    assert both(model.eval(), PROMPT, max_new_tokens=16).same().ours.tolist() != before
    merged = model.merge_and_unload()
    both(merged, PROMPT, max_new_tokens=16).same()


@pytest.mark.parametrize("name", ["LoRA", "prompt tuning"])
@pytest.mark.thinned(1, most=2)
def test_the_graph_backend_where_it_can(both: Any, name: str) -> None:
    """Virtual tokens are K/V like any other; a LoRA layer is no plain matrix, unless it was merged."""
    model = adapted(name)
    if name == "LoRA":
        with pytest.raises(ValueError, match="no plain matrix"):
            model.generate(**PROMPT, max_new_tokens=4, custom_generate=decoding(backend="graph"))
        model = model.merge_and_unload()
    assert both(model, PROMPT, max_new_tokens=16, hook=decoding(backend="graph")).same().compression > 1


def test_an_adapter_per_row() -> None:
    """One row has one adapter; rows of several would be mixed up when one of them ends."""
    model = adapted("LoRA")
    model.add_adapter("second", CONFIGS["LoRA"]())
    stir(model, 8)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(**PROMPT, **options, adapter_names=["second"])
    ours = model.generate(**PROMPT, **options, adapter_names=["second"], custom_generate=decoding())
    assert ours.tolist() == stock.tolist()
    names = ["default", "second", "default"]
    with pytest.raises(ValueError, match=r"adapter_names=\['default', 'second', 'default'\].*once per adapter"):
        model.generate(**ROWS, **options, adapter_names=names, custom_generate=decoding())


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_adapters_of_a_refused_call_do_not_stay(both: Any) -> None:
    """PEFT hooks one call's adapters into the layers, and takes them out again only when the call ends well."""
    model = adapted("LoRA")
    model.add_adapter("second", CONFIGS["LoRA"]())
    stir(model, 8)
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    before, count = both(model, ROWS, **options).same().ours.tolist(), hooks(model)
    names = ["default", "second", "default"]
    for more in ({}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=r"adapter_names|num_beams=2"):
            model.generate(**ROWS, **options, **more, adapter_names=names, custom_generate=decoding())
        assert hooks(model) == count
    assert both(model, ROWS, **options).same().ours.tolist() == before


@pytest.mark.parametrize("name", ["prompt tuning", "prefix tuning"])
@pytest.mark.thinned(1, most=1)
def test_padding_behind_virtual_tokens(both: Any, name: str) -> None:
    """It is on the left as asked for, and the virtual tokens further left; a sliding window counts it."""
    model = adapted(name, "Mistral")
    for each in (PROMPT, ids([5, 9, 17], [4, 8, 4])):
        both(model, each, max_new_tokens=12, pad_token_id=0).same()
    with pytest.raises(ValueError, match="virtual tokens are in front of the padding; call generate for prompts of eq"):
        model.generate(**ROWS, max_new_tokens=12, pad_token_id=0, custom_generate=decoding())


def test_an_activated_adapter_is_refused() -> None:
    model = peft.get_peft_model(tiny("Llama", seed=0), peft.LoraConfig(alora_invocation_tokens=[23, 5], **TARGETS))
    stir(model, 3)
    model.eval()
    with pytest.raises(ValueError, match="activated LoRA"):
        model.generate(**PROMPT, max_new_tokens=4, custom_generate=decoding())
    assert not hooks(model)
