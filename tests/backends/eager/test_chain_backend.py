"""Chains in the model's own cache: every family, refused at every depth, in batches, and against `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chain_models import OTHERS, QUICK, RECURRENT, REFUSED, chain_model, known
from marks import slow_but
from stock import greedy_text
from tiny import outputs, run

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.choose import make_backend
from lookahead.backends.eager.cache_rows import can_join, copied, joined, row_of
from lookahead.backends.eager.chains import RERUN_ROWS, ChainBackend
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError

LONG = [5, 9, 17, 23, 42, 9, 17, 30, 5, 9, 17, 23, 51, 8, 11, 9, 17, 23, 42, 33, 5, 9]
PROMPTS = (LONG, LONG[3:14], LONG[7:10])
COUNT = 24
CHAINS = LookaheadConfig(recycle_scope="request").as_chain()
PLAIN = LookaheadConfig.autoregressive()
MODELS = slow_but(known((*RECURRENT, *OTHERS)), *QUICK)


def expected(name: str) -> list[list[int]]:
    return [greedy_text(chain_model(name), prompt, COUNT) for prompt in PROMPTS]


def backend_of(name: str) -> ChainBackend:
    return ChainBackend(chain_model(name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(1, most=1)
def test_texts_are_those_of_generate(name: str) -> None:
    backend = backend_of(name)
    sequences = [run(backend, [prompt], CHAINS, COUNT)[0] for prompt in PROMPTS]
    assert [sequence.output for sequence in sequences] == expected(name)
    stats = [sequence.stats for sequence in sequences]
    assert sum(one.steps for one in stats) < sum(one.step_tokens for one in stats), "there were draft tokens"
    assert outputs(backend, PROMPTS, CHAINS, COUNT) == expected(name)
    assert outputs(backend, PROMPTS, PLAIN, COUNT) == expected(name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(1, most=1)
def test_seeded_samples_are_those_of_single_tokens(name: str) -> None:
    backend, sampling = backend_of(name), SamplingParams(temperature=0.8, seed=3)
    single = outputs(backend, PROMPTS, PLAIN, COUNT, sampling)
    assert outputs(backend, PROMPTS, CHAINS, COUNT, sampling) == single
    assert [outputs(backend, [prompt], CHAINS, COUNT, sampling)[0] for prompt in PROMPTS] == single
    assert single != expected(name)


class Counting(ChainBackend):
    """Notes the chunk and the draft tokens of every step, and how many forward passes there were."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, probed=False)
        self.steps: list[tuple[int, int]] = []
        self.passes = 0

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        self.steps += [(len(one.chunk), one.tree.size - 1) for one in inputs]
        return super().launch(inputs)

    def append(self, slots: list[int], tokens: Any, indices: list[int]) -> Any:
        self.passes += 1
        return super().append(slots, tokens, indices)


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("name", slow_but(known((*RECURRENT, *OTHERS)), "Qwen3NextForCausalLM"))
@pytest.mark.thinned(1, most=1)
def test_chains_that_are_refused_at_this_depth(name: str, depth: int) -> None:
    """A prediction with a wrong token after every `depth` right ones: accepted tokens run again in front of the next
    root, and no pass is added."""
    text = expected(name)[0]
    wrong = [(token + 1) % 61 if index % (depth + 1) == depth else token for index, token in enumerate(text)]
    backend = Counting(chain_model(name))
    config = LookaheadConfig(sources=("suffix",), budget=8).as_chain()
    sequence = DecodingSequence(LONG, config, rules=StopRules(COUNT), prediction=wrong)
    engine = Engine(backend)
    engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    assert sequence.output == text
    assert all(chunk + drafted < config.budget for chunk, drafted in backend.steps[1:])
    assert any(chunk for chunk, _ in backend.steps[1:])
    assert backend.passes == len(backend.steps) + (backend.steps[0][1] > 0)  # the prompt's, apart from a chain


