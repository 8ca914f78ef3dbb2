"""Steps of other families, at the shapes of checkpoints, with random weights: `python benchmarks/families.py phi-4`.

Without names all of them are measured, one after the other. Random weights say nothing of acceptance, so what is timed
is a step: of one token for 1 and for 16 sequences, as a share of what reading weights and K/V as fast as a copy would
allow, and of 121 rows of one sequence, as a multiple of a step of one. `hook`: token by token through `model.generate`,
beside stock `generate`. `equal`: whether lookahead gave the tokens of token-by-token decoding, alone and 16 at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import lookahead
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.choose import graph_backend
from lookahead.backends.exact import exact_config
from lookahead.bench.gpu.timing import bytes_read, copy_bandwidth, step_ms
from lookahead.bench.run.about import device_name, versions
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request

Shape = tuple[str, dict[str, Any]]


def shape(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> Shape:
    """A config class of transformers, and its fields."""
    fields = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": kv, "eos_token_id": None, "pad_token_id": None}
    return kind, {**fields, "bos_token_id": None, **more}


SHAPES: dict[str, Shape] = {
    "llama-2-7b": shape("Llama", 4096, 11008, 32, 32, 32, 32000),
    "gemma-3-12b": shape("Gemma3Text", 3840, 15360, 48, 16, 8, 262208, head_dim=256, query_pre_attn_scalar=256),
    "phi-4": shape("Phi3", 5120, 17920, 40, 40, 10, 100352),
    "olmo-3-7b": shape("Olmo3", 4096, 11008, 32, 32, 32, 100278),
    "granite-3-8b": shape(
        "Granite", 4096, 12800, 40, 32, 8, 49159, embedding_multiplier=12.0, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=16.0, tie_word_embeddings=True,
    ),
    "glm-4-9b": shape("Glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
    "command-r7b": shape("Cohere2", 4096, 14336, 32, 32, 8, 256000, logit_scale=0.25),
    "qwen-2.5-7b": shape("Qwen2", 3584, 18944, 28, 28, 4, 152064),
}  # fmt: skip
"""Qwen 2.5 7B is the text model of Qwen2.5-VL 7B, whose tokens have one position in text."""


def random_model(shape: Shape, device: str, layers: int | None) -> Any:
    """A model of this shape in bf16 with wide random weights, so that texts do not collapse."""
    kind, fields = shape
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    config = getattr(transformers, f"{kind}Config")(**{**fields, **fewer, "initializer_range": 0.05})
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def texts(backend: Any, prompts: list[list[int]], config: LookaheadConfig, tokens: int) -> list[list[int]]:
    """The new tokens of these prompts, all at once."""
    sequences = [DecodingSequence(prompt, config, rules=StopRules(tokens)) for prompt in prompts]
    engine = Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    return [sequence.output for sequence in sequences]


def equal_texts(backend: Any, tokens: int) -> str:
    """How many of 16 texts lookahead gives as token by token: alone, and 16 at once."""
    generator = torch.Generator().manual_seed(0)
    most = min(1000, backend.vocab_size)
    prompts = [torch.randint(most, (20 + 7 * i,), generator=generator).tolist() * 2 for i in range(16)]
    plain, default = LookaheadConfig.autoregressive(), exact_config(LookaheadConfig(), backend)
    expected = [texts(backend, [prompt], plain, tokens)[0] for prompt in prompts]
    alone = [texts(backend, [prompt], default, tokens)[0] for prompt in prompts]
    together = texts(backend, prompts, default, tokens)
    return " + ".join(f"{sum(map(list.__eq__, expected, found))} of 16" for found in (alone, together))


def generate_speed(model: Any, tokens: int, **how: Any) -> float:
    """Tokens per second of one `generate` call; the first call warms up."""
    ids = torch.arange(5, 69, device=model.device)[None]
    call = partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **how
    )
    for _ in range(2):
        begin = time.perf_counter()
        call()
        taken = time.perf_counter() - begin
    return tokens / taken


def measure(shape: Shape, device: str = "cuda", layers: int | None = None, tokens: int = 64) -> dict[str, Any]:
    """The figures of a shape."""
    begin = time.perf_counter()
    model = random_model(shape, device, layers)
    made = time.perf_counter()
    backend: Any = graph_backend(model)
    found: dict[str, Any] = {"made s": made - begin, "load s": time.perf_counter() - made}
    context, bandwidth = 512 if device == "cuda" else 32, copy_bandwidth(device)
    for name, rows, sequences in (("1", 1, 1), ("16", 1, 16), ("121", 121, 1)):
        found[f"ms {name}"] = step_ms(backend, rows, context, sequences)[0]
        if rows == 1:
            bound = 1e3 * bytes_read(backend.layers, sequences, context) / bandwidth
            found[f"share {name}"] = bound / found[f"ms {name}"]
    found["121 / 1"] = found["ms 121"] / found["ms 1"]
    found["equal"] = equal_texts(backend, tokens)
    del backend
    gc.collect()
    torch.cuda.empty_cache()
    stock = generate_speed(model, min(tokens, 32))
    plain = lookahead.decoding(LookaheadConfig.autoregressive(), backend="graph")
    found["hook"] = generate_speed(model, tokens, custom_generate=plain)
    found["stock"], found["hook / stock"] = stock, found["hook"] / stock
    return {name: value if isinstance(value, str) else round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of other families at the shapes of real checkpoints.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--layers", type=int, help="only this many layers")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each shape")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHAPES):
        parser.error(f"unknown shape {unknown.pop()!r}; choose from {', '.join(SHAPES)}")
    found: dict[str, Any] = {}
    for name in options.names or SHAPES:
        try:
            found[name] = measure(SHAPES[name], layers=options.layers)
        except Exception as error:  # the others are measured all the same
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(name, json.dumps(found[name]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if options.out:
            about = {"device": device_name(torch.device("cuda")), **versions()}
            options.out.write_text(json.dumps({"about": about, "shapes": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
