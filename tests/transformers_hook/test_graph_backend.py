"""`lookahead.decoding(backend="graph")`: the same promises on the graph backend, which outlives a call.

On a CPU it runs on the kernels' slow twins. `backends/graph/test_cuda.py` has the same on CUDA.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_table_more import GEMMA4
from pairs import Pair, Recorder, decoding, ids, in_threads, output_of
from tiny import tiny
from transformers import DynamicCache, LogitsProcessorList

import lookahead
from lookahead.backends import choose
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph import kv
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kinds import Sampler
from lookahead.config import LookaheadConfig
from lookahead.models.facts import UnsupportedModelError
from lookahead.transformers_hook import backends, facts, run

MANY = 12
Both = Callable[..., Pair]


@pytest.fixture
def model(make_model: Any) -> Any:
    """One of the test's own: its projections become views."""
    return make_model(eos_token_id=None)


def graph() -> lookahead.Decoding:
    return decoding(backend="graph")


@pytest.mark.thinned(1, most=1)
def test_greedy(both: Both, model: Any, inputs: dict[str, Any]) -> None:
    pair = both(model, inputs, max_new_tokens=MANY, hook=graph()).same()
    assert pair.compression > 1
    assert isinstance(facts.known[model].graph, GraphBackend)


@pytest.mark.thinned(1, most=1)
def test_bigrams_come_from_disk_at_once_and_are_computed_later(
    both: Both, make_model: Any, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that calls once does not wait for them; no text depends on them."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    first, second = (make_model(eos_token_id=None) for _ in range(2))
    windows = list[int]()
    sequences = run.Run._sequences
    monkeypatch.setattr(run.Run, "_sequences", lambda *args: windows.append(args[1].window) or sequences(*args))
    for call in range(backends.BIGRAMS_CALL + 1):
        both(first, inputs, max_new_tokens=MANY, hook=lookahead.decoding(backend="graph")).same()
        assert (facts.known[first].memory.bigrams is None) == (call < backends.BIGRAMS_CALL)
    assert windows == [LookaheadConfig().window] * backends.BIGRAMS_CALL + [0]  # then all rows are for draft tokens
    assert len(list((tmp_path / "bigrams").iterdir())) == 1
    both(second, inputs, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[second].memory.bigrams is not None


@pytest.mark.thinned(1, most=1)
def test_sampling(both: Both, model: Any, inputs: dict[str, Any]) -> None:
    for seed in range(2):
        both(
            model, inputs, max_new_tokens=MANY, do_sample=True, temperature=0.8, top_p=0.9, seed=seed, hook=graph()
        ).same()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.7, "top_k": 0}, marks=pytest.mark.slow),
        {"temperature": 1.3, "top_k": 7},
        pytest.param({"top_k": 0, "top_p": 0.8}, marks=pytest.mark.slow),
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.thinned(1, most=1)
def test_draws_inside_the_step(both: Both, model: Any, prompt: dict[str, Any], settings: dict[str, Any]) -> None:
    """The tokens, and where the generator stands after them, are those of `generate`."""
    pair = both(model, prompt, max_new_tokens=24, do_sample=True, seed=5, hook=graph(), **settings).same()
    assert any(kind.targets.sampler is Sampler.MULTINOMIAL for kind in facts.known[model].graph.runner.steps.pairs)  # type: ignore[union-attr]
    assert len(set(pair.ours[0].tolist()[-24:])) > 4
    after = []
    for hook in (None, graph()):
        torch.manual_seed(3)
        model.generate(**prompt, max_new_tokens=20, do_sample=True, custom_generate=hook, pad_token_id=0, **settings)
        after.append(torch.rand(1).item())
    assert after[0] == after[1]


@pytest.mark.parametrize("settings", [{"typical_p": 0.9}, {"epsilon_cutoff": 0.01}, {"repetition_penalty": 1.2}])
@pytest.mark.thinned(1, most=1)
def test_draws_that_the_step_does_not_know(
    both: Both, model: Any, inputs: dict[str, Any], settings: dict[str, Any]
) -> None:
    both(model, inputs, max_new_tokens=MANY, do_sample=True, seed=5, hook=graph(), **settings).same()
    assert not any(kind.targets.sampler is Sampler.MULTINOMIAL for kind in facts.known[model].graph.runner.steps.pairs)  # type: ignore[union-attr]


