"""The graph backend lowers every description: each model of the table, and layers that differ from each other.

`models.reference` says what is right. On a CPU the steps run on the kernels' slow twins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from described import VOCABULARY, uneven_decoder
from knobs import KNOBS, Maker
from marks import slow_but
from mixture_knobs import MIXTURES
from model_table import FIRST_ROWS, ROUNDING, ROWS, build, error
from tiny import PROMPTS, greedy, outputs, random_tree, root, tiny

from lookahead import LookaheadConfig
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.kernels.tiles import HeadShape
from lookahead.backends.graph.matrices.products import products_of
from lookahead.backends.graph.model import GraphModel
from lookahead.backends.graph.ops import Ops
from lookahead.backends.graph.sizes import PAGE
from lookahead.config import SamplingParams
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read
from lookahead.models.reference import forward, forward_tree
from lookahead.models.spec import Decoder

TREE = random_tree(21, 4)
LENGTHS = pytest.mark.parametrize("length", slow_but([1, 70], 70))
"""Of the prefix: shorter than every window, and longer than a page."""


def tokens(count: int) -> list[int]:
    return [(11 * i + i // 7) % VOCABULARY for i in range(count)]


def check_trees(backend: GraphBackend, described: Decoder, lengths: Sequence[int]) -> None:
    """A tree behind prefixes of these lengths, and behind what was committed of it: as in the reference."""
    path = [2, next(node for node in range(3, 21) if TREE.parents[node] == 2)] if 2 in TREE.parents else [1]
    for length in lengths:
        prefix, slot = tokens(length), backend.open()
        found = backend.step([greedy(slot, prefix, TREE, logits=True)])[0].logits
        expected = forward_tree(described, prefix, TREE.tokens, TREE.parents)
        assert error(found, expected) < 5 * ROUNDING, length
        backend.commit([(slot, path)])
        text = [*prefix, TREE.tokens[0], *(TREE.tokens[node] for node in path)]
        found = backend.step([greedy(slot, (), root(5), logits=True)])[0].logits
        assert error(found, forward(described, [*text, 5])[-1:]) < 5 * ROUNDING, length
        backend.close(slot)


@pytest.mark.parametrize("name", slow_but([row[0] for row in ROWS], *FIRST_ROWS))
@LENGTHS
@pytest.mark.thinned(1, most=12)
def test_every_model_of_the_table(name: str, length: int, device: str) -> None:
    check_trees(GraphBackend(build(name, device)), read(build(name, device), "graph"), [length])


ALL_KNOBS = KNOBS | MIXTURES


@pytest.mark.parametrize("name", slow_but(ALL_KNOBS, *list(ALL_KNOBS)[::2]))
@LENGTHS
def test_every_knob(name: str, length: int, device: str) -> None:
    """Descriptions that differ in one knob each, some of their layers only."""
    carrier = tiny("Llama", device=device, max_position_embeddings=512)
    backend = GraphBackend(carrier, description=ALL_KNOBS[name](Maker(device)))
    check_trees(backend, ALL_KNOBS[name](Maker(device)), [length])


def tensors_in(part: Any) -> Iterator[torch.Tensor]:
    """All tensors of a description, or of a part of one."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, torch.nn.Module):
        yield from part.parameters()
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from tensors_in(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_in(getattr(part, field.name))


def test_captured_steps_follow_every_tensor() -> None:
    """All tensors of a description are the ones that steps read, or views of these: no copies. A second model of the
    same description reads the same ones."""
    ops, products = Ops(torch.device("cpu")), products_of(torch.device("cpu"), torch.float32, True)
    for name, make in ALL_KNOBS.items():
        described = make(Maker())
        made = GraphModel(described, ops, products)
        ranges = [(read.data_ptr(), read.data_ptr() + read.nbytes) for read in made._tensors()]
        for tensor in tensors_in(described):
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert any(first <= start and end <= last for first, last in ranges), (name, tensor.shape)
        assert made.addresses() == GraphModel(described, ops, products).addresses(), name


@pytest.mark.parametrize("name", ["transposed weights", "bias of q alone"])
def test_parts_stay_what_they_are(name: str, device: str) -> None:
    """Modules whose weights are transposed, or of which some have no bias, keep their shapes and numbers; in-place
    changes are seen."""
    given, other = (KNOBS[name](Maker(device)) for _ in range(2))
    backend = GraphBackend(tiny("Llama", device=device, max_position_embeddings=512), description=given)
    pairs = list(zip(given.blocks[1].attention.qkv.parts, other.blocks[1].attention.qkv.parts, strict=True))
    for ours, theirs in pairs:
        assert torch.equal(ours.weight, theirs.weight)
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
    with torch.no_grad():
        for part in (part for pair in pairs for part in pair):
            part.weight.mul_(-0.5)
            if part.bias is not None:
                part.bias.add_(0.7)
    assert backend.runner.reads_weights_of(given, backend.model)
    check_trees(backend, other, (40,))


def test_learned_positions_end(device: str) -> None:
    """Draft tokens may lie behind the last learned position: they change nothing for the others."""
    given, other = (
        replace(made, position_embedding=made.position_embedding[:72].clone())
        for made in (KNOBS["learned positions"](Maker(device)) for _ in range(2))
    )
    backend = GraphBackend(tiny("Llama", device=device, max_position_embeddings=72), description=given)
    prefix, slot = tokens(70), backend.open()
    found = backend.step([greedy(slot, prefix, TREE, logits=True)])[0].logits
    inside = [node for node, depth in enumerate(TREE.depths) if 70 + depth < 72]
    assert 1 < len(inside) < len(TREE.depths)
    for node in inside:
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, TREE.tokens[at])
            at = TREE.parents[at]
        assert error(found[node], forward(other, [*prefix, *path])[-1]) < 5 * ROUNDING
    assert bool(found.isfinite().all())


