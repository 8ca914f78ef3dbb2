"""What rounded weights cost in quality, format by format: `python benchmarks/quality.py --data-dir DIR`.

    perplexity  of the first tokens of news articles, each article a window of its own
    change      of the perplexity, with its standard error over the articles
    same token  how often the likeliest token is the unquantised model's, after the same tokens: its greedy answers
    in common   tokens of a greedy answer before it differs from the unquantised model's
    whole       answers that do not differ

The reference is the model in bfloat16, computed in fp32. From its weights each format is made as `dtype=` makes it on a
GPU (`int8, activations too`: on a CPU), and computed in fp32, too. So rounding to the format is all that differs, and
the kernels' own rounding, the same for all of them, is left out: the row `bfloat16` shows how much that is. Layers that
`dtype=` leaves alone are left alone. Texts come from a folder with `cnn_dm_sample.jsonl` and `mt_bench.jsonl`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import lookahead
from lookahead.bench.run.about import about
from lookahead.bench.run.prompts import load as load_prompts
from lookahead.bench.run.runner import prompt_ids
from lookahead.config import LookaheadConfig
from lookahead.generate import LookaheadModel
from lookahead.loading.embedded import EMBEDDED
from lookahead.loading.formats import CPU_INT8, FORMATS, linear_layers
from lookahead.models.matrix import Matrix
from lookahead.models.number_formats import Codes, Format, rounded
from lookahead.models.quantised import QuantisedLinear
from lookahead.models.rounding import quantise

TRIED = {
    "fp8": FORMATS["fp8"],
    "fp8_dynamic": FORMATS["fp8_dynamic"],
    "int8": FORMATS["int8"],
    "int8, activations too": CPU_INT8,
    "int4": FORMATS["int4"],
    "int4, symmetric": Format(Codes.INT4, 128),
    "int4, groups of 64": Format(Codes.INT4, 64, zeros=True),
    "int4, groups of 32": Format(Codes.INT4, 32, zeros=True),
    "MXFP4": Format(Codes.E2M1, 32),
}
BATCH = 4
"""Articles in a forward pass: 512 tokens of each make 0.4 GB of logits of the embedded model."""


class Expanded(torch.nn.Module):
    """A quantised layer whose weights are expanded once and not in every pass."""

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        self.activations, self.bias = layer.format.activations, layer.bias
        self.weight = torch.nn.Parameter(layer.dequantised(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x if self.activations is None else rounded(x, self.activations), self.weight, self.bias)


@torch.no_grad()
def rounded_copy(model: Any, format: Format) -> tuple[Any, float]:
    """A model with the linear layers of this one rounded, beside it, and the bytes of one of their weights.

    They share what is not rounded.
    """
    made = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    expanded, weights, stored = dict[torch.nn.Module, Expanded](), 0, 0
    for parent, name, layer in list(linear_layers(made, head=format == CPU_INT8)):
        if layer not in expanded:
            matrix = Matrix((layer,), transposed=type(layer).__name__ == "Conv1D")
            codes = quantise(matrix.weight().bfloat16(), format, matrix.bias())
            expanded[layer] = Expanded(codes)
            weights += codes.out_features * codes.in_features
            stored += sum(tensor.nbytes for tensor in codes.buffers())
        setattr(parent, name, expanded[layer])
    return made, stored / weights


def in_bfloat16(model: Any) -> Any:
    """The model as it computes in bfloat16: its buffers, the frequencies of positions, keep their dtype."""
    made = copy.deepcopy(model)
    for weight in made.parameters():
        weight.data = weight.data.bfloat16()
    return made


def articles(lm: LookaheadModel, name: str, folder: Path, count: int, length: int) -> torch.Tensor:
    """The first tokens of the first articles of a set that are long enough [count, length]."""
    found: list[list[int]] = []
    for prompt in load_prompts(name, folder):
        text = (prompt.system or "").split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
        ids = lm.encode(text, raw=True)
        if len(ids) >= length:
            found.append(list(ids[:length]))
            if len(found) == count:
                return torch.tensor(found)
    raise ValueError(
        f"set {name!r} has {len(found)} articles of {length} tokens, and {count} are asked for: "
        "lower --articles or --window"
    )


@torch.no_grad()
def losses(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """-log p of a token, the mean over each window's tokens after its first. [windows], fp64"""
    found = []
    for window in windows.split(BATCH):
        for logits, ids in zip(model(input_ids=window, use_cache=False).logits, window, strict=True):
            found.append(F.cross_entropy(logits[:-1].float(), ids[1:]))
    return torch.stack(found).double()


