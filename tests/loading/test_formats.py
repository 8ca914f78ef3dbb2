"""Models that are quantised while they are loaded: which layers, to which weights, and which text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from marks import slow_but
from model_table import DENSE, FIRST_ROWS, build
from quantising import int8_by_hand
from tiny import tiny
from tiny_gguf import write_gguf
from torch import nn
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.eager.backend import EagerBackend
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.loading.embedded import ModelError
from lookahead.loading.fitting import identity_of
from lookahead.loading.formats import CPU_INT8, FORMATS, ROUTERS, linear_layers, quantise_model, quantised_copy
from lookahead.loading.load import load_pretrained
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.number_formats import Codes
from lookahead.models.quantised import QuantisedLinear, formats_of
from lookahead.models.read import read
from lookahead.models.rounding import quantise
from lookahead.models.spec import matrices_in

CPU = torch.device("cpu")
PROMPTS = ("the quick brown fox", "once more the dog and the fox")


@pytest.fixture(scope="module")
def saved(make_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Which layers


@pytest.mark.parametrize("name", slow_but(DENSE, *(set(DENSE) & set(FIRST_ROWS))))
@pytest.mark.thinned(1, most=16)
def test_the_layers_are_the_matrices_of_the_blocks(name: str) -> None:
    """For every class with a reader. A tied head is quantised without the embedding, and only where it is asked for."""
    model = build(name)
    described = read(model, "test")
    parts = {part for matrix in matrices_in(described.blocks) for part in matrix.parts}
    own = {part for part in parts if part in set(model.modules())}  # a reader may have made some from weights
    assert {layer for _, _, layer in linear_layers(model, head=False)} >= own
    assert len(list(linear_layers(model, head=False))) == len(parts)
    assert {layer for _, _, layer in linear_layers(model, head=True)} >= own | set(described.head.parts)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", slow_but(DENSE, *(set(DENSE) & set(FIRST_ROWS))))
@pytest.mark.thinned(1, most=16)
def test_every_class_with_a_reader_has_one_when_it_is_quantised(name: str, dtype: str) -> None:
    model = build(name)
    quantise_model(model, dtype, CPU)
    described = read(model, "test")
    expected = CPU_INT8 if dtype == "int8" else FORMATS[dtype]
    assert {format for matrix in matrices_in(described.blocks) for format in matrix.formats} == {expected}
    assert set(described.head.formats) == {CPU_INT8 if dtype == "int8" else None}
    assert described.embedding.dtype is torch.float32


def test_weights_are_rounded_and_biases_kept() -> None:
    model, before = (tiny("Llama", attention_bias=True, mlp_bias=True) for _ in range(2))
    quantise_model(model, "fp8", CPU)
    old = dict(before.named_modules())
    count = 0
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            expected = quantise(old[name].weight, FORMATS["fp8"])
            assert torch.equal(layer.codes, expected.codes)
            assert torch.equal(layer.bias, old[name].bias)
            assert (layer.weight - old[name].weight).abs().max() < 2**-4 * old[name].weight.abs().max()
            count += 1
    assert count == 7 * model.config.num_hidden_layers
    assert (type(model.lm_head), type(model.model.embed_tokens)) == (nn.Linear, nn.Embedding)


def test_int8_on_a_cpu_has_the_integers_and_scales_of_numpy() -> None:
    """Also of rows of zeros and of tiny weights."""
    weight = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    weight[1], weight[2], weight[3] = 0, weight[2] * 1e-29, weight[3] * 1e-8
    layer, (codes, scales) = quantise(torch.from_numpy(weight), CPU_INT8), int8_by_hand(weight)
    assert np.array_equal(layer.codes.view(torch.int8).numpy(), codes)
    assert np.array_equal(layer.scales[:, 0].numpy(), scales)


def test_a_width_that_is_odd_stays_plain_in_int4() -> None:
    model = tiny("Llama", intermediate_size=33)
    quantise_model(model, "int4", CPU)
    for layer in model.model.layers:
        assert type(layer.mlp.down_proj) is nn.Linear
        assert layer.mlp.up_proj.format == FORMATS["int4"]


def test_routers_of_experts_are_not_quantised() -> None:
    model = tiny("Llama")
    for name in ROUTERS:
        setattr(model.model.layers[0].mlp, name, nn.Linear(32, 4))
        setattr(model.model.layers[1].mlp, name, nn.Sequential(nn.Linear(32, 4)))  # as in HunYuan's and Gemma's
    quantise_model(model, "fp8", CPU)
    assert all(type(getattr(model.model.layers[0].mlp, name)) is nn.Linear for name in ROUTERS)
    assert all(type(getattr(model.model.layers[1].mlp, name)[0]) is nn.Linear for name in ROUTERS)


def test_a_layer_that_is_in_two_places_is_quantised_once() -> None:
    model = tiny("Llama")
    first, second = model.model.layers
    second.mlp.up_proj = first.mlp.up_proj
    quantise_model(model, "int4", CPU)
    assert second.mlp.up_proj is first.mlp.up_proj
    assert isinstance(first.mlp.up_proj, QuantisedLinear)


def test_the_weights_go_to_the_device_one_by_one() -> None:
    """Codes are there, and the rest is where it was."""
    model = tiny("Llama", attention_bias=True)
    quantise_model(model, "fp8", torch.device("meta"))
    layer = model.model.layers[0].self_attn.q_proj
    assert (layer.codes.device.type, layer.scales.device.type, layer.bias.device.type) == ("meta", "meta", "cpu")
    assert model.model.embed_tokens.weight.device.type == "cpu"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.thinned(1, most=1)
def test_on_another_device_the_rest_keeps_its_own_dtype(
    dtype: str, fused: bool, tmp_path: Path, tokenizer: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device here is one that has no memory. Weights are rounded, those of int4 with scales of two bytes."""
    make_model(attention_bias=True).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("lookahead.loading.load.pick_device", lambda name: torch.device("meta"))
    model = load_pretrained(tmp_path, dtype=dtype, fused=fused)[0]
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert formats_of(model) == (FORMATS[dtype],)
    assert type(model.lm_head) is nn.Linear
    layer = model.model.layers[0].self_attn.q_proj
    assert (layer.zeros is not None) is (dtype == "int4")
    scales = {"int4": torch.bfloat16, "mxfp4": torch.uint8}.get(dtype, torch.float32)
    assert (layer.dtype, layer.scales.dtype) == (torch.bfloat16, scales)


