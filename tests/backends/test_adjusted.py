"""Penalties, biases, masks, `min_tokens` and log-probabilities on all backends: the text of one token per step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from grammar import Alternating
from marks import slow_but
from tiny import PROMPTS, VOCABULARY, tiny

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.choose import cpu_backend
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph import adjusting, packet
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event, Request

KINDS = ("eager", "graph", "cpu")
ENDS = frozenset([3, 17])
TOKENS = 20
CONFIGS = (
    LookaheadConfig.autoregressive(),
    LookaheadConfig(window=3, ngram=4, guesses=4, budget=40),
    LookaheadConfig(window=2, ngram=2, guesses=3, budget=16),
    LookaheadConfig(window=0, guesses=4, budget=12, sources=("prompt", "suffix", "recycle")),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 4.0, 9: -float("inf"), 60: 2.5}},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.4, "logit_bias": {8: -3.0}},
}


@cache
def model(device: str = "cpu") -> Any:
    return tiny("Llama", device=device)


@cache
def eager(device: str) -> EagerBackend:
    return EagerBackend(model(device))


def make(kind: str, device: str) -> Any:
    if kind == "cpu":
        if device != "cpu":
            pytest.skip("the cpu backend runs on a CPU")
        pytest.importorskip("onnxruntime")
        return cpu_backend(model())
    return GraphBackend(model(device)) if kind == "graph" else eager(device)


def request(
    prompt: Sequence[int],
    config: LookaheadConfig,
    sampling: SamplingParams,
    min_tokens: int = 0,
    masked: bool = False,
    memory: SharedMemory | None = None,
) -> Request:
    rules = StopRules(TOKENS, ENDS, 256, min_tokens=min_tokens)
    sequence = DecodingSequence(prompt, config, sampling, rules, memory=memory)
    return Request(sequence, mask=Alternating(VOCABULARY) if masked else None)


def finish(backend: Any, requests: Sequence[Request], **options: Any) -> list[Event]:
    """Run the requests together, to their ends."""
    engine, events = Engine(backend, **options), list[Event]()
    for one in requests:
        engine.submit(one)
    while engine.running:
        events += engine.step()
    assert all(event.error is None for event in events)
    return events


def alone(device: str, one: Request) -> list[int]:
    """The text of a request of the same settings, one token per step, by the eager backend; remembered, as requests to
    several backends have one."""
    sequence = one.sequence
    prompt = sequence.tokens[: sequence.prompt_tokens]
    settings = sequence.sampling, sequence.rules.min_tokens, one.mask is not None
    key = repr((device, prompt, settings))
    if key not in _texts_alone:
        again = request(prompt, CONFIGS[0], *settings)
        finish(eager(device), [again])
        _texts_alone[key] = again.sequence.output
    return _texts_alone[key]


_texts_alone: dict[str, list[int]] = {}


@cache
def stock_text(
    device: str, prompt: tuple[int, ...], penalty: float, bias: tuple[tuple[int, float], ...], least: int
) -> list[int]:
    """The greedy text of `model.generate` with a repetition penalty, biases of tokens and a fewest number of tokens."""
    ids = torch.tensor([prompt], device=device)
    options = {"sequence_bias": {(token,): value for token, value in bias}} if bias else {}
    return model(device).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=sorted(ENDS), repetition_penalty=penalty, min_new_tokens=least, **options,
    )[0, len(prompt) :].tolist()  # fmt: skip


@cache
def penalised_text(device: str, prompt: tuple[int, ...], presence: float, frequency: float) -> list[int]:
    """Greedy, token by token, from the logits of plain passes, by OpenAI's rule: only the output counts."""
    text = list(prompt)
    for _ in range(TOKENS):
        scores = plain_logits(device, text)[-1]
        for token in set(text[len(prompt) :]):
            scores[token] -= presence + frequency * text[len(prompt) :].count(token)
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


@torch.no_grad()
def plain_logits(device: str, text: Sequence[int]) -> torch.Tensor:
    """[len(text), V] of the model's own forward pass."""
    return model(device)(torch.tensor([text], device=device)).logits[0].float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", slow_but(CONFIGS, *CONFIGS[1:2]), ids=["one by one", "window", "bigrams", "guesses"])
