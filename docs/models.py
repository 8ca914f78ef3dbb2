"""Try every causal LM class of transformers and write models.md: `python docs/models.py`, or `--check` to compare only.

Each class is built tiny with random weights and decoded by `model.generate`, as it is and with
`custom_generate=lookahead.decoding(...)`. It may be refused; other tokens are a bug, and the command fails.
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
from typing import Any

import torch
import transformers
from tiny_models import WINDOW, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import lookahead

PAGE = Path(__file__).parent / "models.md"
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
Answer = tuple[list[list[int]], torch.Tensor | None]
EXACT, REFUSED, UNBUILT, WRONG = "exact", "refused", "cannot be built small", "WRONG"


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """A left-padded batch and its mask."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model: Any, case: str, **how: Any) -> Answer:
    """New tokens per prompt, and the logits [B, tokens, V] they were taken from.

    Sampled rows may end early, and the logits after a row's end mean nothing: those are not kept.
    """
    prompts, sample = CASES[case]
    batch = padded(prompts)
    torch.manual_seed(SEED)
    output = model.generate(
        **batch, **how, max_new_tokens=NEW_TOKENS, do_sample=sample, eos_token_id=EOS if sample else None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = None if sample else torch.stack(output.logits, dim=1)
    return output.sequences[:, batch["input_ids"].shape[1] :].tolist(), logits


def difference(found: Answer, expected: Answer) -> str:
    """What is wrong with an answer; nothing if it is exact."""
    if found[0] != expected[0]:
        return "other tokens"
    if found[1] is not None and expected[1] is not None:
        distance = (found[1] - expected[1]).norm(dim=-1) / expected[1].norm(dim=-1).clamp_min(1e-6)
        if not float(distance.max()) <= TOLERANCE:
            return "other logits"
    return ""


def verdict(kind: str) -> str:
    """What came of one model type: the text of its row."""
    try:
        model = tiny_model(kind)
    except Exception as error:
        return f"{UNBUILT}: {one_line(error)}"
    hook = lookahead.decoding(**SETTINGS)
    wrong, refused, saved = [], "", 0
    for case in CASES:
        # First as it is: a model that a pass may change is to be seen before lookahead's passes.
        try:
            expected = generate(model, case)
        except Exception as error:
            return f"{UNBUILT}: transformers' own generate fails on it: {one_line(error)}"
        try:
            found = generate(model, case, custom_generate=hook)
        except ValueError as error:
            refused = one_line(error)
            if case == "greedy":
                return f"{REFUSED}: {refused}"
        except Exception as error:
            return f"{WRONG}: {case}: {one_line(error)}"
        else:
            saved += sum(stats.generated_tokens - stats.steps for stats in hook.stats)
            wrong += [f"{what} ({case})" for what in (difference(found, expected),) if what]
    if wrong:
        return f"{WRONG}: {', '.join(wrong)}"
    if not saved:
        return f"{WRONG}: no guess was accepted, so nothing was shown"
    return f"{EXACT} one prompt at a time; a batch is refused: {refused}" if refused else EXACT


def one_line(error: Exception) -> str:
    """The reason alone, the same in every run: no model type (the row has it) and no measured numbers."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"^model type '[^']*' cannot be decoded exactly: ", "", text)
    text = re.sub(r"^model type '[^']*'", "it", text)
    text = re.sub(r" \(relative error [^)]*\)", "", text)
    return text.split(". ")[0].replace("|", "\\|").rstrip(".")


def work(kind: str, answer: Connection) -> None:
    """In a process of its own: some classes print, and one that hangs or dies must not stop the walk."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    answer.send(verdict(kind))


def walk(kinds: Iterable[str], workers: int) -> dict[str, str]:
    """Model type -> verdict."""
    context = multiprocessing.get_context("fork")  # the children find transformers imported
    waiting, verdicts = list(kinds), dict[str, str]()
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(waiting[0], theirs))
            process.start()
            theirs.close()
            running[mine] = waiting.pop(0), process, time.monotonic()
        ready = wait(running, timeout=1.0)
        for mine, (kind, process, begin) in list(running.items()):
            if mine in ready:
                try:
                    verdicts[kind] = mine.recv()
                except EOFError:
                    verdicts[kind] = f"{WRONG}: its process died"
            elif time.monotonic() - begin > TIME_LIMIT:
                process.kill()
                verdicts[kind] = f"{UNBUILT}: not done within {TIME_LIMIT:.0f} seconds"
            else:
                continue
            process.join()
            del running[mine]
            if sys.stderr.isatty():
                print(f"\r{len(verdicts):4d} {kind:40}", end="\r", file=sys.stderr)
    return verdicts


def status(verdict: str) -> str:
    return next(name for name in (EXACT, REFUSED, UNBUILT, WRONG) if verdict.startswith(name))


def table(verdicts: dict[str, str]) -> list[str]:
    """The page's lines about these model types."""
    kinds = sorted(verdicts, key=lambda kind: (CLASSES[kind].lower(), kind))
    return [f"| `{CLASSES[kind]}` | `{kind}` | {verdicts[kind]} |" for kind in kinds]


def page(verdicts: dict[str, str]) -> str:
    """The document."""
    count = Counter(map(status, verdicts.values()))
    return f"""# Models

Every causal LM class of transformers {transformers.__version__}, tried by `python docs/models.py`, which also wrote
this page (`--check` tries again and compares). Of {len(verdicts)} model types {count[EXACT]} are exact,
{count[REFUSED]} are refused and {count[UNBUILT]} could not be tried. One that gives other tokens fails the command.

**exact**: a tiny model of the class (fp32, CPU, wide random weights, one layer of every kind that its default config
has) was decoded by `model.generate`, as it is and with `custom_generate=lookahead.decoding(...)`: greedy and sampled,
one prompt and a left-padded batch of {len(PROMPTS)}, {NEW_TOKENS} new tokens, with guesses accepted on the way. All
tokens were equal, and the greedy ones' logits, too, within {TOLERANCE:.4f} of their norm. Sliding windows were switched
on wherever the config knows them, {WINDOW} tokens wide, and the longest prompt has {len(LONG)}.

**refused**: `generate` stops with this message before the first token.

**cannot be built small**: no tiny model of the class could be made, or transformers itself cannot decode it from
tokens alone.

| class | model type | status |
|---|---|---|
{chr(10).join(table(verdicts))}
"""


def changes(verdicts: dict[str, str], whole: bool) -> list[str]:
    """What differs from the page, as lines of a diff; of some model types alone, the lines that it does not have."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    if not whole:
        return [f"+{line}" for line in table(verdicts) if line not in old]
    return list(difflib.unified_diff(old, page(verdicts).splitlines(), "models.md", "now", n=0, lineterm=""))


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every causal LM class of transformers and write models.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if models.md is out of date")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="try these alone and print what came of them")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    _ = transformers.MixtralForCausalLM  # imported here, what every class needs is there in all processes

    verdicts = walk(options.kinds or CLASSES, options.workers)
    wrong = {kind: text for kind, text in verdicts.items() if status(text) == WRONG}
    for kind, text in (verdicts if options.kinds else wrong).items():
        print(f"{kind}: {text}", file=sys.stderr)
    if not options.kinds and not options.check:
        PAGE.write_text(page(verdicts), encoding="utf-8", newline="\n")
    differences = changes(verdicts, whole=not options.kinds) if options.check else []
    if differences:
        print(*differences[:40], "models.md is out of date; run: python docs/models.py", sep="\n", file=sys.stderr)
    return 1 if wrong or differences else 0


if __name__ == "__main__":
    sys.exit(main())
