"""What the command can run by name: prompt sets, methods, sizes, and the paper's figures to show beside the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from lookahead.bench.paper import tables
from lookahead.bench.paper.parallel import ranks
from lookahead.bench.paper.rouge import rouge
from lookahead.bench.report.sections import PaperFigures, Section
from lookahead.bench.run.methods import Method, named
from lookahead.bench.run.summary import BenchRun
from lookahead.config import SOURCES, LookaheadConfig


@dataclass(frozen=True)
class Size:
    """How much to run: prompts of each set and new tokens of each answer (None: the set's own), times each."""

    limit: int | None
    max_tokens: int | None
    repeats: int = 1


@dataclass(frozen=True)
class Preset:
    """`tables` makes sections before the common one, or instead of it if not `common`. `paper` are its figures, shown
    in the common one, and `notes` stand below it. `turns` are those of each conversation,
    None for all."""

    name: str
    title: str
    sets: tuple[str, ...]
    methods: tuple[Method, ...]
    full: Size
    quick: Size
    paper: PaperFigures = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    tables: Callable[[BenchRun], list[Section]] | None = None
    common: bool = True
    temperatures: tuple[float, ...] = (0.0,)
    cuda: bool = False
    warm: bool = False
    turns: int | None = None
    quick_methods: tuple[Method, ...] = field(default=(), repr=False)

    def check(self, device: str) -> None:
        if self.cuda and device != "cuda":
            raise ValueError(f"preset {self.name!r} compares GPU kernels and needs a CUDA device")


GREEDY, LOOKUP = named("hf-greedy"), named("hf-prompt-lookup")
STATIC = named("hf-static", device="cuda")  # compiling for a CPU takes minutes and gains nothing
ALONE, OURS = named("autoregressive"), named("lookahead")
WHOLE = LookaheadConfig()
"""The default with its whole budget in every step, whatever a step costs here."""


def paper(ngram: int, window: int, guesses: int, *, prompt: bool = False, **where: Any) -> Method:
    """The paper's order: (N, W, G)."""
    label = f"({ngram},{window},{guesses}){' + prompt' if prompt else ''}"
    made = named(f"paper{'+prompt' if prompt else ''}:{window},{ngram},{guesses}", label)
    return replace(made, **where)


def only(*names: str) -> Method:
    """The default config with these sources alone; without the window where `jacobi` is not among them."""
    config = replace(WHOLE, sources=names, window=WHOLE.window if "jacobi" in names else 0)
    return Method("+".join(names) if len(names) < len(SOURCES) else "all four", "lookahead", config)


def cold(label: str, *names: str) -> Method:
    """The same, starting every prompt cold even in a warm run."""
    config = only(*names).config
    assert config is not None
    return Method(label, "lookahead", replace(config, recycle_scope="request"))


PAPER = paper(5, 15, 15, prompt=True)
# What the paper reports: speedup and S of LLaMA-2-7B-Chat on an A100.
FIGURE_5 = {
    (data, PAPER.label, 0.0): "1.5x to 2.3x" for data in ("mt-bench", "humaneval", "mbpp", "gsm8k", "classeval")
}
TABLE_2 = {
    ("cnn-dm", PAPER.label, 0.0): "1.57x, 1.72",
    ("cnn-dm", PAPER.label, 1.0): "1.46x, 1.64",
    ("xsum", PAPER.label, 0.0): "1.60x, 1.77",
    ("xsum", PAPER.label, 1.0): "1.50x, 1.67",
}
TABLE_3 = {
    GREEDY: "1.00x, 1.00",
    LOOKUP: "1.44x, 1.55",
    paper(10, 1, 3, prompt=True): "1.36x, 1.45",
    paper(5, 1, 10, prompt=True): "1.36x, 1.51",
    paper(5, 1, 30): "1.04x, 1.12",
    paper(5, 1, 30, prompt=True): "1.46x, 1.59",
    paper(5, 30, 1): "1.61x, 1.79",
    paper(5, 15, 15): "1.78x, 1.96",
    PAPER: "1.88x, 2.05",
}
SOURCE_METHODS = tuple(only(*names) for count in range(1, len(SOURCES) + 1) for names in combinations(SOURCES, count))
WINDOWS = (1, 2, 5, 10, 15, 20, 30)
GRID = tuple(paper(ngram, window, window) for ngram in (3, 4, 5, 6, 7) for window in (3, 5, 7, 10, 15, 20))
LAW = tuple(paper(ngram, window, window) for ngram in (3, 5, 7) for window in (1, 2, 4, 8, 16, 32))
ACCEPTANCE = (
    GREEDY, named("jacobi"), named("prompt-lookup"), cold("suffix alone", "suffix"), cold("recycle alone", "recycle"),
    cold("suffix + recycle", "suffix", "recycle"), cold("all, no window", *(s for s in SOURCES if s != "jacobi")),
    paper(5, 15, 15), PAPER, cold("default, cold", *SOURCES), Method("default, warm", "lookahead", WHOLE),
)  # fmt: skip
HALF = "bfloat16"


def _paths(dtype: str, backend: str | None, suffix: str) -> tuple[Method, ...]:
    name = "fp32" if dtype == "float32" else "half"
    where: dict[str, Any] = {"dtype": dtype, "backend": backend}
    return (
        replace(ALONE, label=f"{name} autoregressive{suffix}", **where),
        replace(OURS, label=f"{name} lookahead{suffix}", config=WHOLE, **where),
        replace(PAPER, label=f"{name} paper (5,15,15){suffix}", **where),
    )


EXACT = (
    replace(GREEDY, label="fp32 hf-greedy", dtype="float32"),
    *_paths("float32", None, ""),
    replace(GREEDY, label="half hf-greedy, eager attention", dtype=HALF, attention="eager"),
    replace(GREEDY, label="half hf-greedy, sdpa", dtype=HALF, attention="sdpa"),
    *_paths(HALF, "eager", ", eager"),
    *(replace(method, device="cuda") for method in _paths(HALF, "graph", ", graph")),
    # The quantised model, and how far its text is from that of fp32.
    *(replace(m, label=f"int8 {m.label}", dtype="int8", backend="cpu", device="cpu") for m in (ALONE, OURS)),
)
FLASH = (
    GREEDY,
    *(
        replace(method, label=f"{method.label}, {'kernel' if backend == 'graph' else 'no kernel'}", backend=backend)
        for method in (ALONE, PAPER, OURS)
        for backend in ("eager", "graph")
    ),
)
PARALLEL = (
    GREEDY, ALONE, PAPER, paper(5, 30, 30, prompt=True),
    *(replace(method, label=f"default, {budget} tokens", config=replace(WHOLE, budget=budget))
      for method, budget in ((OURS, 128), (OURS, 256))),
)  # fmt: skip
"""With room for larger windows and more draft tokens, which several ranks have."""
MT_BENCH, BOTH = ("mt-bench",), ("mt-bench", "humaneval")

# fmt: off
DEFAULT = Preset(
    "default", "Does lookahead pay here?", ("builtin",), (GREEDY, STATIC, LOOKUP, ALONE, OURS, PAPER),
    Size(None, 128, 3), Size(5, 48),
)
PRESETS = {preset.name: preset for preset in (
    Preset(
        "end-to-end", "End to end (the paper's figure 5)", (*BOTH, "mbpp", "gsm8k", "classeval"),
        (GREEDY, STATIC, LOOKUP, ALONE, PAPER, OURS), Size(None, None), Size(1, 48), FIGURE_5,
        ("paper: speedups over transformers' greedy search of 7B to 70B models on A100s (section 5.1: up to 2.3x on "
         "HumanEval). The figure gives no numbers with its bars.",),
    ),
    Preset(
        "flash", "With and without the attention kernel (figures 6 and 7)", (*BOTH, "classeval"), FLASH,
        Size(20, 512), Size(2, 64), notes=(
            "The paper, 7B on MT-Bench: lookahead with FlashAttention 1.9x, autoregressive with FlashAttention 1.07x, "
            "both over transformers' greedy search; the kernel makes lookahead 1.20x as fast. Without the kernel here: "
            "the eager backend, SDPA with a dense mask. The kernel's backend also fuses layers and captures the step "
            "as one graph, so the gain is that of all three.",
        ), cuda=True,
    ),
    Preset(
        "sampling", "Sampling (table 2)", ("cnn-dm", "xsum"), (GREEDY, ALONE, PAPER, OURS), Size(None, 256),
        Size(1, 32), TABLE_2, (
            "With the same seeds lookahead draws the tokens that autoregressive sampling draws. paper: speedup and S "
            "of LLaMA-2-7B-Chat.",
        ), tables=rouge, temperatures=(0.0, 0.7, 1.0), quick_methods=(ALONE, OURS),
    ),
    Preset(
        "ablation", "Ablation (table 3)", MT_BENCH, (*TABLE_3, ALONE, *SOURCE_METHODS), Size(None, 512), Size(1, 32),
        {("mt-bench", method.label, 0.0): reported for method, reported in TABLE_3.items()},
        ("paper: speedup and S of LLaMA-2-7B-Chat. Below it each source alone and combined, at the default budget; a "
         "window only with `jacobi`.",),
        quick_methods=(*TABLE_3, ALONE, *(only(name) for name in SOURCES), only(*SOURCES)),
    ),
    Preset(
        "configs", "Good configs (table 4)", MT_BENCH, (GREEDY, ALONE, *GRID), Size(20, 256), Size(1, 48),
        tables=tables.best, quick_methods=(GREEDY, ALONE, *(paper(n, w, w) for n in (3, 5) for w in (3, 7, 15))),
    ),
    Preset(
        "overhead", "S and speedup against the window (figure 8)", MT_BENCH,
        (GREEDY, ALONE, *(paper(5, window, window) for window in WINDOWS)), Size(20, 256, 3), Size(1, 48), notes=(
            "The paper (figure 8, MT-Bench): S does not depend on the device; the speedup does: over 1.5x on an A100 "
            "and about 1.3x on an RTX 3090. Its curves have no numbers in the text.",
        ),
    ),
    Preset(
        "exactness", "Exactness (appendix E)", MT_BENCH, EXACT, Size(None, 256), Size(1, 6), tables=tables.exactness,
        common=False,
    ),
    Preset(
        "identity", "Exactness in the run's own precision", MT_BENCH, (GREEDY, ALONE, PAPER, OURS), Size(None, 256),
        Size(1, 6), tables=tables.identity, common=False,
    ),
    Preset(
        "scaling-law", "The scaling law (figure 4)", MT_BENCH, LAW, Size(20, 256), Size(2, 48), tables=tables.law,
        common=False, quick_methods=tuple(paper(n, w, w) for n in (3, 5) for w in (1, 4, 16)),
    ),
    Preset(
        "parallel", "Lookahead parallelism (figures 6 and 7)", (*BOTH, "classeval"), PARALLEL, Size(20, 256),
        Size(1, 32), notes=(
            "The paper, on 8 A100s: up to 4x on ClassEval, where tensor and pipeline parallelism have 0.75x to 0.82x. "
            "With --ranks each of our methods runs on one rank and on all of them.",
        ), tables=ranks,
    ),
    Preset(
        "acceptance", "S of every source, and of the paper's method", BOTH, ACCEPTANCE, Size(20, 192), Size(1, 32),
        warm=True, turns=1,
    ),
    Preset(
        "speed", "The default against autoregressive decoding, prompt by prompt", BOTH, (ALONE, OURS), Size(8, 128),
        Size(1, 32), tables=tables.prompt_by_prompt, warm=True, turns=1,
    ),
)}
# fmt: on
