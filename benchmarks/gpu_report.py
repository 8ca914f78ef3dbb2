"""The page of a GPU run: targets, what was measured, tables and plots, from the JSON that `gpu.py` left.

    python benchmarks/gpu_report.py benchmarks/results/h200 --out DIR [--page gpu.md]

Runs anywhere. Without matplotlib the page is written and the plots are left out. What is not in the files is 'not
measured', and what was not measured on the same prompts is 'open'. Where two files hold the same row, the last counts.
What a person has to say of the run stands in the folder's `remarks.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts import tables
from gpu_parts.results import Results, ratio
from gpu_parts.results import show as number

SETS = ("mt-bench", "humaneval")
PAPER, DEFAULT, OWN = "paper (5,15,15) + prompt", "default", "autoregressive"
EAGER, STATIC = "transformers eager", "transformers static + compile"
LOOKUP = "transformers prompt lookup"
REFERENCE = 77
"""Tokens per second of the paper's reference implementation with this model on such a machine, measured elsewhere."""


@dataclass(frozen=True)
class Line:
    """A target, what was measured, whether that meets it (None: cannot be told), and from where."""

    target: str
    measured: str | None
    met: bool | None
    source: str


def missing(target: str, source: str) -> Line:
    return Line(target, None, None, source)


# The targets


def step_lines(results: Results) -> Iterable[Line]:
    source = "step-7b, device_ms"
    one = results.last("step", "7b", invariant=results.invariant, K=1, context=1024)
    many = results.last("step", "7b", invariant=results.invariant, K=121, context=1024)
    target = "a step of 1 token at context 1024 takes at most 4.3 ms"
    yield missing(target, source) if one is None else at_most(target, one["device_ms"], 4.3, "ms", source)
    target = "121 tokens at most 1.15 times that"
    if one is None or many is None:
        yield missing(target, source)
    else:
        found = many["device_ms"] / one["device_ms"]
        yield Line(target, f"{found:.2f} times ({many['device_ms']:.2f} ms)", found <= 1.15, source)


def attention_lines(results: Results) -> Iterable[Line]:
    for context in (2048, 16384):
        target = f"attention of 121 tokens at context {context} at least 2 times as fast as SDPA with a dense mask"
        rows = results.all("attention", None, K=121, context=context, invariant=results.invariant)
        shapes = {(r["heads"], r["kv_heads"], r["dim"]): r for r in rows}
        words = [
            f"{r['speedup']:.2f} ({heads} heads, {kv} for K/V, of {dim}; {100 * r['of_copy_bandwidth']:.0f}% of copy "
            "bandwidth)"
            for (heads, kv, dim), r in shapes.items()
        ]
        source = "attention-7b, speedup"
        met = all(r["speedup"] >= 2 for r in shapes.values())
        yield Line(target, "; ".join(words), met, source) if words else missing(target, source)


def gap_lines(results: Results) -> Iterable[Line]:
    target = "host and launch at most 5% of a step"
    rows = [results.speed("7b", method, data) for method in (OWN, PAPER, DEFAULT) for data in SETS]
    known = [row for row in rows if row and "gap_percent" in row]
    words = [f"{r['method']} on {r['set']} {r['gap_percent']:.1f}% ({r['gap_ms']:.2f} ms)" for r in known]
    source = "speed-7b, gap_percent"
    met = all(r["gap_percent"] <= 5 for r in known)
    yield Line(target, "; ".join(words), met, source) if known else missing(target, source)


def rate_line(results: Results, shape: str, method: str, least: float, sets: Sequence[str], what: str) -> Line:
    rows = [results.speed(shape, method, data) for data in sets]
    target, source = f"{what}, {' and '.join(sets)}: at least {least:g} tok/s", f"speed-{shape}, tok_s"
    if any(row is None for row in rows):
        return missing(target, source)
    found = [row["tok_s"] for row in rows if row]
    return Line(target, " and ".join(map(number, found)) + " tok/s", min(found) >= least, source)


