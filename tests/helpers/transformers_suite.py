"""transformers' own generation tests, with every call of `generate` made twice.

`python tests/helpers/transformers_suite.py TREE` takes a source tree of the installed version of transformers. The
tree's tests run in a pytest of their own, with this file as a plugin. Each outermost call that is greedy or sampled is
made stock and with the hook, from the same random state, and the results are compared. A test gets stock's result and
stock's random state, so it goes on as if we were not there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from pairs import Pair, Recorder, first_difference, one_line, same_cache, tokens_of
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

import lookahead

ROOT = Path(__file__).parents[2]
TREE, REPORT = "LOOKAHEAD_TRANSFORMERS_TREE", "LOOKAHEAD_SUITE_REPORT"
SETTINGS = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40}
MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt",
    "falcon", "stablelm", "cohere", "olmo2", "mixtral", "granite", "starcoder2", "bloom", "mamba",
)  # fmt: skip
"""Folders of TREE/tests/models."""
SAME, REFUSED, TIE, DIFFERENT, CRASHED = "same", "refused", "tie", "different", "crashed"
SKIPPED, FAILED = "not ours", "stock fails"
OUTCOMES = (SAME, REFUSED, TIE, DIFFERENT, CRASHED, FAILED, SKIPPED)
CLOSEST = 1e-5
"""Two scores are tied within this part of the largest one. The tests' models have narrow weights, and so near ties."""


@dataclass
class Call:
    """What came of one call of `generate`."""

    outcome: str
    detail: str = ""
    model: str = ""
    test: str = ""


# The plugin


def make_hook() -> lookahead.Decoding:
    return lookahead.decoding(**SETTINGS)


class Tee(BaseStreamer):
    """Keeps what it hands on."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.kept = streamer, Recorder()

    def put(self, value: torch.Tensor) -> None:
        self.kept.put(value)
        self.streamer.put(value)

    def end(self) -> None:
        self.kept.end()
        self.streamer.end()


class Twice:
    """Stands for `GenerationMixin.generate`; `told` gets a `Call` for every outermost call."""

    def __init__(
        self, stock: Callable[..., Any], told: Callable[[Call], None], hook: Callable[[], Any] = make_hook
    ) -> None:
        self.stock, self.told, self.hook = stock, told, hook
        self._inside = False

    def method(self) -> Callable[..., Any]:
        @functools.wraps(self.stock)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self(model, args, kwargs)

        return generate

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return self.stock(model, *args, **kwargs)
        self._inside = True
        try:
            return self._outermost(model, args, kwargs)
        finally:
            self._inside = False

    def _outermost(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def tell(outcome: str, detail: str = "") -> None:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
            self.told(Call(outcome, detail, type(model).__name__, test))

        reason = why_not(model, args, kwargs)
        if reason:
            tell(SKIPPED, reason)
            return self.stock(model, *args, **kwargs)
        # 1. Copies of what a call may change, for the hooked run and for one that asks for the scores.
        before, streamer = random_state(), kwargs.get("streamer")
        if streamer is not None:
            kwargs = {**kwargs, "streamer": Tee(streamer)}
        try:
            ours, again = (copied(model, args, kwargs) for _ in range(2))
        except Exception as error:
            tell(SKIPPED, f"its arguments cannot be copied: {type(error).__name__}")
            return self.stock(model, *args, **kwargs)
        # 2. Stock; then the hook, from the same random state.
        try:
            stock = self.stock(model, *args, **kwargs)
        except Exception as error:
            tell(FAILED, type(error).__name__)
            raise
        after = random_state()
        try:
            set_random_state(before)
            tell(*self._compare(model, ours, again, stock, kwargs, before))
        finally:
            set_random_state(after)
        return stock

    def _compare(
        self, model: Any, ours: Any, again: Any, stock: Any, kwargs: dict[str, Any], before: tuple[Any, ...]
    ) -> tuple[str, str]:
        hook = self.hook()
        try:
            output = self.stock(model, *ours[0], **ours[1], custom_generate=hook)
        except Exception as error:
            if is_refusal(error):
                return REFUSED, one_line(error)
            return CRASHED, f"{type(error).__name__}: {one_line(error)}"
        try:
            if torch.equal(tokens_of(output), tokens_of(stock)):
                everything_same(Pair(stock, output, hook, kwargs, ours[1]))
                return SAME, ""
            set_random_state(before)
            scored = {**again[1], "return_dict_in_generate": True, "output_scores": True}
            scores = self.stock(model, *again[0], **scored).scores
            found = first_difference(tokens_of(stock), tokens_of(output), scores)
            return (TIE if found.margin <= CLOSEST * found.largest else DIFFERENT), found.text
        except Exception as error:
            return DIFFERENT, f"{type(error).__name__}: {one_line(error)}"


def why_not(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call is none for the hook; nothing if it is one."""
    if kwargs.get("custom_generate") is not None:
        return "custom_generate"
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    if kwargs.get("cache_implementation") == "paged":
        return "paged"
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    more = {k: v for k, v in kwargs.items() if k not in ("generation_config", "streamer", "assistant_model")}
    try:
        config, _ = model._prepare_generation_config(copy.deepcopy(given), **more)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
    except Exception:
        return ""  # stock will say what is wrong
    return "" if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) else str(mode)


