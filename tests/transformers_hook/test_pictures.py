"""Vision-language models: prompts with pictures, greedy and sampled, in a batch, and in a second turn on the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow_but
from pairs import decoding
from pictures import FAMILIES, PICTURES, inputs_of, model_of, pair, words
from transformers import DynamicCache

from lookahead.models.read import readers

QUICK = ("qwen3_vl", "gemma3")
"""The families that `make test` tries; `make test-all` tries every one."""
REFUSED = {
    "mllama": "'cross_attention_mask' goes into every pass",
    "kosmos2": "fails on a tree of tokens",
    "kosmos2_5": "it computes positions in its own way",
    "qwen2_audio": "'feature_attention_mask' goes into every pass",
}
"""Family -> what its refusal says, on the eager backend."""
names = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES if name not in REFUSED],
)
NEW = {"max_new_tokens": 16, "pad_token_id": 0}


@names
def test_a_picture(both: Any, name: str) -> None:
    model, inputs = PICTURES[name]()
    found = both(model, inputs, **NEW, return_dict_in_generate=True, output_logits=True).same()
    assert found.compression > 1.3
    other = {key: value * 0.5 + 0.1 if value.is_floating_point() else value for key, value in inputs.items()}
    unseen = model.generate(**other, **NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert not torch.allclose(unseen.logits[0], found.ours.logits[0], atol=1e-3)
    both(model, inputs, **NEW, do_sample=True, temperature=0.8).same()


@names
@pytest.mark.thinned(1, most=1)
def test_two_pictures_and_none(both: Any, name: str) -> None:
    """Left-padded, each row with a picture of its own size; and words alone."""
    model = model_of(name)
    both(model, pair(name), **NEW).same()
    both(model, pair(name), **NEW, do_sample=True).same()
    both(model, words(), **NEW).same()


@pytest.mark.slow
@names
def test_a_second_turn_on_the_returned_cache(name: str) -> None:
    """Also one that stock began and we go on with, and the other way round."""
    turns = []
    for first_hook, second_hook in ((False, False), (True, True), (True, False), (False, True)):
        model, inputs = PICTURES[name]()
        options = {**NEW, "do_sample": False, "return_dict_in_generate": True}
        hook = [{"custom_generate": decoding()} if hooked else {} for hooked in (first_hook, second_hook)]
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        first = model.generate(**inputs, **options, past_key_values=cache, **hook[0])
        longer = torch.cat([first.sequences, torch.tensor([[7, 9, 11]])], dim=1)
        again = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        try:
            second = model.generate(**again, **options, past_key_values=first.past_key_values, **hook[1])
        except Exception as error:
            if turns or second_hook:
                raise
            pytest.skip(f"stock cannot go on with its own cache: {type(error).__name__}")
        turns.append((second.sequences.tolist(), second.past_key_values.get_seq_length()))
    assert turns == turns[:1] * 4


@pytest.mark.parametrize("name", ["qwen2_vl", "llama4"])
@pytest.mark.thinned(1, most=1)
def test_a_second_turn_goes_on_where_the_first_ended(name: str) -> None:
    test_a_second_turn_on_the_returned_cache(name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    model, inputs = PICTURES[name]()
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        model.generate(**inputs, **NEW, do_sample=False, custom_generate=decoding())
    assert "\n" not in str(caught.value)


def test_attention_that_is_scaled_by_place_runs_in_chains_or_is_refused() -> None:
    """Llama 4 does so from 8192 places on; a tree must not reach them."""
    model = model_of("llama4")
    with pytest.raises(ValueError, match=r"7679 positions.*lower max_new_tokens"):
        model.generate(**words(), max_new_tokens=8000, custom_generate=decoding())
    model = model_of("llama4")
    model.config.get_text_config().floor_scale = 8
    stock = model.generate(**words(), max_new_tokens=24, do_sample=False)
    assert torch.equal(model.generate(**words(), max_new_tokens=24, do_sample=False, custom_generate=decoding()), stock)


def test_a_probe_of_one_picture_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead.transformers_hook import backends

    probed = []
    probe = backends.probe_start
    monkeypatch.setattr(backends, "probe_start", lambda *args: probed.append(args) or probe(*args))
    model = model_of("qwen2_vl")
    for rows in ([0], [1], [0]):
        model.generate(**inputs_of("qwen2_vl", rows), **NEW, do_sample=False, custom_generate=decoding())
    assert len(probed) == 1


READ = [name for name, family in FAMILIES.items() if family.name + family.ending in readers() and name != "qwen2_audio"]


@pytest.mark.parametrize("name", slow_but(READ, "qwen2_5_vl", "paligemma"))
@pytest.mark.thinned(1, most=1)
def test_on_the_graph_backend(both: Any, name: str) -> None:
    """The graph backend continues behind the prompt's own pass, also where positions are shifted; a picture, two of
    them in a batch, and none."""
    model, inputs = PICTURES[name]()
    for given in (inputs, pair(name), words()):
        for sample in (False, True):
            found = both(model, given, **NEW, do_sample=sample, hook=decoding(backend="graph")).same()
            assert found.hook.used == "graph"