def ratio_line(
    results: Results, one: str, other: str, data: str, least: float, what: str, source: str, shape: str = "7b"
) -> Line:
    found = ratio(results, shape, one, other, data)
    if found is None:
        return missing(what, source)
    note = "" if found.shared else ", not on the same prompts"
    words = f"{found.value:.2f} times ({number(found.one)} against {number(found.other)} tok/s, {found.prompts}{note})"
    return Line(what, words, found.value >= least if found.shared else None, source)


def speed_lines(results: Results) -> Iterable[Line]:
    both = "speed-7b and baselines-7b"
    yield rate_line(results, "7b", OWN, 225, SETS, "own autoregressive decoding")
    yield rate_line(results, "7b", PAPER, 430, SETS[:1], "the paper's method (5,15,15) with prompt n-grams")
    what = "the same, mt-bench: at least 1.85 times own autoregressive"
    yield ratio_line(results, PAPER, OWN, "mt-bench", 1.85, what, "speed-7b")
    for data, least, times in (("mt-bench", 620, 2.6), ("humaneval", 800, 3.4)):
        yield rate_line(results, "7b", DEFAULT, least, [data], "default")
        what = f"default, {data}: at least {times} times own autoregressive"
        yield ratio_line(results, DEFAULT, OWN, data, times, what, "speed-7b")
    for other, times, name in ((STATIC, 4.5, "static cache + compile"), (EAGER, 18, "eager decoding")):
        what = f"default, mt-bench: at least {times} times transformers' {name}"
        yield ratio_line(results, DEFAULT, other, "mt-bench", times, what, both)
    for data in SETS:
        what = f"default, {data}: faster than transformers' prompt lookup"
        yield ratio_line(results, DEFAULT, LOOKUP, data, 1, what, both)
    what = (
        f"default, mt-bench: at least 8 times {REFERENCE} tok/s, the paper's reference implementation with this model "
        "on such a machine (measured elsewhere, not by this script)"
    )
    row = results.speed("7b", DEFAULT, "mt-bench")
    times = row["tok_s"] / REFERENCE if row else 0
    yield Line(what, f"{times:.1f} times", times >= 8, "speed-7b") if row else missing(what, "speed-7b")
    yield rate_line(results, "small", OWN, 1000, SETS, "the 135M model itself, autoregressive")
    yield rate_line(results, "small", DEFAULT, 2000, SETS, "the 135M model itself, default")


def exact_lines(results: Results) -> Iterable[Line]:
    source = "exact"
    rows = list({(r["model"], r["method"], r["set"]): r for r in results.all("exact", None)}.values())
    greedy, sampled = [r for r in rows if "identical" in r], [r for r in rows if "identical_to_own" in r]

    def counted(target: str, chosen: list[dict[str, Any]], field: str) -> Line:
        if not chosen:
            return missing(target, source)
        models = dict.fromkeys(r["model"] for r in chosen)
        words, met = [], True
        for model in models:
            equal = sum(r[field] for r in chosen if r["model"] == model)
            count = sum(r["prompts"] for r in chosen if r["model"] == model)
            words.append(f"{equal} of {count} ({model})")
            met = met and equal == count
        return Line(target, ", ".join(words), met, source)

    yield counted("fp32: outputs of the graph backend identical to transformers' greedy ones", greedy, "identical")
    yield counted("fp32: and to the eager backend's", greedy, "identical_to_eager")
    target = "fp32: S of the graph backend within 0.5% of the eager backend's"
    if greedy:
        off = [(abs(r["S_ratio"] - 1), r) for r in greedy]
        most, worst = max(off, key=lambda one: one[0])
        words = f"at most {100 * most:.2f}% apart ({worst['model']}, {worst['method']}, {worst['set']}: "
        words += f"{worst['S']} and {worst['S_eager']})"
        yield Line(target, words, most <= 0.005, source)
    else:
        yield missing(target, source)
    target = "fp32: seeded sampling by trees identical to own autoregressive sampling"
    yield counted(target, sampled, "identical_to_own")


