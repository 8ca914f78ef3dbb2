"""The preset `workloads` of `lookahead bench`: one row for each kind of work that people do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lookahead.cli.common import INTERRUPTED, Host
from lookahead.cli.settings import Settings

if TYPE_CHECKING:
    from lookahead.bench.workloads.command import WorkloadOptions
    from lookahead.bench.workloads.measure import Bind


def workload_options(
    sets: str | None,
    methods: Sequence[str] | None,
    data_dir: Path | None,
    quick: bool,
    limit: int | None,
    max_tokens: int | None,
    repeats: int | None,
    seed: int,
) -> WorkloadOptions:
    from lookahead.bench.workloads.command import WorkloadOptions
    from lookahead.bench.workloads.measure import STOCK

    if others := [name for name in methods or () if name != STOCK]:
        raise ValueError(
            f"--method {others[0]} is not for the preset workloads: it takes {STOCK} beside its own three ways"
        )
    names = None if sets is None else [name.strip() for name in sets.split(",") if name.strip()]
    return WorkloadOptions(names, data_dir, quick, limit, max_tokens, repeats or 1, seed, bool(methods))


def run_workloads(host: Host, settings: Settings, options: WorkloadOptions, out: Path, as_json: bool) -> None:
    """Measure and report. After Ctrl-C the same command goes on with the workload that was cut short."""
    from lookahead.bench.run.about import about, versions
    from lookahead.bench.run.results import Results
    from lookahead.bench.workloads.command import report, run

    results = Results(out / "workloads.jsonl")
    results.check(versions())  # before a model is loaded
    lm: Any = settings.load(host)
    results.begin(about(lm))
    try:
        records = run(lm, options, results, host.say, structured(lm, host))
    except KeyboardInterrupt:
        host.say("interrupted: the same command goes on with the first workload that is not done")
        raise typer.Exit(INTERRUPTED) from None
    path = report(options, records, results, out)
    if as_json:
        host.write(json.dumps({"about": results.about, "records": records, "files": {"markdown": str(path)}}) + "\n")
    else:
        host.write(path.read_text(encoding="utf-8"))
    host.say(f"results in {results.path}, report in {path}")


def structured(lm: Any, host: Host) -> Bind | None:
    """The server's structured output, where its packages are installed."""
    if any(find_spec(package) is None for package in ("llguidance", "fastapi")):
        host.say("note: without the server's packages, answers of `extract` are free text")
        return None
    from lookahead.serve.grammar import Grammars, json_grammar

    grammars = Grammars(lm)
    return lambda schema: grammars.mask(json_grammar(schema))
