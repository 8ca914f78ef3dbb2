"""The graph backend's keys, values and positions where they differ from a plain model's: shared K/V, shifts, chunks.

`models.reference` says what is right. On a CPU the steps run on the kernels' slow twins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from described import VOCABULARY
from knobs import DIM, HEADS, KNOBS, KV_HEADS, Maker
from model_table import ROUNDING, build, error
from tiny import greedy, random_tree, root, tiny
from transformers import DynamicCache

from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.backends.graph.steps import CapturedStep
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.reference import forward, forward_tree
from lookahead.models.spec import Decoder

TREE = random_tree(21, 4)


def tokens(count: int) -> list[int]:
    return [(11 * i + i // 7) % VOCABULARY for i in range(count)]


def backend_of(name: str, device: str, **options: Any) -> tuple[GraphBackend, Decoder]:
    """A backend of a knob's description, and another copy of it."""
    carrier = tiny("Llama", device=device, max_position_embeddings=512)
    return GraphBackend(carrier, description=KNOBS[name](Maker(device)), **options), KNOBS[name](Maker(device))


def prefilled(backend: GraphBackend, text: list[int]) -> int:
    """A slot with these tokens cached."""
    slot = backend.open()
    backend.step([greedy(slot, text[:-1], root(text[-1]))])
    backend.commit([(slot, ())])
    return slot


@pytest.mark.parametrize(
    "name", ["window", "part of a head is rotated", "queries scaled by position", "learned positions"]
)
@pytest.mark.parametrize("shift", [-40, 7])
@pytest.mark.thinned(1)
def test_shifted_positions(name: str, shift: int, device: str) -> None:
    """After a prompt with images a token's position is its index plus a number. Windows still count tokens."""
    backend, described = backend_of(name, device)
    text = tokens(70)
    first, second = prefilled(backend, text), backend.open()
    backend.adopt(second, 70, backend.cached(first), (shift,) * 3)
    both = [greedy(slot, (), TREE, logits=True) for slot in (first, second)]
    for found, moved in zip(backend.step(both), (0, shift), strict=True):
        expected = forward_tree(described, text, TREE.tokens, TREE.parents, moved)
        assert error(found.logits, expected) < 5 * ROUNDING, moved
    path = [node for node in range(1, 21) if TREE.parents[node] == 0][-1:]  # its K/V moves next to the root's
    backend.commit([(first, path), (second, path)])
    further = [TREE.tokens[0], TREE.tokens[path[0]], 3, 9]
    for slot, moved in ((first, 0), (second, shift)):
        found = backend.step([greedy(slot, further[2:3], root(further[3]), logits=True)])[0].logits
        expected = forward_tree(described, text, further, range(-1, 3), moved)[-1:]
        assert error(found, expected) < 5 * ROUNDING, moved


def test_steps_ahead_with_shifted_positions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that start before the host asks for them shift positions, too."""
    ahead: list[CapturedStep] = []
    run_ahead = CapturedStep.run_ahead
    monkeypatch.setattr(CapturedStep, "run_ahead", lambda step, turn: (ahead.append(step), run_ahead(step, turn)))
    backend, described = backend_of("scale", device)
    text, output = tokens(70), list[int]()
    slot = prefilled(backend, text)
    backend.adopt(slot, 70, backend.cached(slot), (-40,))
    token, unshifted = 5, list[int]()
    for _ in range(6):
        step = replace(greedy(slot, (), root(token)), continues_alone=True)
        output.append(token)
        (token,) = backend.step([step])[0].targets
        backend.commit([(slot, ())])
        expected = forward_tree(described, text, output, range(-1, len(output) - 1), -40)[-1]
        assert token == int(expected.argmax())
        unshifted.append(int(forward(described, [*text, *output])[-1].argmax()))
    assert len(ahead) == 6
    assert unshifted != [*output[1:], token]


def test_a_shift_ends_with_its_sequence(device: str) -> None:
    """The next sequence in the slot counts from 0, and shares no pages with shifted positions."""
    backend, described = backend_of("scale", device)
    text = tokens(2 * PAGE)
    slot = prefilled(backend, text)
    layers = backend.cached(slot)
    backend.adopt(slot, len(text), layers, (-5,))
    assert backend.slots[slot].shift == -5
    backend.remember(slot, text)
    backend.close(slot)
    assert not backend.kv.shifts.any()
    again = backend.open(text)
    assert backend.length(again) == 0
    found = backend.step([greedy(again, text, root(5), logits=True)])[0].logits
    assert error(found, forward(described, [*text, 5])[-1:]) < 5 * ROUNDING
    backend.close(again)


def test_shifts_that_differ_by_axis_or_are_too_large_are_refused(device: str) -> None:
    backend, _ = backend_of("scale", device)
    slot = prefilled(backend, tokens(5))
    layers = backend.cached(slot)
    for offset in ((1, 2, 2), (5000,)):
        with pytest.raises(ValueError, match="shifts all axes"):
            backend.adopt(slot, 5, layers, offset)
    assert backend.slots[slot].shift == 0


def test_only_layers_with_their_own_kv_have_pages(device: str) -> None:
    """A cache of such a model has entries for these layers alone, also when it is taken over."""
    backend, described = backend_of("keys and values of earlier layers", device)
    assert sorted(layer for group in backend.layers.groups for layer in group.layers) == [0, 1]
    assert [len(cache) for cache in backend.kv.caches] == [1, 1]
    text = tokens(100)
    slot, other = prefilled(backend, text), backend.open()
    layers = backend.cached(slot)
    assert [keys.shape[0] for keys, _ in layers] == [KV_HEADS] * 2
    assert layers[1][0].shape[1] == 100 >= layers[0][0].shape[1] >= 9  # the first layer has a window
    backend.adopt(other, 100, layers)
    found = [backend.step([greedy(one, (), TREE, logits=True)])[0].logits for one in (slot, other)]
    expected = forward_tree(described, text, TREE.tokens, TREE.parents)
    assert max(error(one, expected) for one in found) < 5 * ROUNDING
    with pytest.raises(ValueError, match="keys and values of 4 layers, where 2 have their own"):
        backend.adopt(other, 100, [*layers, *layers])


def test_layers_are_those_that_transformers_caches(device: str) -> None:
    """Gemma 4's last layers read the K/V of earlier ones, and its cache has none of theirs."""
    model, text = build("gemma4-shared", device), tokens(20)
    backend = GraphBackend(build("gemma4-shared", device))
    assert any(block.attention.spec.kv_layer is not None for block in backend.layers.blocks)
    with torch.inference_mode():
        run = model(torch.tensor([text], device=device), past_key_values=DynamicCache())
        layers = [(layer.keys[0], layer.values[0]) for layer in run.past_key_values.layers]
        expected = model(torch.tensor([[*text, 3]], device=device)).logits[0, -1:]
    slot, other = prefilled(backend, text), backend.open()
    for pair, found in zip(layers, backend.cached(slot), strict=True):
        for cached, exported in zip(pair, found, strict=True):
            torch.testing.assert_close(exported, cached, atol=1e-4, rtol=1e-4)
    backend.adopt(other, 20, layers)
    assert error(backend.step([greedy(other, (), root(3), logits=True)])[0].logits, expected) < 5 * ROUNDING


