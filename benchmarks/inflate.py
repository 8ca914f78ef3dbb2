"""A small model's function at a large model's cost: `python benchmarks/inflate.py 7b VERB ...`.

A step's time depends on the shapes, its acceptance on the text. To measure both without a large checkpoint, the small
model's weights are padded into a larger Llama that computes the same function: the text is real, and so is the cost.

VERB is any of `lookahead`, or `gpu` (docs/bench.md); the model that it names runs in the larger shape. The padding:

- Padded hidden channels stay zero: the embedding has zeros there, and nothing writes to them (`o_proj` and `down_proj`
  have zero rows). RMSNorm divides by the root of the mean over the wider vector, so its weight takes a factor
  sqrt(small / large), and its eps a factor small / large.
- An added head has no values (`v_proj` rows of zeros), so whatever it attends to adds nothing; one that shares the
  values of a real head has a zero column in `o_proj`.
- An added neuron has a zero `up_proj` row. An added layer has zero `o_proj` and `down_proj`: the identity.
- Everything that meets only those zeros is random, so that no kernel is timed on zeros alone.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

import lookahead
from lookahead.bench.run.models import fitted
from lookahead.config import LookaheadConfig
from lookahead.loading.formats import FORMATS, quantise_model


@dataclass(frozen=True)
class ModelShape:
    """A Llama's shape; heads keep the small model's dimension, which its rotary positions depend on."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int


MODEL_SHAPES = {
    "1.5b": ModelShape(2048, 30, 5632, 32, 32),
    "7b": ModelShape(4096, 32, 11008, 64, 64),
    "13b": ModelShape(5120, 40, 13824, 80, 80),
    "34b": ModelShape(8192, 48, 22016, 128, 16),
}
"""Llama-like: 7b and 13b are Llama 2's with heads of 64 instead of 128, 34b is Code Llama's with its K/V size."""


@torch.no_grad()
def inflate(model: Any, shape: ModelShape, *, dtype: torch.dtype | None = None) -> Any:
    """A Llama of this shape that computes the same function as `model`, a small Llama."""
    small = model.config
    check_shape(model, shape)
    config = copy.deepcopy(small)
    config.hidden_size, config.num_hidden_layers = shape.hidden, shape.layers
    config.intermediate_size, config.head_dim = shape.intermediate, head_dim(small)
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    config.tie_word_embeddings = False
    config.dtype = dtype or model.dtype
    device = str(model.device)
    with torch.device(device):
        large = type(model)._from_config(config, dtype=config.dtype).eval()
    large.generation_config = copy.deepcopy(model.generation_config)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in large.parameters():
        parameter.normal_(std=0.02, generator=generator)

    hidden = small.hidden_size
    large.model.embed_tokens.weight[:, hidden:] = 0
    put(large.model.embed_tokens.weight, model.model.embed_tokens.weight)
    put(large.lm_head.weight, model.lm_head.weight)
    put_norm(large.model.norm, model.model.norm)
    for number, block in enumerate(large.model.layers):
        mlp = block.mlp
        if number >= small.num_hidden_layers:
            block.self_attn.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
            continue
        old = model.model.layers[number]
        put_norm(block.input_layernorm, old.input_layernorm)
        put_norm(block.post_attention_layernorm, old.post_attention_layernorm)
        put_attention(block.self_attn, old.self_attn, small, shape)
        # Neurons: the small model's first, the others with nothing to gate.
        mlp.up_proj.weight[small.intermediate_size :] = 0
        put(mlp.gate_proj.weight, old.mlp.gate_proj.weight)
        put(mlp.up_proj.weight, old.mlp.up_proj.weight)
        put(mlp.down_proj.weight, old.mlp.down_proj.weight)
        mlp.down_proj.weight[hidden:] = 0
    return large


def put_attention(attention: Any, old: Any, small: Any, shape: ModelShape) -> None:
    """The small model's heads where `head_indices` puts them, the others without values, or without a way out."""
    dim, hidden = head_dim(small), small.hidden_size
    q_heads, kv_heads, source = head_indices(small, shape)
    for head in set(range(shape.kv_heads)) - set(kv_heads):
        attention.v_proj.weight[head_rows(head, dim)] = 0
    for head in range(shape.heads):
        if head not in q_heads and head * shape.kv_heads // shape.heads in kv_heads:
            attention.o_proj.weight[:, head_rows(head, dim)] = 0
    for index, head in enumerate(q_heads):
        to, at = head_rows(head, dim), head_rows(index, dim)
        put(attention.q_proj.weight[to], old.q_proj.weight[at])
        put(attention.o_proj.weight[:, to], old.o_proj.weight[:, at])
    for head, index in zip(kv_heads, source, strict=True):
        to, at = head_rows(head, dim), head_rows(index, dim)
        put(attention.k_proj.weight[to], old.k_proj.weight[at])
        put(attention.v_proj.weight[to], old.v_proj.weight[at])
    attention.o_proj.weight[hidden:] = 0


