"""Facts of published checkpoints: what their config.json says, their tensors, and what a reader must find in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Published:
    """A checkpoint: what its config.json says, its tensors of layer 0 and outside of layers, and what must be read.

    `q`, `kv`: the rows of its q_proj, and of its k_proj and v_proj. `heads`: query heads, K/V heads, head_dim. `extra`:
    more tensors of a layer. `rope_factor`: of Llama 3.1's scaling.
    """

    kind: str
    config: dict[str, Any]
    parameters: int
    layers: int
    hidden: int
    q: int
    kv: int
    inner: int
    vocabulary: int
    heads: tuple[int, int, int]
    eps: float
    theta: float
    window: int | None = None
    tied: bool = False
    rope_factor: float | None = None
    extra: dict[str, list[int]] = field(default_factory=dict)

    def tensors(self) -> dict[str, list[int]]:
        layer = {
            "input_layernorm.weight": [self.hidden],
            "self_attn.q_proj.weight": [self.q, self.hidden],
            "self_attn.k_proj.weight": [self.kv, self.hidden],
            "self_attn.v_proj.weight": [self.kv, self.hidden],
            "self_attn.o_proj.weight": [self.hidden, self.q],
            "post_attention_layernorm.weight": [self.hidden],
            "mlp.gate_proj.weight": [self.inner, self.hidden],
            "mlp.up_proj.weight": [self.inner, self.hidden],
            "mlp.down_proj.weight": [self.hidden, self.inner],
            **self.extra,
        }
        rest = {"model.embed_tokens.weight": [self.vocabulary, self.hidden], "model.norm.weight": [self.hidden]}
        head = {} if self.tied else {"lm_head.weight": [self.vocabulary, self.hidden]}
        return {f"model.layers.0.{name}": shape for name, shape in layer.items()} | rest | head


def config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, context: int, **more: Any
) -> dict[str, Any]:
    """The fields that every config.json has, by the names that it uses."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        **more,
    }


def llama3(factor: float) -> dict[str, Any]:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "attention_bias": False,
        "mlp_bias": False,
    }


MISTRAL = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False}
QWEN3 = {**QWEN, "head_dim": 128, "attention_bias": False, "rope_scaling": None, "sliding_window": None}
HEAD_NORMS = {"self_attn.q_norm.weight": [128], "self_attn.k_norm.weight": [128]}


def biases(q: int, kv: int) -> dict[str, list[int]]:
    return {"self_attn.q_proj.bias": [q], "self_attn.k_proj.bias": [kv], "self_attn.v_proj.bias": [kv]}


# fmt: off
PUBLISHED = {
    "Llama-2-7B": Published(
        "Llama",
        config(4096, 11008, 32, 32, 32, 32000, 4096, rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False),
        parameters=6_738_415_616, layers=32, hidden=4096, q=4096, kv=4096, inner=11008, vocabulary=32000,
        heads=(32, 32, 128), eps=1e-5, theta=1e4,
    ),
    "Llama-3.1-8B": Published(
        "Llama",
        config(4096, 14336, 32, 32, 8, 128256, 131072, **llama3(8.0), tie_word_embeddings=False),
        parameters=8_030_261_248, layers=32, hidden=4096, q=4096, kv=1024, inner=14336, vocabulary=128256,
        heads=(32, 8, 128), eps=1e-5, theta=5e5, rope_factor=8.0,
    ),
    "Llama-3.2-1B": Published(
        "Llama",
        config(2048, 8192, 16, 32, 8, 128256, 131072, **llama3(32.0), head_dim=64, tie_word_embeddings=True),
        parameters=1_235_814_400, layers=16, hidden=2048, q=2048, kv=512, inner=8192, vocabulary=128256,
        heads=(32, 8, 64), eps=1e-5, theta=5e5, rope_factor=32.0, tied=True,
    ),
    "Mistral-7B-v0.1": Published(
        "Mistral",
        config(4096, 14336, 32, 32, 8, 32000, 32768, **MISTRAL, rope_theta=10000.0, sliding_window=4096),
        parameters=7_241_732_096, layers=32, hidden=4096, q=4096, kv=1024, inner=14336, vocabulary=32000,
        heads=(32, 8, 128), eps=1e-5, theta=1e4, window=4096,
    ),
    "Mistral-7B-v0.3": Published(
        "Mistral",
        config(4096, 14336, 32, 32, 8, 32768, 32768, **MISTRAL, rope_theta=1000000.0, sliding_window=None),
        parameters=7_248_023_552, layers=32, hidden=4096, q=4096, kv=1024, inner=14336, vocabulary=32768,
        heads=(32, 8, 128), eps=1e-5, theta=1e6,
    ),
    "Ministral-8B-Instruct-2410": Published(
        "Mistral",
        config(4096, 12288, 36, 32, 8, 131072, 32768, **MISTRAL, head_dim=128, rope_theta=1e8, sliding_window=32768),
        parameters=8_019_808_256, layers=36, hidden=4096, q=4096, kv=1024, inner=12288, vocabulary=131072,
        heads=(32, 8, 128), eps=1e-5, theta=1e8, window=32768,
    ),
    "Mistral-Nemo-Base-2407": Published(  # head_dim is not hidden / heads
        "Mistral",
        config(
            5120, 14336, 40, 32, 8, 131072, 128000, **MISTRAL, head_dim=128, rope_theta=1000000.0, sliding_window=None
        ),
        parameters=12_247_782_400, layers=40, hidden=5120, q=4096, kv=1024, inner=14336, vocabulary=131072,
        heads=(32, 8, 128), eps=1e-5, theta=1e6,
    ),
    "Qwen2.5-7B": Published(
        "Qwen2",
        config(
            3584, 18944, 28, 28, 4, 152064, 131072, **QWEN,
            sliding_window=131072, max_window_layers=28, tie_word_embeddings=False,
        ),
        parameters=7_615_616_512, layers=28, hidden=3584, q=3584, kv=512, inner=18944, vocabulary=152064,
        heads=(28, 4, 128), eps=1e-6, theta=1e6, extra=biases(3584, 512),
    ),
    "Qwen2.5-0.5B": Published(
        "Qwen2",
        config(
            896, 4864, 24, 14, 2, 151936, 32768, **QWEN,
            sliding_window=32768, max_window_layers=24, tie_word_embeddings=True,
        ),
        parameters=494_032_768, layers=24, hidden=896, q=896, kv=128, inner=4864, vocabulary=151936,
        heads=(14, 2, 64), eps=1e-6, theta=1e6, tied=True, extra=biases(896, 128),
    ),
    "Qwen3-8B": Published(
        "Qwen3",
        config(4096, 12288, 36, 32, 8, 151936, 40960, **QWEN3, max_window_layers=36, tie_word_embeddings=False),
        parameters=8_190_735_360, layers=36, hidden=4096, q=4096, kv=1024, inner=12288, vocabulary=151936,
        heads=(32, 8, 128), eps=1e-6, theta=1e6, extra=HEAD_NORMS,
    ),
    "Qwen3-0.6B": Published(  # head_dim is not hidden / heads
        "Qwen3",
        config(1024, 3072, 28, 16, 8, 151936, 40960, **QWEN3, max_window_layers=28, tie_word_embeddings=True),
        parameters=596_049_920, layers=28, hidden=1024, q=2048, kv=1024, inner=3072, vocabulary=151936,
        heads=(16, 8, 128), eps=1e-6, theta=1e6, tied=True, extra=HEAD_NORMS,
    ),
}
# fmt: on
