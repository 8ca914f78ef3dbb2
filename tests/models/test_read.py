"""What `models.read` refuses, and what it reads from the configs of published checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from model_table import build
from published import PUBLISHED, Published
from tiny import tiny
from torch import nn

from lookahead.models.facts import UnsupportedModelError, position_limit
from lookahead.models.number_formats import Codes, Format
from lookahead.models.quantised_experts import quantised_experts
from lookahead.models.read import read, readers
from lookahead.models.spec import Rope

# Refusals


class Lora(nn.Module):
    """An adapter around a matrix."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Adapted(nn.Embedding):
    """An adapter in place of the embedding, with the weight of the plain one."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class Packed(torch.Tensor):
    """A weight that is stored in a format of its own."""


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("gemma2", {"use_bidirectional_attention": True}),
    "embeddings of layers": ("gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}),
    "Gemma experts": (
        "gemma4",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "clipped behind norms": ("olmoe", {"clip_qkv": 0.5}),
    "least sum": ("ernie-moe", {"moe_norm_min": 0.1}),
}
"""Why -> a row of the table, and changes with which its reader refuses it."""


def broken(reason: str) -> Any:
    if reason == "class":
        return tiny("Bert", is_decoder=True)
    if reason == "activation":
        return build("llama", hidden_act="mish")
    if reason == "ALiBi":
        return build("falcon", alibi=True)
    if reason == "norms behind layers":
        return build("opt", do_layer_norm_before=False)
    if reason == "no final norm":
        return build("opt", _remove_final_layer_norm=True)
    if reason == "narrow embedding":
        return build("opt", word_embed_proj_dim=16)
    if reason in REFUSED:
        row, changes = REFUSED[reason]
        return build(row, **changes)
    model = build("llama")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    if reason == "remote code":
        model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.some.modeling"})
    elif reason == "adapter":
        attention.k_proj = Lora(attention.k_proj)
    elif reason == "adapted embedding":
        model.model.embed_tokens = Adapted(61, 32, _weight=model.model.embed_tokens.weight)
    elif reason == "hook":
        mlp.register_forward_hook(lambda module, given, output: None)
    elif reason == "replaced forward":
        mlp.forward = lambda x: x
    elif reason == "quantised":
        mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().as_subclass(Packed))
    elif reason == "split":
        model._tp_size = 2
    elif reason == "spread":
        attention._hf_hook = object()
    elif reason == "dtypes":
        model.model.norm.to(torch.bfloat16)
    return model


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("class", "there is no reader for BertLMHeadModel"),
        ("remote code", "its LlamaForCausalLM is one of transformers_modules.some.modeling, not of transformers"),
        ("activation", "its activation is 'mish'"),
        ("ALiBi", r"its positions are a bias of the scores \(ALiBi\)"),
        ("norms behind layers", "its norms are behind its layers"),
        ("no final norm", "it has no norm behind its last layer"),
        ("narrow embedding", "its embedding has another width than its layers"),
        ("encoder", "its attention is bidirectional"),
        ("embeddings of layers", "its layers have embeddings of their own"),
        ("Gemma experts", "it has experts"),
        ("clipped behind norms", "it clips queries and keys behind their norms"),
        ("least sum", "it divides its router's weights by 0.1 or more"),
        ("adapter", "a Lora is no plain matrix"),
        ("adapted embedding", r"its Adapted is one of .*test_read, not of transformers"),
        ("hook", "a forward hook on its LlamaMLP would not be called"),
        ("replaced forward", "the forward that was set on its LlamaMLP would not be called"),
        ("quantised", "its weights are quantised or split between processes"),
        ("split", "its weights are quantised or split between processes"),
        ("spread", "it is spread over devices"),
        ("dtypes", "its weights have several dtypes or devices"),
    ],
)
def test_refuses_in_one_line(reason: str, message: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"^the some backend does not run this model: {message}$"
    ) as caught:
        read(broken(reason), "some")
    assert "\n" not in str(caught.value)


def test_hooks_of_transformers_own_are_no_reason() -> None:
    """Asking a model for hidden states leaves hooks in it, which only record what passes."""
    model = build("llama")
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    read(model, "some")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_readers_are_found(kind: str) -> None:
    assert f"{kind}ForCausalLM" in readers()


def test_reads_without_copying() -> None:
    """A description refers to the model's own tensors."""
    model = build("qwen3-tied-mqa")
    description = read(model, "some")
    assert description.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert description.head.weight().data_ptr() == description.embedding.data_ptr()  # tied
    attention, layer = description.blocks[1].attention, model.model.layers[1].self_attn
    assert attention.qkv.parts == (layer.q_proj, layer.k_proj, layer.v_proj)
    assert attention.q_norm is not None
    assert attention.q_norm.weight.data_ptr() == layer.q_norm.weight.data_ptr()
    assert description.blocks[0].attention.rope is attention.rope  # layers that turn alike share one object