def head_dim(small: Any) -> int:
    return int(small.head_dim or small.hidden_size // small.num_attention_heads)


def check_shape(model: Any, shape: ModelShape) -> None:
    """Raise ValueError for a model that cannot be padded into this shape."""
    small = model.config
    if type(model).__name__ != "LlamaForCausalLM" or small.attention_bias or small.mlp_bias:
        raise ValueError(f"only a Llama without biases can be inflated, not this {type(model).__name__}")
    theirs = "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    for field, their in zip(fields(ModelShape), theirs, strict=True):
        if (given := getattr(shape, field.name)) < getattr(small, their):
            raise ValueError(f"{field.name}={given} is less than the small model's {getattr(small, their)}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads={shape.heads} is no multiple of kv_heads={shape.kv_heads}")


def head_indices(small: Any, shape: ModelShape) -> tuple[list[int], list[int], list[int]]:
    """Where the small model's query heads go; the K/V heads they then use; and the small K/V head each of those is.

    Where a large group has room for a small one it takes it whole. Else every query head gets a K/V head of its own.
    """
    group, small_group = shape.heads // shape.kv_heads, small.num_attention_heads // small.num_key_value_heads
    heads = range(small.num_attention_heads)
    if group >= small_group:
        kv = list(range(small.num_key_value_heads))
        return [(h // small_group) * group + h % small_group for h in heads], kv, kv
    if shape.kv_heads < small.num_attention_heads:
        raise ValueError(f"kv_heads={shape.kv_heads} leaves no room for {small.num_attention_heads} separate heads")
    return [h * group for h in heads], list(heads), [h // small_group for h in heads]


def head_rows(head: int, dim: int) -> slice:
    return slice(head * dim, (head + 1) * dim)


def put(large: torch.Tensor, small: torch.Tensor) -> None:
    """The small matrix into the corner of the large one."""
    large[: small.shape[0], : small.shape[1]] = small.to(large)


def put_norm(large: Any, small: Any) -> None:
    """A norm's weight, stretched as the mean over the wider vector is smaller."""
    size = len(small.weight)
    large.weight[:size] = (small.weight.float() * (size / len(large.weight)) ** 0.5).to(large.weight)


def shaped_load(
    shape: str, load: Callable[..., Any] = lookahead.load, make: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """`lookahead.load`, but the model comes in this shape. `make` makes it of the small `LookaheadModel`."""

    def loaded(name: str | None = None, *, backend: str = "auto", config: Any = None, **options: Any) -> Any:
        format = options.get("dtype") if options.get("dtype") in FORMATS else None
        if format is not None:  # the large model is quantised, not the small one
            options["dtype"] = "bfloat16"
        # The small model answers nothing: it needs no graphs, no config that suits it, and no notes on its backend.
        small = load(name, backend="eager", config=LookaheadConfig(), **{**options, "log": None})
        large = inflate(small.model, MODEL_SHAPES[shape], dtype=small.dtype) if make is None else make(small)
        if format is not None:
            quantise_model(large, format, large.device, options.get("log"))
        return fitted(large, small.tokenizer, f"{small.name} in {shape} shape", backend, options.get("log"), config)

    return loaded


def main(shapes: Iterable[str] = MODEL_SHAPES, load_in: Callable[[str], Callable[..., Any]] = shaped_load) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=list(shapes))
    parser.add_argument("verb", nargs=argparse.REMAINDER, help="of `lookahead`, or gpu, with its options")
    args = parser.parse_args()
    if others := [word for word in args.verb if word.startswith(("--ranks", "--replicas"))]:
        parser.error(f"{others[0]}: only this process has the model in another shape")
    if args.verb[:1] == ["gpu"]:
        from lookahead.bench.gpu.command import main as gpu

        gpu(args.verb[1:], load_in(args.shape), args.shape)
    else:
        from lookahead.cli import app
        from lookahead.cli.common import Host

        app(args.verb, prog_name="lookahead", obj=Host(load=load_in(args.shape), arguments=args.verb))


if __name__ == "__main__":
    main()
