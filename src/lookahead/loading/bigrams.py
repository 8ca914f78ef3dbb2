"""The model's bigrams: its top tokens after each token of the vocabulary alone.

The source `recycle` uses them for tokens that no step of the request has seen. In 8 MT-Bench answers of the embedded
model, one step in five began with such a token and had no draft at all; with bigrams S rose from 2.67 to 3.20. They are
computed once per model, kept on disk, and contain nothing of any request.

The tokens are children of one root, a line break, so that a pass over a tree of depth one computes as many bigrams as a
step has nodes. After a token that was new to its answer, the next one was among the top eight in 50% of cases with a
line break before it, in 32% with the model's first special token, and in 23% with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.successors import MAX_SUCCESSORS
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import Backend, StepInput
from lookahead.backends.prompts import run_prompt_chunks
from lookahead.cache import check_version, key_of, read_arrays, write_arrays
from lookahead.config import SamplingParams
from lookahead.loading.fitting import identity_of

PREFIXES = ("\n", ",", "the")
"""What comes before each token: the first of these for which the tokenizer has tokens."""
MAX_TOKENS = 1 << 16
"""Bigrams of at most the first tokens of a vocabulary, which are the most frequent ones in most tokenizers."""
MAX_SECONDS = 10.0
"""Bigrams that would take longer than this are not computed."""
VERSION = 1
"""The format of the file."""

Top = npt.NDArray[np.int32]


def prefix_of(tokenizer: Any) -> list[int]:
    """The tokens before each token: a line break, after the tokens with which the tokenizer begins every text."""
    return next((ids for text in PREFIXES if (ids := list(tokenizer(text)["input_ids"]))), [])


def bigrams(
    backend: Backend,
    prefix: Sequence[int],
    nodes: int,
    folder: Path,
    log: Callable[[str], None] | None = None,
    max_seconds: float = MAX_SECONDS,
) -> Top | None:
    """Row i: the MAX_SUCCESSORS top tokens after token i, and their levels. They are read from `folder`, or computed
    after this `prefix` by trees of up to `nodes` nodes and written there.

    None where they would take longer than `max_seconds` (0: they are only read), and without captured steps, for which
    a large tree costs hardly more than a single token. Several ranks must all choose the same trees, so they do not
    rely on files either.
    """
    capabilities = backend.capabilities
    if not capabilities.row_sizes or capabilities.ranks > 1 or not capabilities.runs_prompts or nodes < 2:
        return None
    count = min(backend.vocab_size, MAX_TOKENS)
    path = folder / "bigrams" / f"{key_of({**identity_of(backend), 'count': count})}.npz"
    stored = read_bigrams(path)
    if stored is not None and len(stored[1]) == count:
        # The same numbers for the same tokens: the file is of these weights.
        first = compute(backend, stored[0], range(min(nodes - 1, count)))
        if np.array_equal(stored[1][: len(first)], first):
            return stored[1]
    begin, found, tokens = 0.0, list[Top](), 0
    while tokens < count and prefix and max_seconds:
        found.append(compute(backend, prefix, range(tokens, min(tokens + nodes - 1, count))))
        tokens += len(found[-1])
        begin = begin or perf_counter()  # after the first pass, which may be captured
        if (perf_counter() - begin) * count > max_seconds * tokens:
            return None
    if not found:
        return None
    top = np.concatenate(found)
    if log is not None:
        log(f"computed the bigrams of {count} tokens in {perf_counter() - begin:.1f} s (once per model)")
    with suppress(OSError):
        write_arrays(path, {"version": np.array(VERSION), "prefix": np.array(prefix), "top": top})
    return top


def read_bigrams(path: Path) -> tuple[list[int], Top] | None:
    """The prefix and the top tokens in a file. None if it is missing or damaged: zipfile and NumPy raise errors of many
    kinds then."""
    try:
        stored = read_arrays(path)
        check_version(int(stored["version"]), VERSION)
        return stored["prefix"].tolist(), stored["top"].astype(np.int32)
    except Exception:
        return None


def compute(backend: Backend, prefix: Sequence[int], tokens: Sequence[int]) -> Top:
    """The top tokens after each of these tokens, and their levels, in one pass."""
    count = len(tokens)
    tree = TokenTree([prefix[-1], *tokens], [-1, *[0] * count], [0, *[1] * count], list(range(count + 1)))
    slot = backend.open()
    try:
        inputs = [StepInput(slot, prefix[:-1], tree, SamplingParams(), (), top=MAX_SUCCESSORS)]
        top = backend.step(run_prompt_chunks(backend, inputs))[0].top
    finally:
        backend.close(slot)
    if top is None:
        raise ValueError("the backend returned no top tokens")
    return np.array(top[1:], dtype=np.int32)
