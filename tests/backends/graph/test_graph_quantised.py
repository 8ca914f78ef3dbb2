"""The graph backend on quantised models of every format: the eager backend's tokens, and lookahead's are those of
token-by-token decoding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import interpreted_backends
from marks import slow_but
from quantised_files import AWQ, FP8, Case, awq, fp8, write
from quantising import random_layer
from tiny import PROMPTS, VOCABULARY, outputs, tiny

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.eager.backend import EagerBackend
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.config import SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised import QuantisedLinear

FORMATS = {
    "fp8": Format(Codes.E4M3, 0),
    "fp8 blocks": Format(Codes.E4M3, 128, rows=128),
    "fp8_dynamic": Format(Codes.E4M3, 0, activations=Codes.E4M3),
    "int8": Format(Codes.INT8, 32),
    "int4": Format(Codes.INT4, 128),
    "int4 zeros": Format(Codes.INT4, 32, zeros=True),
    "int4 ordered": Format(Codes.INT4, 128, zeros=True, ordered=True),
    "gguf": Format(Codes.INT4, 32, offsets=True),
    "mxfp4": Format(Codes.E2M1, 32),
}
AUTOREGRESSIVE = LookaheadConfig.autoregressive()
SMALL = LookaheadConfig(window=0, budget=5)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def random_weights(format: Format, out: int, width: int, seed: int) -> QuantisedLinear:
    """Numbers with a standard deviation of about 0.1."""
    layer = random_layer(format, out, width, seed)
    if layer.offsets is not None:
        layer.offsets /= 8
    size = float(layer.dequantised().std())
    if layer.scales.dtype is torch.uint8:
        layer.scales -= round(math.log2(size / 0.1))
    else:
        layer.scales *= 0.1 / size
        layer.offsets = None if layer.offsets is None else layer.offsets * (0.1 / size)
    return layer


def quantised_model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny Llama whose matrices, but for the head, are of this format, with rows of 128 bytes."""
    width = 32 * 32 // FORMATS[name].codes.bits  # 128 bytes
    fields = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "initializer_range": 0.1}
    model = tiny("Llama", **{**fields, **changes}).to(dtype)
    layers = [(one, number) for number, block in enumerate(model.model.layers) for one in (block.self_attn, block.mlp)]
    for parent, number in layers:
        for index, (child, module) in enumerate(list(parent.named_children())):
            if isinstance(module, torch.nn.Linear):
                made = random_weights(FORMATS[name], module.out_features, module.in_features, 10 * number + index)
                made.dtype = dtype
                setattr(parent, child, made)
    return model.to(device)