@pytest.mark.thinned(1, most=1)
def test_processors_and_what_comes_with_the_tokens(both: Both, model: Any, inputs: dict[str, Any]) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    both(model, inputs, max_new_tokens=MANY, repetition_penalty=1.3, hook=graph(), **wanted).same()


def test_a_conversation_on_one_cache(both: Both, model: Any, prompt: dict[str, Any]) -> None:
    """The K/V that a call returns is taken by the next, by stock's and by ours."""
    made: dict[str, Any] = {}
    for hook in ({}, {"custom_generate": graph()}):
        cache = DynamicCache(config=model.config)
        first = model.generate(**prompt, max_new_tokens=8, do_sample=False, past_key_values=cache, **hook)
        longer = ids([*first[0].tolist(), 5, 9, 2])
        made[str(bool(hook))] = model.generate(
            **longer, max_new_tokens=MANY, do_sample=False, past_key_values=cache, **hook
        ).tolist()
        made[f"{bool(hook)} length"] = cache.get_seq_length()
    assert made["True"] == made["False"]
    assert made["True length"] == made["False length"]


def test_a_cache_with_a_head_for_every_query_head(both: Both, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    """Falcon's newer classes cache copies of their K/V heads; the graph backend stores each head once."""
    groups = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 4}
    model = tiny("Falcon", seed=0, vocab_size=120, **groups)
    caches = []
    for hook in (None, graph()):
        cache = DynamicCache(config=model.config)
        first = model.generate(**prompt, max_new_tokens=MANY, past_key_values=cache, custom_generate=hook)
        assert cache.layers[0].keys.shape[1] == 4
        model.generate(torch.cat([first, prompt["input_ids"]], 1), max_new_tokens=MANY, past_key_values=cache,
                       custom_generate=hook)  # fmt: skip
        caches.append(cache)
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-4)
        assert torch.allclose(ours.values, theirs.values, atol=1e-4)
    flipped = {name: value.flip(1) for name, value in batch.items()}
    both(model, flipped, max_new_tokens=MANY, pad_token_id=0, hook=graph()).same()


def test_a_streamer(model: Any, prompt: dict[str, Any]) -> None:
    expected = output_of(prompt, model.generate(**prompt, max_new_tokens=MANY, do_sample=False))
    recorder = Recorder()
    model.generate(**prompt, max_new_tokens=MANY, do_sample=False, streamer=recorder, custom_generate=graph())
    assert [token for put in recorder.puts[1:] for token in put.tolist()] == expected[0]


def test_embeddings(model: Any, prompt: dict[str, Any]) -> None:
    given = {"inputs_embeds": model.get_input_embeddings()(prompt["input_ids"])}
    expected = model.generate(**given, max_new_tokens=MANY, do_sample=False)
    assert model.generate(**given, max_new_tokens=MANY, do_sample=False, custom_generate=graph()).equal(expected)


