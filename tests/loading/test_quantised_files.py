"""Quantised checkpoints: what their layers are once loaded, the text they generate, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import AWQ, CASES, FP8, GPTQ, Case, awq, compressed, fp8, gptq, packed, save, write
from safetensors.torch import load_file
from tiny import tiny

import lookahead
from lookahead.loading.embedded import ModelError
from lookahead.loading.load import load_pretrained
from lookahead.models.number_formats import Codes
from lookahead.models.quantised import QuantisedLinear

PROMPT = "the quick brown fox jumps over the quick brown"


def layers(model: Any) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def check_weights(model: Any, dense: Any) -> None:
    """All layers of a loaded model have the weights of its plain twin."""
    for name, module in dense.named_modules():
        if isinstance(module, torch.nn.Linear):
            found = model.get_submodule(name)
            torch.testing.assert_close(found.weight, module.weight.detach(), rtol=1e-6, atol=0, msg=name)
            assert (found.bias is None) == (module.bias is None), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(1, most=10)
def test_a_folder_of_each_format_is_loaded(name: str, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    dense = write(tmp_path, make_model(), tokenizer, CASES[name])
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    found = layers(model)
    assert len(found) == 14
    assert model.dtype is torch.float32
    assert {layer.dtype for layer in found.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    check_weights(model, dense)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8-block", "awq", "gptq-order", "ct-4-asymmetric", "ct-int8", "ct-mxfp4"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.thinned(1, most=2)
def test_the_text_of_a_quantised_model_is_exact(
    name: str, backend: str, make_model: Any, tokenizer: Any, settings: Any, plain: Callable[..., Any], tmp_path: Path
) -> None:
    dense = write(tmp_path, make_model(), tokenizer, CASES[name])
    loaded = lookahead.load(tmp_path, device="cpu", config=settings, backend=backend)
    if backend == "eager" or find_spec("onnxruntime"):
        assert loaded.backend.capabilities.name == {"auto": "cpu", "eager": "eager"}[backend]
    quick = loaded.generate(PROMPT, max_tokens=24)
    slow = loaded.generate(PROMPT, max_tokens=24, method="autoregressive")
    assert quick.token_ids == slow.token_ids
    ids = loaded.encode(PROMPT)
    assert quick.token_ids == plain(dense, ids, 24)
    with torch.no_grad():
        own = loaded.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert quick.token_ids == own[0, len(ids) :].tolist()


def test_biases_tied_embeddings_and_shards(tokenizer: Any, tmp_path: Path) -> None:
    fields = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True}
    model = tiny("Qwen2", **fields)
    dense = write(tmp_path, model, tokenizer, CASES["gptq"], files=3)
    loaded, _, _ = load_pretrained(tmp_path, device="cpu")
    check_weights(loaded, dense)
    for name, layer in layers(loaded).items():
        bias = dense.get_submodule(name).bias
        assert (layer.bias is None and bias is None) or torch.equal(layer.bias, bias)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_quantised_head_is_its_own_although_the_config_ties_it(
    make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    case = Case(GPTQ, gptq(16), plain=("nothing",))
    dense = write(tmp_path, make_model(), tokenizer, case)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    assert "lm_head" in layers(model)
    check_weights(model, dense)


def test_layers_that_the_files_have_plain_stay_plain(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    case = Case({**AWQ, "modules_to_not_convert": ["down_proj"]}, awq(16), plain=("lm_head", "down_proj"))
    dense = write(tmp_path, make_model(), tokenizer, case)
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    assert {name.rpartition(".")[2] for name in layers(model)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    }  # fmt: skip
    check_weights(model, dense)


def test_groups_of_layers_have_schemes_of_their_own(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    config = compressed("mixed-precision")
    four, eight = compressed("", group_size=16), compressed("", num_bits=8, type="float", strategy="channel")
    groups = [config["config_groups"]["group_0"] for config in (four, eight)]
    groups[0] |= {"targets": ["re:.*mlp.*"], "format": "pack-quantized"}
    groups[1] |= {"targets": ["Linear"], "format": "float-quantized"}
    config["config_groups"] = dict(zip("ab", groups, strict=True))

    def pack(draw: Any, shape: tuple[int, int]) -> Any:
        return (packed(16) if 64 in shape else fp8(per="column"))(draw, shape)

    dense = write(tmp_path, make_model(), tokenizer, Case(config, pack))
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    kinds = {name.rpartition(".")[2]: layer.format.codes for name, layer in layers(model).items()}
    assert kinds["down_proj"] is Codes.INT4
    assert kinds["q_proj"] is Codes.E4M3
    check_weights(model, dense)


def test_half_precision_keeps_the_checkpoints_dtype(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    dense = write(tmp_path, make_model(), tokenizer, CASES["awq"])
    model, _, _ = load_pretrained(tmp_path, device="cpu", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, layer in layers(model).items():
        assert layer.scales.dtype is torch.float16, name
        assert torch.equal(layer.weight, dense.get_submodule(name).weight.bfloat16()), name


def test_fp8_codes_are_mapped_from_the_file(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, make_model(), tokenizer, CASES["fp8-block"])
    stored = load_file(tmp_path / "model.safetensors")
    for name, layer in layers(load_pretrained(tmp_path, device="cpu")[0]).items():
        assert torch.equal(layer.codes, stored[f"{name}.weight"].view(torch.uint8))


def test_a_config_without_a_dtype_is_not_that_of_its_codes(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, make_model(), tokenizer, CASES["fp8-block"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("dtype",)}))
    from transformers import AutoModelForCausalLM

    from lookahead.loading.quantised.quantizer import quantised_config

    found: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=quantised_config(str(tmp_path), torch.device("cpu")), dtype="auto"
    )
    assert found.dtype is torch.bfloat16


def test_a_loaded_model_keeps_its_config_and_is_not_saved(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, make_model(), tokenizer, CASES["awq"])
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    assert model.config.quantization_config == AWQ
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")


def test_loading_reports_no_unexpected_weights(
    make_model: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    logger = logging.get_logger("transformers")
    write(tmp_path, make_model(), tokenizer, CASES["gptq"])
    logger.addHandler(caplog.handler)
    try:
        load_pretrained(tmp_path, device="cpu")
    finally:
        logger.removeHandler(caplog.handler)
    assert "UNEXPECTED" not in caplog.text
    assert "MISSING" not in caplog.text


# Refusals


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GPTQ, "bits": 3}, "GPTQ of 3 bits"),
        ({**AWQ, "version": "gemv"}, "AWQ of version 'gemv'"),
        ({**FP8, "fmt": "e5m2"}, "FP8 of format 'e5m2'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ({"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}, "ModelOpt's NVFP4"),
        (compressed("nvfp4-pack-quantized", type="float"), "'nvfp4-pack-quantized' of 4 bits"),
        (compressed("pack-quantized", num_bits=2), "'pack-quantized' of 2 bits"),
        (compressed("marlin-24"), "'marlin-24'"),
        ({**compressed("pack-quantized"), "transform_config": {"config_groups": {"u": {}}}}, "transforms"),
        ({**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.thinned(1, most=5)
def test_unknown_formats_are_refused_in_one_line(
    config: dict[str, Any], named: str, make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, make_model(), tokenizer, Case(config, gptq(16)))
    with pytest.raises(ModelError) as caught:
        load_pretrained(tmp_path, device="cpu")
    message = str(caught.value)
    assert named in message
    assert "known are FP8 (" in message
    assert "\n" not in message


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors, 1)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"{Q} cannot be read: it has no qzeros"),
        ("awq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :8].clone()}), "its scales is"),
        ("fp8-block", lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(32)}), "a pre_quant_scale"),
        ("fp8-block", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q} has weights in FP8 without scales"),
        ("gptq-order", lambda t: t.update({f"{Q}.g_idx": torch.zeros(32, dtype=torch.int32)}), "do not all have 16"),
        ("ct-int8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), "its weight is float32, not int8"),
        ("ct-4", lambda t: t.update({f"{Q}.weight_shape": torch.tensor([32, 48])}), r"its weight_shape is \[32, 48\]"),
    ],
)
@pytest.mark.thinned(1, most=3)
def test_broken_layers_are_refused(
    name: str, edit: Any, message: str, make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, make_model(), tokenizer, CASES[name])
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        load_pretrained(tmp_path, device="cpu")


def test_a_config_that_promises_what_the_files_lack(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    nothing = Case(AWQ, awq(16), plain=("proj", "lm_head"))
    write(tmp_path, model, tokenizer, nothing)
    with pytest.raises(ModelError, match=r"says that it is quantised \(awq\), but its files are not"):
        load_pretrained(tmp_path, device="cpu")


def test_scales_without_a_config_are_not_ignored(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, make_model(), tokenizer, CASES["modelopt"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="its config does not say how its weights are quantised"):
        load_pretrained(tmp_path, device="cpu")


def test_pickled_checkpoints_are_refused(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, make_model(), tokenizer, CASES["awq"])
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="quantised ones are read from safetensors only"):
        load_pretrained(tmp_path, device="cpu")


# Names that differ between the files and the model


def rename(folder: Path, change_name: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save(folder, {change_name(name): tensor for name, tensor in tensors.items()}, 1)


def test_files_of_the_model_without_its_head_have_other_names(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    dense = write(tmp_path, make_model(tie_word_embeddings=True), tokenizer, CASES["ct-4-order"])
    rename(tmp_path, lambda name: name.removeprefix("model."))
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    assert len(layers(model)) == 14
    check_weights(model, dense)


def test_a_model_with_pictures_has_other_names_in_its_files(tokenizer: Any, tmp_path: Path) -> None:
    """As Gemma 3's were written before transformers 5: `language_model.model` is now `model.language_model`."""
    from pictures import model_of

    case = Case(CASES["ct-4-order"].config, CASES["ct-4-order"].pack, plain=("lm_head",))
    dense = write(tmp_path, model_of("gemma3"), tokenizer, case)
    rename(tmp_path, lambda name: name.replace("model.language_model.", "language_model.model."))
    model, _, _ = load_pretrained(tmp_path, device="cpu")
    check_weights(model, dense)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
