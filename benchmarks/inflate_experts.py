"""Mixtures of experts to measure with: `python benchmarks/inflate_experts.py moe-qwen3 VERB ...`, as `inflate.py`.

`inflate_experts` pads a small Llama into a Mixtral that computes the same function, as `inflate` pads it into a larger
Llama. Every expert of a layer is the small model's feed-forward, and the weights of those chosen sum to 1, so the
routers are free:

- A router's logits are random in the token, plus, by a factor, the same for all tokens. The factor is such that the
  experts of four tokens in a row of a text are UNION times those of one, as in trained mixtures. Texts share their
  favourite experts, so that a batch of different texts reads fewer than of a trained mixture, whose load is balanced.
- Tokens that the small model has not are never chosen. The first padded hidden channel is the same small number for
  every token. Only the last norm lets it through, and it makes the logits of these tokens about -200 or less.
- The shapes in MXFP4 have experts that are rounded, so their text is not that of the small model, but one of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
import transformers
from inflate import (
    MODEL_SHAPES,
    ModelShape,
    check_shape,
    head_dim,
    main,
    put,
    put_attention,
    put_norm,
    shaped_load,
)
from torch.nn import functional as F

import lookahead
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.models.number_formats import MXFP4
from lookahead.models.quantised_experts import NAMES, QuantisedExperts, is_experts, stacked
from lookahead.models.rounding import quantise

UNION = 2.5
UNION_ROWS = (2, 4, 8, 16, 32)
CONSTANT = 2.0**-10
"""The channel that is the same for every token: its square is nothing beside the sum of the others' squares."""
REFUSED = 200.0
"""About the least distance of a token's logit below 0 that is never to be chosen."""
CALIBRATED = 1024
"""Tokens of text that the routers are fitted to. The first FIRST are left out: they attract attention, and differ."""
FIRST = 4


@dataclass(frozen=True)
class MixtureShape(ModelShape):
    """A Mixtral's shape; `intermediate` is an expert's. `rounded`: experts in MXFP4."""

    experts: int
    top_k: int
    vocabulary: int
    rounded: bool = False


_QWEN3, _GPT_OSS = (2048, 48, 1536, 64, 8, 64, 4, 151936), (2880, 30, 2880, 64, 8, 32, 4, 201088)
MIXTURE_SHAPES = {
    "moe-qwen3": MixtureShape(*_QWEN3),
    "moe-qwen3-mxfp4": MixtureShape(*_QWEN3, rounded=True),
    "moe-gpt-oss": MixtureShape(*_GPT_OSS),
    "moe-gpt-oss-mxfp4": MixtureShape(*_GPT_OSS, rounded=True),
}
"""Qwen3-30B-A3B's bytes with heads of 64 and 64 experts of 1,536, of which 4 are chosen, for 8 of 128 of 768, which as
many independent rows read as many bytes of. gpt-oss-20b's with 30 layers instead of 24."""
SHAPES = {**MODEL_SHAPES, **MIXTURE_SHAPES}


@torch.no_grad()
def inflate_experts(
    model: Any, shape: MixtureShape, ids: list[int], *, dtype: torch.dtype | None = None
) -> tuple[Any, dict[int, float]]:
    """A Mixtral of this shape that computes the same function as `model`, a small Llama.

    Returns it with the experts that 2, 4, ... tokens in a row of the text `ids` choose, as multiples of `top_k`.
    """
    check_shape(model, shape)
    small, hidden = model.config, model.config.hidden_size
    if shape.vocabulary < small.vocab_size or (shape.vocabulary > small.vocab_size and shape.hidden == hidden):
        raise ValueError(
            f"vocabulary={shape.vocabulary} needs at least the small model's {small.vocab_size} tokens, and if it has "
            f"more, a hidden size above {hidden}"
        )
    dtype, device = dtype or model.dtype, model.device
    large = allocated("MixtralForCausalLM", _config(small, shape, dtype), device, without_experts=True)
    large.generation_config = copy.deepcopy(model.generation_config)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in large.parameters():
        parameter.normal_(std=0.02, generator=generator)
    inputs, last = _inputs(model, ids)

    _put_vocabulary(large, model, float(last.norm(dim=1).max()) / shape.hidden**0.5)
    normed = last * (hidden / last.square().sum(1, keepdim=True)) ** 0.5
    unions = list[list[float]]()
    for number, block in enumerate(large.model.layers):
        old = model.model.layers[number] if number < small.num_hidden_layers else None
        if old is None:  # an added layer: the identity
            block.self_attn.o_proj.weight.zero_()
            block.post_attention_layernorm.weight[:hidden] = (hidden / shape.hidden) ** 0.5
        else:
            put_norm(block.input_layernorm, old.input_layernorm)
            put_norm(block.post_attention_layernorm, old.post_attention_layernorm)
            put_attention(block.self_attn, old.self_attn, small, shape)
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight[hidden:] = 0
        router, found = fit_router(normed if old is None else inputs[number], shape.experts, shape.top_k, generator)
        put(block.mlp.gate.weight, router)
        unions.append(found)
        gate_up, down = _expert(None if old is None else old.mlp, shape, dtype, device, generator)
        if shape.rounded:
            rounded = (stacked(repeat(quantise(one, MXFP4), shape.experts), shape.experts) for one in (gate_up, down))
            block.mlp.experts = QuantisedExperts(block.mlp.experts, *rounded)
        else:
            for name, one in zip(NAMES, (gate_up, down), strict=True):
                own = one.expand(shape.experts, *one.shape).contiguous()
                block.mlp.experts.register_parameter(name, torch.nn.Parameter(own))
    means = torch.tensor(unions).mean(0).tolist()
    return large, dict(zip(UNION_ROWS, means, strict=True))


