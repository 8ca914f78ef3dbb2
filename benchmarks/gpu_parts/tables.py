"""The tables of the GPU page, one function per section. A section without rows is left out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from gpu_parts.results import Results, show

SHAPES = {"7b": "7B shape", "small": "the 135M model itself"}
VERSIONS = ("torch", "transformers", "triton", "python", "lookahead")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def prose(*words: str) -> str:
    return textwrap.fill(" ".join(words), 120, break_long_words=False, break_on_hyphens=False)


def figure(value: Any) -> str:
    return "" if value is None else show(value) if isinstance(value, (int, float)) else str(value)


def shapes_of(results: Results, part: str) -> list[str]:
    return list(dict.fromkeys(file.shape for file in results.files if file.part == part))


def titled(results: Results, part: str, made: Callable[[str], str]) -> str:
    """A table for each shape that was measured."""
    return "\n\n".join(f"{SHAPES.get(shape, shape)}:\n\n{made(shape)}" for shape in shapes_of(results, part))


def provenance(results: Results) -> str:
    """Machine, versions and commands."""
    machines = dict.fromkeys((f.about["gpu"], f.about.get("cpu", "")) for f in results.files)
    kinds = dict.fromkeys(
        tuple(f"{name} {f.about[name]}" for name in VERSIONS if name in f.about) for f in results.files
    )
    text = prose(
        " and ".join(" beside ".join(filter(None, machine)) for machine in machines) + ".",
        "; ".join(", ".join(kind) for kind in kinds) + ".",
        "Batch 1 unless said otherwise. The model is the embedded one, inflated to the shape of a 7B Llama (hidden",
        "4096, 32 layers, 64 heads of 64, intermediate 11008; 13.8 GB of bf16 weights), or itself (135M). The rows",
        f"that count are those with `invariant` {str(results.invariant).lower()}, as the backend does it unless told.",
    )
    rows = [
        [f"`{f.name}`", f"`{f.about['argv']}`" if "argv" in f.about else "not recorded", f.about["dtype"],
         f.about.get("prompts"), f.about.get("new_tokens")]
        for f in results.files
    ]  # fmt: skip
    return text + "\n\n" + table(["file", "command", "dtype", "prompts of a set", "new tokens"], rows)


def step_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = [
            [r["K"], "yes" if r["invariant"] else "no", figure(r["products_ms"]), figure(r["device_ms"]),
             figure(r["step_wall_ms"]), figure(r.get("gap_percent"))]
            for r in results.all("step", shape)
        ]  # fmt: skip
        return table(["K", "invariant", "products ms", "device ms", "wall ms", "gap %"], rows)

    return titled(results, "step", made)


def attention_table(results: Results) -> str:
    rows = [
        [f"{r['heads']}, {r['kv_heads']}, {r['dim']}", r["K"], r["context"], "yes" if r["invariant"] else "no", r["us"],
         r["sdpa_us"], r["speedup"], r["of_copy_bandwidth"]]
        for r in results.all("attention", None)
    ]  # fmt: skip
    head = ["heads, K/V heads, dim", "K", "context", "invariant", "ours us", "SDPA us", "ratio", "of copy bandwidth"]
    return table(head, rows) if rows else ""


def speed_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = []
        for r in [*results.all("baselines", shape), *results.all("speed", shape)]:
            if "error" in r:
                rows.append([r["method"], "", "", f"failed: {r['error']}".replace("|", "/").replace("\n", " ")])
                continue
            flag = {True: "yes", False: "no", None: ""}[r.get("invariant")]
            rows.append(
                [r["method"], flag, r["set"], r.get("prompts"), figure(r["tok_s"]), figure(r.get("median_tok_s")),
                 figure(r.get("S")), figure(r.get("first_ms")), figure(r.get("ms_per_step", r.get("ms_per_token"))),
                 figure(r.get("device_ms")), figure(r.get("gap_percent"))]
            )  # fmt: skip
        head = ["method", "invariant", "set", "prompts", "tok/s", "median", "S", "first token ms", "ms per step"]
        return table([*head, "device ms", "gap %"], rows)

    shapes = dict.fromkeys([*shapes_of(results, "speed"), *shapes_of(results, "baselines")])
    notes = prose(
        "Tokens per second from prompt to last token, the prompt included; `median` over prompts. `gap` is the part of",
        "a step in which the device does not work: its mean wall time less the replayed graphs' at the mean context.",
    )
    body = "\n\n".join(f"{SHAPES.get(shape, shape)}:\n\n{made(shape)}" for shape in shapes)
    hows = {r["method"]: r for r in results.all("baselines", None) if "how" in r}
    told = "\n".join(
        f"- {method}: `{r['how']}`, warm-up {r['warm_up_s']} s"
        + (f", compiled {r['compiled_graphs']} time(s)" if "compiled_graphs" in r else "")
        for method, r in hows.items()
    )
    return "\n\n".join(filter(None, [notes, body, told])) if body else ""


def context_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = []
        for r in results.all("context", shape):
            one = results.last("context", shape, K=1, context=r["context"])
            kv = r.get("kv_mb", 1e3 * r["kv_gb"] if "kv_gb" in r else None)
            more = None
            if one is not None and "kv_mb" in r and r["K"] > 1:
                more = r["kv_mb"] - one["kv_mb"] + r["all_steps_mb"] - one["all_steps_mb"]
            rows.append(
                [r["context"], r["K"], figure(r["device_ms"]), r.get("slots"), figure(kv), figure(r.get("scratch_mb")),
                 figure(r.get("step_mb")), figure(r.get("all_steps_mb")), figure(r.get("pool_mb")), figure(more)]
            )  # fmt: skip
        head = ["context", "K", "device ms", "slots", "K/V MB", "of it the step's", "step MB", "all steps MB"]
        return table([*head, "graph pool MB", "above autoregressive MB"], rows)

    notes = prose(
        "K/V is allocated in whole blocks, so the K slots of a step may cost nothing. Beside them a step of K tokens",
        "holds K rows of activations and of logits, and the attention's partial results (`step`); and so does every",
        "smaller size once it was used (`all steps`). Above autoregressive: K/V and all steps, K = 128 less K = 1.",
    )
    body = titled(results, "context", made)
    return f"{notes}\n\n{body}" if body else ""


def batch_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = results.all("batch", shape)
        methods, batches = dict.fromkeys(r["method"] for r in rows), dict.fromkeys(r["batch"] for r in rows)
        cell = {(r["batch"], r["method"]): figure(r["tok_s"]) for r in rows}
        return table(["rows", *methods], [[b, *(cell.get((b, m)) for m in methods)] for b in batches])

    body = titled(results, "batch", made)
    return f"Total tokens per second, 96 new tokens, cold memory.\n\n{body}" if body else ""


def exact_table(results: Results) -> str:
    head = [
        "model",
        "method",
        "set",
        "prompts",
        "as generate()",
        "as eager backend",
        "as own AR",
        "S",
        "S eager",
        "ratio",
    ]
    rows = [
        [r["model"], r["method"], r["set"], r["prompts"], r.get("identical"), r.get("identical_to_eager"),
         r.get("identical_to_own"), r["S"], r.get("S_eager"), r.get("S_ratio")]
        for r in results.all("exact", None)
    ]  # fmt: skip
    notes = prose(
        "fp32, TF32 off. transformers' greedy outputs come from one padded batch; where ours differ, from the prompt",
        "by itself.",
    )
    return f"{notes}\n\n{table(head, rows)}" if rows else ""


def drift_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = []
        for r in results.all("drift", shape):
            margins = r["margins"]
            middle = margins[len(margins) // 2] if margins else None
            flag = {True: "yes", False: "no", None: ""}[r["invariant"]]
            rows.append(
                [r["of"], r["against"], flag, r["prompts"], r["equal"], r["prompts"] - r["equal"],
                 r.get("margin_median", middle), max(margins) if margins else None]
            )  # fmt: skip
        head = ["outputs of", "against", "invariant", "prompts", "equal", "differ", "median margin", "largest"]
        return table(head, rows)

    notes = prose(
        "The margin is the gap of the two best fp32 logits where two outputs first part. `fp32` is transformers'",
        "greedy decoding of the small model, which computes the same function (the paper's appendix E compares so).",
    )
    body = titled(results, "drift", made)
    return f"{notes}\n\n{body}" if body else ""


def steady_table(results: Results) -> str:
    def made(shape: str) -> str:
        rows = [
            [r["method"], r["round"], r["prompts"], r["differ"],
             ", ".join(map(str, r["at"])), r["median_step_ms"]]
            for r in results.all("steady", shape)
        ]  # fmt: skip
        return table(["method", "round", "prompts", "differ", "from token", "median step ms"], rows)

    notes = prose("The same prompts in every round, invariant; all texts against the first, which is autoregressive.")
    body = titled(results, "steady", made)
    return f"{notes}\n\n{body}" if body else ""


SECTIONS: dict[str, Callable[[Results], str]] = {
    "A step by K, context 1024": step_table,
    "Attention": attention_table,
    "Tokens per second": speed_table,
    "Context and memory": context_table,
    "Batch": batch_table,
    "Exactness": exact_table,
    "Drift": drift_table,
    "From run to run": steady_table,
}
PLOTS = {
    "gpu-step.svg": "A step by K, context 1024",
    "gpu-speed.svg": "Tokens per second",
    "gpu-context.svg": "Context and memory",
    "gpu-batch.svg": "Batch",
}
"""Each plot's section."""