@pytest.mark.parametrize("changes", [{"window": 8}, {"heads": 2}])
def test_kv_of_a_layer_that_differs_is_refused(changes: dict[str, Any], device: str) -> None:
    make = Maker(device)
    heads = changes.get("heads", HEADS)
    reader = make.attention(**{"qkv": make.matrix(heads * DIM), "kv_layer": 0, **changes})
    described = make.decoder(make.block(), make.block(reader))
    with pytest.raises(UnsupportedModelError, match="layer 1 reads the keys and values of layer 0, which has other"):
        GraphBackend(tiny("Llama", device=device), description=described)


def test_norms_of_all_heads_after_the_rotation_are_refused(device: str) -> None:
    described = KNOBS["norms over all heads"](Maker(device))
    block = described.blocks[1]
    attention = replace(block.attention, norms_after_rope=True)
    blocks = [described.blocks[0], replace(block, mixer=attention), described.blocks[2]]
    with pytest.raises(UnsupportedModelError, match="after the rotation"):
        GraphBackend(tiny("Llama", device=device), description=replace(described, blocks=blocks))


def test_chunks_read_no_page_before_their_own(device: str) -> None:
    """A sequence frees pages as with a window of a chunk's length. What lies in pages that it does not hold is NaN."""
    make = Maker(device)
    chunked = make.attention(chunk=80)
    described = make.decoder(make.block(chunked), make.block())
    carrier = tiny("Llama", device=device, max_position_embeddings=1024)
    backend = GraphBackend(carrier, description=described)
    assert [group.window for group in backend.layers.groups] == [80, None]
    text, slot = tokens(400), backend.open()
    backend.step([greedy(slot, text[:200], root(text[200]))])
    backend.commit([(slot, ())])
    assert backend.reserve(slot, 500)  # which frees what lies before the window
    tables = backend.slots[slot].tables
    assert tables[0].dropped == (192 - 79) // PAGE > tables[1].dropped == 0
    with torch.inference_mode():
        for pool, cache in zip(backend.pool.pools, backend.kv.caches, strict=True):
            cache[:, :, [page + 1 for page in pool._free]] = torch.nan
    expected = forward_tree(described, [*text[:201], *text[201:250]], TREE.tokens, TREE.parents)
    found = backend.step([greedy(slot, text[201:250], TREE, logits=True)])[0].logits
    assert error(found, expected) < 5 * ROUNDING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dim": 514, "heads": 1, "kv_heads": 1}, "its heads are 514 columns wide"),
        ({"dim": 7, "rope": None}, "its heads are 7 columns wide"),
        ({"window": 8, "chunk": 16}, "both a sliding window and attention chunks"),
    ],
)
def test_heads_that_the_kernels_cannot_run_are_refused(changes: dict[str, Any], reason: str, device: str) -> None:
    make = Maker(device)
    described = make.decoder(make.block(), make.block(make.attention(**changes)))
    with pytest.raises(UnsupportedModelError, match=reason):
        GraphBackend(tiny("Llama", device=device), description=described)
