"""Quantised experts in checkpoints: what their modules are once loaded, the text they generate, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow_but
from mixtures import KINDS, SIZES, dequantised, experts_of, mixture
from pictures import FAMILIES
from quantised_files import (
    AWQ,
    CASES,
    FP8,
    GPT_OSS,
    GPT_OSS_EXPERTS,
    Case,
    ExpertsPacker,
    fp8,
    save,
    separately,
    together,
    write,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

import lookahead
from lookahead.loading.embedded import ModelError
from lookahead.loading.load import load_pretrained
from lookahead.loading.quantised.quantizer import quantised_config
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised import QuantisedLinear, formats_of
from lookahead.models.quantised_experts import QuantisedExperts, expert_matrices

PROMPT = "the quick brown fox jumps over the quick brown"
ROUTERS = ("lm_head", "mlp.gate", "gate.wg", "router", "router.gate", "router.proj", "expert_gate", "model_projection")
W = ("w1", "w3", "w2")
WIDE = {"moe_intermediate_size": 64, "intermediate_size": 64}
BLOCKS = fp8((24, 24), name="weight_scale_inv")
BLOCK_CONFIG = {**FP8, "weight_block_size": [24, 24]}


def with_routers(case: Case) -> Case:
    return Case(case.config, case.pack, plain=ROUTERS)


def check_experts(model: Any, dense: Any) -> None:
    """All experts of a loaded model have the weights of its plain twin."""
    for name, module in experts_of(dense).items():
        found = model.get_submodule(name)
        assert type(found) is QuantisedExperts
        for own, plain in zip(expert_matrices(found), expert_matrices(module), strict=True):
            assert (own.bias is None) == (plain.bias is None)
            assert own.bias is None or torch.equal(own.bias, plain.bias)
            for expert in range(plain.experts):
                weights = own.weight(expert, torch.float32), plain.weight(expert, torch.float32)
                torch.testing.assert_close(*weights, rtol=1e-6, atol=0, msg=f"{name} {expert}")


def check_loaded(folder: Path, dense: Any) -> Any:
    """The model in a folder, whose experts and logits are those of its plain twin."""
    model, _, _ = load_pretrained(folder, device="cpu")
    check_experts(model, dense)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = torch.tensor([[5, 9, 5, 9, 5, 3, 17, 23]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-3, atol=1e-3)
    return model


def tiny_mixture(name: str, tokenizer: Any, **changes: Any) -> Any:
    fields = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return mixture(name, **{**WIDE, **fields, **changes})


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gptq-order", "gptq-8", "ct-4-order")])
@pytest.mark.thinned(1, most=8)
def test_experts_of_each_format_are_loaded(name: str, tokenizer: Any, tmp_path: Path) -> None:
    case = with_routers(CASES[name])
    dense = write(tmp_path, tiny_mixture("qwen3", tokenizer), tokenizer, case, experts=separately(case.pack))
    model = check_loaded(tmp_path, dense)
    assert len(formats_of(model)) == len({format.codes for format in formats_of(model)}) or "block" in name


@pytest.mark.parametrize("name", slow_but([name for name in KINDS if not name.startswith(("gpt", "gran"))], "phi"))
def test_experts_of_each_class_are_loaded(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """By the names that the publishers' files have; in blocks of 24 rows, whose last ones in an expert are fewer."""
    old = name in ("mixtral", "phi", "minimax")
    model = tiny_mixture(name, tokenizer)
    dense = write(
        tmp_path,
        model,
        tokenizer,
        with_routers(Case(BLOCK_CONFIG, BLOCKS)),
        experts=separately(BLOCKS, W) if old else separately(BLOCKS),
        rename=lambda key: key.replace(".mlp.", ".block_sparse_moe.") if old else key,
        files=2,
    )
    loaded = check_loaded(tmp_path, dense)
    kinds = {matrix.format for module in experts_of(loaded).values() for matrix in expert_matrices(module)}
    assert kinds == {Format(Codes.E4M3, 24, rows=8)}


def test_gpt_oss_keeps_its_bits(tokenizer: Any, tmp_path: Path) -> None:
    """As it is published: experts in MXFP4 with biases, all else in bfloat16."""
    model = tiny_mixture("gpt-oss", tokenizer, intermediate_size=96, hidden_size=160)
    dense = write(tmp_path, model, tokenizer, GPT_OSS, experts=GPT_OSS_EXPERTS)
    loaded = check_loaded(tmp_path, dense)
    assert formats_of(loaded) == (Format(Codes.E2M1, 32),)
    stored = load_file(tmp_path / "model.safetensors")
    for name, module in experts_of(loaded).items():
        assert module.gate_up_proj.codes.numel() == stored[f"{name}.gate_up_proj_blocks"].numel()
        assert torch.equal(module.down_proj.scales, stored[f"{name}.down_proj_scales"].flatten(0, 1))
    half = load_pretrained(tmp_path, device="cpu", dtype="bfloat16")[0]
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    check_experts(half, dense.bfloat16().float())


