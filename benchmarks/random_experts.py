"""Mixtures of experts in the shapes of published ones, with random weights: how fast they decode token by token."""

from __future__ import annotations

import argparse
import statistics
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers
from answers import weight_bytes
from families import Shape, shape
from inflate_experts import allocated

import lookahead
from lookahead.algorithm.cost import PassCost
from lookahead.bench.gpu.timing import copy_bandwidth
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel
from lookahead.loading.fitting import cost_of_passes
from lookahead.loading.timing import measure_passes
from lookahead.models.number_formats import MXFP4
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.quantised_experts import QuantisedExperts, is_experts

PASS_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PLAIN = LookaheadConfig.autoregressive()

RANDOM_SHAPES: dict[str, Shape] = {
    "gpt-oss-20b": shape(
        "GptOss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, attention_bias=True,
    ),
    "qwen3-30b-a3b": shape(
        "Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}  # fmt: skip
"""gpt-oss-20b has experts in MXFP4, and in its config's defaults windows on every other layer and yarn."""


@torch.no_grad()
def random_mixture(shape: Shape, device: str = "cuda", *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model of this shape with random weights; the experts of gpt-oss as random codes of MXFP4."""
    kind, fields = shape
    config = getattr(transformers, f"{kind}Config")(**{**fields, **changes})
    config.dtype = dtype
    rounded = kind == "GptOss"
    model = allocated(f"{kind}ForCausalLM", config, device, without_experts=rounded)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02, generator=generator)
    for block in model.model.layers if rounded else ():
        own, size, hidden = block.mlp.experts, config.intermediate_size, config.hidden_size
        count = config.num_local_experts
        gate_up = _random_codes(count * 2 * size, hidden, dtype, generator)
        down = _random_codes(count * hidden, size, dtype, generator)
        block.mlp.experts = QuantisedExperts(own, gate_up, down, own.gate_up_proj_bias, own.down_proj_bias)
    model.generation_config.eos_token_id = None
    return model


def _random_codes(out: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> QuantisedLinear:
    """A matrix in MXFP4 whose numbers are about as large as those of a normal distribution with std=0.02."""

    def bytes(columns: int, least: int, end: int) -> torch.Tensor:
        made = torch.empty(out, columns, dtype=torch.uint8, device=generator.device)
        return made.random_(least, end, generator=generator)

    return QuantisedLinear(MXFP4, bytes(width // 2, 0, 256), bytes(MXFP4.groups(width), 119, 121), dtype=dtype)


class WatchedCost(PassCost):
    """A pass cost that goes on from another, and keeps (rows, expected seconds, seconds, experts read) of passes."""

    def __init__(self, own: PassCost) -> None:
        vars(self).update(vars(own))
        self.passes: list[tuple[int, float, float, float]] = []

    def record_pass(self, rows: int, seconds: float, reads: float = 0.0) -> None:
        self.passes.append((rows, self.seconds(rows), seconds, reads))
        super().record_pass(rows, seconds, reads)


@contextmanager
def watched(lm: LookaheadModel) -> Any:
    """The passes of the block, for an engine that has their cost; else none."""
    budget = lm.engine.budget
    if budget.cost is None:
        yield []
        return
    own, budget.cost = budget.cost, (watching := WatchedCost(budget.cost))
    try:
        yield watching.passes
    finally:
        vars(own).update({name: value for name, value in vars(watching).items() if name != "passes"})
        budget.cost = own


def bytes_read(model: Any) -> tuple[int, float]:
    """The bytes of weights that every pass reads, which are all but those of embeddings and experts; and those of one
    expert. K/V are little beside them."""
    experts = [module for module in model.modules() if is_experts(module)]
    stacked, count = sum(map(weight_bytes, experts)), sum(module.num_experts for module in experts)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if head is embedding else embedding.nbytes
    return weight_bytes(model) - stacked - unread, stacked / count


def speed(records: Any, model: Any, tokenizer: Any, name: str, options: argparse.Namespace) -> None:
    """Token by token: one answer, 16 answers at once, and passes of several numbers of rows."""
    dense, expert = bytes_read(model)  # before a backend lays the weights out with padding
    config, begin = model.config, perf_counter()
    one = config.num_hidden_layers * config.num_experts_per_tok
    lm = lookahead.load((model, tokenizer), backend=options.backend, config=PLAIN, log=print)
    lm.stop_ids = frozenset()
    loaded, bandwidth = perf_counter() - begin, copy_bandwidth(lm.device)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(min(1000, config.vocab_size), (16, 64), generator=generator).tolist()
    sizes = [size for size in PASS_ROWS if size <= lm.backend.most_rows]
    curve = lm.client.call(partial(measure_passes, lm.backend, sizes))
    lm.engine.budget.cost = cost_of_passes(curve, lm.backend)
    for count in (1, 16):
        seconds = list[float]()
        with watched(lm) as passes:
            for _ in range(3):
                found = lm.generate(prompts[:count], max_tokens=options.tokens)
                seconds.append(max(done.stats.seconds - done.stats.first_token_seconds for done in found))
        own = [reads for rows, _, _, reads in passes if rows == count]
        reads = (statistics.median(own) if own else 0) or one
        rate = (options.tokens - 1) / statistics.median(seconds)
        read = dense + expert * reads
        values = {"GB read": read / 1e9, "share": rate * read / bandwidth, "copy TB/s": bandwidth / 1e12}
        records.add("speed", f"{name}, {count} at once", plain=count * rate, experts=reads / one, **values)
    ms = {size: round(1e3 * taken, 3) for size, taken in zip(curve.sizes, curve.seconds, strict=True)}
    experts = {size: round(found / one, 2) for size, found in zip(curve.sizes, curve.reads, strict=False)}
    records.add("speed", f"{name}, passes", **{"load s": loaded, "ms": ms, "experts by rows": experts})
