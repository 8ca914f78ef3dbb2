"""What a step and a token cost on a GPU: one command, in parts that each end within ten minutes.

    python benchmarks/gpu.py PART [PART ...] --model smollm2.gguf --data-dir DIR --out DIR

    attention   the kernel against SDPA with a dense mask, and against the device's copy bandwidth
    profile     device time by kernel of a step of 1 and of 128 tokens
    step        time of a step by K: the matrix products alone, the device, the host around it
    speed       tokens per second and S of every method on MT-Bench and HumanEval, on one counter
    baselines   transformers' own: eager, static cache + compile, prompt lookup
    drift       outputs that differ between half-precision paths, with and without invariance
    context     step time and memory from 1k to 32k tokens of context
    batch       total tokens per second for 1 to 16 sequences

The model is the embedded one, inflated to a larger shape (`--shape 7b`; `small` is itself): real text at a real cost.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

import lookahead
from lookahead.backends.base import StepInput
from lookahead.backends.graph import GraphBackend
from lookahead.bench.inflate import SHAPES, inflate
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine import Engine
from lookahead.kernels import attention
from lookahead.sequence import DecodingSequence
from lookahead.sources import Warmth
from lookahead.tree import TokenTree, packed_visibility

DEVICE = torch.device("cuda")


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median device time of a call, in milliseconds, by events; three warm-up calls."""
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a captured graph, so that launching costs nothing."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) * 1e3