def test_gpt_oss_has_the_weights_that_transformers_expands(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, tiny_mixture("gpt-oss", tokenizer), tokenizer, GPT_OSS, experts=GPT_OSS_EXPERTS)
    expanded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    assert len(experts_of(expanded)) == 2
    check_experts(load_pretrained(tmp_path, device="cpu", dtype="bfloat16")[0], expanded)


def test_nothing_is_expanded_while_it_loads(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, tiny_mixture("gpt-oss", tokenizer), tokenizer, GPT_OSS, experts=GPT_OSS_EXPERTS)
    expanded: list[int] = []
    monkeypatch.setattr(QuantisedLinear, "dequantised_rows", lambda *args: expanded.append(1))
    model = load_pretrained(tmp_path, device="cpu")[0]
    assert not expanded
    assert all(parameter.numel() < 4 * 128 * 32 for parameter in model.parameters())


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("inner", [16, 32, 64])
@pytest.mark.thinned(1, most=2)
def test_fp8_experts_in_one_tensor_are_loaded(turned: bool, inner: int, tokenizer: Any, tmp_path: Path) -> None:
    """As Qwen3-VL's, whose matrices are [in, out]. Of the two one may be square: hidden is 32."""
    pack = together(BLOCKS, {"weight": "", "weight_scale_inv": "_scale_inv"}, turned=turned)
    model = tiny_mixture("qwen3", tokenizer, moe_intermediate_size=inner)
    dense = write(tmp_path, model, tokenizer, with_routers(Case(BLOCK_CONFIG, BLOCKS)), experts=pack)
    check_loaded(tmp_path, dense)


@pytest.mark.parametrize("apart", [True, False])
def test_a_model_with_pictures_has_experts_in_its_text_model(apart: bool, tokenizer: Any, tmp_path: Path) -> None:
    whole = together(BLOCKS, {"weight": "", "weight_scale_inv": "_scale_inv"}, turned=True)
    fields = FAMILIES["qwen3_vl"].config
    config = Qwen3VLMoeConfig(**{**fields, "text_config": {**fields["text_config"], **SIZES}})
    model: Any = Qwen3VLMoeForConditionalGeneration(config).eval()
    case = Case(BLOCK_CONFIG, BLOCKS, plain=("",))
    dense = write(tmp_path, model, tokenizer, case, experts=separately(BLOCKS) if apart else whole)
    assert len(experts_of(dense)) == 2
    stored = quantised_config(str(tmp_path), torch.device("cpu"))
    check_experts(Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path, config=stored), dense)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3", "mixtral"])
@pytest.mark.thinned(1, most=1)
def test_the_text_of_quantised_experts_is_exact(
    name: str, tokenizer: Any, settings: Any, plain: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_mixture(name, tokenizer)
    case, pack = (GPT_OSS, GPT_OSS_EXPERTS) if name == "gpt-oss" else (with_routers(CASES["awq"]), None)
    dense = write(tmp_path, model, tokenizer, case, experts=pack or separately(case.pack))
    lm = lookahead.load(tmp_path, device="cpu", config=settings, backend="eager")
    ids = lm.encode(PROMPT)
    quick = lm.generate(PROMPT, max_tokens=24)
    assert quick.token_ids == lm.generate(PROMPT, max_tokens=24, method="autoregressive").token_ids
    assert quick.token_ids == plain(dense, ids, 24) == plain(dequantised(lm.model, dense), ids, 24)
    hooked = lm.model.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, custom_generate=lookahead.decoding(settings)
    )
    assert quick.token_ids == hooked[0, len(ids) :].tolist()


def test_plain_experts_of_a_quantised_model_stay_plain(tokenizer: Any, tmp_path: Path) -> None:
    case = with_routers(CASES["awq"])
    dense = write(tmp_path, tiny_mixture("qwen3", tokenizer), tokenizer, case)
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    for name, module in experts_of(model).items():
        assert torch.equal(module.gate_up_proj, dense.get_submodule(name).gate_up_proj)


def test_layers_that_the_model_does_not_have_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    """GLM's and DeepSeek's files end with a layer for drafting."""
    case = with_routers(CASES["fp8-block"])
    dense = write(tmp_path, tiny_mixture("glm4", tokenizer), tokenizer, case, experts=separately(case.pack))
    tensors = load_file(tmp_path / "model.safetensors")
    more(tensors, "model.layers.1.", "model.layers.2.")
    save(tmp_path, tensors, 1)
    check_loaded(tmp_path, dense)


