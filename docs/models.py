"""Try every generative class of transformers and write models.md: `python docs/models.py`, or `--check` to compare.

Each class is built tiny with random weights and decoded by `model.generate`, as it is and with
`custom_generate=lookahead.decoding(...)`. It may be refused; other tokens are a bug, and the command fails. An exact
class is decoded on the two fast backends, too, or its row says why it cannot be.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from tiny_models import WINDOW, tiny_config, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lookahead
from lookahead import LookaheadConfig
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.choose import cpu_backend
from lookahead.backends.support import check_supported
from lookahead.config import StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.models.facts import UnsupportedModelError
from lookahead.transformers_hook import facts

PAGE = Path(__file__).parent / "models.md"
HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
"""Where the tiny models are that take pictures."""
CONDITIONAL = "ForConditionalGeneration"
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of the classes end; those of AutoModelForCausalLM under other names are causal, too."""
LONG = [5, 9, 17, 23, 42, 9, 17, 30, 5, 9, 17, 23, 51, 8, 11, 9, 17, 23, 42, 33, 5, 9]
PROMPTS = (LONG, LONG[3:14], LONG[7:10])
NEW_TOKENS, EOS, SEED = 24, 7, 11
SETTINGS = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40}
CASES = {
    "greedy": ([LONG], False),
    "sampled": ([LONG], True),
    "greedy batch": (PROMPTS, False),
    "sampled batch": (PROMPTS, True),
}
TOLERANCE = 1e-4
"""Of the logits, relative. Rounding stays below 1e-5 in all exact classes but one, which is below this."""
TIME_LIMIT = 120.0
"""Seconds for one class, which takes about one."""
LONGEST_REASON = 250
"""Characters of a message on the page; torch's own can be very long."""
Answer = tuple[list[list[int]], torch.Tensor | None]
EXACT, REFUSED, UNBUILT, WRONG = "exact", "refused", "cannot be built small", "WRONG"
IN_CHAINS, WITH_IMAGES = "in chains", "also with images"
ARGUMENTS = {f"Qwen3OmniMoe{CONDITIONAL}": {"return_audio": False, "thinker_max_new_tokens": NEW_TOKENS}}
"""Class -> arguments without which its `generate` would not give these tokens alone."""


def with_images(name: str) -> tuple[Any, dict[str, Any]] | None:
    """A tiny model of this class and the inputs of a `generate` call with images in it; None where there are none.

    Where a class has them and is exact on text, they are decoded, too, and its row says what came of it.
    """
    sys.path.append(str(HELPERS))
    from pictures import FAMILIES, PICTURES

    known = {family.name + family.ending: key for key, family in reversed(FAMILIES.items())}
    return PICTURES[known[name]]() if name in known else None