def uneven(device: str) -> tuple[GraphBackend, Decoder]:
    """A backend of a description with four attention groups and three head shapes, and another copy of it."""
    carrier = tiny("Llama", device=device, max_position_embeddings=512)
    made = [moved(uneven_decoder(head_bias=True), device) for _ in range(2)]
    return GraphBackend(carrier, description=made[0]), made[1]


def moved(decoder: Decoder, device: str) -> Decoder:
    """The same on this device, in place."""
    for block in decoder.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        for matrix in (attention.qkv, attention.out, feed_forward.gate_up, feed_forward.down):
            for part in matrix.parts:
                part.to(device)
        for norm in (block.mixer_norm, block.feed_forward_norm, attention.q_norm, attention.k_norm):
            if norm is not None:
                object.__setattr__(norm, "weight", norm.weight.to(device))
    decoder.head.parts[0].to(device)
    object.__setattr__(decoder.norm, "weight", decoder.norm.weight.to(device))
    object.__setattr__(decoder, "embedding", decoder.embedding.to(device))
    return decoder


def test_layers_that_differ(device: str) -> None:
    """In heads, K/V heads, head width, window, rope, norms, eps, biases and width of the feed-forward."""
    backend, described = uneven(device)
    assert backend.layers.shapes == (HeadShape(4, 2, 8), HeadShape(4, 4, 16), HeadShape(6, 2, 8))
    assert [(group.window, group.layers) for group in backend.layers.groups] == [
        (None, (0, 4)), (7, (1,)), (None, (2,)), (7, (3,))
    ]  # fmt: skip
    check_trees(backend, described, (1, 5, 63, 64, 65, 130, 200))


@pytest.mark.slow
def test_texts_of_layers_that_differ(device: str, settings: LookaheadConfig) -> None:
    """Greedy, alone and in a batch; drawn by trees as token by token. Pages behind the windows are given back."""
    backend, described = uneven(device)
    prompts = [PROMPTS[0], PROMPTS[2], tokens(90)]
    expected = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(16):
            text.append(int(forward(described, text)[-1].argmax()))
        expected.append(text[len(prompt) :])
    assert outputs(backend, prompts, settings, 16) == expected
    assert [outputs(backend, [prompt], LookaheadConfig.autoregressive(), 16)[0] for prompt in prompts] == expected
    sampling = SamplingParams(temperature=0.9, seed=3)
    drawn = [outputs(backend, [p], LookaheadConfig.autoregressive(), 16, sampling)[0] for p in prompts]
    assert outputs(backend, prompts, settings, 16, sampling) == drawn != expected
    assert backend.pool.used == 0