def test_loading_experts_reports_no_unexpected_weights(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    logger = logging.get_logger("transformers")
    case = with_routers(Case(BLOCK_CONFIG, BLOCKS))
    write(tmp_path, tiny_mixture("mixtral", tokenizer), tokenizer, case, experts=separately(BLOCKS, W))
    logger.addHandler(caplog.handler)
    try:
        load_pretrained(tmp_path, device="cpu")
    finally:
        logger.removeHandler(caplog.handler)
    assert "UNEXPECTED" not in caplog.text
    assert "MISSING" not in caplog.text


# Refusals

E = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("awq", lambda t: drop(t, f"{E}.2.up_proj"), f"{E} cannot be read: expert 2 has no quantised up_proj"),
        ("awq", lambda t: t.pop(f"{E}.3.down_proj.qzeros"), rf"{E}\.3\.down_proj cannot be read: it has no qzeros"),
        (
            "awq",
            lambda t: more(t, f"{E}.3", f"{E}.4"),
            f"{E} cannot be read: there is an expert 4, and the model has 4",
        ),
        ("ct-4", lambda t: biased(t, f"{E}.1.up_proj", 64), r"up_proj cannot be read: it has a bias, and the model's"),
        (
            "fp8-block",
            lambda t: t.pop(f"{E}.0.up_proj.weight_scale_inv"),
            "0.up_proj has weights in FP8 without scales",
        ),
    ],
)
@pytest.mark.thinned(1, most=2)
def test_broken_experts_are_refused(name: str, edit: Any, message: str, tokenizer: Any, tmp_path: Path) -> None:
    case = with_routers(CASES[name])
    write(tmp_path, tiny_mixture("qwen3", tokenizer), tokenizer, case, experts=separately(case.pack))
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save(tmp_path, tensors, 1)
    with pytest.raises(ModelError, match=message):
        load_pretrained(tmp_path, device="cpu")


def drop(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def more(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors |= {name.replace(old, new): one.clone() for name, one in tensors.items() if name.startswith(old)}


def biased(tensors: dict[str, torch.Tensor], name: str, rows: int) -> None:
    tensors[f"{name}.bias"] = torch.ones(rows)


def refused(folder: Path, name: str, case: Case, experts: ExpertsPacker, tokenizer: Any, **changes: Any) -> str:
    write(folder, tiny_mixture(name, tokenizer, **changes), tokenizer, with_routers(case), experts=experts)
    with pytest.raises(ModelError) as caught:
        load_pretrained(folder, device="cpu")
    return str(caught.value)


def test_experts_with_columns_in_different_orders_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    case = CASES["gptq-order"]
    message = refused(tmp_path, "qwen3", case, separately(case.pack), tokenizer)
    assert f"{E} cannot be read: its experts have their columns in different orders (GPTQ's desc_act)" in message


def test_experts_in_different_formats_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    """Some of GPTQ's experts symmetric, and some not: they are the same to a config."""
    packers = [CASES[name].pack for name in ("gptq", "gptq-asymmetric")]

    def pack(draw: Any, shape: tuple[int, int]) -> Any:
        packers.reverse()
        return packers[0](draw, shape)

    message = refused(tmp_path, "qwen3", CASES["gptq"], separately(pack), tokenizer)
    assert "cannot be read: its experts have several formats" in message


def test_gates_and_ups_that_alternate_in_the_model_are_not_read_apart(tokenizer: Any, tmp_path: Path) -> None:
    message = refused(tmp_path, "gpt-oss", CASES["awq"], separately(CASES["awq"].pack), tokenizer)
    assert "its gates and ups are apart, and rows of the model's alternate" in message


def test_other_layouts_of_experts_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    """A stack of a whole layer by the name of a linear layer, as Granite's."""
    case = with_routers(CASES["fp8-tensor"])
    write(tmp_path, tiny_mixture("granite", tokenizer), tokenizer, case)
    tensors = load_file(tmp_path / "model.safetensors")
    stack = tensors.pop("model.layers.0.block_sparse_moe.experts.gate_up_proj")
    name = "model.layers.0.block_sparse_moe.input_linear"
    tensors |= {f"{name}.weight": stack.to(torch.float8_e4m3fn), f"{name}.weight_scale": torch.ones(4)}
    save(tmp_path, tensors, 1)
    with pytest.raises(ModelError, match=f"{name} is quantised, and no linear layer but one of several in a tensor"):
        load_pretrained(tmp_path, device="cpu")


def test_stacks_of_the_wrong_size_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, tiny_mixture("gpt-oss", tokenizer), tokenizer, GPT_OSS, experts=GPT_OSS_EXPERTS)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {**tensors, f"{E}.down_proj_scales": tensors[f"{E}.down_proj_scales"][:3].clone()}
    save(tmp_path, changed, 1)
    with pytest.raises(ModelError, match=rf"{E}\.down_proj cannot be read: its scales is \[3, 32, 2\]"):
        load_pretrained(tmp_path, device="cpu")
    save(tmp_path, {**tensors, f"{E}.down_proj_blocks": tensors[f"{E}.down_proj_blocks"][:, :, :1].clone()}, 1)
    with pytest.raises(ModelError, match=rf"{E}\.down_proj cannot be read: its blocks is \[32, 1, 16\]"):
        load_pretrained(tmp_path, device="cpu")


def test_a_format_that_is_not_known_is_named(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, tiny_mixture("gpt-oss", tokenizer), tokenizer, GPT_OSS, experts=GPT_OSS_EXPERTS)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**AWQ, "quant_method": "mxfp9"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quant_method 'mxfp9'; known are FP8 .* MXFP4 "):
        load_pretrained(tmp_path, device="cpu")