def tree_of(count: int, window: int = 5, ngram: int = 5) -> TokenTree:
    """A tree as the default makes it: a window, and guesses that hang from each other at random."""
    rng = random.Random(count)
    parents = [-1, *(max(0, i - rng.randrange(1, 9)) for i in range(1, count))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return TokenTree([rng.randrange(1000) for _ in range(count)], parents, depths, list(range(count)))


# attention

SWEEP = [
    (block_m, block_n, warps, stages)
    for block_m in (16, 64, 128)
    for block_n in (64, 128)
    for warps, stages in ((4, 3), (4, 4), (8, 2), (8, 3))
]


def attention_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Kernel, SDPA with a dense mask over the live prefix, and the floor: K/V read once at copy bandwidth."""
    rows = []
    bandwidth = copy_bandwidth()
    for heads, kv_heads, dim in ((64, 64, 64), (32, 32, 128), (32, 8, 128)):
        for count in (1, 121):
            for context in (1024, 2048, 16384):
                rows.append(attention_case(heads, kv_heads, dim, count, context, bandwidth, args.sweep))
                print(rows[-1], flush=True)
    return rows


def attention_case(
    heads: int, kv_heads: int, dim: int, count: int, context: int, bandwidth: float, sweep: bool
) -> dict[str, Any]:
    capacity = context + 512
    sets = max(2, int(2e8 // (2 * kv_heads * capacity * dim * 2)) + 1)  # more than the cache holds
    dtype, whole = torch.bfloat16, {"dtype": torch.int32, "device": DEVICE}
    caches = [torch.randn(2, 1, kv_heads, capacity, dim, device=DEVICE, dtype=dtype) for _ in range(sets)]
    q = torch.randn(1, count, heads, dim, device=DEVICE, dtype=dtype)
    tree = tree_of(count)
    bits = torch.from_numpy(packed_visibility(tree.parents).view("<i4").copy())[None].to(DEVICE)
    places = {
        "rows": torch.zeros(1, **whole),
        "lengths": torch.tensor([context], **whole),
        "positions": torch.tensor([[context + d for d in tree.depths]], **whole),
        "bits": bits,
    }
    out, work, scale = torch.empty_like(q), attention.Workspace(DEVICE), dim**-0.5

    def timed(**options: Any) -> float:
        def run() -> None:
            for keys, values in caches:
                attention.attend(q, keys, values, **places, out=out, work=work, scale=scale, **options)

        return median_ms(graphed(run), 10) / sets * 1e3

    tried = {}
    base = attention.tiles_for(1, count, heads, kv_heads, dim)
    for block_m, block_n, warps, stages in SWEEP if sweep and (heads, dim) == (64, 64) else ():
        if (block_m == 16) == (count == 1):
            for splits in (1, 2, 4) if count > 1 else (2, 4, 8):
                tiles = attention.Tiles(block_m, block_n, splits, warps, stages)
                with contextlib.suppress(triton.runtime.errors.OutOfResources):
                    tried[f"{block_m}x{block_n}/{splits}/{warps}/{stages}"] = timed(tiles=tiles)
    node = torch.arange(count, device=DEVICE)
    seen = (bits[0][:, node // 32] >> (node % 32)) & 1 == 1
    mask = torch.zeros(1, 1, count, (context + count + 15) // 16 * 16, device=DEVICE, dtype=dtype)
    mask = mask[..., : context + count]
    mask[0, 0, :, context:].masked_fill_(~seen, float("-inf"))
    query = q.transpose(1, 2)

    def dense() -> None:
        for keys, values in caches:
            k, v = keys[:, :, : context + count], values[:, :, : context + count]
            torch.nn.functional.scaled_dot_product_attention(
                query, k, v, attn_mask=mask, enable_gqa=heads != kv_heads, scale=scale
            )

    sdpa = median_ms(graphed(dense), 10) / sets * 1e3
    best = sorted(tried.items(), key=lambda one: one[1])
    ours = timed(tiles=base)
    floor = 2 * kv_heads * (context + count) * dim * 2 / bandwidth * 1e6
    return {
        "heads": heads, "kv_heads": kv_heads, "dim": dim, "K": count, "context": context,
        "us": round(ours, 1),
        "tiles": f"{base.block_m}x{base.block_n}/{base.splits}/{base.warps}/{base.stages}",
        "best": {name: round(us, 1) for name, us in best[:5]},
        "sdpa_us": round(sdpa, 1), "speedup": round(sdpa / ours, 2), "of_copy_bandwidth": round(floor / ours, 2),
    }  # fmt: skip


# step


def step_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for invariant in (False, True):
        backend = GraphBackend(args.large, invariant=invariant)
        slot = backend.open()
        backend._reserve(1, 4096)
        backend.cache.normal_()
        for count in (1, 16, 32, 64, 121, 128):
            rows.append({"invariant": invariant, **step_case(backend, slot, count, 1024)})
            print(rows[-1], flush=True)
        backend.close(slot)
        del backend
        torch.cuda.empty_cache()
    return rows


def step_case(backend: GraphBackend, slot: int, count: int, context: int) -> dict[str, Any]:
    """Device time of the step, of its matrix products alone, and wall time with the host's part."""
    tree = tree_of(count)
    item = StepInput(slot, (), tree, SamplingParams(), (), top=8)
    backend._length[slot] = context
    backend.step([item])
    shape = next(s for (b, c, head), s in backend._shapes.items() if b == 1 and head and c >= count)
    device = median_ms(shape.graph.replay)
    w = backend.weights

    def products() -> None:
        for layer in w.layers:
            torch.mm(shape.normed, layer.qkv.t(), out=shape.qkv)
            torch.mm(shape.mixed, layer.out.t(), out=shape.delta)
            torch.mm(shape.normed, layer.gate_up.t(), out=shape.gate_up)
            torch.mm(shape.active, layer.down.t(), out=shape.delta)
        torch.mm(shape.normed, w.head.t(), out=shape.logits)

    gemm = median_ms(graphed(products))
    walls = []
    for _ in range(30):
        begin = time.perf_counter()
        backend.step([item])
        walls.append(1e3 * (time.perf_counter() - begin))
    return {
        "K": count, "bucket": shape.count, "context": context, "device_ms": round(device, 3),
        "products_ms": round(gemm, 3), "step_wall_ms": round(statistics.median(walls), 3),
    }  # fmt: skip


def profile_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Mean microseconds of each kernel of a replayed step, and how often it runs."""
    rows = []
    backend = GraphBackend(args.large, invariant=True)
    slot = backend.open()
    backend._reserve(1, 4096)
    backend.cache.normal_()
    for count in (1, 128):
        item = StepInput(slot, (), tree_of(count), SamplingParams(), (), top=8)
        backend._length[slot] = 1024
        backend.step([item])
        replay = backend._shapes[1, count, True].graph.replay
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                replay()
            torch.cuda.synchronize()
        for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:14]:
            rows.append(
                {"K": count, "us": round(event.device_time, 2), "times": event.count / 5, "name": event.key[:60]}
            )
            print(rows[-1], flush=True)
    return rows


# speed


def prompts_of(lm: Any, folder: Path, count: int) -> dict[str, list[list[int]]]:
    def read(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines() if line.strip()]
        return [lines[i * len(lines) // count] for i in range(count)]

    return {
        "mt-bench": [lm.encode(row["turns"][0]) for row in read("mt_bench.jsonl")],
        "humaneval": [lm.encode(row["prompt"].rstrip(), raw=True) for row in read("humaneval.jsonl")],
    }


METHODS = {
    "autoregressive": LookaheadConfig.autoregressive(),
    "paper (5,15,15) + prompt": LookaheadConfig.paper(15, 5, 15, prompt=True),
    "default": LookaheadConfig(),
}


def speed_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    stop = args.lm.stop_ids
    for invariant in (True, False):
        backend = GraphBackend(args.large, invariant=invariant)
        backend._reserve(1, 2048)
        for name, config in METHODS.items():
            decode(backend, args.prompts["mt-bench"][0], config, StopRules(64, stop), Warmth())  # captures the graphs
            for data, prompts in args.prompts.items():
                warmth = Warmth()
                done = [decode(backend, p, config, StopRules(args.new_tokens, stop), warmth) for p in prompts]
                args.outputs[name, data, invariant] = [s.output for s in done]
                rows.append({"method": name, "set": data, "invariant": invariant, **summary(done)})
                print(rows[-1], flush=True)
        del backend
        torch.cuda.empty_cache()
    return rows


def baselines_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """transformers' own decoding on the same model, prompts and counter."""
    rows = []
    methods: dict[str, dict[str, Any]] = {"eager": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}
    for name, options in methods.items():
        for data, prompts in args.prompts.items():
            outputs, seconds = [], 0.0
            for prompt in prompts[: args.baseline_prompts]:
                ids = torch.tensor([prompt], device=DEVICE)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                out = args.large.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.new_tokens,
                    eos_token_id=list(args.lm.stop_ids), pad_token_id=0, **options,
                )  # fmt: skip
                torch.cuda.synchronize()
                seconds += time.perf_counter() - begin
                outputs.append(out[0, len(prompt) :].tolist())
            args.outputs[f"transformers {name}", data, None] = outputs
            tokens = sum(map(len, outputs))
            rows.append({"method": f"transformers {name}", "set": data, "tokens": tokens})
            rows[-1]["tok_s"] = round(tokens / seconds, 1)
            print(rows[-1], flush=True)
    return rows


