"""S over (W, N) with G = W: the best of them for a model (table 4), and the scaling law (figure 4)."""

from __future__ import annotations

from lookahead.bench.report.sections import Section, by_data, times
from lookahead.bench.run.summary import BenchRun
from lookahead.tune.scaling_law import PAPER, Point, fit


def best(run: BenchRun) -> list[Section]:
    """Table 4, searched for rather than copied: the fastest (W, N) of each set."""
    section = Section("Table 4: the best of the grid", ("set", "W", "N", "S", "K", "speedup"))
    timed = [line for line in run.lines if line.method.config is not None and line.gain]
    for data, lines in by_data(timed).items():
        line = max(lines, key=lambda line: line.gain or 0.0)
        config, stats = line.method.config, line.stats
        assert config is not None
        shape = [str(config.window), str(config.ngram), f"{line.compression:.2f}", f"{stats.tokens_per_step:.0f}"]
        section.rows.append([data, *shape, times(line.gain)])
    section.notes.append(
        "speedup: over our own autoregressive decoding, if it was run. "
        "The paper's (W, N): 7B (15, 5), 13B (10, 5), 34B (7, 5) on an A100."
    )
    return [section]


def law(run: BenchRun) -> list[Section]:
    """Figure 4: S as measured, beside the paper's law with its numbers and with those that fit here."""
    made = []
    for data, lines in by_data(run.lines).items():
        configs = [(line.method.config, line.compression) for line in lines if line.stats.steps]
        points = [Point(c.window, c.ngram, c.guesses, s) for c, s in configs if c is not None]
        fitted = fit(points)
        paper = f"law, paper's alpha = {PAPER.alpha}, f = {PAPER.f}"
        section = Section(f"S over (W, N) on {data}", ("N", "W = G", "S measured", paper, "law, fitted"))
        for p in points:
            laws = [law.predict(p.window, p.ngram, p.guesses) for law in (PAPER, fitted)]
            section.rows.append([str(p.ngram), str(p.window), f"{p.compression:.2f}", *(f"{s:.2f}" for s in laws)])
        section.notes = [
            "The law: S grows by a constant for every doubling of W, as long as N is large enough. The paper's alpha "
            "and f are those of LLaMA-2-7B-Chat on MT-Bench.",
            f"Fitted to the S measured here: alpha = {fitted.alpha:.3f}, f = {fitted.f:.3f}. A point of few steps (few "
            "prompts, short answers) is rough, and so is the fit."
            if points
            else "Nothing was measured yet: run the same command again.",
        ]
        made.append(section)
    return made
