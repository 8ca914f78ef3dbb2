"""A tiny random Llama and a byte-level BPE tokenizer that fits it: no download, fp32, the same in every run.

With `-n`, pytest loads this file also in the process that deals the tests out and runs none. So torch and transformers
are imported inside the functions: that process starts without them.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from lookahead import LookaheadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def deals_tests_out() -> bool:
    """Whether this is the process that `-n` makes the master of the others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return False
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-n", "--numprocesses", default="0")
    return options.parse_known_args(sys.argv[1:])[0].numprocesses != "0"


if not deals_tests_out():
    import torch

    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # one file each: they share the cores
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        torch.set_num_threads(threads)
    if not torch.cuda.is_available():  # before the first import of triton, and transformers may be that
        os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: tokens are compared exactly, and fresh examples would one day hit a near tie of two
# logits, where fp32 rounding decides. To search further: `pytest --hypothesis-profile=search`.
# `make test` tries a part of them; see `marks.examples`.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("quick", derandomize=True, max_examples=25)
hypothesis.settings.register_profile("search", max_examples=1000)
hypothesis.settings.load_profile("repeatable")

EOS = "<|end|>"
CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other fox jumps too",
    "once more the dog and the fox; once more the café, the naïve façade and 中文",
    "def fox(dog): return [dog for _ in range(10)]  # the end of the fox",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS = LookaheadConfig(window=3, ngram=4, guesses=4, budget=40)
"""Small enough for a CPU, and every source at work."""


QUICK = "not slow"
"""What `make test` gives with `-m`."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what the imports make: that stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Before `-m` looks at the marks."""
    from order import drop, longest_first
    from thin import mark_the_rest_slow

    mark_the_rest_slow(items)
    if config.option.markexpr == QUICK and not torch.cuda.is_available():  # each would be skipped, which takes time
        drop(items, [item for item in items if item.get_closest_marker("gpu")], config)
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that it all goes when Python ends: triton complains of what stays


@pytest.fixture(scope="session", autouse=True)
def invariance_is_checked_once_per_model() -> Iterator[None]:
    """A CPU backend checks how large a tree its kernels compute exactly, which takes longer than a tiny model's text.

    For a model with the same weights the answer is the same, so it is remembered.
    """
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        yield
        return
    from stock import fingerprint

    from lookahead.backends.cpu import backend as cpu

    check, known = cpu.invariant_nodes, dict[tuple[str, str], int]()

    def checked_once(backend: Any) -> int:
        mark = fingerprint(backend.model), str(backend.dtype)
        if not mark[0]:
            return check(backend)
        if mark not in known:
            known[mark] = check(backend)
        return known[mark]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "invariant_nodes", checked_once)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, so that tokens may end inside a character; with an EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = [EOS, "<|user|>", "<|assistant|>", "<|system|>"]
    bare.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=EOS)
    made.add_special_tokens({"additional_special_tokens": special[1:]})
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """A tiny Llama with these config fields changed; the same weights for the same fields."""
    from tiny import tiny

    def make(**changes: Any) -> Any:
        fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "eos_token_id": tokenizer.eos_token_id}
        return tiny("Llama", seed=7, stirred=False, **{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Any]) -> Any:
    """Shared by all tests: do not change it, make another one."""
    return make_model()


@pytest.fixture(scope="session")
def settings() -> LookaheadConfig:
    return SETTINGS


@pytest.fixture(scope="session")
def plain() -> Callable[[Any, Sequence[int], int], list[int]]:
    """Greedy tokens by transformers itself: (model, prompt ids, most new tokens) -> new ids, the EOS included."""
    from stock import greedy_text

    return greedy_text