@pytest.mark.thinned(1, most=1)
def test_greedy_equals_transformers(kind: str, config: LookaheadConfig, device: str) -> None:
    """What `model.generate` has, too: the repetition penalty, a bias, a ban, the fewest tokens before an end."""
    backend = make(kind, device)
    settings: list[tuple[float, dict[int, float], int]] = [
        (1.3, {}, 0), (1.0, {5: 4.0, 9: -float("inf")}, 7), (0.7, {}, 12), (2.5, {}, 20),
    ]  # fmt: skip
    for prompt in PROMPTS[::2]:
        for penalty, bias, least in settings:
            expected = stock_text(device, tuple(prompt), penalty, tuple(bias.items()), least)
            one = request(prompt, config, SamplingParams(repetition_penalty=penalty, logit_bias=bias), least)
            finish(backend, [one])
            assert one.sequence.output == expected
            assert len(expected) >= least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 1), *(pytest.param(seed, 3, marks=pytest.mark.slow) for seed in range(12))]
)
@pytest.mark.thinned(1, most=1)
def test_any_mix_equals_one_token_per_step(kind: str, seed: int, rounds: int, device: str) -> None:
    """Several requests at once, each with settings of its own; some of them with none."""
    rng, memory = random.Random(seed), SharedMemory()
    backend = make(kind, device)
    guessed = 0
    for _ in range(rounds):
        requests = []
        for _ in range(6):
            settings = SETTINGS[rng.choice(list(SETTINGS))]
            drawn = {
                "temperature": rng.choice((0.7, 1.3)),
                "top_k": rng.choice((0, 9)),
                "top_p": rng.choice((0.8, 1.0)),
            }
            sampling = SamplingParams(**settings, **(drawn if rng.random() < 0.6 else {}), seed=rng.randrange(99))
            prompt = rng.choice(PROMPTS)
            least, masked = rng.choice((0, 0, 6, TOKENS)), rng.random() < 0.3
            requests.append(request(prompt, rng.choice(CONFIGS), sampling, least, masked, memory))
        finish(backend, requests)
        for one in requests:
            assert one.sequence.output == alone(device, one)
            guessed += sum(one.sequence.stats.accepted_by_source.values())
            if one.mask is not None:
                output = one.sequence.output
                assert all(Alternating.allows(output[:i], token) for i, token in enumerate(output))
    assert guessed > 6 * rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(1, most=1)
def test_frequent_tokens_cost_more_and_presence_does_not_count(kind: str, device: str) -> None:
    """OpenAI's rule, token by token, from the logits of plain passes: only the output counts, not the prompt."""
    for presence, frequency in ((1.1, 0.0), (0.0, 0.6), (0.4, 0.3)):
        sampling = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
        one = request(PROMPTS[0], CONFIGS[1], sampling)
        one.sequence.rules = StopRules(TOKENS)
        finish(make(kind, device), [one])
        assert one.sequence.output == penalised_text(device, tuple(PROMPTS[0]), presence, frequency)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.1])