def test_a_gguf_is_quantised_once_it_is_dense(tmp_path: Path, tokenizer: Any) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tokenizer)
    model = load_pretrained(path, dtype="int8", device="cpu")[0]
    assert formats_of(model) == (CPU_INT8,)


# Texts


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("dtype", [name for name in FORMATS if name != "fp8_dynamic"])
@pytest.mark.thinned(1, most=2)
def test_texts_are_those_of_the_quantised_model(
    saved: Path, settings: LookaheadConfig, plain: Callable[..., list[int]], dtype: str, backend: str
) -> None:
    if backend == "cpu":
        pytest.importorskip("onnxruntime")
    lines: list[str] = []
    options: dict[str, Any] = {"dtype": dtype, "config": settings, "device": "cpu", "backend": backend}
    lm = lookahead.load(saved, log=lines.append, **options)
    assert lm.weights == dtype
    assert lm.backend.capabilities.name == backend
    assert f"note: dtype={dtype!r} rounds the weights of" in "\n".join(lines)
    for prompt in PROMPTS:
        ids = lm.encode(prompt, raw=True)
        expected = plain(lm.model, ids, 24)
        assert lm.generate(ids, max_tokens=24).token_ids == expected
        assert lm.generate(ids, max_tokens=24, method="autoregressive").token_ids == expected
        sampled = {"max_tokens": 24, "temperature": 0.9, "seed": 5}
        assert lm.generate(ids, **sampled).token_ids == (lm.generate(ids, method="autoregressive", **sampled).token_ids)


def test_fp8_dynamic_is_exact_on_a_cpu(saved: Path, settings: LookaheadConfig) -> None:
    """Where each row has the same bits in every step: lookahead's text is that of token by token, alone and among
    others. A config is fitted to what is exact."""
    pytest.importorskip("onnxruntime")
    lines: list[str] = []
    options: dict[str, Any] = {"device": "cpu", "config": LookaheadConfig(window=5, ngram=4, guesses=8, budget=90)}
    lm = lookahead.load(saved, dtype="fp8_dynamic", log=lines.append, **options)
    assert (lm.weights, lm.rounding, lm.dtype) == ("fp8_dynamic", None, torch.float8_e4m3fn)
    assert lm.backend.capabilities.name == "cpu"  # that of 'auto'
    assert "note: dtype='fp8_dynamic' rounds the weights of" in "\n".join(lines)
    nodes = lm.backend.capabilities.exact_nodes
    assert lm.default_config.budget <= (90 if nodes is None else nodes)
    prompts = [lm.encode(prompt, raw=True) for prompt in PROMPTS]
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
        given: dict[str, Any] = {"max_tokens": 24, **sampling}
        expected = [lm.generate(ids, method="autoregressive", **given).token_ids for ids in prompts]
        assert [lm.generate(ids, **given).token_ids for ids in prompts] == expected
        assert [lm.generate(ids, config=settings, **given).token_ids for ids in prompts] == expected
        assert [done.token_ids for done in lm.generate(prompts, **given)] == expected
    other = lookahead.load(saved, dtype="fp8", **options)
    assert [other.generate(ids, max_tokens=24, temperature=0).token_ids for ids in prompts] != expected