def drift_lines(results: Results) -> Iterable[Line]:
    for method in (DEFAULT, PAPER):
        target = f"bf16, invariant: {method} equal to own autoregressive on at least 95% of prompts"
        found = {flag: results.last("drift", "7b", of=method, against=OWN, invariant=flag) for flag in (True, False)}
        on, off = found[True], found[False]
        if on is None:
            yield missing(target, "drift-7b")
            continue
        words = f"{on['equal']} of {on['prompts']}"
        words += f"; without invariant {off['equal']} of {off['prompts']}" if off else ""
        yield Line(target, words, on["equal"] >= 0.95 * on["prompts"], "drift-7b")


def report_lines(results: Results) -> Iterable[Line]:
    """What has no bound, but must be told."""
    contexts = {r["context"]: r for r in results.all("context", "7b", K=128)}
    words = ", ".join(f"{c // 1024}k {r['device_ms']:.2f} ms" for c, r in contexts.items())
    target = "step time and memory at 1k, 4k, 16k and 32k tokens of context"
    there = all(c in contexts for c in (1024, 4096, 16384, 32768))
    yield Line(target, f"K = 128: {words}", there, "context-7b") if words else missing(target, "context-7b")
    target = "memory above autoregressive is the K scratch slots and nothing else"
    if contexts:
        most = max(contexts.values(), key=lambda r: r["all_steps_mb"])
        words = f"beside its K/V slots a step of 128 holds {most['step_mb']:.0f} MB of activations, logits and partial"
        words += f" results, with all smaller sizes captured {most['all_steps_mb']:.0f} MB, at any context"
        yield Line(target, words, most["all_steps_mb"] < 1, "context-7b")
    else:
        yield missing(target, "context-7b")
    batches = {r["batch"] for r in results.all("batch", "7b")}
    target = "batches of 1 to 16"
    words = "batch " + ", ".join(map(str, sorted(batches)))
    yield Line(target, words, 16 in batches, "batch-7b") if batches else missing(target, "batch-7b")


def at_most(target: str, found: float, bound: float, unit: str, source: str) -> Line:
    return Line(target, f"{found:.2f} {unit}", found <= bound, source)


TARGETS: tuple[Callable[[Results], Iterable[Line]], ...] = (
    step_lines, attention_lines, gap_lines, speed_lines, exact_lines, drift_lines, report_lines,
)  # fmt: skip


# The page


def targets_table(results: Results) -> str:
    lines = [line for made in TARGETS for line in made(results)]
    met = {True: "yes", False: "**no**", None: "open"}
    rows = [[one.target, one.measured or "not measured", met[one.met], one.source] for one in lines]
    return tables.table(["target", "measured", "met?", "rows of"], rows)


def page(results: Results, plots: dict[str, str]) -> str:
    """`plots`: file -> the rows it was drawn from."""
    about = results.files[-1].about
    parts = [f"# {about['gpu']}", tables.provenance(results), "## Targets", targets_table(results)]
    for title, made in tables.SECTIONS.items():
        body = made(results)
        if body:
            parts += [f"## {title}", body]
            parts += [f"![{title}]({name})\n\n{rows}" for name, rows in plots.items() if tables.PLOTS[name] == title]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the JSON of gpu.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the page and the plots")
    parser.add_argument("--page", default="gpu.md")
    args = parser.parse_args(argv)
    try:
        results = Results.read(args.folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        from gpu_parts import plots

        drawn = plots.draw(results, args.out)
    except ImportError:
        print("note: no matplotlib here, so no plots: pip install matplotlib", file=sys.stderr)
        drawn = {}
    text, remarks = page(results, drawn), args.folder / "remarks.md"
    if remarks.exists():
        text = text.replace("## Targets", remarks.read_text(encoding="utf-8").strip() + "\n\n## Targets", 1)
    (args.out / args.page).write_text(text, encoding="utf-8")
    print(f"{args.out / args.page}: {len(results.files)} files read, {len(drawn)} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
