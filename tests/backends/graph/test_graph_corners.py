"""Corners of pages, fused weights and descriptions: each of these went wrong once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from described import Angles, uneven_decoder
from model_table import build
from tiny import PROMPTS, greedy, outputs, random_tree, root, tiny
from transformers import AutoModelForCausalLM

from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import PAGE
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.spec import Decoder, Rope

TREE = random_tree(21, 4)
Plain = Callable[[Any, Sequence[int], int], list[int]]


def tokens(count: int, step: int = 0) -> list[int]:
    return [(11 * i + i // 7 + step * i * i) % 61 for i in range(count)]


def mistral(device: str) -> Any:
    return tiny("Mistral", device=device, sliding_window=30, max_position_embeddings=1024)


def test_a_slot_adopts_a_shorter_text_after_a_longer_one(device: str) -> None:
    """The pages behind the longer text's window are the shorter text's own: K/V written to page 0 are lost."""
    backend, text = GraphBackend(mistral(device)), tokens(500)
    slots, cached = {}, {}
    for length in (100, 500):
        slots[length] = slot = backend.open()
        backend.step([greedy(slot, text[: length - 1], root(text[length - 1]))])
        backend.commit([(slot, ())])
        cached[length] = backend.cached(slot)
    expected = backend.step([greedy(slots[100], (), TREE, logits=True)])[0].logits
    slot = backend.open()
    backend.adopt(slot, 500, cached[500])
    backend.adopt(slot, 100, cached[100])
    found = backend.step([greedy(slot, (), TREE, logits=True)])[0].logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_request_waits_only_while_there_is_no_room(device: str) -> None:
    """Pages behind the window of a running request are room for a waiting one: here 9 of 12 pages, for 120 steps."""
    backend = GraphBackend(mistral(device), kv_tokens=12 * PAGE)
    engine = Engine(backend)
    for step in range(2):
        rules = StopRules(200, frozenset(), backend.max_length)
        engine.submit(Request(DecodingSequence(tokens(500, step), LookaheadConfig.autoregressive(), None, rules)))
    most = 0
    while engine.running and most < 2:
        engine.step()
        most = max(most, len(engine._scheduler.running))
    assert most == 2


def changed(**changes: Any) -> Decoder:
    """A description whose second layer, of 4 heads of width 16 with a window, has other settings."""
    made = uneven_decoder()
    block = made.blocks[1]
    other = block.with_attention(**changes)
    return replace(made, blocks=[made.blocks[0], other, *made.blocks[2:]])


@pytest.mark.parametrize(
    "changes",
    [{"rope": Rope(Angles(1e4, 32), 32)}, {"window": 0}, {"window": -3}],
    ids=["rope.dim", "window-0", "below"],
)
def test_a_setting_that_no_kernel_knows_is_refused(changes: dict[str, Any]) -> None:
    """With one line, when the backend or the description is made: not in the first step, and not computed wrongly."""
    with pytest.raises((UnsupportedModelError, ValueError)):
        GraphBackend(tiny("Llama", max_position_embeddings=512), description=changed(**changes))


def test_fused_parameters_stay_trainable(device: str) -> None:
    """Those that an optimizer already holds, too."""
    model = tiny("Qwen2", device=device)
    before = dict(model.named_parameters())
    GraphBackend(model)
    after = dict(model.named_parameters())
    assert [name for name in before if before[name].requires_grad and not after[name].requires_grad] == []
    assert [name for name in before if before[name] is not after[name]] == []


def test_weights_that_are_stored_transposed_are_not_taken_for_fused(device: str, settings: LookaheadConfig) -> None:
    expected = outputs(GraphBackend(tiny("Llama", device=device)), PROMPTS, settings)
    model = tiny("Llama", device=device)
    for layer in model.model.layers:
        attention, start = layer.self_attn, 0
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        memory = torch.cat([part.weight.detach().t().flatten() for part in parts])
        for part in parts:
            end = start + part.weight.numel()
            part.weight = torch.nn.Parameter(memory[start:end].view(part.in_features, part.out_features).t())
            start = end
    assert outputs(GraphBackend(model), PROMPTS, settings) == expected


def test_a_model_of_transposed_weights_is_held_once_and_can_be_saved(tmp_path: Path, device: str, plain: Plain) -> None:
    """GPT-2's parameters become transposed views of the matrices that steps read. It gives the same output on its own,
    and when it is loaded again."""
    model = build("gpt2", device)
    expected = [plain(model, prompt, 12) for prompt in PROMPTS]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backend = GraphBackend(model)
    pieces = [
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        for tensors in ([*model.parameters()], [*model.parameters(), *backend.layers._tensors()])
    ]
    assert pieces[0] == pieces[1]
    assert sum(pieces[0].values()) == sum(parameter.nbytes for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    for one in (model, again):
        assert [plain(one, prompt, 12) for prompt in PROMPTS] == expected