def _config(small: Any, shape: MixtureShape, dtype: torch.dtype) -> Any:
    config = transformers.MixtralConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=head_dim(small),
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        vocab_size=shape.vocabulary,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / shape.hidden,
        hidden_act=small.hidden_act,
        max_position_embeddings=small.max_position_embeddings,
        rope_parameters=copy.deepcopy(small.rope_parameters),
        bos_token_id=small.bos_token_id,
        eos_token_id=small.eos_token_id,
        pad_token_id=small.pad_token_id,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    config.dtype = dtype
    return config


def allocated(kind: str, config: Any, device: torch.device | str, *, without_experts: bool = False) -> Any:
    """A model whose weights are allocated on the device, and not set; maybe without the matrices of experts."""
    with torch.device("meta"):
        model = getattr(transformers, kind)._from_config(config, dtype=config.dtype).eval()
    for module in [module for module in model.modules() if is_experts(module)] if without_experts else ():
        for name in NAMES:
            module.register_parameter(name, None)
    model.to_empty(device=device)
    if model.model.rotary_emb is not None:
        with torch.device(device):  # it has buffers that it computes
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def _inputs(model: Any, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the feed-forward of each layer reads for a text, fp32 [tokens, hidden], and what the last norm does."""
    found = list[torch.Tensor]()
    modules = [*(layer.mlp for layer in model.model.layers), model.model.norm]
    hooks = [module.register_forward_pre_hook(lambda _, x: found.append(x[0][0, FIRST:].float())) for module in modules]
    try:
        model.model(torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[:-1], found[-1]


def _put_vocabulary(large: Any, model: Any, size: float) -> None:
    """Embedding, last norm and head; `size` is the largest root of a text's mean square before the last norm."""
    hidden, tokens = model.config.hidden_size, model.config.vocab_size
    embedding, head, norm = large.model.embed_tokens.weight, large.lm_head.weight, large.model.norm
    embedding[:, hidden:] = 0
    put(embedding, model.model.embed_tokens.weight)
    put(head, model.lm_head.weight)
    put_norm(norm, model.model.norm)
    if len(head) > tokens:
        embedding[:, hidden] = CONSTANT
        norm.weight[hidden] = factor = (REFUSED * 4 * size / CONSTANT) ** 0.5  # even if it were 4 times as large
        head[:tokens, hidden], head[tokens:, hidden] = 0, -factor


def _expert(
    old: Any, shape: MixtureShape, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert that is the small model's feed-forward, or, without one, gives zeros: [2 inner, hidden] and [hidden,
    inner]."""
    size, hidden = shape.intermediate, shape.hidden
    gate, up, down = (
        torch.empty(out, width, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
        for out, width in ((size, hidden), (size, hidden), (hidden, size))
    )
    if old is None:
        down.zero_()
    else:
        put(gate, old.gate_proj.weight)
        put(up, old.up_proj.weight)
        put(down, old.down_proj.weight)
        up[len(old.up_proj.weight) :] = 0
        down[len(old.down_proj.weight) :] = 0
    return torch.cat([gate, up]), down


def fit_router(
    x: torch.Tensor, experts: int, top_k: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[float]]:
    """A router [experts, hidden] for the rows x [tokens, hidden] of a text, whose four rows in a row choose UNION
    times the experts of one, or as near as a random one comes; and `unions` of it."""
    mean = x.mean(0)
    direction = mean / mean.square().sum()
    own = torch.randn(experts, x.shape[1], generator=generator, device=x.device)
    own -= (own @ mean)[:, None] * direction
    own /= (x @ own.T).std(0)[:, None]
    favourites = torch.randn(experts, 1, generator=generator, device=x.device) * direction
    low, high = 0.0, 16.0
    for _ in range(12):
        factor = (low + high) / 2
        more = unions(x @ (own + factor * favourites).T, top_k, (4,))[0] > UNION
        low, high = (factor, high) if more else (low, factor)
    router = own + low * favourites
    return router, unions(x @ router.T, top_k)


def unions(logits: torch.Tensor, top_k: int, rows: Iterable[int] = UNION_ROWS) -> list[float]:
    """How many experts so many rows in a row choose, for logits [tokens, experts], as multiples of `top_k`."""
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(top_k, 1).indices, 1.0).T[None]
    return [float(F.max_pool1d(chosen, min(count, len(logits)), 1).sum(1).mean()) / top_k for count in rows]


def calibration(tokenizer: Any, model: Any) -> list[int]:
    """Tokens of the builtin prompts, one after the other."""
    text = "\n\n".join(prompt.turns[0] for prompt in load_prompts("builtin"))
    return list(tokenizer(text)["input_ids"])[: min(CALIBRATED, model.config.max_position_embeddings)]


def make_mixture(small: Any, name: str, seen: Callable[[dict[int, float]], None] = lambda _: None) -> Any:
    """A loaded small model in one of MIXTURE_SHAPES; `seen` gets its unions."""
    ids = calibration(small.tokenizer, small.model)
    large, found = inflate_experts(small.model, MIXTURE_SHAPES[name], ids, dtype=small.dtype)
    seen(found)
    return large


def load_in(name: str, load: Callable[..., Any] = lookahead.load, **options: Any) -> Callable[..., Any]:
    """`lookahead.load`, but the model comes in one of SHAPES."""
    return shaped_load(name, load, partial(make_mixture, name=name, **options) if name in MIXTURE_SHAPES else None)


if __name__ == "__main__":
    main(SHAPES, load_in)