@pytest.mark.parametrize(("row", "router"), [("hunyuan-moe", "gate.wg"), ("ernie-moe", "gate")])
def test_routers_may_stay_in_fp32(row: str, router: str) -> None:
    """As `from_pretrained` leaves those of these classes; no other weight may."""
    model = build(row).to(torch.bfloat16)
    model.model.layers[1].mlp.get_submodule(router).float()
    assert read(model, "some").blocks[1].feed_forward.router.logits.weight().dtype is torch.float32
    model.model.layers[1].mlp.experts.float()
    with pytest.raises(UnsupportedModelError, match="its weights have several dtypes or devices"):
        read(model, "some")


def test_experts_are_read_without_copying() -> None:
    for row in ("qwen3-moe", "gpt-oss"):
        model = build(row)
        mixture, experts = read(model, "some").blocks[1].feed_forward, model.model.layers[1].mlp.experts
        assert mixture.gate_up.weights.data_ptr() == experts.gate_up_proj.data_ptr()
        assert mixture.down.weights.data_ptr() == experts.down_proj.data_ptr()


@pytest.mark.parametrize("row", ["mixtral", "gpt-oss"])
def test_quantised_experts_are_read_as_one_layer_of_their_rows(row: str) -> None:
    """Whatever order the class stores its plain tensors in."""
    model = build(row)
    plain = read(model, "some").blocks[1].feed_forward
    block, format = model.model.layers[1].mlp, Format(Codes.E2M1, group=32)
    block.experts = quantised_experts(block.experts, format, torch.device("cpu"))
    found = read(model, "some").blocks[1].feed_forward
    for quantised, matrix in ((found.gate_up, plain.gate_up), (found.down, plain.down)):
        assert quantised.format == format
        assert quantised.shape == matrix.shape
        own, other = (one.weight(3, torch.float32) for one in (quantised, matrix))
        assert torch.corrcoef(torch.stack([own.flatten(), other.flatten()]))[0, 1] > 0.95