def generative(name: str) -> bool:
    """Whether this public name of transformers gets a row: its class can generate, and is no other name's, too."""
    if not (name.endswith((*CAUSAL, CONDITIONAL)) or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return False
    made = getattr(transformers, name, None)
    return (
        made is not None
        and made.__name__ == name
        and issubclass(made, transformers.PreTrainedModel)
        and made.can_generate()
    )


def model_type(name: str) -> str:
    """The model type of a class; a few configs, which stand inside others only, have none."""
    made = getattr(transformers, name).config_class
    return made.model_type or made.__name__


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """A left-padded batch and its mask."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(
    model: Any, case: str, inputs: dict[str, Any] | None = None, tokens_alone: bool = False, **how: Any
) -> Answer:
    """New tokens per prompt, and, unless it gives `tokens_alone`, the logits [B, tokens, V] they were taken from.

    Sampled rows may end early, and the logits after a row's end mean nothing: those are not kept.
    """
    prompts, sample = CASES[case]
    batch = padded(prompts) if inputs is None else inputs
    torch.manual_seed(SEED)
    output = model.generate(
        **batch, **how, **ARGUMENTS.get(type(model).__name__, {}), max_new_tokens=NEW_TOKENS, do_sample=sample,
        eos_token_id=EOS if sample else None, pad_token_id=0, return_dict_in_generate=not tokens_alone,
        output_logits=not tokens_alone,
    )  # fmt: skip
    sequences = output if tokens_alone else output.sequences
    logits = None if sample or tokens_alone else torch.stack(output.logits, dim=1)
    return sequences[:, batch["input_ids"].shape[1] :].tolist(), logits


def difference(found: Answer, expected: Answer) -> str:
    """What is wrong with an answer; nothing if it is exact."""
    if found[0] != expected[0]:
        return "other tokens"
    if found[1] is not None and expected[1] is not None:
        distance = (found[1] - expected[1]).norm(dim=-1) / expected[1].norm(dim=-1).clamp_min(1e-6)
        if not float(distance.max()) <= TOLERANCE:
            return "other logits"
    return ""


class Verdict(NamedTuple):
    """What came of a class: the texts of its row. `cuda` and `cpu`: whether it is fast there, or why not."""

    text: str
    cuda: str = ""
    cpu: str = ""


class StockError(Exception):
    """transformers itself cannot decode the model from these inputs."""


def verdict(name: str) -> Verdict:
    """What came of one class."""
    try:
        model = tiny_model(name)
    except Exception as error:
        return Verdict(untested(name, one_line(error)))
    try:
        text = decoded(model, CASES)
    except StockError as error:
        return Verdict(untested(name, f"transformers' own generate fails on it: {one_line(error)}"))
    if status(text) != EXACT:
        return Verdict(text)
    if any(known.chains for known in facts.known.values()):  # a class may call the `generate` of a part of it
        text = text.replace(EXACT, f"{EXACT}, {IN_CHAINS}" + ("" if text == EXACT else ","), 1)
    cuda, cpu = decoded(model, CASES, backend="graph"), on_cpu_backend(model)
    if pictured := with_images(name) if text in (EXACT, f"{EXACT}, {IN_CHAINS}") else None:
        seen = {backend: decoded_with(pictured, backend) for backend in ("auto", "graph")}
        if seen["auto"] == EXACT:
            text = f"{text}, {WITH_IMAGES}"
            cuda = seen["graph"] if cuda == EXACT else cuda
        elif seen["auto"].startswith(REFUSED):
            text = f"{text} on text; with images {seen['auto']}"
        else:
            text = f"{WRONG}: with images: {seen['auto']}"
    return Verdict(text, *map(speed, (cuda, cpu)))


def decoded_with(pictured: tuple[Any, dict[str, Any]], backend: str) -> str:
    """What came of decoding a prompt with images."""
    try:
        return decoded(pictured[0], ("greedy", "sampled"), pictured[1], backend)
    except StockError as error:
        return f"transformers' own generate fails on it: {one_line(error)}"


def on_cpu_backend(model: Any) -> str:
    """What came of decoding on the CPU backend, which the hook does not use."""
    expected = generate(model, "greedy batch")[0]
    try:
        backend = cpu_backend(model)
    except UnsupportedModelError as error:
        return f"{REFUSED}: {one_line(error)}"
    sequences = [
        DecodingSequence(prompt, LookaheadConfig(**SETTINGS), rules=StopRules(NEW_TOKENS)) for prompt in PROMPTS
    ]
    engine = Engine(backend)
    for sequence in sequences:
        engine.submit(Request(sequence))
    while engine.running:
        engine.step()
    same = [sequence.output for sequence in sequences] == expected
    return EXACT if same else f"{WRONG}: other tokens on the CPU backend"


def speed(text: str) -> str:
    """What a row says of a fast backend."""
    reason = re.sub(rf"^{REFUSED}: (the \w+ backend does not run this model: )?", "", text)
    reason = re.sub(r"^there is no reader for (its )?\w+", "no reader", reason)
    return "yes" if text == EXACT else reason


def untested(name: str, reason: str) -> str:
    """The row of a class that was not decoded. An encoder-decoder needs no model: its config says enough to refuse."""
    try:
        config = tiny_config(getattr(transformers, name).config_class)
        if config.is_encoder_decoder:
            check_supported(SimpleNamespace(config=config))
    except ValueError as error:
        return f"{REFUSED}: {one_line(error)}"
    except Exception:
        pass
    return f"{UNBUILT}: {reason}"


def decoded(model: Any, cases: Iterable[str], inputs: dict[str, Any] | None = None, backend: str = "auto") -> str:
    """What came of decoding, with `inputs` or the prompts of the cases."""
    hook = lookahead.decoding(**SETTINGS, backend=backend)
    wrong, refused, saved, tokens_alone = [], "", 0, False
    for case in cases:
        # First as it is: a model that a pass may change is to be seen before lookahead's passes.
        try:
            expected = generate(model, case, inputs)
        except Exception as error:
            raise StockError(str(error) or type(error).__name__) from error
        hook.stats = []
        try:
            try:
                found = generate(model, case, inputs, tokens_alone, custom_generate=hook)
            except UnsupportedModelError as error:
                if tokens_alone or "return_dict_in_generate" not in str(error):
                    raise
                tokens_alone = True  # the graph backend gives no cache with recurrent states back
                found = generate(model, case, inputs, tokens_alone, custom_generate=hook)
        except ValueError as error:
            refused = one_line(error)
            if case == "greedy":
                return f"{REFUSED}: {refused}"
        except Exception as error:
            return f"{WRONG}: {case}: {one_line(error)}"
        else:
            if not hook.stats:
                return f"{UNBUILT}: its own generate never calls `custom_generate`"
            saved += sum(stats.generated_tokens - stats.steps for stats in hook.stats)
            wrong += [f"{what} ({case})" for what in (difference(found, expected),) if what]
    if wrong:
        return f"{WRONG}: {', '.join(wrong)}"
    if not saved:
        return f"{WRONG}: no draft token was accepted, so nothing was shown"
    return f"{EXACT} one prompt at a time; a batch is refused: {refused}" if refused else EXACT


def one_line(error: Exception) -> str:
    """The reason alone, the same in every run: no model type (the row has it) and no measured numbers."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"^model type '[^']*' cannot be decoded exactly: ", "", text)
    text = re.sub(r"^model type '[^']*'", "it", text)
    text = re.sub(r" \(relative error [^)]*\)", "", text)
    text = text.split(". ")[0].replace("|", "\\|").rstrip(".")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def work(name: str, answer: Connection) -> None:
    """In a process of its own: some classes print, and one that hangs or dies must not stop the walk."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    answer.send(verdict(name))


def walk(names: Iterable[str], workers: int) -> dict[str, Verdict]:
    """Class -> verdict."""
    context = multiprocessing.get_context("fork")  # the children find transformers imported
    waiting, verdicts = list(names), dict[str, Verdict]()
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(waiting[0], theirs))
            process.start()
            theirs.close()
            running[mine] = waiting.pop(0), process, time.monotonic()
        ready = wait(running, timeout=1.0)
        for mine, (name, process, begin) in list(running.items()):
            if mine in ready:
                try:
                    verdicts[name] = mine.recv()
                except EOFError:
                    verdicts[name] = Verdict(f"{WRONG}: its process died")
            elif time.monotonic() - begin > TIME_LIMIT:
                process.kill()
                verdicts[name] = Verdict(f"{UNBUILT}: not done within {TIME_LIMIT:.0f} seconds")
            else:
                continue
            process.join()
            del running[mine]
            if sys.stderr.isatty():
                print(f"\r{len(verdicts):4d} {name:60}", end="\r", file=sys.stderr)
    return verdicts


def status(verdict: str) -> str:
    return next(name for name in (EXACT, REFUSED, UNBUILT, WRONG) if verdict.startswith(name))


def is_wrong(verdict: Verdict) -> bool:
    return any(WRONG in text for text in verdict)


def table(verdicts: dict[str, Verdict]) -> list[str]:
    """The page's lines about these classes."""
    return [
        f"| `{name}` | `{model_type(name)}` | {' | '.join(verdicts[name])} |"
        for name in sorted(verdicts, key=lambda name: (name.lower(), name))
    ]


