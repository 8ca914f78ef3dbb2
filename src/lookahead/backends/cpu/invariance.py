"""Verifies on this machine that a row's numbers do not depend on the other rows of its step.

Kernels differ between processors and releases. The check runs a model with one layer of each kind, with random K/V
before it: a path of tokens, once in single steps and once inside trees of several sizes, and compares logits bit for
bit. The two heads are compared with each other, in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.cpu.cells import HOME, SPARE
from lookahead.backends.cpu.groups import layer_groups
from lookahead.backends.cpu.products import merged
from lookahead.config import SamplingParams
from lookahead.models.feed_forward import FeedForward, MoE, Router
from lookahead.models.matrix import ExpertMatrix, Matrix
from lookahead.models.norm import Norm
from lookahead.models.spec import Attention, Block, Decoder

LENGTHS = (1, HOME - 2, HOME + 26, 2 * HOME - 1, 256, 1000)
"""Cached tokens before the root. With some of them the path crosses from one block into the next."""
VOCABULARY = 512
"""Maximum vocabulary of the checked model."""
PATH = 3
"""Nodes of the path below the root."""
SIZES = (PATH + 1, 5, 6, 8, 12, 16, 24, SPARE + 1)
"""Nodes of the trees that are compared with single steps."""


def reduced_model(decoder: Decoder) -> Decoder:
    """The model that is checked: the first layer of each kind, and the beginning of the vocabulary.

    Layers are of one kind if they have the same group and the same parts, of the same shapes: then the same kernels
    run.
    """
    kinds = [(group, parts_of(block)) for block, group in zip(decoder.blocks, layer_groups(decoder), strict=True)]
    first = list(dict.fromkeys(kinds))
    blocks = [decoder.blocks[kinds.index(kind)] for kind in first]
    for number, block in enumerate(blocks):
        source = block.plain()[0].kv_layer
        if source is not None:  # the layer of its kind has K/V of the same shape
            blocks[number] = block.with_attention(kv_layer=first.index(kinds[source]))
    embedding, head = decoder.embedding[:VOCABULARY], merged(decoder.head, slice(VOCABULARY))
    return replace(decoder, embedding=embedding, blocks=blocks, head=head)


def parts_of(part: Any) -> Any:
    """A description's parts, its shapes and what else decides which nodes it is lowered to; no numbers of it."""
    if isinstance(part, Matrix):
        return part.shape, part.has_bias, part.transposed, part.formats
    if isinstance(part, ExpertMatrix):
        return part.shape, part.experts, part.bias is not None, part.transposed, part.format
    if isinstance(part, torch.Tensor):
        return tuple(part.shape)
    if isinstance(part, Router):
        numbers = part.top_k, part.groups, part.kept_groups, part.group_best
        return numbers, *(parts_of(getattr(part, field.name)) for field in fields(part))
    if isinstance(part, Block | Attention | FeedForward | MoE | Norm):
        return tuple(parts_of(getattr(part, field.name)) for field in fields(part))
    return part if isinstance(part, bool | Enum) else part is not None


def invariant_nodes(backend: Any, lengths: Sequence[int] = LENGTHS) -> int:
    """The most nodes of a tree, up to SPARE + 1, whose rows equal single steps on this backend bit for bit; at least 1.

    `backend` runs a `reduced_model`. Its slots are opened and closed.
    """
    passed = list(SIZES)
    limit = backend.max_length or max(lengths) + SIZES[-1]
    for number, length in enumerate(lengths):
        if length + SIZES[-1] > limit:
            continue
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(min(VOCABULARY, backend.vocab_size), (SPARE + 1,), generator=generator).tolist()
        groups = layer_groups(backend.description)
        shapes = [(group.kv_heads, group.head_dim) for group in groups if group.own_kv]
        cached = [tuple(torch.randn(2, heads, length, dim, generator=generator)) for heads, dim in shapes]
        slot = backend.open()
        try:
            backend.adopt(slot, length, cached)
            singles = []
            for token in tokens[: PATH + 1]:
                singles.append(_logits(backend, slot, TokenTree([token], [-1], [0], [0]))[0])
                backend.commit([(slot, ())])
            for size in list(passed):
                backend.adopt(slot, length, cached)
                tree, path = tree_around(tokens, size)
                found = _logits(backend, slot, tree)
                if any(not torch.equal(found[node], single) for node, single in zip(path, singles, strict=True)):
                    passed = [smaller for smaller in passed if smaller < size]
        finally:
            backend.close(slot)
    return max(passed, default=1)


def tree_around(tokens: Sequence[int], size: int) -> tuple[TokenTree, list[int]]:
    """A tree of this many nodes, and the nodes of the path whose tokens are the first ones. The other nodes come
    between the path's, as separate chains, so that the path's cells are far from their home cells."""
    others = size - PATH - 1
    parents, depths, taken = [-1], [0], [tokens[0]]
    path = [0]
    gaps = np.diff(np.linspace(0, others, PATH + 1).astype(int))
    for step, gap in enumerate(gaps, start=1):
        above = path[-1]
        for other in range(int(gap)):  # a chain that hangs from the path
            parents.append(above if other == 0 else len(parents) - 1)
            depths.append(depths[parents[-1]] + 1)
            taken.append(tokens[(PATH + len(taken)) % len(tokens)])
        parents.append(path[-1])
        depths.append(step)
        taken.append(tokens[step])
        path.append(len(parents) - 1)
    return TokenTree(taken, parents, depths, range(size)), path


def same_bits(full: Any, screened: Any, width: int, most_rows: int, candidates: int, scale: float = 1.0) -> bool:
    """Whether the exact logits of the screened head are those of the full head bit for bit, in runs of 1 to `most_rows`
    rows. Hidden states have this `width`, and are multiplied by `scale`.

    Random states are enough: their products cancel, so that any change in the order of summation changes some of the
    many logits.
    """
    hidden = (np.random.default_rng(0).standard_normal((most_rows, width)) * scale).astype(np.float32)
    logits = full.run(hidden, 1).logits.numpy().copy()
    for rows in sorted({1, 2, 3, most_rows}):
        computed, _ = screened.run(hidden[:rows], candidates)
        expected = np.take_along_axis(logits[:rows], computed.ids, axis=1)
        again = full.run(hidden[:rows], 1).logits.numpy()
        if not (np.array_equal(again, logits[:rows]) and np.array_equal(computed.values, expected)):
            return False
    return True


def _logits(backend: Any, slot: int, tree: TokenTree) -> torch.Tensor:
    logits: torch.Tensor = backend.step([StepInput(slot, (), tree, SamplingParams(), (), logits=True)])[0].logits
    return logits