# Windows that a config names and its class does not use


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("Llama", {}, [None]),
        ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, [7]),
        ("Mistral", {"layer_types": ["full_attention", "full_attention"]}, [7]),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}, [None]),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [7]),
        ("Qwen3", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, [None, 7]),
    ],
)
def test_windows_are_those_of_the_forward_pass(kind: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    """In transformers itself, a change of the first token is seen as far as the widest window lets it."""
    model = tiny(kind, sliding_window=7, **changes)
    assert read(model, "some").windows == windows
    text = list(range(2, 32))
    with torch.no_grad():
        before, after = (model(torch.tensor([[first, *text]])).logits[0, -1] for first in (0, 1))
    assert torch.equal(before, after) is (None not in windows)


@pytest.mark.parametrize("kind", ["Llama", "Granite", "Glm4", "Olmo2", "SeedOss", "Phi", "Nemotron"])
def test_a_model_without_windows_stays_below_one_that_its_config_names(kind: str) -> None:
    """Its attention does not use the window and the cache of `generate` does, so beyond it no text would be right."""
    model = tiny(kind, sliding_window=7, head_dim=8)
    assert read(model, "some").windows == [None]
    limit = position_limit(model.config)
    assert (limit.positions, limit.hard) == (7, True)
    assert position_limit(tiny(kind, head_dim=8).config).positions is None


@pytest.mark.parametrize("kind", ["GPT2", "GPTJ", "GPTNeo", "OPT"])
def test_a_table_of_positions_and_a_window_that_is_not_used(kind: str) -> None:
    """The shorter one is the limit."""
    changes = {"GPTJ": {"rotary_dim": 4}, "GPTNeo": {"attention_types": [[["global"], 2]]}}.get(kind, {})
    for window, positions in ((7, 7), (1000, 256)):
        model = tiny(kind, sliding_window=window, **changes)
        assert read(model, "some").windows == [None]
        assert position_limit(model.config).positions == positions


# Published checkpoints


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.thinned(1, most=5)
def test_published_checkpoints(name: str) -> None:
    """Models without memory: transformers' tensors are those of the checkpoint, and the reader finds what it should."""
    facts = PUBLISHED[name]
    with torch.device("meta"):
        made = getattr(transformers, f"{facts.kind}Config")(**facts.config)
        model = transformers.AutoModelForCausalLM.from_config(made)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    if facts.tied:
        assert shapes.pop("lm_head.weight") == shapes["model.embed_tokens.weight"]
    outside = {key: shape for key, shape in shapes.items() if ".layers." not in key or ".layers.0." in key}
    assert outside == facts.tensors()
    assert sum(parameter.numel() for parameter in model.parameters()) == facts.parameters

    description = read(model, "some")
    assert (description.hidden, description.vocabulary) == (facts.hidden, facts.vocabulary)
    assert (description.head.parts[0].weight is model.model.embed_tokens.weight) is facts.tied
    assert not description.head.has_bias
    assert description.norm.eps == facts.eps
    assert len(description.blocks) == facts.layers
    assert description.windows == [facts.window]
    for block in description.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        assert (attention.heads, attention.kv_heads, attention.head_dim) == facts.heads
        assert attention.scale == facts.heads[2] ** -0.5
        assert attention.qkv.shape == (facts.q + 2 * facts.kv, facts.hidden)
        assert attention.qkv.has_bias is any(key.endswith("bias") for key in facts.extra)
        assert (attention.q_norm is not None) is (attention.k_norm is not None) is ("q_norm" in str(facts.extra))
        norms = [block.mixer_norm, block.feed_forward_norm, attention.q_norm, attention.k_norm]
        assert {norm.eps for norm in norms if norm is not None} == {facts.eps}
        assert feed_forward.gate_up.shape == (2 * facts.inner, facts.hidden)
        assert not any(matrix.has_bias for matrix in (attention.out, feed_forward.gate_up, feed_forward.down))
        assert attention.rope is not None
    check_rope(description.blocks[-1].attention.rope, facts)


def check_rope(rope: Rope | None, facts: Published) -> None:
    """The module of the model, made again with memory, turns by theta's angles."""
    assert rope is not None
    assert rope.limit is None
    assert rope.dim == facts.heads[2]
    cosine, sine = Rope(type(rope.module)(rope.module.config), rope.dim).tables(256, torch.device("cpu"))
    frequencies = [facts.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]
    if facts.rope_factor is not None:
        frequencies = [slowed(frequency, facts.rope_factor) for frequency in frequencies]
    angles = torch.arange(256, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    torch.testing.assert_close(cosine.double(), angles.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sine.double(), angles.sin(), atol=1e-4, rtol=0)


def slowed(frequency: float, factor: float) -> float:
    """Llama 3.1's scaling: waves longer than 8192 tokens are slowed down, those shorter than 2048 stay as they are."""
    turns = 8192 * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
    return kept * frequency + (1 - kept) * frequency / factor