def counts(verdicts: dict[str, Verdict]) -> str:
    """What came of these classes, as a row of the page's first table."""
    count = Counter(status(verdict.text) for verdict in verdicts.values())
    fast = [sum(verdict[column] == "yes" for verdict in verdicts.values()) for column in (1, 2)]
    return f"{len(verdicts)} | {count[EXACT]} | {fast[0]} | {fast[1]} | {count[REFUSED]} | {count[UNBUILT]}"


def page(verdicts: dict[str, Verdict]) -> str:
    """The document."""
    conditional = {name: text for name, text in verdicts.items() if name.endswith(CONDITIONAL)}
    causal = {name: text for name, text in verdicts.items() if name not in conditional}
    return f"""# Models

Every generative class of transformers {transformers.__version__}, tried by `python docs/models.py`, which also wrote
this page (`--check` tries again and compares). One that gives other tokens fails the command.

| classes | all | exact | fast on CUDA | fast on a CPU | refused | could not be tried |
|---|---|---|---|---|---|---|
| [causal language models](#causal-language-models) | {counts(causal)} |
| [conditional generation](#conditional-generation) | {counts(conditional)} |
| all | {counts(verdicts)} |

There is one row for each public class that can generate and whose name ends in `ForCausalLM`, `LMHeadModel` or
`{CONDITIONAL}`, or that `AutoModelForCausalLM` knows. Two names of one class are one row, and base
classes that cannot generate have none. Every class is given text alone, also where it takes images or sound as well.

**exact**: a tiny model of the class (fp32, CPU, wide random weights, one layer of every kind that its default config
has) was decoded by `model.generate`, as it is and with `custom_generate=lookahead.decoding(...)`: greedy and sampled,
one prompt and a left-padded batch of {len(PROMPTS)}, {NEW_TOKENS} new tokens, with draft tokens accepted. All
tokens were equal, and the greedy ones' logits, too, within {TOLERANCE:.4f} of their norm. Sliding windows were switched
on wherever the config knows them, {WINDOW} tokens wide, and the longest prompt has {len(LONG)}. Vision towers of the
timm package, which text does not use, are left out.

**fast on CUDA**, **fast on a CPU**: whether the graph backend and the CPU backend run the class, and decoded the same
prompts to the same tokens here (the graph backend on the slow twins of its kernels, and where it keeps recurrent states
without logits and caches, which it does not give back); or why not, in a few words. Then the eager backend runs it:
exact in fp32, a few times slower, and in half precision without the promise that the text is that of token-by-token
decoding. Where there are images, the graph backend continued behind a prompt with one.
These classes run there with [quantised weights](quantised.md), too.

**in chains**: the draft tokens of a step are one chain, since the class has a recurrent state, or attention that takes
no mask of ours ([what that costs](limits.md#chains)).

**refused**: `generate` stops with this message before the first token. An encoder-decoder that could not be built, or
that does not start from text, is listed with the message that its config alone gives.

**cannot be built small**: no tiny model of the class could be made, transformers itself cannot decode it from tokens
alone, or its own `generate` passes `custom_generate` by.

## Causal language models

| class | model type | status | fast on CUDA | fast on a CPU |
|---|---|---|---|---|
{chr(10).join(table(causal))}

## Conditional generation

| class | model type | status | fast on CUDA | fast on a CPU |
|---|---|---|---|---|
{chr(10).join(table(conditional))}
"""


