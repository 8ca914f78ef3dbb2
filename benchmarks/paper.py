"""The paper's tables at the paper's sizes, in pieces of a few minutes: `python benchmarks/paper.py VERB ...`.

    plan 7b --data-dir DATA --out DIR                    # answers and tokens of each table, and what is left
    measure 7b --data-dir DATA --out DIR --minutes 8     # goes on where DIR/7b/results.jsonl stops
    merge DIR DIR ... --out RECORDS                      # what several machines have measured
    pages --data-dir DATA                                # one page per table, from the records

MODEL is a shape of `inflate.py`, in which the embedded model runs, `small`, the embedded model as it is, or the path of
another model, such as a GGUF file. The time is shared among the tables that are not done; all methods answer a prompt
before the next, and every beginning of a table is a fair sample. Neither typer nor rich is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from inflate import MODEL_SHAPES, shaped_load

import lookahead
from lookahead.bench.paper.options import BenchOptions
from lookahead.bench.paper.pages import Measured, read_words, write_page
from lookahead.bench.paper.parallel import projection
from lookahead.bench.paper.presets import PRESETS
from lookahead.bench.paper.series import Series
from lookahead.bench.run.about import about, versions
from lookahead.bench.run.pace import Pace, about_time
from lookahead.bench.run.results import Results
from lookahead.bench.run.runner import Job
from lookahead.bench.run.summary import BenchRun

PAGES = Path(__file__).parent / "results" / "paper"
RECORDS, WORDS = PAGES / "records", PAGES / "words.md"
STEPS = Path(__file__).parent / "results" / "h200" / "step-7b.json"
SMALL, LARGER, EVERY = "small", ("13b", "34b"), 15.0
SLOW = 8
"""Prompts of each set that transformers' own methods answer: they are ten times as slow."""
TOKENS = {"mt-bench": 256, "humaneval": 384, "mbpp": 256, "gsm8k": 256, "classeval": 768}
"""New tokens of an answer. The paper bounds HumanEval and ClassEval by 512 and 2,048 tokens with the prompt."""


@dataclass(frozen=True)
class Table:
    """A page: a preset with its sizes. `small` tables are measured with the embedded model as it is, on any device, and
    `larger` ones with the shapes of 13b and 34b as well, on `limit` prompts there."""

    title: str
    preset: str
    sizes: dict[str, Any] = field(default_factory=dict)
    small: bool = False
    larger: int = 0


TABLES = {
    "end-to-end": Table("Figure 5: end to end", "end-to-end", {"only": "^(?!hf-prompt-lookup)"}, larger=SLOW),
    "identity": Table("Appendix E: texts in half precision", "identity"),
    "ablation": Table("Table 3: the ablation", "ablation", {"only": r"^(hf-|autoreg|\()", "max_tokens": 256}),
    "overhead": Table("Figure 8: S and speedup against W", "overhead", {"repeats": 1}),
    "sampling": Table("Table 2: sampling", "sampling"),
    "scaling-law": Table("Figure 4: the scaling law", "scaling-law"),
    "configs": Table("Table 4: good configs", "configs", larger=SLOW),
    "flash": Table("Figures 6 and 7: with and without the kernel", "flash", {"limit": SLOW, "max_tokens": 256}),
    "exactness": Table("Appendix E: fp32", "exactness", {"only": "^fp32", "baseline_limit": None}, small=True),
}
"""By page, in the order in which they are measured. With 256 tokens they share answers on MT-Bench: `identity` has all
of its answers from `end-to-end`."""
PARALLEL = Table("Section 5.2: lookahead parallelism", "parallel")
"""Measured by `lookahead bench --preset parallel --ranks R` into a folder `ranks-R`."""


def tables_of(model: str, device: str) -> dict[str, Table]:
    found = {name: one for name, one in TABLES.items() if one.small == (model == SMALL)}
    found = {name: one for name, one in found.items() if one.larger or model not in LARGER}
    return {name: one for name, one in found.items() if device == "cuda" or not PRESETS[one.preset].cuda}


def options(table: Table, model: str, data_dir: Path, **given: Any) -> BenchOptions:
    """The table's run. What is given replaces the table's sizes, but for None."""
    sizes = {"baseline_limit": SLOW, "tokens": TOKENS, **table.sizes}
    if model in LARGER:
        sizes["limit"] = table.larger
    sizes |= {name: value for name, value in given.items() if value is not None}
    return BenchOptions(table.preset, data_dir=data_dir, **sizes)


