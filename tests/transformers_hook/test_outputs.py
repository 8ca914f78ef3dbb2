"""What comes back: the type, the scores, the logits, and that all of it is ordinary tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import CLOSE, Pair, decoding, ids, output_of
from transformers import pipeline
from transformers.generation.utils import GenerateDecoderOnlyOutput

MANY = 14
ENDS = {"eos_token_id": [28, 10, 75], "pad_token_id": 1}


@pytest.mark.parametrize(
    ("scores", "logits", "sample"),
    [(False, False, False), (True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
@pytest.mark.thinned(1, most=1)
def test_dictionary(both: Any, llama: Any, inputs: dict[str, Any], scores: bool, logits: bool, sample: bool) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": scores, "output_logits": logits}
    pair = both(llama, inputs, max_new_tokens=MANY, do_sample=sample, temperature=0.7, **wants).same()
    assert type(pair.ours) is GenerateDecoderOnlyOutput
    assert (pair.ours.scores is not None) == scores
    assert (pair.ours.logits is not None) == logits
    assert pair.ours.attentions is None is pair.ours.hidden_states
    if scores:
        rows, vocabulary = len(inputs["input_ids"]), llama.config.vocab_size
        assert [tuple(part.shape) for part in pair.ours.scores] == [(rows, vocabulary)] * MANY
    if not sample:
        assert pair.compression > 1


def test_nothing_is_kept_without_the_dictionary(both: Any, llama: Any, inputs: dict[str, Any]) -> None:
    pair = both(llama, inputs, max_new_tokens=4, output_scores=True, output_logits=True).same()
    assert isinstance(pair.ours, torch.Tensor)


def test_scores_of_rows_that_end(both: Any, llama: Any, batch: dict[str, Any]) -> None:
    """`same` compares them up to each row's end."""
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = both(llama, batch, max_new_tokens=MANY, **wants, **ENDS).same()
    assert len({stats.generated_tokens for stats in pair.hook.stats}) > 1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("ends", [{}, ENDS], ids=["no eos", "eos"])
@pytest.mark.thinned(1, most=1)
def test_transition_scores(both: Any, llama: Any, batch: dict[str, Any], normalize: bool, ends: dict[str, Any]) -> None:
    wants = {"return_dict_in_generate": True, "output_scores": True}
    pair = both(llama, batch, max_new_tokens=MANY, **wants, **ends).same()
    stock, ours = (
        llama.compute_transition_scores(run.sequences, run.scores, normalize_logits=normalize)
        for run in (pair.stock, pair.ours)
    )
    assert ours.shape == stock.shape
    for row, stats in enumerate(pair.hook.stats):
        torch.testing.assert_close(ours[row, : stats.generated_tokens], stock[row, : stats.generated_tokens], **CLOSE)


def tensors(pair: Pair) -> list[torch.Tensor]:
    layers = pair.ours.past_key_values.layers
    return [
        pair.ours.sequences,
        *pair.ours.scores,
        *pair.ours.logits,
        *(layer.keys for layer in layers),
        *(layer.values for layer in layers),
    ]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2}, ENDS], ids=["plain", "processor", "eos"])
@pytest.mark.thinned(1)
def test_tensors_are_ordinary(both: Any, llama: Any, inputs: dict[str, Any], more: dict[str, Any], cache: str) -> None:
    """Not of inference mode, which autograd would refuse later, far from here."""
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    pair = both(llama, inputs, max_new_tokens=6, cache_implementation=cache, **wants, **more).same()
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors(pair))
    weight = torch.ones(llama.config.vocab_size, requires_grad=True)
    (pair.ours.logits[0] * weight).sum().backward()
    assert weight.grad is not None


