"""baselines: transformers' own decoding on the same model, prompts and counter, each as strong as it can be made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from gpu_parts.bench import Bench
from gpu_parts.measure import synchronize

STOCK = ("eager", "static", "prompt-lookup")
NAMES = {
    "eager": "transformers eager",
    "static": "transformers static + compile",
    "prompt-lookup": "transformers prompt lookup",
}
PROMPT_LOOKUP = 10


class Plain:
    """`generate` with these options."""

    how = "generate()"

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.bench, self.options = bench, options
        if options:
            self.how = f"generate({', '.join(f'{name}={value}' for name, value in options.items())})"

    def __call__(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.bench.device)
        out = self.bench.large.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
            eos_token_id=sorted(self.bench.lm.stop_ids), pad_token_id=0, **self.options,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def notes(self) -> dict[str, Any]:
        return {"how": self.how}


class Static(Plain):
    """A static cache, with which `generate` compiles the decoding step by itself.

    One cache serves all prompts, as long as the longest needs and no longer: its attention runs over the whole of it. A
    new cache for every prompt might stand elsewhere in memory, and the captured step would have to be made anew.
    """

    def __init__(self, bench: Bench, fullgraph: bool) -> None:
        longest = max(len(prompt) for prompts in bench.prompts.values() for prompt in prompts)
        length = -(-(longest + bench.args.new_tokens + 1) // 64) * 64
        self.cache = StaticCache(config=bench.large.config, max_cache_len=length)
        mode, backend = bench.args.compile_mode, bench.args.compile_backend
        compiling = CompileConfig(fullgraph=fullgraph, mode=mode if backend == "inductor" else None, backend=backend)
        compiling._compile_all_devices = True  # on a CPU too, where this is tested
        super().__init__(bench, past_key_values=self.cache, compile_config=compiling)
        self._graphs = counters["stats"]["unique_graphs"]
        self.how = f"generate(past_key_values=StaticCache({length})), mode={mode}, fullgraph={fullgraph}"

    def __call__(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        self.cache.reset()
        return super().__call__(prompt, new_tokens)

    def notes(self) -> dict[str, Any]:
        """More than one graph would mean that a prompt made it compile again, while it was timed."""
        return {"how": self.how, "compiled_graphs": counters["stats"]["unique_graphs"] - self._graphs}


def ways(bench: Bench, method: str) -> Iterator[Plain]:
    """The settings to try for a method, best first."""
    if method == "eager":
        yield Plain(bench)
    elif method == "prompt-lookup":
        yield Plain(bench, prompt_lookup_num_tokens=PROMPT_LOOKUP)
    else:
        yield Static(bench, fullgraph=True)
        yield Static(bench, fullgraph=False)


def baselines_part(bench: Bench) -> None:
    """Every method warmed up first. A method that fails leaves a row with its error, and the next one has its turn."""
    with torch.inference_mode(False):  # torch.compile and inference mode do not go well together
        for method in bench.args.methods:
            name, errors = NAMES[method], []
            for way in ways(bench, method):
                begin = time.perf_counter()
                try:
                    way(bench.prompts["mt-bench"][0], min(32, bench.args.new_tokens))
                    seconds = time.perf_counter() - begin
                    print(f"{name}: warm-up {seconds:.1f} s, {way.how}", flush=True)
                    measure(bench, name, way, round(seconds, 1))
                    break
                except Exception as error:
                    errors.append(f"{way.how}: {type(error).__name__}: {str(error).strip()[:500]}")
                    print(f"{name} failed. {errors[-1]}", flush=True)
            else:
                bench.add({"method": name, "error": "; ".join(errors)})


def measure(bench: Bench, name: str, way: Plain, warm_up_s: float) -> None:
    """Each prompt's prefill once for warm-up and once for the time to the first token, then the whole answer."""
    for data, prompts in bench.prompts.items():
        outputs, seconds, first = [], [], []
        begin = time.perf_counter()
        for prompt in prompts[: bench.args.baseline_prompts]:
            way(prompt, 1)
            first.append(timed(way, prompt, 1)[1])
            output, took = timed(way, prompt, bench.args.new_tokens)
            outputs.append(output)
            seconds.append(took)
            if time.perf_counter() - begin > bench.args.method_seconds:
                break
        tokens = sum(map(len, outputs))
        later = max(1, tokens - len(outputs))
        bench.keep(name, data, None, outputs, seconds)
        row = {"method": name, "set": data, "prompts": len(outputs), "tokens": tokens}
        row |= {
            "tok_s": round(tokens / sum(seconds), 1),
            "median_tok_s": round(statistics.median(len(o) / s for o, s in zip(outputs, seconds, strict=True)), 1),
            "first_ms": round(1e3 * statistics.median(first), 2),
            "ms_per_token": round(1e3 * (sum(seconds) - sum(first)) / later, 3),
        }
        bench.add(row | {"warm_up_s": warm_up_s} | way.notes())


def timed(way: Plain, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    synchronize()
    begin = time.perf_counter()
    output = way(prompt, new_tokens)
    synchronize()
    return output, time.perf_counter() - begin