def check_interleaved(model: Any) -> None:
    """All of them, if the kernel for the format reads interleaved codes."""
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert all(layer.is_interleaved is (layer.format.activations is None) for layer in layers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
@pytest.mark.parametrize("name", slow_but(FORMATS, "fp8 blocks"))
@pytest.mark.parametrize("count", slow_but([2, 3], 2))
def test_kernels_give_the_eager_backends_tokens(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, in steps of up to 16 rows."""
    model = quantised_model(name)
    expected = outputs(EagerBackend(model), [PROMPTS[0]], AUTOREGRESSIVE, count)
    make = interpreted_backends(monkeypatch, (1, 4, 5, 16))
    assert outputs(make(model), [PROMPTS[0]], SMALL, count) == expected
    check_interleaved(model)


@pytest.mark.parametrize("name", slow_but(FORMATS, "int8", "int4 ordered"))
@pytest.mark.thinned(1, most=1)
def test_lookahead_equals_token_by_token(name: str, device: str, settings: LookaheadConfig) -> None:
    """Alone and in a batch. The model's own forward pass reads the same weights before and after; where it rounds
    activations, a difference in the last bit may become a step of a code, and its text another."""
    model = quantised_model(name, device)
    rounds = FORMATS[name].activations is not None

    def other() -> Any:
        return GraphBackend(model, kv_tokens=2048) if rounds else EagerBackend(model)

    expected = outputs(other(), PROMPTS, AUTOREGRESSIVE, 10)
    assert len({token for output in expected for token in output}) > 10
    backend = GraphBackend(model, kv_tokens=2048)
    check_interleaved(model)
    assert outputs(backend, PROMPTS, AUTOREGRESSIVE, 10) == expected
    assert [outputs(backend, [prompt], settings, 10)[0] for prompt in PROMPTS] == expected
    assert outputs(backend, PROMPTS, settings, 10) == expected
    assert outputs(other(), PROMPTS, AUTOREGRESSIVE, 10) == expected


def check_shared_pages(
    make: Callable[[], Any], most_rows: int | None, count: int, length: int, settings: LookaheadConfig
) -> None:
    """`count` texts that share their prompts' beginning, in memory for fewer: they join, are preempted and come back,
    and each is what token-by-token decoding gives alone."""
    pages = 3 * count // 4 + 1
    backend = GraphBackend(make(), kv_tokens=pages * PAGE, **({} if most_rows is None else {"most_rows": most_rows}))
    stem = random.Random(3).choices(range(VOCABULARY), k=PAGE + 9)
    prompts = [[*stem, i % VOCABULARY, 2 * i % VOCABULARY] for i in range(count)]
    engine, sequences = Engine(backend), list[DecodingSequence]()
    for i in range(count):
        sampling = SamplingParams(0.9 * (i % 2), seed=i)
        config = (settings, AUTOREGRESSIVE)[i % 4 == 3]
        sequences.append(DecodingSequence(prompts[i], config, sampling, StopRules(length)))
        engine.submit(Request(sequences[-1]))
        if i + 1 in (count // 8, count // 4):  # the others come at once, and need their next pages at once
            assert all(event.error is None for event in engine.step())
    while engine.running:
        assert all(event.error is None for event in engine.step())
    assert engine.preemptions
    assert backend.pool.hit_tokens
    other = GraphBackend(make(), kv_tokens=2048)
    for i, sequence in enumerate(sequences):
        alone = outputs(other, [prompts[i]], AUTOREGRESSIVE, length, SamplingParams(0.9 * (i % 2), seed=i))
        assert sequence.output == alone[0]


@pytest.mark.slow
def test_texts_that_share_pages_and_leave_for_others(device: str, settings: LookaheadConfig) -> None:
    check_shared_pages(lambda: quantised_model("int8", device), 32, 8, 60, settings)


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in FORMATS])
def test_sixty_four_texts_that_share_pages(name: str) -> None:
    def make() -> Any:
        return half_model(name, 512)

    check_shared_pages(make, None, 64, 60, LookaheadConfig())


def half_model(name: str, hidden: int) -> Any:
    """Wide enough for sums that change when their order does."""
    return quantised_model(
        name, "cuda", torch.bfloat16, hidden_size=hidden, intermediate_size=1024, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in FORMATS])
@pytest.mark.parametrize("hidden", slow_but([512, 520], 512))
def test_half_precision_lookahead_equals_token_by_token(name: str, hidden: int) -> None:
    """In bf16, where any change of a sum shows: alone and among 16. A width of 520 has no interleaved codes."""
    backend = GraphBackend(half_model(name, hidden))
    prompts = [random.Random(i).choices(range(VOCABULARY), k=(300, 8, 40, 1)[i % 4]) for i in range(16)]
    expected = [outputs(backend, [prompt], AUTOREGRESSIVE, 40)[0] for prompt in prompts]
    assert [outputs(backend, [prompt], LookaheadConfig(), 40)[0] for prompt in prompts] == expected
    assert outputs(backend, prompts, AUTOREGRESSIVE, 40) == expected
    assert outputs(backend, prompts, LookaheadConfig(budget=20), 40) == expected


LOADED: dict[str, Callable[[], Case]] = {
    "fp8": lambda: Case({**FP8, "weight_block_size": [128, 128]}, fp8((128, 128), name="weight_scale_inv")),
    "awq": lambda: Case({**AWQ, "group_size": 32}, awq(32)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in LOADED])
def test_a_folder_is_loaded_for_the_kernels(name: str, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """`lookahead.load` of a quantised checkpoint in bf16: its logits are those of the plain weights within rounding."""
    fields = {"hidden_size": 256, "intermediate_size": 512}
    dense = write(tmp_path, make_model(**fields), tokenizer, LOADED[name]())
    loaded = lookahead.load(tmp_path, device="cuda")
    assert loaded.backend.capabilities.name == "graph"
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    check_interleaved(loaded.model)
    for module_name, module in loaded.model.named_modules():
        if isinstance(module, QuantisedLinear):
            expected = dense.get_submodule(module_name).weight.detach()
            torch.testing.assert_close(module.dequantised().cpu(), expected, rtol=1e-6, atol=0, msg=module_name)
    check_texts(loaded, ["the quick brown fox jumps over", "once more", "def fox(dog): return"])


def check_texts(loaded: Any, prompts: Sequence[str]) -> None:
    """Alone and in a batch, lookahead's are those of token-by-token decoding."""
    expected = [loaded.generate(prompt, max_tokens=32, method="autoregressive").token_ids for prompt in prompts]
    assert [loaded.generate(prompt, max_tokens=32).token_ids for prompt in prompts] == expected
    assert [done.token_ids for done in loaded.generate(list(prompts), max_tokens=32)] == expected
