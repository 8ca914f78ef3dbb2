"""Loading: devices, dtypes, folders, what is missing, and what a GGUF says of its own tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

import lookahead
from lookahead import LookaheadConfig
from lookahead.cli.settings import DTYPES as CLI_DTYPES
from lookahead.loading.embedded import ModelError
from lookahead.loading.formats import FORMATS
from lookahead.loading.load import (
    DTYPES,
    fix_gguf_tokenizer,
    greedy_settings,
    load_pretrained,
    pick_device,
    pick_dtype,
    stop_ids,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Devices and dtypes


def test_device_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ModelError, match=rf"device '{name}' is not available; use cpu"):
            pick_device(name)


def test_device_that_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match="'cuda:2' is not available"):
        pick_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cpu0"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ModelError, match=rf"unknown device '{name}'; use auto, cpu, cuda or cuda:N"):
        pick_device(name)


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_device_of_a_kind_that_is_not_supported(name: str) -> None:
    with pytest.raises(ModelError, match=rf"device '{name}'"):
        pick_device(name)


def test_dtype() -> None:
    assert pick_dtype("auto", CPU) is torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == "auto"
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    for quantised in FORMATS:  # what is not quantised has the dtype of 'auto'
        assert pick_dtype(quantised, CPU) is torch.float32
        assert pick_dtype(quantised, torch.device("cuda")) == "auto"
    with pytest.raises(ModelError, match="unknown dtype 'int5'; use auto, float32, bfloat16, float16, fp8,"):
        pick_dtype("int5", CPU)
    assert ("auto", *DTYPES, *FORMATS) == CLI_DTYPES


# Folders


def test_load_from_a_folder(saved: Path, model: Any, settings: LookaheadConfig) -> None:
    loaded, tokenizer, label = load_pretrained(saved, device="cpu")
    assert label == str(saved)
    assert loaded.dtype is torch.float32
    assert not loaded.training
    again = lookahead.load(saved, device="cpu", config=settings)
    assert again.name == str(saved)
    prompt = [{"role": "user", "content": "the fox"}]
    here = lookahead.load((model, tokenizer), config=settings).generate(prompt, max_tokens=12)
    there = again.generate(prompt, max_tokens=12)
    assert (there.text, there.token_ids) == (here.text, here.token_ids)


def test_load_in_another_dtype(saved: Path) -> None:
    assert load_pretrained(saved, dtype="bfloat16", device="cpu")[0].dtype is torch.bfloat16


def test_a_saved_model_in_half_precision_runs_in_float32_on_a_cpu(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, device="cpu")[0].dtype is torch.float32


# What is missing


@pytest.mark.parametrize("name", ["no-such-organisation/no-such-model", "/no/such/folder", "./nothing-here"])
def test_missing_model_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment on import
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_pretrained(name, device="cpu")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_pretrained(tmp_path, device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot load model"):
        load_pretrained(tmp_path, device="cpu")


def test_missing_gguf(tmp_path: Path) -> None:
    path = tmp_path / "absent.gguf"
    with pytest.raises(ModelError, match=r"no file '.*absent\.gguf'; give the path of a \.gguf file"):
        load_pretrained(path)


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"cannot load model '.*broken\.gguf'"):
        load_pretrained(path, device="cpu")


def test_devices_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown device 'gpu'"):
        load_pretrained(tmp_path / "absent.gguf", device="gpu")


# Stop ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (None, None, None, set()),
        (2, None, None, {2}),
        ([2, 3], 4, 5, {2, 3}),
        (0, (0, 7), 7, {0}),
        (None, (0, 7), 5, {0, 7}),
        (None, None, 5, {5}),
    ],
)
def test_stop_ids(generation: Any, config: Any, tokenizer: Any, expected: set[int]) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=config)
    )
    assert stop_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_stop_ids_without_a_generation_config() -> None:
    model = SimpleNamespace(generation_config=None, config=SimpleNamespace(eos_token_id=3))
    assert stop_ids(model, SimpleNamespace()) == {3}


# GGUF tokenizers


class FakeTokenizer:
    eos_token = "<bos>"

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"


def gguf_file(path: Path, *, add_bos: bool | None, bos: int | None) -> Path:
    writer = GGUFWriter(str(path), "llama")
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("add_bos", "bos", "expected"),
    [(True, 1, 1), (True, 0, 0), (False, 1, None), (None, 1, None), (True, None, None)],
)
def test_gguf_bos(tmp_path: Path, add_bos: bool | None, bos: int | None, expected: int | None) -> None:
    tokenizer = FakeTokenizer()
    path = gguf_file(tmp_path / "meta.gguf", add_bos=add_bos, bos=bos)
    fix_gguf_tokenizer(tokenizer, SimpleNamespace(eos_token_id=7), path)
    assert getattr(tokenizer, "lookahead_bos", None) == expected
    assert tokenizer.eos_token == "<7>"


@pytest.mark.parametrize(("eos", "expected"), [([9, 7], "<9>"), (None, "<bos>"), (0, "<0>")])
def test_gguf_eos(tmp_path: Path, eos: Any, expected: str) -> None:
    tokenizer = FakeTokenizer()
    path = gguf_file(tmp_path / "meta.gguf", add_bos=False, bos=1)
    fix_gguf_tokenizer(tokenizer, SimpleNamespace(eos_token_id=eos), path)
    assert tokenizer.eos_token == expected


def test_bos_comes_first_exactly_once(model: Any, tokenizer: Any, settings: LookaheadConfig, tmp_path: Path) -> None:
    mended = copy.deepcopy(tokenizer)
    user = mended.convert_tokens_to_ids("<|user|>")
    system = mended.convert_tokens_to_ids("<|system|>")
    path = gguf_file(tmp_path / "meta.gguf", add_bos=True, bos=system)
    fix_gguf_tokenizer(mended, model.config, path)
    lm = lookahead.load((model, mended), config=settings)
    bare = tokenizer("the fox")["input_ids"]

    assert lm.encode("the fox", raw=True) == [system, *bare]
    assert lm.encode("the fox")[:2] == [system, user]  # the chat template wrote none
    chat = [{"role": "system", "content": "the fox"}]
    assert lm.encode(chat)[:2] == [system, bare[0]]  # it wrote one already
    assert lm.encode("<|system|>the fox", raw=True) == [system, *bare]
    assert lm.encode(bare) == bare  # token ids are taken as they are


def test_no_bos_unless_asked_for(model: Any, tokenizer: Any, settings: LookaheadConfig) -> None:
    lm = lookahead.load((model, tokenizer), config=settings)
    assert lm.encode("the fox", raw=True) == tokenizer("the fox")["input_ids"]


def test_settings_of_the_generation_config_that_change_greedy_output() -> None:
    asks = SimpleNamespace(repetition_penalty=1.1, no_repeat_ngram_size=0, suppress_tokens=[4])
    assert greedy_settings(SimpleNamespace(generation_config=asks)) == {
        "repetition_penalty": 1.1,
        "suppress_tokens": [4],
    }
    assert greedy_settings(SimpleNamespace(generation_config=SimpleNamespace(repetition_penalty=1.0))) == {}
    assert greedy_settings(SimpleNamespace()) == {}