def is_refusal(error: Exception) -> bool:
    """Whether lookahead itself raised it, with a message of one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(lookahead.__file__).parent in Path(last.filename).parents and (last.line or "").startswith("raise ")
    return isinstance(error, ValueError) and ours and "\n" not in str(error)


def copied(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with a copy of everything that a call may change; models and tokenizers stay."""
    kept = {id(model): model}
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.nn.Module | transformers.PreTrainedTokenizerBase):
            kept[id(value)] = value
        elif isinstance(value, torch.Tensor):
            kept[id(value)] = value.detach().clone()
        elif isinstance(value, torch.Generator):
            kept[id(value)] = value.clone_state()
        elif isinstance(value, Tee):
            kept[id(value)] = Recorder()
    return copy.deepcopy((args, kwargs), kept)


def random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    numpy.random.set_state(state[3])


def everything_same(pair: Pair) -> None:
    """Equal tokens given, assert that scores, logits, cache and what was streamed are equal, too."""
    pair.same()
    if pair.made_stock.get("streamer") is not None:
        puts = [kept.puts for kept in (pair.made_stock["streamer"].kept, pair.made_ours["streamer"])]
        assert [put.tolist() for put in puts[0]] == [put.tolist() for put in puts[1]], "the streamer got something else"
    stock, ours = (cache_of(*both) for both in ((pair.stock, pair.made_stock), (pair.ours, pair.made_ours)))
    assert (stock is None) == (ours is None), "one of the two has a cache"
    if stock is None or not stock.get_seq_length():
        return
    mask = pair.made_stock.get("attention_mask")
    if mask is not None:
        mask = mask.repeat_interleave(len(tokens_of(pair.stock)) // len(mask), dim=0)
        mask = torch.nn.functional.pad(mask, (0, max(0, stock.get_seq_length() - mask.shape[1])), value=1)
    same_cache(stock, ours, mask)


def cache_of(output: Any, given: Any) -> Any:
    """The cache that came back, or that was given to be filled."""
    returned = getattr(output, "past_key_values", None)
    return given.get("past_key_values") if returned is None else returned


def pytest_configure(config: Any) -> None:
    report = os.environ.get(REPORT)
    if report is None:
        return

    def tell(call: Call) -> None:
        with open(report, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(call)) + "\n")

    GenerationMixin.generate = Twice(GenerationMixin.generate, tell).method()  # type: ignore[method-assign]


# The runner