def drift_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Outputs that are equal, pair by pair, and the fp32 margin of the two best logits where they first part.

    The fp32 reference is the small model itself, which computes the same function. Needs `speed` (and `baselines`, for
    stock transformers) before it in the same command.
    """
    rows = []
    small = args.small
    exact = {data: reference(small, prompts, args) for data, prompts in args.prompts.items()}
    pairs = []
    for invariant in (True, False):
        for name in ("paper (5,15,15) + prompt", "default"):
            pairs.append((name, "autoregressive", invariant, invariant))
        pairs.append(("autoregressive", "fp32", invariant, None))
        pairs.append(("default", "fp32", invariant, None))
    pairs += [
        ("transformers eager", "fp32", None, None),
        ("transformers prompt lookup", "transformers eager", None, None),
    ]
    for one, other, left, right in pairs:
        margins, equal, count = [], 0, 0
        for data, prompts in args.prompts.items():
            first = args.outputs.get((one, data, left))
            second = exact[data] if other == "fp32" else args.outputs.get((other, data, right))
            if first is None or second is None:
                continue
            for prompt, a, b in zip(prompts, first, second, strict=False):
                count += 1
                equal += a == b
                if a != b:
                    margins.append(margin(small, prompt, a, b))
        if count:
            rows.append({"of": one, "against": other, "invariant": left, "equal": equal, "prompts": count})
            rows[-1]["margins"] = [round(m, 4) for m in sorted(margins)]
            print(rows[-1], flush=True)
    return rows


def reference(model: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> list[list[int]]:
    """transformers' fp32 greedy outputs, as one left-padded batch, up to the first end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=args.new_tokens,
        eos_token_id=list(args.lm.stop_ids), pad_token_id=0,
    )  # fmt: skip
    outputs = []
    for tokens in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(tokens) if token in args.lm.stop_ids), len(tokens))
        outputs.append(tokens[: end + 1])
    return outputs


