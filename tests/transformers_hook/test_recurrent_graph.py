"""`model.generate` with the hook on models with recurrent states, on the graph backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain_models import chain_model
from marks import slow_but
from model_table_recurrent import RECURRENT_ROWS
from tiny import PROMPTS, tiny

import lookahead
from lookahead.backends.graph import states
from lookahead.models.facts import UnsupportedModelError
from lookahead.models.read import read

ROWS = {name: (kind, changes) for name, kind, changes in RECURRENT_ROWS}
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
NAMES = ("qwen3.5", "granite-mamba", "lfm2")


def make(name: str) -> Any:
    kind, changes = ROWS[name]
    return tiny(kind, **changes)


@pytest.mark.parametrize("name", slow_but(NAMES, "granite-mamba"))
def test_tokens_are_those_of_generate(name: str) -> None:
    """One prompt, then the next call with the same backend, and a batch behind padding."""
    model, decoding = make(name), lookahead.decoding(backend="graph")
    for prompt in (PROMPTS[0], PROMPTS[2]):
        ids = torch.tensor([prompt])
        assert torch.equal(
            model.generate(ids, custom_generate=decoding, **SETTINGS), make(name).generate(ids, **SETTINGS)
        )
    padded = torch.tensor([[0] * 4 + list(PROMPTS[0]), list(PROMPTS[3])])
    mask = (torch.arange(10) >= torch.tensor([[4], [0]])).long()
    found = model.generate(padded, attention_mask=mask, custom_generate=decoding, **SETTINGS)
    assert torch.equal(found, make(name).generate(padded, attention_mask=mask, **SETTINGS))


def test_a_cache_with_states_is_refused() -> None:
    """It is neither left behind nor taken over: one line says what to leave out."""
    model, ids = make("granite-mamba"), torch.tensor([PROMPTS[0]])
    decoding = lookahead.decoding(backend="graph")
    with pytest.raises(UnsupportedModelError, match="neither begins from a cache with recurrent states nor leaves one"):
        model.generate(ids, custom_generate=decoding, return_dict_in_generate=True, **SETTINGS)


HOLE = torch.tensor([[1, 1, 0, 0, 1, 1, 1]])
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        ("granite-mamba", HOLE, "attention_mask hides a position after a token"),
        ("granite-mamba-biases", PADDING, "attention_mask hides padding, which the model's own pass folds into"),
    ],
)
def test_a_state_that_hidden_positions_change_is_left_to_the_models_own_pass(
    name: str, mask: torch.Tensor, message: str
) -> None:
    ids = torch.tensor([[5, 9, 5, 3, 8, 11, 2]])
    expected = make(name).generate(ids, attention_mask=mask, **SETTINGS)
    assert not torch.equal(expected, make(name).generate(ids, **SETTINGS)), "the mask changes nothing"
    with pytest.raises(UnsupportedModelError, match=message):
        make(name).generate(ids, attention_mask=mask, custom_generate=lookahead.decoding(backend="graph"), **SETTINGS)
    decoding = lookahead.decoding()
    assert torch.equal(make(name).generate(ids, attention_mask=mask, custom_generate=decoding, **SETTINGS), expected)


def test_a_prompt_adapter_is_not_left_out() -> None:
    peft = pytest.importorskip("peft")

    def tuned() -> Any:
        model = peft.get_peft_model(make("lfm2"), peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
        source = torch.Generator().manual_seed(3)
        for name, weight in model.named_parameters():
            if "prompt_encoder" in name:
                weight.data.copy_(torch.randn(weight.shape, generator=source))
        return model.eval()

    inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "attention_mask": torch.ones(1, len(PROMPTS[0])).long()}
    with pytest.raises(UnsupportedModelError, match="whose inputs other code prepares"):
        tuned().generate(**inputs, custom_generate=lookahead.decoding(backend="graph"), **SETTINGS)


def test_a_batch_without_room_for_its_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("lfm2")
    size = sum(group.slot_bytes(4) for group in states.state_groups_of(read(model, "graph")))
    monkeypatch.setattr(states, "CPU_BYTES", 2 * size)
    monkeypatch.setattr(states, "free_bytes", lambda device: None)
    ids, decoding = torch.tensor([[5, 9, 5, 3], [7, 8, 9, 1], [3, 3, 4, 4]]), lookahead.decoding(backend="graph")
    with pytest.raises(UnsupportedModelError, match="room for the recurrent states of 2 sequences, and 3 are needed"):
        model.generate(ids, custom_generate=decoding, **SETTINGS)
    assert len(model.generate(ids[:2], custom_generate=decoding, **SETTINGS)) == 2


def test_a_multimodal_class_runs_whole_from_text() -> None:
    """Its `generate` prepares several positions for a token, and what its encoders gave, which is nothing."""
    model = chain_model("Qwen3_5ForConditionalGeneration")
    ids = torch.tensor([[20 + token for token in PROMPTS[0]]])
    expected = model.generate(ids, **SETTINGS)
    decoding = lookahead.decoding(backend="graph")
    assert torch.equal(model.generate(ids, custom_generate=decoding, **SETTINGS), expected)
    assert decoding.stats[0].generated_tokens == 10


def test_a_cache_of_another_name_is_no_argument_of_the_users() -> None:
    model, decoding = chain_model("Mamba2ForCausalLM"), lookahead.decoding(backend="graph")
    ids = torch.tensor([[20 + token for token in PROMPTS[0]]])
    expected = model.generate(ids, **SETTINGS)
    assert torch.equal(model.generate(ids, custom_generate=decoding, **SETTINGS), expected)
