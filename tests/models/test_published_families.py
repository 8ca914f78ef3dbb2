"""What is read from the configs of published checkpoints whose families differ from Llama in more than shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from published import config

from lookahead.models.norm import Norm
from lookahead.models.read import read
from lookahead.models.spec import Attention


@dataclass
class Facts:
    """What must be read: `heads` are query heads, K/V heads and head_dim; `windows` those of the first layers.

    `decoder`, `block` and `attention` are fields of these parts that differ from their defaults, `norm` of every norm
    of the residual stream. `angles` are those of the second pair of columns at position 1, in the first and the last
    layer; None without rotation. `rotated`: the part of a head that is. `norms`: how many a block has.
    """

    kind: str
    config: dict[str, Any]
    parameters: int
    heads: tuple[int, int, int]
    eps: float
    scale: float
    windows: list[int | None]
    angles: tuple[float | None, float | None]
    decoder: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    norm: dict[str, Any] = field(default_factory=dict)
    rotated: float = 1.0
    norms: int = 2


def angle(theta: float, dim: int) -> float:
    return theta ** (-2 / dim)


GEMMA = {"offset": 1.0, "rounds_first": False}
OLMO = {"rounds_first": False}

# fmt: off
CHECKPOINTS = {
    "Gemma-2-9B": Facts(
        "Gemma2",
        config(
            3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
            sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0,
        ),
        9_241_705_984, (16, 8, 256), 1e-6, 1 / 16, [4096, None, 4096, None], (angle(1e4, 256), angle(1e4, 256)),
        decoder={"embedding_scale": 59.75, "logit_softcap": 30.0}, attention={"softcap": 50.0}, norm=GEMMA, norms=4,
    ),
    "Gemma-3-12B, text": Facts(
        "Gemma3Text",
        config(
            3840, 15360, 48, 16, 8, 262208, 131072, head_dim=256, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
            sliding_window=1024, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
        11_766_034_176, (16, 8, 256), 1e-6, 1 / 16, [1024] * 5 + [None, 1024], (angle(1e4, 256), angle(1e6, 256) / 8),
        decoder={"embedding_scale": 62.0}, norm=GEMMA, norms=4,
    ),
    "OLMo-2-7B": Facts(
        "Olmo2",
        config(4096, 11008, 32, 32, 32, 100352, 4096, rms_norm_eps=1e-6, rope_theta=500000, tie_word_embeddings=False),
        7_298_617_344, (32, 32, 128), 1e-6, 128**-0.5, [None, None], (angle(5e5, 128), angle(5e5, 128)),
        attention={"whole_norms": True}, norm=OLMO,
    ),
    "OLMo-3-7B": Facts(
        "Olmo3",
        config(
            4096, 11008, 32, 32, 32, 100278, 65536, rms_norm_eps=1e-6, sliding_window=4096, tie_word_embeddings=False,
            rope_theta=500000,
            rope_scaling={
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
            },
        ),
        7_298_011_136, (32, 32, 128), 1e-6, 128**-0.5, [4096, 4096, 4096, None, 4096],
        (angle(5e5, 128), angle(5e5, 128)), attention={"whole_norms": True}, norm=OLMO,
    ),
    "Granite-3.1-8B": Facts(
        "Granite",
        config(
            4096, 12800, 40, 32, 8, 49155, 131072, rms_norm_eps=1e-5, rope_theta=1e7, tie_word_embeddings=True,
            attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
        ),
        8_170_848_256, (32, 8, 128), 1e-5, 1 / 128, [None, None], (angle(1e7, 128), angle(1e7, 128)),
        decoder={"embedding_scale": 12.0, "logit_scale": 1 / 16}, block={"residual_scale": 0.22},
    ),
    "GLM-4-9B": Facts(
        "Glm",
        config(
            4096, 13696, 40, 32, 2, 151552, 131072, head_dim=128, rms_norm_eps=1.5625e-07, attention_bias=True,
            rope_theta=10000.0, partial_rotary_factor=0.5, tie_word_embeddings=False,
        ),
        9_399_951_360, (32, 2, 128), 1.5625e-07, 128**-0.5, [None, None], (angle(1e4, 64), angle(1e4, 64)), rotated=0.5,
    ),
    "Command-R7B": Facts(
        "Cohere2",
        config(
            4096, 14336, 32, 32, 8, 256000, 8192, layer_norm_eps=1e-5, rope_theta=50000, logit_scale=0.25,
            sliding_window=4096, sliding_window_pattern=4, use_qk_norm=False,
        ),
        8_028_033_024, (32, 8, 128), 1e-5, 128**-0.5, [4096, 4096, 4096, None, 4096], (angle(5e4, 128), None),
        decoder={"logit_scale": 0.25}, block={"parallel": True}, norm={"centered": True, "rounds_first": False},
    ),
}
# fmt: on


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.thinned(1, most=3)
def test_published_families(name: str) -> None:
    """Models without memory: they have the parameters of the checkpoint, and the reader finds what it should."""
    facts = CHECKPOINTS[name]
    made = getattr(transformers, f"{facts.kind}Config")(**facts.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").to(torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == facts.parameters

    model.model.rotary_emb = type(model.model.rotary_emb)(made)  # with memory
    description = read(model, "some")
    blocks = description.blocks
    assert len(blocks) == facts.config["num_hidden_layers"]
    windows = [block.attention.window for block in blocks]
    assert windows[: len(facts.windows)] == facts.windows
    check_fields(description, {"embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None, **facts.decoder})
    for block in blocks:
        attention = block.attention
        assert (attention.heads, attention.kv_heads, attention.head_dim) == facts.heads
        assert attention.scale == pytest.approx(facts.scale)
        check_fields(block, {"parallel": False, "residual_scale": 1.0, "output_scale": None, **facts.block})
        check_fields(attention, {"softcap": None, "whole_norms": False, "sinks": None, **facts.attention})
        norms = (block.mixer_norm, block.feed_forward_norm, block.mixer_out_norm, block.feed_forward_out_norm)
        own = [norm for norm in norms if norm is not None]
        assert len(own) == facts.norms
        for norm in (*own, description.norm):
            check_norm(norm, facts)
    angles = [rotation(blocks[index].attention, facts) for index in (0, -1)]
    assert angles == [expected if expected is None else pytest.approx(expected, rel=1e-4) for expected in facts.angles]


def check_fields(part: Any, expected: dict[str, Any]) -> None:
    assert {name: getattr(part, name) for name in expected} == expected


def check_norm(norm: Norm, facts: Facts) -> None:
    assert norm.eps == facts.eps
    check_fields(norm, {"offset": 0.0, "centered": False, "rounds_first": True, **facts.norm})


def rotation(attention: Attention, facts: Facts) -> float | None:
    """The angle of the second pair of columns at position 1."""
    if attention.rope is None:
        return None
    assert attention.rope.dim == facts.heads[2] * facts.rotated
    cosine, sine = attention.rope.tables(2, torch.device("cpu"))
    return float(torch.atan2(sine[1, 1], cosine[1, 1]))