@torch.no_grad()
def same_tokens(model: Any, prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]]) -> list[list[bool]]:
    """For every token of each answer whether it is the model's likeliest after the prompt and the tokens before it."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
        found.append([token == likeliest for token, likeliest in zip(answer, logits.argmax(-1).tolist(), strict=True)])
    return found


def in_common(same: Sequence[bool]) -> int:
    """Tokens before the first that differs: so many has the model's own greedy answer in common with this one."""
    return len(list(takewhile(bool, same)))


@dataclass(frozen=True)
class Row:
    """The figures of a format. `bytes`: of a weight and its share of scales. `change`, `error`, `same`: in percent."""

    bytes: float
    perplexity: float
    change: float
    error: float
    same: float
    common: float
    whole: int

    @classmethod
    def of(cls, bytes: float, lost: torch.Tensor, reference: torch.Tensor, same: Sequence[Sequence[bool]]) -> Row:
        """From the losses of each window, and of each answer's tokens whether they are the same."""
        more, common = lost - reference, [in_common(one) for one in same]
        times = math.exp(float(more.mean()))
        return cls(
            round(bytes, 4),
            round(math.exp(float(lost.mean())), 3),
            round(100 * (times - 1), 2),
            round(100 * times * float(more.std()) / len(more) ** 0.5, 2) if len(more) > 1 else math.nan,
            round(100 * sum(map(sum, same)) / sum(map(len, same)), 2),
            round(sum(common) / len(common), 1),
            sum(all(one) for one in same),
        )


def table(rows: dict[str, Row], answers: int) -> str:
    """The rows in Markdown."""
    lines = [
        "| weights | bytes per weight | perplexity | change | same token | in common | whole |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        changed = f"{round(row.change, 1) + 0.0:+.1f}% ± {row.error:.1f}" if row.change or row.error else ""
        lines.append(
            f"| {name} | {row.bytes:.3f} | {row.perplexity:.2f} | {changed} | {row.same:.1f}% | {row.common:.1f} | "
            f"{row.whole} of {answers} |"
        )
    return "\n".join(lines)


def measure(lm: LookaheadModel, options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Row]:
    """The rows of a model in fp32 whose weights are numbers of bfloat16."""
    model = lm.model
    windows = articles(lm, options.set, options.data_dir, options.articles, options.window).to(model.device)
    prompts = [prompt_ids(lm, prompt) for prompt in load_prompts("mt-bench", options.data_dir, options.prompts, 1)]
    done = lm.generate(prompts, max_tokens=options.tokens, temperature=0, repetition_penalty=1)
    answers = [one.token_ids for one in done]
    log(f"{sum(map(len, answers))} tokens of {len(answers)} answers")
    reference, rows = losses(model, windows), dict[str, Row]()

    def add(name: str, bytes: float, other: Any, lost: torch.Tensor | None = None) -> None:
        found = losses(other, windows) if lost is None else lost
        rows[name] = Row.of(bytes, found, reference, same_tokens(other, prompts, answers))
        log(f"{name}: {rows[name]}")

    add("bfloat16 in fp32", 2, model, reference)
    if options.bfloat16:
        add("bfloat16", 2, in_bfloat16(model))
    for name in options.formats:
        made, bytes = rounded_copy(model, TRIED[name])
        add(name, bytes, made)
        del made
    return rows


def open_reference(name: str | None, device: str) -> LookaheadModel:
    """A model in bfloat16, then in fp32 without other weights. No draft tokens: nothing needs to be fitted."""
    settings: Any = {"config": LookaheadConfig.autoregressive(), "log": print}
    half = lookahead.load(name, dtype="bfloat16", device=device, backend="eager", **settings)
    return lookahead.load((half.model.float(), half.tokenizer), **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with the articles and mt_bench.jsonl")
    parser.add_argument("--model", help="a folder or a name; the embedded model without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", choices=("cnn-dm", "xsum"), default="cnn-dm", help="the articles")
    parser.add_argument("--articles", type=int, default=20)
    parser.add_argument("--window", type=int, default=512, help="tokens of each article")
    parser.add_argument("--prompts", type=int, default=20, help="of MT-Bench, first turns")
    parser.add_argument("--tokens", type=int, default=64, help="the most new tokens of each answer")
    parser.add_argument("--formats", nargs="*", choices=TRIED, default=list(TRIED), metavar="NAME")
    parser.add_argument("--no-bfloat16", dest="bfloat16", action="store_false", help="leave this row out")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    try:
        lm = open_reference(options.model, options.device)
        rows = measure(lm, options, lambda line: print(line, flush=True))
    except ValueError as error:
        parser.error(str(error))
    print(table(rows, options.prompts))
    if options.out is not None:
        asked = {name: getattr(options, name) for name in ("set", "articles", "window", "prompts", "tokens")}
        content = {
            "about": {**about(lm), "model": options.model or EMBEDDED, **asked},
            "rows": {name: asdict(row) for name, row in rows.items()},
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
