"""`lookahead bench --preset workloads`: which workloads, how large, and what is on disk already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookahead.bench.run.methods import near
from lookahead.bench.run.results import Record, Results, key_of
from lookahead.bench.run.stock import Stock
from lookahead.bench.workloads import page
from lookahead.bench.workloads.material import material
from lookahead.bench.workloads.measure import STOCK, Bind, Measurement
from lookahead.bench.workloads.tasks import WORKLOADS, Task, Workload
from lookahead.generate import LookaheadModel

LIMIT, QUICK_LIMIT = 10, 2
WARM_UP_TOKENS = 16
Say = Callable[[str], None]


@dataclass(frozen=True)
class WorkloadOptions:
    """Mistakes raise ValueError when it is made. `names` None are all workloads."""

    names: Sequence[str] | None = None
    data_dir: Path | None = None
    quick: bool = False
    limit: int | None = None
    max_tokens: int | None = None
    repeats: int = 1
    seed: int = 0
    stock: bool = False

    def __post_init__(self) -> None:
        for name in self.names or ():
            if name not in WORKLOADS:
                raise ValueError(
                    f"unknown workload {name!r}: {near(name, list(WORKLOADS))}choose from {', '.join(WORKLOADS)}"
                )
        for workload in self.chosen:  # what is missing is reported before a model is loaded
            self.tasks(workload)

    @property
    def chosen(self) -> list[Workload]:
        return [WORKLOADS[name] for name in dict.fromkeys(self.names or WORKLOADS)]

    def tasks(self, workload: Workload) -> list[Task]:
        return workload.make(material(self.data_dir), self.limit or (QUICK_LIMIT if self.quick else LIMIT))

    def tokens(self, workload: Workload) -> int:
        return self.max_tokens or (workload.quick_tokens if self.quick else workload.tokens)


def run(
    lm: LookaheadModel, options: WorkloadOptions, results: Results, say: Say, bind: Bind | None = None
) -> list[Record]:
    """Measure what is not in the results yet. Returns the records of all that the options ask for."""
    stock, ready = Stock(lm) if options.stock else None, False
    found = []
    for repeat, workload, tasks in _cells(options):
        key = _key(options, workload, tasks, repeat, bind is not None)
        if key not in results:
            if not ready:  # what happens once per kind of step happens here
                _warm_up(lm, stock)
                ready = True
            say(f"{workload.name}: {len(tasks)} tasks, at most {options.tokens(workload)} new tokens each answer")
            measured = Measurement(lm, workload, options.tokens(workload), options.seed, stock, bind, repeat).run(tasks)
            results.add({"kind": "workload", "key": key, "workload": workload.name, "repeat": repeat, **measured})
        found.append(results.records[key])
    return found


def report(options: WorkloadOptions, records: Sequence[Record], results: Results, out: Path) -> Path:
    facts = {
        "material": material(options.data_dir).source,
        "command": command(options),
        "repeats": options.repeats,
    }
    return page.write(records, results.about or {}, facts, out)


def command(options: WorkloadOptions) -> str:
    """Without the folders of the machine that it ran on."""
    words = ["lookahead bench --preset workloads"]
    words += ["--data-dir DATA"] if options.data_dir else []
    words += [f"--sets {','.join(options.names)}"] if options.names else []
    words += ["--quick"] if options.quick else []
    words += [
        f"--{name} {value}" for name, value in (("limit", options.limit), ("max-tokens", options.max_tokens)) if value
    ]
    words += [f"--repeats {options.repeats}"] if options.repeats > 1 else []
    return " ".join([*words, *(["--method hf-greedy"] if options.stock else [])])


def _cells(options: WorkloadOptions) -> Iterator[tuple[int, Workload, list[Task]]]:
    for repeat in range(options.repeats):
        for workload in options.chosen:
            yield repeat, workload, options.tasks(workload)


def _key(options: WorkloadOptions, workload: Workload, tasks: Sequence[Task], repeat: int, bound: bool) -> str:
    facts: dict[str, Any] = {
        "workload": workload.name,
        "tasks": [asdict(task) for task in tasks],
        "tokens": options.tokens(workload),
        "epochs": [workload.samples, workload.epochs, workload.drift],
        "seed": options.seed,
        "stock": options.stock,
        "bound": bound and any(task.schema for task in tasks),
        "repeat": repeat,
    }
    return key_of(facts)


def _warm_up(lm: LookaheadModel, stock: Stock | None) -> None:
    prompt = lm.encode("Count to ten.")
    own, lm.memory = lm.memory, lm.memory.new()
    for settings in ({}, {"method": "autoregressive"}, {"temperature": 1.0}):
        lm.generate(prompt, max_tokens=WARM_UP_TOKENS, **settings)
    lm.memory = own
    if stock is not None:
        stock.run(STOCK, prompt, WARM_UP_TOKENS, len(prompt) + WARM_UP_TOKENS)