def margin(model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> float:
    """How far apart the two best fp32 logits are where two outputs first part."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ids = torch.tensor([[*prompt, *a[:same]]], device=DEVICE)
    best = model(input_ids=ids).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def context_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Step time and memory by context. Memory: what is allocated beyond the weights, with room for just the step."""
    rows = []
    for context in (1024, 4096, 16384, 32768):
        for count in (1, 128):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            backend = GraphBackend(args.large, invariant=False)
            slot = backend.open()
            backend._reserve(1, context + count)
            backend.cache.normal_()
            row = step_case(backend, slot, count, context)
            row["memory_gb"] = round((torch.cuda.memory_allocated() - before) / 1e9, 3)
            row["kv_gb"] = round(backend.cache.numel() * backend.cache.element_size() / 1e9, 3)
            rows.append(row)
            print(row, flush=True)
            del backend
    return rows


def batch_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Total tokens per second of B prompts at once, from the first prompt in to the last token out."""
    rows = []
    stop, prompts = args.lm.stop_ids, args.prompts["mt-bench"]
    backend = GraphBackend(args.large, invariant=False)
    for batch in (1, 2, 4, 8, 16):
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        for name, config in {
            "autoregressive": LookaheadConfig.autoregressive(),
            "default, K=128": LookaheadConfig(),
            "default, K=32": LookaheadConfig().adapted(budget=32),
        }.items():
            for timed in (False, True):  # the first run captures the graphs
                engine, warmth = Engine(backend), Warmth()
                sequences = [DecodingSequence(p, config, rules=StopRules(96, stop), warmth=warmth) for p in chosen]
                begin = time.perf_counter()
                for sequence in sequences:
                    engine.add(sequence)
                while engine.running:
                    engine.step()
                seconds = time.perf_counter() - begin
                if timed:
                    tokens = sum(s.stats.generated_tokens for s in sequences)
                    steps = max(s.stats.steps for s in sequences)
                    rows.append({"batch": batch, "method": name, "tok_s": round(tokens / seconds, 1)})
                    rows[-1] |= {"ms_per_step": round(1e3 * seconds / steps, 2), "S": round(tokens / batch / steps, 2)}
                    print(rows[-1], flush=True)
    return rows


def decode(
    backend: GraphBackend, prompt: Sequence[int], config: LookaheadConfig, rules: StopRules, warmth: Warmth
) -> DecodingSequence:
    sequence = DecodingSequence(prompt, config, rules=rules, warmth=warmth)
    engine = Engine(backend)
    begin = time.perf_counter()
    engine.add(sequence)
    while engine.running:
        engine.step()
        if not sequence.stats.first_token_seconds:
            sequence.stats.first_token_seconds = time.perf_counter() - begin
    sequence.stats.seconds = time.perf_counter() - begin
    return sequence


def summary(done: Sequence[DecodingSequence]) -> dict[str, Any]:
    """Totals over the prompts; tokens per second from prompt to last token, prefill included."""
    stats = [s.stats for s in done]
    tokens, steps = sum(s.generated_tokens for s in stats), sum(s.steps for s in stats)
    seconds = sum(s.seconds for s in stats)
    decoding = sum(s.seconds - s.first_token_seconds for s in stats)
    forward = sum(s.forward_seconds for s in stats)
    return {
        "tokens": tokens, "steps": steps, "S": round(tokens / steps, 3), "tok_s": round(tokens / seconds, 1),
        "median_tok_s": round(statistics.median(s.tokens_per_second for s in stats), 1),
        "ms_per_step": round(1e3 * decoding / max(1, steps - len(stats)), 3),
        "K": round(sum(s.step_tokens for s in stats) / steps, 1),
        "propose_ms": round(1e3 * sum(s.propose_seconds for s in stats) / steps, 3),
        "absorb_ms": round(1e3 * sum(s.absorb_seconds for s in stats) / steps, 3),
        "forward_ms": round(1e3 * forward / steps, 3),
    }  # fmt: skip


PARTS = {
    "attention": attention_part,
    "profile": profile_part,
    "step": step_part,
    "speed": speed_part,
    "baselines": baselines_part,
    "drift": drift_part,
    "context": context_part,
    "batch": batch_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", help="the embedded model, or another small Llama, as lookahead.load() takes it")
    parser.add_argument("--shape", default="7b", choices=["small", *SHAPES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--baseline-prompts", type=int, default=4, help="of each set, for transformers' own methods")
    parser.add_argument("--sweep", action="store_true", help="try other tiles for the attention kernel")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    count, args.outputs = args.prompts, {}
    if set(args.parts) - {"attention"}:
        args.lm = lookahead.load(args.model, dtype="float32", device="cuda", config=LookaheadConfig(), backend="eager")
        args.small, dtype = args.lm.model, getattr(torch, args.dtype)
        if args.shape == "small":
            args.large = copy.deepcopy(args.small).to(dtype)
        else:
            args.large = inflate(args.small, SHAPES[args.shape], dtype=dtype)
        if args.data_dir:
            args.prompts = prompts_of(args.lm, args.data_dir, count)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "shape": args.shape,
        "dtype": args.dtype,
    }
    for part in args.parts:
        begin = time.perf_counter()
        with torch.inference_mode():
            rows = PARTS[part](args)
        print(f"-- {part}: {time.perf_counter() - begin:.0f} s", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{part}-{args.shape}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