def test_it_is_kept_for_the_next_call(both: Both, model: Any, prompt: dict[str, Any], batch: dict[str, Any]) -> None:
    both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    kept = facts.known[model].graph
    both(model, batch, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept
    assert kept is not None
    assert not kept.slots, "every slot was closed"


def test_pages_for_every_row_of_a_call(
    both: Both, model: Any, prompt: dict[str, Any], batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kept backend has too few, it gets others, whatever the call asked for."""
    monkeypatch.setattr(kv, "CPU_TOKENS", 320)
    both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    kept = facts.known[model].graph
    assert kept is not None
    assert kept.holds() == 320
    both(model, batch, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept
    assert min(kept.kv.pages) >= 3 * 5


def test_weights_that_change_are_seen(both: Both, model: Any, prompt: dict[str, Any]) -> None:
    """In place they are the same memory; a weight that is another tensor now makes another backend."""
    first = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    kept = facts.known[model].graph
    torch.manual_seed(3)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.normal_(std=0.3)
        model.model.layers[1].mlp.up_proj.weight.normal_(std=0.3)
    second = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept
    replaced = torch.randn_like(model.model.layers[1].mlp.down_proj.weight) * 0.3
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(replaced)
    third = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is not kept
    assert len({str(pair.tokens.tolist()) for pair in (first, second, third)}) == 3


def test_biases_that_change_are_seen(both: Both, prompt: dict[str, Any]) -> None:
    """They are copied into one vector, and so have to be copied again."""
    model = tiny("Qwen2", seed=0, stirred=False, vocab_size=120)
    first = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias.normal_(std=2.0)
    second = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert first.tokens.tolist() != second.tokens.tolist()


def test_a_buffer_that_is_replaced_is_seen(both: Both, prompt: dict[str, Any]) -> None:
    """Gemma 4 scales the result of each layer by one."""
    model = tiny("Gemma4Text", seed=0, vocab_size=120, **GEMMA4)
    first = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    kept = facts.known[model].graph
    with torch.no_grad():
        model.model.layers[0].layer_scalar.mul_(-3.0)
    second = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept
    model.model.layers[0].layer_scalar = torch.full((1,), 0.2)
    third = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is not kept
    assert len({str(pair.tokens.tolist()) for pair in (first, second, third)}) == 3


COMPUTED = {
    "Nemotron": {"head_dim": 8},
    "StableLm": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "NanoChat": {},
    "Apertus": {},
}


@pytest.mark.parametrize("family", COMPUTED)
@pytest.mark.thinned(1, most=1)
def test_numbers_computed_from_weights_that_change(both: Both, prompt: dict[str, Any], family: str) -> None:
    """Readers of these families compute norms, embeddings or constants from weights. Changes in place reach them."""
    model = tiny(family, seed=0, vocab_size=120, **COMPUTED[family])
    first = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    kept = facts.known[model].graph
    both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept
    changed = ("norm", "embed_tokens", "alpha_n", "alpha_p")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in changed):
                weight.copy_(weight.flip(-1) * 1.7)
    second = both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert first.tokens.tolist() != second.tokens.tolist()
    assert (facts.known[model].graph is kept) == (family != "Apertus")


def test_an_error_leaves_it_usable(both: Both, model: Any, prompt: dict[str, Any]) -> None:
    calls = []

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("enough")
        return scores

    with pytest.raises(RuntimeError, match="enough"):
        model.generate(**prompt, logits_processor=LogitsProcessorList([fail]), custom_generate=graph())
    kept = facts.known[model].graph
    assert kept is not None
    assert not kept.slots
    both(model, prompt, max_new_tokens=MANY, hook=graph()).same()
    assert facts.known[model].graph is kept


def test_threads_take_turns(
    model: Any, prompt: dict[str, Any], batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first call on: one of them finds out about the model, and makes the backend that all of them use."""
    probed: list[Any] = []
    probe = backends.probe
    for module in (backends, choose):
        monkeypatch.setattr(module, "probe", lambda backend: probed.append(type(backend)) or probe(backend))
    inputs = [prompt, batch] * 2
    expected = [output_of(one, model.generate(**one, max_new_tokens=MANY, do_sample=False)) for one in inputs]

    def job(one: dict[str, Any]) -> Callable[[], list[list[int]]]:
        return lambda: output_of(
            one, model.generate(**one, max_new_tokens=MANY, do_sample=False, custom_generate=graph())
        )

    assert in_threads([job(one) for one in inputs]) == expected
    assert probed == [GraphBackend]


def test_the_model_is_not_kept_alive(make_model: Any, prompt: dict[str, Any]) -> None:
    """Nor are its K/V pages."""

    def used() -> list[weakref.ref[Any]]:
        model = make_model(eos_token_id=None)
        model.generate(**prompt, max_new_tokens=4, do_sample=False, custom_generate=graph())
        return [weakref.ref(model), weakref.ref(facts.known[model].graph)]

    gone = used()
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_the_model_can_still_be_trained(model: Any, prompt: dict[str, Any]) -> None:
    with torch.inference_mode():
        model.generate(**prompt, max_new_tokens=4, do_sample=False, custom_generate=graph())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_what_it_does_not_run(model: Any, prompt: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"there is no reader for BertLMHeadModel"):
        tiny("Bert", is_decoder=True).generate(torch.tensor([[5, 9, 2]]), max_new_tokens=4, custom_generate=graph())
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"in training mode; call model\.eval\(\)"):
        model.generate(**prompt, max_new_tokens=4, do_sample=False, custom_generate=graph())
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose from auto, eager, graph"):
        lookahead.decoding(backend="fast")


def test_auto_is_eager_on_a_cpu(
    both: Both, model: Any, prompt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    step = EagerBackend.launch
    monkeypatch.setattr(EagerBackend, "launch", lambda self, inputs: used.append("eager") or step(self, inputs))
    both(model, prompt, max_new_tokens=MANY, hook=decoding(backend="auto")).same()
    assert used
    assert facts.known[model].graph is None
