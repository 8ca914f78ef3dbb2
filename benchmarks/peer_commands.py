"""The servers that `peers.py` knows: how each is started, what its requests need, and whether it is here."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = "lookahead"
Fields = dict[str, Any]


def openai_fields(model: str, tokens: int) -> Fields:
    """What vLLM, llama-server and we understand besides OpenAI's fields."""
    return {"model": model, "ignore_eos": True}


def transformers_fields(model: str, tokens: int) -> Fields:
    """transformers refuses other fields than OpenAI's and its own."""
    config = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return {"model": model, "generation_config": json.dumps(config)}


@dataclass(frozen=True)
class Peer:
    """A server. `command` has {python}, {model}, {gguf} (a file in that folder), {dtype} and {port}; ours is started by
    `server_process.server`.

    `ways` are what is measured on one such server in turn: names, and fields of their requests. `package` must be
    importable, or the `program` be there.
    """

    name: str
    command: str = ""
    package: str = ""
    program: str = ""
    common: Callable[[str, int], Fields] = openai_fields
    ways: dict[str, Fields] = field(default_factory=dict)

    def fields(self, model: str, tokens: int) -> Fields:
        """The fields of all its requests. Ours and llama-server's take any name of the model."""
        given = self.common(model, tokens)
        return {name: value for name, value in given.items() if name != "model" or self.name != OURS}

    def words(self, model: str, dtype: str, port: int) -> list[str]:
        gguf = next((str(file) for file in sorted(Path(model).glob("*.gguf"))), f"{model}/model.gguf")
        values = {"python": sys.executable, "model": model, "gguf": gguf, "dtype": dtype, "port": port}
        return [_filled(word, values) for word in shlex.split(self.command)]

    def shown(self, args: Namespace) -> str:
        """Its command without the folders of the machine that it ran on."""
        if self.name == OURS:
            words = args.url or " ".join(["lookahead serve", *args.options])
            return words.replace(str(args.model), "FOLDER")
        return self.command.replace("{python}", "python").replace("{model}", "FOLDER").replace("{dtype}", args.dtype)

    def version(self) -> str:
        if self.package:
            try:
                return version(self.package)
            except PackageNotFoundError:
                return "?"
        if self.program and shutil.which(self.program):
            done = subprocess.run([self.program, "--version"], capture_output=True, text=True, timeout=30)
            lines = (done.stdout + done.stderr).strip().splitlines()
            return lines[0][:80] if lines else "?"
        return "this revision" if self.name == OURS else "?"


def _filled(word: str, values: dict[str, Any]) -> str:
    """Only these names in braces: a command may hold JSON."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


VLLM = "{python} -m vllm.entrypoints.cli.main serve {model} --dtype {dtype} --max-model-len 4096 --port {port}"


def known_peers() -> list[Peer]:
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    suffix = {"method": "suffix"}
    return [
        Peer(OURS, ways={"plain": {"lookahead": False}, "lookahead": {"lookahead": True}}),
        Peer("vllm", VLLM, "vllm", ways={"vllm": {}}),
        Peer("vllm-ngram", _speculating(ngram), "vllm", ways={"vllm-ngram": {}}),
        Peer("vllm-suffix", _speculating(suffix), "vllm", ways={"vllm-suffix": {}}),
        Peer(
            "transformers",
            "{python} -m transformers.cli.transformers serve {model} --dtype {dtype} --port {port} --host 127.0.0.1",
            "transformers",
            common=transformers_fields,
            ways={"transformers": {}},
        ),
        Peer(
            "llama-server",
            "llama-server -m {gguf} --port {port} --host 127.0.0.1 -c 65536 -np 64",
            program="llama-server",
            ways={"llama-server": {}},
        ),
    ]


def _speculating(config: Fields) -> str:
    return f"{VLLM} --speculative-config {shlex.quote(json.dumps(config))}"


def own_peer(given: str) -> Peer:
    """A server of the user's: NAME=COMMAND."""
    name, equals, command = given.partition("=")
    if not equals or not command.strip():
        raise SystemExit(f"--peer {given!r} is no NAME=COMMAND, such as mine='my-server --port {{port}}'")
    if "{port}" not in command:
        raise SystemExit(f"--peer {name}: the command must hold {{port}}, where the server is asked")
    return Peer(name, command, program=shlex.split(command)[0], ways={name: {}})


def missing(peer: Peer) -> str | None:
    """Why a server cannot be started here, or None."""
    if peer.name == "transformers" and find_spec("openai") is None:
        return "`transformers serve` needs the package openai, which is not installed"
    if peer.package and find_spec(peer.package) is None:
        return f"the package {peer.package} is not installed"
    if peer.program and not peer.program.startswith("{") and shutil.which(peer.program) is None:
        return f"there is no program {peer.program}"
    return None