def folder_of(model: str) -> str:
    return model if model in (*MODEL_SHAPES, SMALL) else Path(model).stem.lower()


def loader(args: argparse.Namespace, say: Callable[[str], None]) -> Callable[..., Any]:
    """(dtype, backend) -> the model, as `Models` wants it."""
    usual = "bfloat16" if args.device.startswith("cuda") and args.model != SMALL else "float32"
    embedded = args.model in (*MODEL_SHAPES, SMALL)
    load = shaped_load(args.model) if args.model in MODEL_SHAPES else lookahead.load

    def loaded(dtype: str | None = None, backend: str | None = None) -> Any:
        name = args.weights if embedded else args.model
        return load(name, dtype=dtype or usual, device=args.device, backend=backend or "auto", log=say)

    return loaded


def plan(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """What there is to measure, without a model: answers that tables share count for the first of them."""
    results = Results(args.out / folder_of(args.model) / "results.jsonl", mend=False)
    found: dict[str, Job] = {}
    for name, table in tables_of(args.model, args.device).items():
        jobs = options(table, args.model, args.data_dir, **sizes_of(args)).jobs(args.device)
        new = [job for job in jobs if job.key not in found]
        found |= {job.key: job for job in new}
        tokens = sum(job.max_tokens * len(job.prompt.turns) for job in new)
        done = sum(job.key in results for job in jobs)
        say(f"{name}: {len(jobs):,} answers, {done:,} measured, {len(new):,} new ones of at most {tokens:,} tokens")
    left = [job for key, job in found.items() if key not in results]
    seconds = Pace(found.values(), results.records).left(left)
    say(f"{len(left):,} of {len(found):,} answers to go" + ("" if seconds is None else f", {about_time(seconds)}"))


def sizes_of(args: argparse.Namespace) -> dict[str, int | None]:
    return {name: getattr(args, name) for name in ("limit", "baseline_limit", "max_tokens")}


def measure(args: argparse.Namespace, say: Callable[[str], None], make: Callable[..., Any] = loader) -> str:
    """Measure until the time is up. Returns what is to go, empty if nothing is."""
    until = None if args.minutes is None else monotonic() + 60 * args.minutes
    tables = tables_of(args.model, torch.device(args.device).type)
    chosen = args.tables.split(",") if args.tables else list(tables)
    if unknown := set(chosen) - set(tables):
        raise ValueError(f"--tables {sorted(unknown)[0]}: {args.model} has {', '.join(tables)}")
    runs = [options(tables[name], args.model, args.data_dir, **sizes_of(args)) for name in chosen]
    results = Results(args.out / folder_of(args.model) / "results.jsonl")
    results.check(versions())
    load = make(args, say)
    lm = load()
    results.begin(about(lm))
    series = Series(runs, runs[0].models(lm, load, say), results, until, brief=True)
    for line in series.plan:
        say(line)
    for name, part in zip(chosen, series.parts(), strict=True):
        said = monotonic()
        say(f"{name}: {part.existing or 'nothing yet'}")
        for number, (job, record) in enumerate(part.answers(), 1):
            if "error" in record:
                say(f"note: {job.method.label} on {job.data} {job.prompt.id}: {record['error']}")
            if monotonic() - said > EVERY:
                said = monotonic()
                say(f"{name}: {part.progress(number)}")
        for line in part.run.lines:
            over = f", {line.own.speedup:.2f}x over AR, {line.own.identity} as AR" if line.own.speedup else ""
            if line.prompts:
                say(f"  {line.data}: {line.method.label}: {line.prompts} prompts, S {line.compression:.2f}{over}")
    left = series.to_go()
    say(f"{left}: the same command goes on" if left else "all measured")
    return left


def merge(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Every model's records of these folders into one file."""
    found = sorted({path.parent.name for folder in args.folders for path in folder.glob("*/results.jsonl")})
    if not found:
        raise ValueError(f"no MODEL/results.jsonl in {', '.join(map(str, args.folders))}")
    for name in found:
        results = Results(args.out / name / "results.jsonl")
        before = len(results.records)
        paths = [folder / name / "results.jsonl" for folder in args.folders]
        differ = results.merge([path for path in paths if path.exists()])
        say(f"{name}: {len(results.records) - before} answers taken over, {len(results.records)} in all")
        if differ:
            say(f"warning: {len(differ)} answers of {name} were measured twice, and are not the same text")


def pages(args: argparse.Namespace, say: Callable[[str], None]) -> list[Path]:
    """A page for every table of which there are records."""
    words = read_words(args.words) if args.words.exists() else {}
    stored = {path.parent.name: Results(path, mend=False) for path in sorted(args.records.glob("*/results.jsonl"))}
    written = []
    for name, table in {**TABLES, "parallel": PARALLEL}.items():
        parts = [
            part for folder, one in stored.items() if (part := measured(name, table, folder, one, args)) is not None
        ]
        if parts:
            command = f"python benchmarks/paper.py measure MODEL --tables {name} --data-dir DATA --out DIR"
            if name == "parallel":
                command = "lookahead bench --preset parallel --ranks R --model MODEL --data-dir DATA --out DIR/ranks-R"
            written.append(write_page(args.out, name, table.title, words.get(name, ""), command, parts))
            say(f"{written[-1]}: {', '.join(part.name for part in parts)}")
    return written


def measured(name: str, table: Table, folder: str, results: Results, args: argparse.Namespace) -> Measured | None:
    """What a folder has of a table, if every method was asked something of every set."""
    ranks = int(folder.removeprefix("ranks-")) if folder.startswith("ranks-") else 1
    device = str((results.about or {}).get("device", "cpu")).partition(":")[0]
    if (name == "parallel") != (ranks > 1) or (ranks == 1 and name not in tables_of(folder, device)):
        return None
    if ranks == 1:
        asked = options(table, folder, args.data_dir, **sizes_of(args))
    else:
        asked = BenchOptions("parallel", data_dir=args.data_dir, ranks=ranks, **sizes_of(args))
    run = BenchRun(asked.jobs(device), results)
    cells = [{(job.data, job.temperature, job.method) for job in jobs} for jobs in (run.jobs, answered(run))]
    if cells[0] != cells[1]:  # answers that it shares with other tables are no table
        return None
    return Measured(folder, asked, run, (projection(run, step_times(args.steps)),) if ranks > 1 else ())


def answered(run: BenchRun) -> list[Job]:
    return [job for job in run.jobs if job.key in run.results]


def step_times(path: Path) -> dict[int, float]:
    """Milliseconds of a step by its tokens, host included, from what the preset `gpu-step` has written."""
    return {
        one["K"]: one["step_wall_ms"] for one in json.loads(path.read_text())["records"] if one.get("invariant", True)
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = made.add_subparsers(dest="verb", required=True)
    sizes = argparse.ArgumentParser(add_help=False)
    sizes.add_argument("--data-dir", type=Path, required=True, help="the prompt sets' files (docs/bench.md)")
    for name in ("--limit", "--baseline-limit", "--max-tokens"):
        sizes.add_argument(name, type=int, help="instead of the tables' own")
    of_model = argparse.ArgumentParser(add_help=False, parents=[sizes])
    of_model.add_argument("model", help="a shape (7b, 13b, 34b, 1.5b), small, or the path of a model")
    of_model.add_argument("--out", type=Path, required=True, help="folder of MODEL/results.jsonl")
    zero = verbs.add_parser("plan", parents=[of_model], help="what there is to measure")
    zero.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="that will measure")
    one = verbs.add_parser("measure", parents=[of_model], help="tables of one model")
    one.add_argument("--tables", help="some of them, such as ablation,overhead")
    one.add_argument("--minutes", type=float, help="stop after this time, loading included")
    one.add_argument("--weights", help="a file or folder of the embedded model, where it is not in the cache")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    two = verbs.add_parser("merge", help="records of several machines into one folder")
    two.add_argument("folders", type=Path, nargs="+")
    two.add_argument("--out", type=Path, default=RECORDS)
    three = verbs.add_parser("pages", parents=[sizes], help="pages from records")
    for name, usual in (("--records", RECORDS), ("--words", WORDS), ("--steps", STEPS), ("--out", PAGES)):
        three.add_argument(name, type=Path, default=usual)
    return made


def main(words: Sequence[str] | None = None) -> None:
    args = parser().parse_args(words)
    try:
        {"plan": plan, "measure": measure, "merge": merge, "pages": pages}[args.verb](
            args, lambda line: print(line, flush=True)
        )
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