@pytest.mark.parametrize(("dtype", "rounding"), [("int8", "int8"), ("fp8_dynamic", "fp8"), ("fp8", None)])
def test_rounded_activations_may_be_inexact_on_the_eager_backend_which_says_so(
    saved: Path, settings: LookaheadConfig, dtype: str, rounding: str | None
) -> None:
    lines: list[str] = []
    lm = lookahead.load(saved, dtype=dtype, device="cpu", backend="eager", config=settings, log=lines.append)
    assert lm.rounding == rounding
    assert any(f"note: in {rounding} on this backend, rounding" in line for line in lines) is (rounding is not None)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_model_that_is_loaded_is_not_changed(
    make_model: Callable[..., Any], tokenizer: Any, settings: LookaheadConfig, dtype: str
) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lm = lookahead.load((model, tokenizer), dtype=dtype, config=settings, backend="eager")
    assert not formats_of(model)
    assert formats_of(lm.model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert lm.model.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert lm.model.model.norm is not model.model.norm


def test_a_model_without_a_reader_is_quantised_too(settings: LookaheadConfig, tokenizer: Any) -> None:
    ranks = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16)
    widths = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    model = tiny(
        "DeepseekV3", vocab_size=len(tokenizer), num_key_value_heads=4, first_k_dense_replace=2, **ranks, **widths
    )
    lines: list[str] = []
    lm = lookahead.load((model, tokenizer), dtype="fp8", config=settings, log=lines.append)
    assert type(lm.backend) is EagerBackend
    assert isinstance(lm.model.model.layers[0].self_attn.o_proj, QuantisedLinear)
    assert any("which compresses its K/V (MLA)" in line and "the eager backend runs it" in line for line in lines)
    tokens = [
        lm.generate([3, 4, 5], max_tokens=12, method=method).token_ids for method in ("lookahead", "autoregressive")
    ]
    assert tokens[0] == tokens[1]


def test_inside_generate(settings: LookaheadConfig) -> None:
    model = quantised_copy(tiny("Llama"), "int4")
    ids = torch.tensor([[5, 9, 5, 9, 5, 3]])
    with_hook = model.generate(ids, max_new_tokens=24, custom_generate=lookahead.decoding(settings))
    assert torch.equal(with_hook, model.generate(ids, max_new_tokens=24))


def test_step_costs_and_profiles_are_kept_apart() -> None:
    model = tiny("Llama")
    backends = [EagerBackend(one, probed=False) for one in (model, *(quantised_copy(model, name) for name in FORMATS))]
    assert len({str(identity_of(backend)) for backend in backends}) == 1 + len(FORMATS)


# Refusals


def test_a_checkpoint_that_is_quantised_already(saved: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("Llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ValueError, match=r"^dtype='fp8': the model is quantised already \(gptq\); leave dtype out$"):
        lookahead.load((model, tokenizer), dtype="fp8")
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"^cannot load model .*: dtype='int4': the model is quantised already \(gptq\)"
    ):
        lookahead.load(tmp_path, dtype="int4", device="cpu")  # before it looks for weights: there are none
    with pytest.raises(UnsupportedModelError, match="dtype='int4': the model is quantised already; leave dtype out"):
        lookahead.load((quantised_copy(tiny("Llama"), "fp8"), tokenizer), dtype="int4")


@pytest.mark.parametrize("verb", [("generate", "-p", "x"), ("serve",), ("tune",), ("bench",)], ids=str)
@pytest.mark.thinned(1, most=1)
def test_the_refusal_is_one_line_of_a_command(verb: tuple[str, ...], tokenizer: Any, tmp_path: Path) -> None:
    config = tiny("Llama").config
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    where = ("--model", str(tmp_path), "--dtype", "fp8", "--device", "cpu")
    out = ("--out", str(tmp_path / "out")) if verb == ("bench",) else ()
    result = CliRunner().invoke(app, [*verb, *where, *out], obj=Host(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: cannot load model")
    assert last.endswith("dtype='fp8': the model is quantised already (awq); leave dtype out")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model, "_tp_size", 2), "its weights are split between processes"),
        (lambda model: setattr(model.model.norm, "_hf_hook", object()), "the model is spread over devices"),
        (lambda model: setattr(type_of(model, "peft.tuners"), "x", 1), "adapters are not quantised; merge them"),
        (lambda model: model.model.__setattr__("layers", nn.ModuleList()), "llama has no linear layers that can be"),
    ],
)
def test_what_cannot_be_quantised_is_refused(change: Callable[[Any], None], reason: str) -> None:
    model = tiny("Llama")
    change(model)
    with pytest.raises(ValueError, match=f"^dtype='fp8': {reason}.*; leave dtype out$"):
        quantise_model(model, "fp8", CPU)


def type_of(model: Any, module: str) -> Any:
    """A module whose class is one of this package."""
    made = type("Adapter", (nn.Module,), {"__module__": module})()
    model.model.layers[0].adapter = made
    return made


def test_codes_of_every_format_are_as_wide_as_they_should_be() -> None:
    model = tiny("Llama", hidden_size=64)
    for name, size in (("fp8", 1), ("fp8_dynamic", 1), ("int8", 1), ("int4", 0.5), ("mxfp4", 0.5)):
        layer = quantised_copy(model, name).model.layers[0].mlp.up_proj
        assert layer.codes.numel() == size * 64 * 64
        kinds = {
            "fp8": Codes.E4M3,
            "fp8_dynamic": Codes.E4M3,
            "int8": Codes.INT8,
            "int4": Codes.INT4,
            "mxfp4": Codes.E2M1,
        }
        assert layer.format.codes is kinds[name]