def changes(verdicts: dict[str, Verdict], whole: bool) -> list[str]:
    """What differs from the page, as lines of a diff; of some classes alone, the lines that it does not have."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    if not whole:
        return [f"+{line}" for line in table(verdicts) if line not in old]
    return list(difflib.unified_diff(old, page(verdicts).splitlines(), "models.md", "now", n=0, lineterm=""))


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every generative class of transformers and write models.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if models.md is out of date")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("names", nargs="*", metavar="CLASS", help="try these alone and print what came of them")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    # Imported by this, all classes are there in all processes.
    names = [name for name in options.names or dir(transformers) if generative(name)]
    if options.names and set(names) != set(options.names):
        parser.error(f"no generative class of transformers: {', '.join(sorted(set(options.names) - set(names)))}")
    verdicts = walk(names, options.workers)
    wrong = {name: verdict for name, verdict in verdicts.items() if is_wrong(verdict)}
    for name, verdict in (verdicts if options.names else wrong).items():
        print(f"{name}: {' | '.join(verdict)}", file=sys.stderr)
    if not options.names and not options.check:
        PAGE.write_text(page(verdicts), encoding="utf-8", newline="\n")
    differences = changes(verdicts, whole=not options.names) if options.check else []
    if differences:
        print(*differences[:40], "models.md is out of date; run: python docs/models.py", sep="\n", file=sys.stderr)
    return 1 if wrong or differences else 0


if __name__ == "__main__":
    sys.exit(main())