def test_model_can_be_trained_on_the_output(make_model: Any, prompt: dict[str, Any]) -> None:
    """Nothing of inference mode stays behind in the model."""
    model = make_model(eos_token_id=None)
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False, custom_generate=decoding())
    assert not output.is_inference()
    model(input_ids=output, labels=output).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_inside_inference_mode(both: Any, make_model: Any, prompt: dict[str, Any]) -> None:
    """The first call may be in inference mode, and the next one out of it."""
    model = make_model(eos_token_id=None)
    with torch.inference_mode():
        both(model, prompt, max_new_tokens=8).same()
    both(model, prompt, max_new_tokens=8, repetition_penalty=1.2).same()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.thinned(1, most=2)
def test_default_dtype_of_torch(both: Any, llama: Any, inputs: dict[str, Any], dtype: torch.dtype) -> None:
    """Stock scores are float32 whatever new tensors are by default; half of them would choose other tokens."""
    wants = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.set_default_dtype(dtype)
    try:
        both(llama, inputs, max_new_tokens=6, do_sample=True, **wants).same()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2}], ids=["plain", "processor"])
def test_ids_of_32_bits(both: Any, llama: Any, batch: dict[str, Any], more: dict[str, Any]) -> None:
    inputs = {**batch, "input_ids": batch["input_ids"].int()}
    both(llama, inputs, max_new_tokens=6, **more).same()


def test_inputs_by_position(llama: Any, prompt: dict[str, Any], text: list[list[int]]) -> None:
    output = llama.generate(prompt["input_ids"], max_new_tokens=9, do_sample=False, custom_generate=decoding())
    assert output_of(prompt, output)[0] == text[0][:9]


def test_inputs_are_not_changed(llama: Any, batch: dict[str, Any]) -> None:
    before = {name: value.clone() for name, value in batch.items()}
    output = llama.generate(**batch, max_new_tokens=4, do_sample=False, custom_generate=decoding())
    output.fill_(0)
    assert all(torch.equal(batch[name], value) for name, value in before.items())


def test_no_prompt_at_all(both: Any, llama: Any) -> None:
    """`generate` starts from the beginning-of-text token."""
    pair = both(llama, {}, max_new_tokens=9, bos_token_id=17).same()
    assert pair.tokens[0, 0] == 17


def test_prompt_of_one_token(both: Any, llama: Any) -> None:
    both(llama, ids([33]), max_new_tokens=MANY).same()
    both(llama, ids([33], [34, 35]), max_new_tokens=MANY).same()


def test_vocabulary_that_shrinks_between_calls(both: Any, make_model: Any, prompt: dict[str, Any]) -> None:
    """What was learned of a model's tokens goes when the tokens do."""
    model, hook = make_model(eos_token_id=None), decoding(recycle_scope="model")
    both(model, prompt, max_new_tokens=40, hook=hook).same()
    model.resize_token_embeddings(100)
    for start in (1, 5):
        both(model, ids([start, start + 1, start + 4]), max_new_tokens=20, hook=hook).same()


def test_weights_that_change_between_calls(both: Any, make_model: Any, prompt: dict[str, Any]) -> None:
    """Guesses from before are wrong now, and no more than that."""
    model, hook = make_model(eos_token_id=None), decoding(recycle_scope="model")
    both(model, prompt, max_new_tokens=24, hook=hook).same()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    both(model, prompt, max_new_tokens=24, hook=hook).same()


@pytest.mark.parametrize("how", ["eager", "train", "float64"])
@pytest.mark.thinned(1, most=2)
def test_model_in_another_state(both: Any, make_model: Any, batch: dict[str, Any], how: str) -> None:
    model = make_model(eos_token_id=None)
    if how == "eager":
        model.set_attn_implementation("eager")
    model = {"eager": model.eval, "train": model.train, "float64": model.double}[how]()
    wants = {"return_dict_in_generate": True, "output_logits": True}
    assert both(model, batch, max_new_tokens=MANY, do_sample=how == "float64", **wants).same().compression > 1


def test_text_generation_pipeline(llama: Any, tokenizer: Any) -> None:
    """It makes the call for its user, arguments of `generate` and all."""
    writer = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    hook = decoding()
    assert writer("once more", **options, custom_generate=hook) == writer("once more", **options)
    assert hook.stats[0].generated_tokens == 12