def test_a_refused_chain_leaves_the_length_as_it_was() -> None:
    backend = backend_of("Qwen3NextForCausalLM")
    slot = backend.open()

    def step(chunk: Sequence[int], tokens: Sequence[int], accepted: int) -> None:
        size = len(tokens)
        tree = TokenTree(tokens, range(-1, size - 1), range(size), range(size))
        backend.step([StepInput(slot, chunk, tree, SamplingParams(), ())])
        backend.commit([(slot, range(1, accepted + 1))])

    step(LONG[:9], LONG[9:10], 0)
    assert backend.length(slot) == 10
    step((), LONG[10:14], 2)
    assert backend.length(slot) == 10
    step(LONG[10:13], LONG[13:15], 1)
    assert backend.length(slot) == 15
    step(LONG * 2, [1, 2], 0)  # a chunk longer than RERUN_ROWS stays
    assert len(LONG * 2) > RERUN_ROWS
    assert backend.length(slot) == 15 + 2 * len(LONG)


def test_ends_inside_a_chain() -> None:
    text = expected("Qwen3NextForCausalLM")[0]
    end = next(token for token in text[6:] if text.index(token) >= 6)
    for ends, reason in ((None, "eos"), (lambda token: token == end, "stop")):
        rules = StopRules(COUNT, frozenset() if ends else frozenset({end}))
        sequence = DecodingSequence(LONG, CHAINS, rules=rules, ends=ends, prediction=text)
        engine = Engine(backend_of("Qwen3NextForCausalLM"))
        engine.submit(Request(sequence))
        while engine.running:
            engine.step()
        assert sequence.output == text[: text.index(end) + 1]
        assert sequence.finish_reason == reason
        assert sequence.stats.steps < len(sequence.output)


def test_trees_are_refused() -> None:
    backend = backend_of("Mamba2ForCausalLM")
    slot = backend.open()
    fork = TokenTree([1, 2, 3], [-1, 0, 0], [0, 1, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="cannot branch"):
        backend.step([StepInput(slot, [4], fork, SamplingParams(), ())])
    with pytest.raises(ValueError, match="cannot branch"):
        Engine(backend).submit(Request(DecodingSequence([1, 2], LookaheadConfig())))


@pytest.mark.parametrize("name", slow_but(known(tuple(REFUSED)), "MambaForCausalLM"))
def test_what_stays_refused_says_why(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        make_backend(chain_model(name), "eager")


def test_a_model_that_forgets_its_state_is_refused() -> None:
    model = chain_model("Qwen3NextForCausalLM")

    class Forgetful(torch.nn.Module):
        """Several tokens begin a new text."""

        config, generation_config, dtype = model.config, model.generation_config, model.dtype

        def get_input_embeddings(self) -> Any:
            return model.get_input_embeddings()

        def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            cache = past_key_values if input_ids.shape[1] == 1 else None
            return model(input_ids=input_ids, past_key_values=cache, use_cache=kwargs["use_cache"])

    with pytest.raises(UnsupportedModelError, match="does not continue from the state"):
        ChainBackend(Forgetful().eval())


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_caches_are_copied_cut_and_joined(name: str) -> None:
    """A row of a joined cache goes on as it would alone, and a copy is not changed by passes over the original."""
    model = chain_model(name)
    texts = [LONG[:9], LONG[:4]]
    caches = [model(input_ids=torch.tensor([text]), use_cache=True).past_key_values for text in texts]
    assert all(map(can_join, caches))
    masks = [torch.ones(len(text), dtype=torch.bool) for text in texts]

    def logits(cache: Any, mask: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        more = torch.cat([mask, torch.ones(len(lengths), 1, dtype=torch.bool)], dim=1).long()
        ids, positions = torch.full((len(lengths), 1), 7), torch.tensor(lengths)[:, None]
        output = model(
            input_ids=ids, attention_mask=more, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.logits[:, -1]

    alone = torch.cat(
        [logits(copied(cache), mask[None], [len(text)]) for cache, mask, text in zip(caches, masks, texts, strict=True)]
    )
    cache, mask = joined(caches, masks)
    assert mask.sum(dim=1).tolist() == [9, 4]
    torch.testing.assert_close(logits(copied(cache), mask, [9, 4]), alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(row_of(cache, 2, 1), mask[1:], [4]), alone[1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(cache, mask, [9, 4]), alone, rtol=1e-4, atol=1e-4)
