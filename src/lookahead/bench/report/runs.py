"""What a report was measured on: the facts of its runs, and what of them differs."""

from __future__ import annotations

from lookahead.bench.report.sections import Section
from lookahead.bench.run.summary import BenchRun


def about_sections(run: BenchRun) -> list[Section]:
    """The facts that all runs share; and, of several runs, a row for each."""
    runs = run.runs or [(run.results.about or {}, 0)]
    facts = {
        name: [about.get(name) for about, _ in runs] for name in dict.fromkeys(key for one, _ in runs for key in one)
    }
    shared = {name: values[0] for name, values in facts.items() if values.count(values[0]) == len(values)}
    section = Section("Measured on", ("what", "value"))
    section.rows = [[name, str(value)] for name, value in shared.items() if value is not None]
    done = sum(job.key in run.results for job in run.jobs)
    if run.jobs:
        repeats = max(job.repeat for job in run.jobs) + 1
        often = "once: on a machine that others use, add --repeats 3" if repeats == 1 else f"{repeats} times"
        unfinished = "" if done == len(run.jobs) else " Not finished."
        section.notes.append(f"{done} of {len(run.jobs)} answers.{unfinished} Each is timed {often}.")
    if len(runs) == 1:
        return [section]
    differ = [name for name in facts if name not in shared]
    several = Section("Runs", (*differ, "answers"))
    several.rows = [[*(str(about.get(name)) for name in differ), str(count)] for about, count in runs]
    split, prompts = run.split_prompts
    several.notes.append(
        f"Merged from {len(runs)} runs. {split} of {prompts} prompts have answers of more than one of them: there a "
        "ratio compares two runs. All others compare answers of one run."
    )
    return [section, several]
