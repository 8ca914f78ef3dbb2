"""The preset `scaling`: what 2, 4 and 8 GPUs would buy, projected from what is measured on one (see `scaling`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from lookahead.bench import costs
from lookahead.bench.context import Context
from lookahead.bench.prompts import Prompt
from lookahead.bench.results import key_of
from lookahead.bench.sections import Curves, Section, times

if TYPE_CHECKING:
    from lookahead.bench.scaling import Measured, Projected
    from lookahead.loading.step_cost import StepCost

FAMILIES = ("ours", "paper")


def shares(run: Context) -> None:
    """S and the shares of every setting on every set, then t(K)."""
    from lookahead.bench import scaling
    from lookahead.bench.methods import plain
    from lookahead.bench.runner import prompt_ids
    from lookahead.config import StopRules

    lm = run.models.own
    for data, prompts in run.prompts.items():
        rules = StopRules(run.max_tokens[data], lm.stop_ids, lm.backend.max_length)
        ids = [prompt_ids(lm, prompt, ()) for prompt in prompts]
        for family, settings in zip(FAMILIES, (scaling.SETTINGS, scaling.PAPER), strict=True):
            for name, config in settings.items():
                key = _key(run, data, prompts, family, name)
                if key in run.results:
                    continue
                run.say(f"{data}: S and shares of {name}")
                (found,) = scaling.measure(lm.backend, ids, {name: config}, rules)
                facts = {"set": data, "family": family, "config": plain(config), **asdict(found)}
                run.results.add({"kind": "share", "key": key, **facts})
    costs.measured(run)


def work(prompts: dict[str, list[Prompt]], tokens: dict[str, int]) -> tuple[int, int]:
    """How many answers `shares` generates, and how many tokens those may have. Only first turns are asked."""
    from lookahead.bench import scaling

    settings = len(scaling.SETTINGS) + len(scaling.PAPER)
    return settings * sum(map(len, prompts.values())), settings * sum(len(p) * tokens[d] for d, p in prompts.items())


def _key(run: Context, data: str, prompts: list[Prompt], family: str, name: str) -> str:
    chosen = [prompt.id for prompt in prompts]
    return key_of(
        {"kind": "share", "set": data, "prompts": chosen, "tokens": run.max_tokens[data], "of": [family, name]}
    )


def show(run: Context) -> list[Section]:
    from lookahead.bench import scaling

    cost = costs.known(run)
    made: list[Section] = []
    for data, prompts in run.prompts.items():
        for family, settings in zip(FAMILIES, (scaling.SETTINGS, scaling.PAPER), strict=True):
            keys = [_key(run, data, prompts, family, name) for name in settings]
            rows = run.results.get(keys)
            if not rows or cost is None:
                continue
            measured = [
                scaling.Measured(
                    row["setting"], row["tokens"], row["steps"], row["step_tokens"],
                    {int(ranks): share for ranks, share in row["shares"].items()}, row["top"],
                )
                for row in rows
            ]  # fmt: skip
            made += _sections(run, data, family, measured, cost)
    if not made:
        made.append(Section("Projection", notes=["Nothing was measured yet: run the same command again."]))
    return made


def _sections(run: Context, data: str, family: str, measured: list[Measured], cost: StepCost) -> list[Section]:
    from lookahead.bench import scaling

    link = scaling.NVLINK
    lines = scaling.project(measured, cost, link)
    whose = "our sources" if family == "ours" else "the paper's method"
    head = (
        "GPUs",
        "setting",
        "S",
        "tokens of the fullest",
        "step ms",
        "exchange ms",
        "ms per token",
        "projected speedup",
    )
    section = Section(f"Projection: {data}, {whose}", head)
    section.rows = [
        [
            str(p.ranks), p.setting, f"{p.compression:.2f}", f"{p.share:.0f}", f"{p.step_ms:.2f}",
            f"{p.exchange_ms:.3f}", f"{p.token_ms:.2f}", times(p.speedup),
        ]
        for p in lines
    ]  # fmt: skip
    source = f"from {run.step_cost}" if run.step_cost else "measured on this machine"
    section.notes.append(
        f"A projection, not a measurement on several GPUs: S and shares measured on one rank, t(K) {source}, the "
        f"exchange reckoned at {link.name}. The speedup is over one rank that decodes token by token."
    )
    section.notes.append("The paper measured up to 4x on ClassEval with 8 A100s (LLaMA and CodeLlama, 7B and 13B).")
    curves = {"projection": [(float(p.ranks), p.speedup) for p in lines]}
    paper = []
    if data == "classeval":
        curves["paper: 4x with 8 GPUs"], paper = [(8.0, 4.0)], ["paper: 4x with 8 GPUs"]
    section.plots.append(Curves(f"{data}: projected speedup, {whose}", "GPUs", "times", dict(curves), paper))
    return [section, _traffic(run, data, whose, lines)]


def _traffic(run: Context, data: str, whose: str, lines: list[Projected]) -> Section:
    from lookahead.bench import scaling

    config = run.models.own.model.config
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    section = Section(
        f"Traffic per generated token: {data}, {whose}",
        ("GPUs", "parallelism", "collectives or sends", "bytes per GPU"),
    )
    for p in lines:
        for one in scaling.traffic(layers, hidden, p.ranks, p.compression, p.sent) if p.ranks > 1 else ():
            section.rows.append([str(p.ranks), one.kind, f"{one.collectives:.2f}", f"{one.sent:.0f}"])
    section.notes.append(
        f"On paper, batch 1, this model's {layers} layers of {hidden} numbers in half precision. Tensor parallel: two "
        "reductions per layer. Pipeline parallel: one hand-over per stage, and no answer gets faster. Lookahead "
        "parallel: one exchange of integers per step."
    )
    return section