@pytest.mark.parametrize("window", slow_but([7, 40, 100], 7, 100))
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.thinned(1, most=1)
def test_pages_behind_a_window_are_given_back(
    window: int, hybrid: bool, device: str, settings: LookaheadConfig
) -> None:
    """While a text grows, layers with a window hold the same number of pages, and layers without one more and more.

    What lies in pages that the sequence does not hold is never read: here it is NaN. The tokens are those of a backend
    that keeps all pages.
    """
    changes: dict[str, Any] = {"sliding_window": window, "max_position_embeddings": 1024}
    kind, changes = ("Qwen2", changes | {"use_sliding_window": True, "max_window_layers": 1}) if hybrid else (
        "Mistral", changes
    )  # fmt: skip
    prompt, count = tokens(150), 120
    whole = GraphBackend(tiny(kind, device=device, **changes), drop_pages=False)
    (expected,) = outputs(whole, [prompt], settings, count)
    backend = GraphBackend(tiny(kind, device=device, **changes))
    held: list[list[int]] = []
    launch = GraphBackend.launch

    def spoiling(inputs: Any) -> Any:
        slots = [backend.slots[item.slot] for item in inputs]
        held.append([sum(page >= 0 for page in table.pages) for table in slots[0].tables])
        for pool, cache in zip(backend.pool.pools, backend.kv.caches, strict=True):
            pool._free.sort()  # so that a new page is not one that was given back just now
            with torch.inference_mode():
                cache[:, :, [page + 1 for page in (*pool._free, *pool._evictable)]] = torch.nan
        return launch(backend, inputs)

    backend.launch = spoiling  # type: ignore[method-assign]
    (found,) = outputs(backend, [prompt], settings, count)
    assert found == expected
    behind = -(-window // PAGE) + 3  # those of the window, of the tree, and half a page ahead
    windowed = [pages[-1] for pages in held]
    assert max(windowed[len(windowed) // 2 :]) <= behind
    if hybrid:
        assert max(pages[0] for pages in held) >= (150 + count) // PAGE
    assert backend.pool.used == 0


def test_a_beginning_is_shared_where_windows_have_moved_on(device: str, settings: LookaheadConfig) -> None:
    """A prompt that runs in several chunks: a later one that begins the same shares it, up to any page of it."""
    changes = {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny("Qwen2", device=device, max_position_embeddings=1024, **changes)
    backend, prompt = GraphBackend(model, most_rows=64), tokens(400)
    (expected,) = outputs(GraphBackend(model), [prompt], settings)
    (first,) = outputs(backend, [prompt], settings)
    hits = [backend.pool.hit_tokens]
    for length in (400, 200, 130):
        (other,) = outputs(backend, [[*prompt[:length], 7]], settings)
        assert other == outputs(GraphBackend(model), [[*prompt[:length], 7]], settings)[0]
        hits.append(backend.pool.hit_tokens)
    assert first == expected
    assert [b - a for a, b in pairwise(hits)] == [384, 192, 128]


@pytest.mark.slow
def test_little_room_behind_a_window(device: str, settings: LookaheadConfig) -> None:
    """More and longer texts than the pages of the layers hold: they wait for each other, and stay exact."""
    model = tiny("Mistral", device=device, sliding_window=30, max_position_embeddings=1024)
    prompts = [tokens(40 + 90 * i)[i:] for i in range(5)]
    roomy = GraphBackend(model)
    expected = [outputs(roomy, [prompt], settings, 30)[0] for prompt in prompts]
    backend = GraphBackend(model, kv_tokens=9 * PAGE, most_rows=64)
    assert sum(map(len, prompts)) + 5 * 30 > 9 * PAGE
    assert backend.holds() >= 1024
    assert outputs(backend, prompts, settings, 30) == expected
    assert backend.pool.used == 0


def test_adopted_kv_of_a_windowed_layer(device: str, settings: LookaheadConfig) -> None:
    """A layer with a window may bring, and hand out, the last tokens alone."""
    model = tiny("Mistral", device=device, sliding_window=30, max_position_embeddings=1024)
    backend, text = GraphBackend(model), tokens(300)
    slot = backend.open()
    backend.step([greedy(slot, text[:200], root(text[200]))])
    backend.commit([(slot, ())])
    backend.step([greedy(slot, text[201:280], root(text[280]))])
    backend.commit([(slot, ())])
    assert backend.reserve(slot, 400)
    layers = backend.cached(slot)
    assert all(30 <= keys.shape[1] < 281 for keys, _ in layers)
    other = backend.open()
    backend.adopt(other, 281, [(keys[:, -30:], values[:, -30:]) for keys, values in layers])
    assert backend.slots[other].tables[0].dropped == (256 - 29) // PAGE
    found = [backend.step([greedy(one, text[281:], TREE, logits=True)])[0].logits for one in (slot, other)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_lowered_is_refused_before_a_weight_is_touched(device: str) -> None:
    make = Maker(device)
    described = make.decoder(make.block(), make.block(make.attention(dim=7, rope=None)))
    before = [part.weight.data_ptr() for block in described.blocks for part in block.attention.qkv.parts]
    with pytest.raises(UnsupportedModelError, match="the graph backend does not run this model: its heads are 7 "):
        GraphBackend(tiny("Llama", device=device), description=described)
    assert [part.weight.data_ptr() for block in described.blocks for part in block.attention.qkv.parts] == before
