"""What the command can run by name: prompt sets, methods, sizes, and how the outcome is shown beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from lookahead.bench import exactness, law, projection, search, views
from lookahead.bench.context import Context
from lookahead.bench.jobs import Job
from lookahead.bench.methods import Method, named
from lookahead.bench.prompts import PAPER_SETS, Prompt
from lookahead.bench.sections import Section
from lookahead.config import SOURCES, LookaheadConfig


@dataclass(frozen=True)
class Size:
    """How much to run: prompts of each set, new tokens of each answer (None: the set's own), times each."""

    limit: int | None
    max_tokens: int | None
    repeats: int = 1


@dataclass(frozen=True)
class Preset:
    """`show` makes the report's sections; `more` measures what is no job, after the jobs. Where it generates, `work`
    counts the answers and their most tokens.
    """

    name: str
    title: str
    sets: tuple[str, ...]
    methods: tuple[Method, ...]
    full: Size
    quick: Size
    show: Callable[[Context], list[Section]]
    more: Callable[[Context], None] | None = None
    work: Callable[[dict[str, list[Prompt]], dict[str, int]], tuple[int, int]] | None = None
    temperatures: tuple[float, ...] = (0.0,)
    cuda: bool = False
    quick_methods: tuple[Method, ...] = field(default=(), repr=False)

    def check(self, device: str) -> None:
        """Refuse a device that cannot run this."""
        if self.cuda and device != "cuda":
            raise ValueError(f"preset {self.name!r} compares GPU kernels and needs a CUDA device")

    def jobs(
        self,
        prompts: dict[str, list[Prompt]],
        methods: Sequence[Method],
        size: Size,
        temperatures: Sequence[float],
        seed: int,
        warm: bool,
    ) -> list[Job]:
        """Methods take turns on each prompt, so that a machine that slows down slows all of them."""
        return [
            Job(data, number, prompt, method, tokens_for(data, size), heat, seed + number, repeat, warm)
            for repeat in range(size.repeats)
            for data, chosen in prompts.items()
            for heat in temperatures
            for number, prompt in enumerate(chosen)
            for method in methods
        ]


def tokens_for(data: str, size: Size) -> int:
    own = PAPER_SETS[data].max_tokens if data in PAPER_SETS else 256
    return size.max_tokens or own


GREEDY, STATIC, LOOKUP = named("hf-greedy"), named("hf-static"), named("hf-prompt-lookup")
ALONE, OURS = named("autoregressive"), named("lookahead")


def paper(ngram: int, window: int, guesses: int, *, prompt: bool = False, **where: Any) -> Method:
    """The paper's order: (N, W, G)."""
    label = f"({ngram},{window},{guesses}){' + prompt' if prompt else ''}"
    made = named(f"paper{'+prompt' if prompt else ''}:{window},{ngram},{guesses}", label)
    return replace(made, **where)


def only(*names: str) -> Method:
    """The default config with these sources alone; without the window where `jacobi` is not among them."""
    base = LookaheadConfig()
    config = replace(base, sources=names, window=base.window if "jacobi" in names else 0)
    return Method("+".join(names) if len(names) < len(SOURCES) else "all four", "lookahead", config)


TABLE_3 = (
    GREEDY,
    LOOKUP,
    paper(10, 1, 3, prompt=True),
    paper(5, 1, 10, prompt=True),
    paper(5, 1, 30),
    paper(5, 1, 30, prompt=True),
    paper(5, 30, 1),
    paper(5, 15, 15),
    paper(5, 15, 15, prompt=True),
)
SOURCE_METHODS = tuple(only(*names) for count in range(1, len(SOURCES) + 1) for names in combinations(SOURCES, count))
WINDOWS = (1, 2, 5, 10, 15, 20, 30)
GRID = tuple(paper(ngram, window, window) for ngram in (3, 4, 5, 6, 7) for window in (3, 5, 7, 10, 15, 20))
LAW = tuple(paper(ngram, window, window) for ngram in (3, 5, 7) for window in (1, 2, 4, 8, 16, 32))
HALF = "bfloat16"
EXACT = (
    replace(GREEDY, label="fp32 hf-greedy", dtype="float32"),
    replace(ALONE, label="fp32 autoregressive", dtype="float32"),
    replace(OURS, label="fp32 lookahead", dtype="float32", config=LookaheadConfig()),
    paper(5, 15, 15, prompt=True, label="fp32 paper (5,15,15)", dtype="float32"),
    *(
        replace(method, label=f"half {name}", dtype=HALF)
        for name, method in (
            ("hf-greedy, eager attention", replace(GREEDY, attention="eager")),
            ("hf-greedy, sdpa", replace(GREEDY, attention="sdpa")),
            ("autoregressive, eager", replace(ALONE, backend="eager")),
            ("lookahead, eager", replace(OURS, backend="eager", config=LookaheadConfig())),
            ("paper (5,15,15), eager", paper(5, 15, 15, prompt=True, backend="eager")),
        )
    ),
)
ON_CUDA = (
    replace(ALONE, label="half autoregressive, graph", dtype=HALF, backend="graph"),
    replace(OURS, label="half lookahead, graph", dtype=HALF, backend="graph", config=LookaheadConfig()),
    paper(5, 15, 15, prompt=True, label="half paper (5,15,15), graph", dtype=HALF, backend="graph"),
)
"""The paths of `exactness` that need a GPU."""
FLASH = (
    GREEDY,
    *(
        replace(method, label=f"{method.label}, {'kernel' if backend == 'graph' else 'no kernel'}", backend=backend)
        for method in (ALONE, paper(5, 15, 15, prompt=True), OURS)
        for backend in ("eager", "graph")
    ),
)

DEFAULT = Preset(
    "default",
    "Does lookahead pay here?",
    ("builtin",),
    (GREEDY, LOOKUP, ALONE, OURS, paper(5, 15, 15, prompt=True)),
    Size(None, 128, 3),
    Size(5, 48),
    views.default,
)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "end-to-end",
            "End to end (the paper's figure 5)",
            ("mt-bench", "humaneval", "mbpp", "gsm8k"),
            (GREEDY, STATIC, LOOKUP, ALONE, paper(5, 15, 15, prompt=True), OURS),
            Size(None, None),
            Size(1, 48),
            views.end_to_end,
            quick_methods=(GREEDY, LOOKUP, ALONE, paper(5, 15, 15, prompt=True), OURS),
        ),
        Preset(
            "flash",
            "With and without the attention kernel (figures 6 and 7)",
            ("mt-bench", "humaneval", "classeval"),
            FLASH,
            Size(20, 512),
            Size(2, 64),
            views.flash,
            cuda=True,
        ),
        Preset(
            "sampling",
            "Sampling (table 2)",
            ("cnn-dm", "xsum"),
            (ALONE, paper(5, 15, 15, prompt=True), OURS),
            Size(100, 256),
            Size(1, 32),
            views.sampling,
            temperatures=(0.0, 1.0),
            quick_methods=(ALONE, OURS),
        ),
        Preset(
            "ablation",
            "Ablation (table 3)",
            ("mt-bench",),
            (*TABLE_3, ALONE, *SOURCE_METHODS),
            Size(None, 512),
            Size(1, 32),
            views.ablation,
            quick_methods=(*TABLE_3, ALONE, *(only(name) for name in SOURCES), only(*SOURCES)),
        ),
        Preset(
            "configs",
            "Good configs (table 4)",
            ("mt-bench",),
            (GREEDY, ALONE, *GRID),
            Size(20, 256),
            Size(1, 48),
            search.show,
            more=search.measure,
            quick_methods=(GREEDY, ALONE, *(paper(n, w, w) for n in (3, 5) for w in (3, 7, 15))),
        ),
        Preset(
            "overhead",
            "S and speedup against the window (figure 8)",
            ("mt-bench",),
            (GREEDY, ALONE, *(paper(5, window, window) for window in WINDOWS)),
            Size(20, 256, 3),
            Size(1, 48),
            views.overhead,
        ),
        Preset(
            "exactness",
            "Exactness (appendix E)",
            ("mt-bench",),
            EXACT,
            Size(None, 256),
            Size(1, 6),
            exactness.show,
            more=exactness.margins,
        ),
        Preset(
            "scaling-law",
            "The scaling law (figure 4)",
            ("mt-bench",),
            LAW,
            Size(20, 256),
            Size(2, 48),
            law.show,
            quick_methods=tuple(paper(n, w, w) for n in (3, 5) for w in (1, 4, 16)),
        ),
        Preset(
            "scaling",
            "What more GPUs buy (a projection)",
            ("mt-bench", "humaneval", "classeval"),
            (),
            Size(20, 256),
            Size(1, 32),
            projection.show,
            more=projection.shares,
            work=projection.work,
        ),
    )
}