def run_tree(
    tree: Path, models: Sequence[str], selected: str = "", marked: str = "generate", more: Sequence[str] = ()
) -> tuple[int, list[Call]]:
    """Run a tree's tests of these models; pytest's exit code and the calls."""
    files = [tree / "tests" / "models" / name / f"test_modeling_{name}.py" for name in models]
    found = [str(path.relative_to(tree)) for path in files if path.is_file()]
    if not found:
        raise ValueError(f"{tree} has no tests/models/*/test_modeling_*.py of {', '.join(models)}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "calls.jsonl"
        path = [str(ROOT / "src"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(path), REPORT: str(report), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "transformers_suite", "-p", "no:cacheprovider", "-q"]
        command += ["--tb=no", *(["-m", marked] if marked else []), *(["-k", selected] if selected else [])]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run([*command, *more, *found], cwd=tree, env={**inherited, **variables}, check=False)
        lines = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
    return done.returncode, [Call(**json.loads(line)) for line in lines]


def summary(calls: Sequence[Call]) -> str:
    """A table of model classes and outcomes, the reasons, and each call that is wrong."""
    counts = Counter((call.model, call.outcome) for call in calls)
    names = sorted({call.model for call in calls})
    width = max(map(len, [*names, "all"]), default=5)
    lines = [f"{'':{width}} " + " ".join(f"{name:>12}" for name in OUTCOMES)]
    for name in names:
        lines.append(f"{name:{width}} " + " ".join(f"{counts[name, outcome]:12d}" for outcome in OUTCOMES))
    total = Counter(call.outcome for call in calls)
    lines.append(f"{'all':{width}} " + " ".join(f"{total[outcome]:12d}" for outcome in OUTCOMES))
    for outcome in (REFUSED, SKIPPED, FAILED):
        reasons = Counter(same_reason(call.detail) for call in calls if call.outcome == outcome)
        lines += [f"{outcome}: {count} x {reason}" for reason, count in reasons.most_common()]
    wrong = (TIE, DIFFERENT, CRASHED)
    lines += [f"{c.outcome.upper()}: {c.model}: {c.detail} ({c.test})" for c in calls if c.outcome in wrong]
    return "\n".join(lines)


def same_reason(text: str) -> str:
    """A message without model types and numbers, so that equal reasons are counted together."""
    text = re.sub(r"^model type '[^']*'", "the model", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)


def verdict(code: int, calls: Sequence[Call]) -> str:
    """What is wrong with a run; nothing if all is well. A test of transformers that fails by itself is not."""
    count = Counter(call.outcome for call in calls)
    if count[DIFFERENT] or count[CRASHED]:
        return f"{count[DIFFERENT]} calls gave something else, and {count[CRASHED]} crashed"
    if code not in (0, 1):
        return f"pytest itself ended with {code}"
    return "" if count[SAME] else "no call was compared"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run transformers' generation tests with every call made twice.")
    parser.add_argument("tree", nargs="?", type=Path, default=os.environ.get(TREE), help=f"a source tree (or ${TREE})")
    parser.add_argument("--models", default=",".join(MODELS), help="folders of tests/models, with commas between")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest's")
    parser.add_argument(
        "-m", default="generate", metavar="MARK", help="as pytest's; '' for all tests (default: %(default)s)"
    )
    parser.add_argument("--report", type=Path, help="write all calls there, as JSON")
    parser.add_argument("more", nargs="*", help="more arguments of pytest, behind --")
    options = parser.parse_args(arguments)
    if options.tree is None:
        parser.error(f"name a source tree of transformers {transformers.__version__}, or set {TREE}")
    tree = Path(options.tree).absolute()
    try:
        code, calls = run_tree(tree, options.models.split(","), options.k, options.m, options.more)
    except ValueError as error:
        parser.error(str(error))
    if options.report:
        options.report.write_text(json.dumps([asdict(call) for call in calls], indent=1) + "\n", encoding="utf-8")
    wrong = verdict(code, calls)
    print(summary(calls), wrong or "all well", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