@pytest.mark.thinned(1)
def test_log_probabilities_are_those_of_a_plain_pass(kind: str, temperature: float, device: str) -> None:
    """Of the logits as they come, also where the token is chosen from adjusted ones; beside a request without any."""
    sampling = [
        SamplingParams(temperature, logprobs=20, repetition_penalty=1.5, seed=4),
        SamplingParams(temperature, logprobs=0, seed=5),
        SamplingParams(temperature, logprobs=3, top_k=5, seed=6),
        SamplingParams(temperature, seed=7),
    ]
    requests = [request(p, CONFIGS[1], s, 5) for p, s in zip(PROMPTS, sampling, strict=True)]
    events = finish(make(kind, device), requests)
    assert temperature or max(len(event.tokens) for event in events) > 1
    for one in requests:
        sequence, count = one.sequence, one.sequence.sampling.logprobs
        own = [event for event in events if event.request is one]
        if count is None:
            assert all(event.logprobs is None for event in own)
            continue
        found = [item for event in own for item in event.logprobs or ()]
        rows = plain_logits(device, sequence.tokens).log_softmax(dim=-1)[sequence.prompt_tokens - 1 : -1]
        assert len(found) == len(rows) == len(sequence.output)
        for item, token, row in zip(found, sequence.output, rows, strict=True):
            assert item.logprob == pytest.approx(float(row[token]), abs=1e-4)
            values, ids = row.topk(count)
            assert [token for token, _ in item.top] == ids.tolist()
            assert [value for _, value in item.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_knows_whether_an_end_may_come_after_it(kind: str, device: str) -> None:
    """The end is always the best token, and comes as the first one that may: in the middle of accepted blocks, too.

    A penalty below 0 makes the text repeat itself, so that guesses are accepted.
    """
    backend, steps = make(kind, device), 0
    for least in (1, 4, 7, 12):
        one = request(PROMPTS[3], CONFIGS[3], SamplingParams(frequency_penalty=-5.0, logit_bias={17: 1000.0}), least)
        finish(backend, [one])
        assert len(one.sequence.output) == least + 1
        assert one.sequence.output[-1] == 17
        assert one.sequence.output == alone(device, one)
        steps += one.sequence.stats.steps
    assert steps < 20  # of 28 tokens


@pytest.mark.slow
def test_counts_outlive_put_backs_pieces_and_shared_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, short passes, and tables that have to grow: sequences leave, come back, and share pages."""
    monkeypatch.setattr(adjusting, "FIRST_TABLE_SLOTS", 2)
    monkeypatch.setattr(packet, "SPARE_MOVES", 0)
    backend = GraphBackend(model(device), kv_tokens=9 * PAGE, most_rows=32)
    stem = random.Random(3).choices(range(VOCABULARY), k=PAGE + 9)
    names, requests = list(SETTINGS), []
    for i in range(14):
        sampling = SamplingParams(0.9 * (i % 3), seed=i, **SETTINGS[names[i % len(names)]])
        requests.append(request([*stem, i, 2 * i], CONFIGS[i % 4], sampling, 4 * (i % 2), i % 5 == 4))
    engine = Engine(backend)
    for one in requests:
        engine.submit(one)
    cancelled = requests[5]
    for _ in range(6):
        engine.step()
    engine.cancel(cancelled.id)
    while engine.running:
        assert all(event.error is None for event in engine.step())
    assert engine.preemptions
    assert backend.pool.hit_tokens
    rules, tables = backend.planner.rules, backend.runner.state.buffers.adjusting
    assert len(tables.counts) == rules.table_slots > 2
    assert sorted(rules.free_table_slots) == list(range(rules.table_slots))
    assert not rules.by_slot
    for one in requests:
        if one is not cancelled:
            assert one.sequence.output == alone(device, one)


def test_a_mask_that_cannot_be_used_ends_its_request_alone(device: str) -> None:
    class Wrong:
        def __init__(self, rows: Any) -> None:
            self.wrong = rows

        def rows(self, tree: TokenTree, sequence: DecodingSequence) -> Any:
            return self.wrong

        def accept(self, tokens: Sequence[int]) -> None: ...

    for rows, words in (
        (np.ones((1, 9), np.uint32), r"the mask is uint32 \[1, 9\]; it must be uint32 \[1, 2\]"),
        (np.ones((1, 2), np.int64), r"the mask is int64 \[1, 2\]; it must be uint32 \[1, 2\]"),
        (np.zeros((1, 2), np.uint32), "the mask allows no token after the text; it must allow one"),
    ):
        for kind in KINDS[:2]:
            engine = Engine(make(kind, device))
            good, bad = (request(PROMPTS[1], CONFIGS[0], SamplingParams()) for _ in range(2))
            bad.mask = Wrong(rows)
            engine.submit(good)
            engine.submit(bad)
            errors = []
            while engine.running:
                errors += [event for event in engine.step() if event.error is not None]
            assert [event.request for event in errors] == [bad]
            with pytest.raises(ValueError, match=words):
                raise errors[0].error
            assert good.sequence.output == alone(device, good)


def test_requests_that_cannot_be_right_are_refused() -> None:
    engine = Engine(EagerBackend(model()))
    with pytest.raises(ValueError, match="logit_bias has token 61; the vocabulary is 0 to 60"):
        engine.submit(request([1], CONFIGS[0], SamplingParams(logit_bias={61: 1.0})))
    both = request([1], CONFIGS[0], SamplingParams(), masked=True)
    both.verifier = lambda results: []
    with pytest.raises(ValueError, match="a request with a mask cannot have a verifier or noise"):
        engine.submit(both)


def test_tables_that_cannot_grow_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GraphBackend(model("cpu"))
    rules, tables = backend.planner.rules, backend.runner.state.buffers.adjusting
    rules.reserve(1)

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short:
        short.setattr(torch, "cat", fail)
        with pytest.raises(torch.OutOfMemoryError):
            rules.reserve(100)
    assert tables.slots == rules.table_slots == len(rules.free_table_slots) == 64
    rules.reserve(100)
    assert sorted(rules.free_table_slots) == list(range(100))
    assert len(tables.bias) == tables.slots == rules.table_slots == 100


def test_only_adjusted_steps_send_more(device: str) -> None:
    """A plain step's packet and kind are those of a backend that never heard of penalties."""
    backend = GraphBackend(model(device))
    finish(backend, [request(PROMPTS[0], CONFIGS[1], SamplingParams())])
    assert all(not kind.targets.adjusted and not kind.targets.logprobs for kind in backend.runner.steps.pairs)
    assert all(not step.targets.packet.fields and step.logprobs is None for step in backend.runner.steps.pairs.values())
    finish(backend, [request(PROMPTS[0], CONFIGS[1], SamplingParams(presence_penalty=1.0, logprobs=2))])
    assert any(kind.targets.adjusted and kind.targets.logprobs for kind in backend.runner.steps.pairs)


@pytest.mark.slow
def test_the_mode_of_the_first_caller_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made in inference mode may not be changed outside of it, unless the backend takes care."""
    monkeypatch.setattr(packet, "SPARE_MOVES", 0)
    sampling, rules = SamplingParams(repetition_penalty=1.4), StopRules(TOKENS)

    def texts() -> list[list[int]]:
        engine = Engine(backend)
        requests = [
            Request(DecodingSequence(prompt, CONFIGS[1], sampling, rules), mask=Alternating(VOCABULARY))
            for prompt in PROMPTS
        ]
        for request in requests:
            engine.submit(request)
        while engine.running:
            assert all(event.error is None for event in engine.step())
        return [request.sequence.output for request in requests]

    with torch.inference_mode():
        backend = GraphBackend(model())
        expected = texts()
    assert texts() == expected
