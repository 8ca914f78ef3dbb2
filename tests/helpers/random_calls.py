"""Random calls of `generate`, each stock and with the hook: `python tests/helpers/random_calls.py 17 100-120`.

A case's number decides everything about it: the model, the prompts, the generation settings and those of lookahead.
Its outcome is 'same', 'refused: why', 'stock fails: why' or 'tie'; anything else is a `MismatchError`.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import pytest
import torch
import transformers
from pairs import Pair, Recorder, first_difference, ids, one_line, same_cache, tokens_of
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lookahead
from lookahead import LookaheadConfig

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "phi", "gpt2", "gpt_neox", "gptj",
    "gpt_bigcode", "opt", "falcon", "stablelm", "cohere", "cohere2", "olmo2", "mixtral", "qwen3_moe", "granite",
    "starcoder2", "bloom", "mpt",
)  # fmt: skip
"""Model types: rotary, learned and ALiBi positions; full and sliding attention; experts."""
MEASURED = ("llama", "gpt2")
"""Those that are also decoded with the default settings, for which a model's step cost is measured first."""

REFUSALS = {
    "padding counted": "counts padding as positions",
    "padding at the end": "ends in padding",
    "model": "cannot be decoded exactly",
    "mode": "lookahead decoding is greedy or sampled",
    "use_cache": "use_cache=False",
    "outputs": "has no such output per token",
    "a static cache under chains": "a StaticLayer cannot be used with lookahead decoding of this model",
}
"""Why a case may be refused, and what the message says then."""
TIE = 1e-5
"""Two scores this close may change places by rounding alone."""


class MismatchError(AssertionError):
    """The hook gave something else than stock."""


class Push(LogitsProcessor):
    """A processor of the user's: what it adds depends on the text so far, and on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        pushed = (input_ids[:, -3:].sum(dim=1) + self.calls) % scores.shape[1]
        return scores.scatter_add(1, pushed[:, None], torch.full_like(scores[:, :1], 3.0))


class Neighbours(LogitsProcessor):
    """A processor that looks at the other rows: none may say what its neighbour said last."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] < 2 or not input_ids.shape[1]:
            return scores
        return scores.scatter(1, input_ids[:, -1:].roll(1, 0), -30.0)


class Enough(StoppingCriteria):
    """A row ends when its last two tokens add up to a multiple of 7."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -2:].sum(dim=1) % 7 == 0


@cache
def tokenizer() -> Any:
    """Byte-level, as many tokens as the models have."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    bare.train_from_iterator(["the quick brown fox jumps over the lazy dog, and the other fox jumps too"] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare)


@cache
def model_of(family: str, attention: str) -> Any:
    model = tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, family))
    if attention != "usual":
        model.set_attn_implementation(attention)
    return model


@dataclass
class Case:
    """One call of `generate`, or two that share a cache. `made` names the arguments that each run gets anew."""

    number: int
    family: str
    attention: str = "usual"
    rows: list[list[int]] = field(default_factory=list)
    form: str = "ids"
    options: list[dict[str, Any]] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    as_config: bool = False
    continued: str = ""
    added: list[list[int]] = field(default_factory=list)
    lookahead: dict[str, Any] | None = None
    method: str = "lookahead"
    seed: int | None = None

    def hook(self) -> lookahead.Decoding:
        if self.method != "lookahead":
            return lookahead.decoding(LookaheadConfig.for_method(self.method), seed=self.seed)
        return lookahead.decoding(seed=self.seed, **(self.lookahead or {}))

    def reference(self) -> lookahead.Decoding | None:
        """Stock; with a seed of the hook's own, our decoding token by token."""
        return None if self.seed is None else lookahead.decoding(LookaheadConfig.autoregressive(), seed=self.seed)

    def __str__(self) -> str:
        lengths = "+".join(str(len(row)) for row in self.rows)
        parts = [
            f"{self.family}, {self.attention} attention",
            f"{self.form} {lengths}",
            *map(str, self.options),
            *self.made,
        ]
        parts += ["as a config"] if self.as_config else []
        parts += [f"continued with {self.continued}"] if self.continued else []
        parts += [self.method if self.method != "lookahead" else str(self.lookahead)]
        parts += [f"seed={self.seed}"] if self.seed is not None else []
        return "; ".join(parts)


# Making one


def random_case(number: int) -> Case:
    rng = random.Random(f"case {number}")
    case = Case(number, rng.choice(FAMILIES))
    case.attention = "eager" if rng.random() < 0.2 else "usual"
    count, equal = rng.choice([1, 1, 1, 2, 3, 4]), rng.random() < 0.5
    length = rng.randint(1, 30)
    circle = rng.sample(range(1, VOCABULARY), rng.randint(4, 12)) if rng.random() < 0.3 else []
    case.rows = [random_text(rng, length if equal else rng.randint(1, 30), circle) for _ in range(count)]
    padded = len(set(map(len, case.rows))) > 1
    case.form = rng.choice(["embeds", "embeds and ids"]) if rng.random() < 0.1 else "ids"
    case.as_config = rng.random() < 0.2
    options = random_options(rng)
    if circle:  # the text that the prompts begin is likely, too, so that long guesses are right
        bias = round(rng.uniform(10, 40), 1)
        options["sequence_bias"] = [[list(pair), bias] for pair in zip(circle, circle[1:] + circle[:1], strict=True)]
    case.made = [name for name in ("streamer", "push", "neighbours", "enough") if rng.random() < 0.1]
    if rng.random() < 0.08:
        options |= {"stop_strings": rng.sample(["fox", "e", "the", " o", "mp", "xj"], 2)}
        case.made.append("tokenizer")
    if "enough" in case.made or "tokenizer" in case.made:
        options["pad_token_id"] = 0
    if options["do_sample"] and rng.random() < 0.15:
        options["num_return_sequences"] = rng.randint(2, 3)
    if rng.random() < 0.3:
        options["return_dict_in_generate"] = True
        options |= {name: True for name in ("output_scores", "output_logits") if rng.random() < 0.5}
    if rng.random() < 0.15 and not padded and case.form == "ids":
        options["prefill_chunk_size"] = rng.randint(1, 12)
    if case.form == "ids" and rng.random() < 0.1:
        case.made.append(rng.choice(["positions", "no mask"]))
        options["pad_token_id"] = 0  # which no prompt has: the mask that `generate` infers is the one we know
    if case.form == "ids" and rng.random() < 0.1:
        options["max_length"] = max(map(len, case.rows)) + options.pop("max_new_tokens")
    case.options = [options]
    random_cache(rng, case)
    if rng.random() < 0.05:
        options |= rng.choice(
            [
                {"num_beams": 2},
                {"use_cache": False},
                {"output_hidden_states": True, "return_dict_in_generate": True},
                {"prompt_lookup_num_tokens": 3},
            ]
        )
    random_settings(rng, case)
    return case


def random_text(rng: random.Random, length: int, circle: Sequence[int]) -> list[int]:
    """Tokens of which stretches come again; or those of a circle, from anywhere on."""
    if circle:
        start = rng.randrange(len(circle))
        return [circle[(start + place) % len(circle)] for place in range(length)]
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.5:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 8)]
        else:
            text += [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 4))]
    return text[:length]


def some(rng: random.Random, chance: float, choices: dict[str, Any]) -> dict[str, Any]:
    return {name: make() for name, make in choices.items() if rng.random() < chance}


def random_options(rng: random.Random) -> dict[str, Any]:
    def token() -> int:
        return rng.randrange(1, VOCABULARY)

    def tokens(most: int) -> list[int]:
        return rng.sample(range(1, VOCABULARY), rng.randint(1, most))

    options: dict[str, Any] = {"do_sample": rng.random() < 0.5, "max_new_tokens": rng.choice([1, 2, *range(3, 41)])}
    if options["do_sample"]:
        options |= some(
            rng,
            0.25,
            {
                "temperature": lambda: round(rng.uniform(0.3, 2.0), 2),
                "top_k": lambda: rng.randint(1, 50),
                "top_p": lambda: round(rng.uniform(0.3, 1.0), 2),
                "min_p": lambda: round(rng.uniform(0.0, 0.3), 2),
                "typical_p": lambda: round(rng.uniform(0.3, 0.99), 2),
                "epsilon_cutoff": lambda: 0.01,
                "eta_cutoff": lambda: 0.01,
            },
        )
    options |= some(
        rng,
        0.1,
        {
            "repetition_penalty": lambda: round(rng.uniform(0.8, 1.6), 2),
            "no_repeat_ngram_size": lambda: rng.randint(2, 4),
            "encoder_repetition_penalty": lambda: round(rng.uniform(0.8, 1.6), 2),
            "bad_words_ids": lambda: [tokens(3) for _ in range(3)],
            "min_new_tokens": lambda: rng.randint(1, options["max_new_tokens"]),
            "suppress_tokens": lambda: tokens(20),
            "begin_suppress_tokens": lambda: tokens(20),
            "sequence_bias": lambda: [[tokens(2), round(rng.uniform(-6, 6), 1)] for _ in range(3)],
            "forced_eos_token_id": token,
            "renormalize_logits": lambda: True,
            "remove_invalid_values": lambda: True,
        },
    )
    options |= some(
        rng,
        0.04,
        {
            "guidance_scale": lambda: 1.5,
            "watermarking_config": lambda: {"greenlist_ratio": 0.4, "bias": 2.0},
            "encoder_no_repeat_ngram_size": lambda: 3,
        },
    )
    if rng.random() < 0.5:
        options["eos_token_id"] = token() if rng.random() < 0.5 else tokens(8)
        options["pad_token_id"] = rng.choice([0, 0, token()])
        if rng.random() < 0.1:
            options["exponential_decay_length_penalty"] = (2, 1.3)
    elif rng.random() < 0.5:
        options["pad_token_id"] = 0
    return options


def random_cache(rng: random.Random, case: Case) -> None:
    """A cache of the call's own kind, or one that is given, and perhaps a second turn that continues it."""
    kind = rng.choice(["", "", "", "", "implementation", "dynamic cache", "bare cache", "static cache"])
    options = case.options[0]
    if kind == "implementation":
        options["cache_implementation"] = rng.choice(["dynamic", "static"])
    elif kind and "num_return_sequences" not in options:
        case.made.append(kind)
        if case.form == "ids" and rng.random() < 0.7:
            case.continued = rng.choice(["all ids", "the new ids"])
            width = rng.randint(1, 5)
            case.added = [[rng.randrange(1, VOCABULARY) for _ in range(width)] for _ in case.rows]
            second = {"do_sample": rng.random() < 0.5, "max_new_tokens": rng.randint(1, 20), "pad_token_id": 0}
            case.options.append(second)


def random_settings(rng: random.Random, case: Case) -> None:
    if rng.random() < 0.1:
        case.method = rng.choice(["jacobi", "prompt-lookup", "autoregressive"])
    elif case.family not in MEASURED or rng.random() < 0.5:
        window, ngram = rng.choice([0, 1, 3, 5]), rng.randint(2, 6)
        case.lookahead = {
            "window": window,
            "ngram": ngram,
            "guesses": rng.randint(0, 8),
            "budget": max(1, window * (ngram - 1)) + rng.randint(0, 40),
            "sources": [name for name in ("jacobi", "prompt", "suffix", "recycle") if rng.random() < 0.75],
            "recycle_scope": rng.choice(["request", "model", "off"]),
        }
    if rng.random() < 0.05 and case.options[0]["do_sample"] and "prompt_lookup_num_tokens" not in case.options[0]:
        case.seed = rng.randrange(1000)


# Running one


@dataclass
class Turn:
    """What one call gave: its output or its error, and what it left."""

    hook: lookahead.Decoding | None
    output: Any = None
    error: Exception | None = None
    streamer: Recorder | None = None
    cache: Any = None
    rng: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        return tokens_of(self.output)


def cache_for(case: Case, model: Any) -> Any:
    """The cache that the case gives to `generate`, if it does."""
    if "dynamic cache" in case.made:
        return DynamicCache(config=model.config)
    if "bare cache" in case.made:
        return DynamicCache()
    if "static cache" in case.made:
        return StaticCache(config=model.config, max_cache_len=128)
    return None


def arguments(case: Case, turn: int, wants: dict[str, Any]) -> dict[str, Any]:
    """The settings of a turn as `generate` takes them, `wants` among them."""
    options = {**case.options[turn], **wants}
    if "sequence_bias" in options:
        options["sequence_bias"] = {tuple(words): bias for words, bias in options["sequence_bias"]}
    given = {"generation_config": GenerationConfig(**options)} if case.as_config else options
    if turn:
        return given
    processors = [made() for name, made in (("push", Push), ("neighbours", Neighbours)) if name in case.made]
    if processors:
        given["logits_processor"] = LogitsProcessorList(processors)
    if "enough" in case.made:
        given["stopping_criteria"] = StoppingCriteriaList([Enough()])
    if "tokenizer" in case.made:
        given["tokenizer"] = tokenizer()
    return given


def first_inputs(case: Case, model: Any) -> dict[str, Any]:
    inputs = ids(*case.rows)
    if "no mask" in case.made:
        del inputs["attention_mask"]
    if "positions" in case.made:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(dim=-1) - 1).clamp_min(0)
    if case.form != "ids":
        with torch.no_grad():
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
    if case.form == "embeds":
        del inputs["input_ids"]
    return inputs


def mask_of(case: Case, rows: int, length: int) -> torch.Tensor:
    """Which of the first `length` positions of a case hold a token, and not the padding before a row."""
    mask = ids(*case.rows)["attention_mask"].repeat_interleave(rows // len(case.rows), dim=0)
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)


def next_inputs(case: Case, output: torch.Tensor) -> dict[str, Any]:
    """The text so far and the case's new tokens. The cache lacks the last token that was said, too."""
    text = torch.cat([output, torch.tensor(case.added)], dim=1)
    lacking = len(case.added[0]) + 1
    shown = text if case.continued == "all ids" else text[:, -lacking:]
    return {"input_ids": shown, "attention_mask": mask_of(case, *text.shape)}


def play(case: Case, hooked: bool, **wants: Any) -> list[Turn]:
    """All turns of a case, up to an error: stock, or with the hook."""
    model = model_of(case.family, case.attention)
    kept, inputs, turns = cache_for(case, model), first_inputs(case, model), list[Turn]()
    for number in range(len(case.options)):
        hook = case.hook() if hooked else case.reference()
        turn = Turn(hook, streamer=Recorder() if "streamer" in case.made else None)
        turns.append(turn)
        more = {"streamer": turn.streamer, "past_key_values": kept, "custom_generate": hook}
        torch.manual_seed(case.number)
        try:
            given = arguments(case, number, wants)
            turn.output = model.generate(**inputs, **given, **{k: v for k, v in more.items() if v is not None})
        except Exception as error:
            turn.error = error
            return turns
        turn.rng = torch.get_rng_state()
        turn.cache = copy.deepcopy(getattr(turn.output, "past_key_values", kept))  # the next turn changes it
        if number + 1 < len(case.options):
            inputs = next_inputs(case, turn.tokens)
    return turns


# Comparing the two


@dataclass
class Outcome:
    """What came of a case: 'same', 'refused: why', 'stock fails: why' or 'tie'."""

    name: str
    tokens: int = 0
    steps: int = 0


def outcome(case: Case) -> Outcome:
    """Play the case, stock and hooked, and compare all that came of it. Raises a MismatchError of one line."""
    pairs = list(zip(play(case, False), play(case, True), strict=False))
    for number, (stock, ours) in enumerate(pairs):
        try:
            if stock.error is not None and ours.error is None:
                raise MismatchError(f"stock fails and the hook does not: {one_line(stock.error)}")
            if stock.error is not None and stock.hook is None:
                return Outcome(f"stock fails: {type(stock.error).__name__}")
            if ours.error is not None:
                return Outcome(f"refused: {reason(ours.error)}")
            if stock.tokens.tolist() != ours.tokens.tolist():
                explain(case, number, stock.tokens, ours.tokens)
                return Outcome("tie")
            compare(case, stock, ours)
        except AssertionError as error:
            raise MismatchError(f"call {number + 1} of {len(case.options)}: {one_line(error)}") from error
    stats = [stats for _, ours in pairs for stats in ours.hook.stats]
    # The prompt's own pass gives one token and can accept no guess.
    return Outcome("same", sum(s.generated_tokens - 1 for s in stats), sum(s.steps - 1 for s in stats))


def compare(case: Case, stock: Turn, ours: Turn) -> None:
    """Equal tokens given, assert that all the rest is equal, too."""
    Pair(stock.output, ours.output, ours.hook, {}, {}).same()
    if stock.streamer is not None:
        puts = [[put.tolist() for put in turn.streamer.puts] for turn in (stock, ours)]
        assert puts[0] == puts[1], "the streamer was given something else"
        assert ours.streamer.ends == 1, "the streamer was not told of the end"
    assert (stock.cache is None) == (ours.cache is None), "one of the two has a cache"
    if stock.cache is not None:
        same_cache(stock.cache, ours.cache, mask_of(case, len(stock.tokens), stock.cache.get_seq_length()))
    assert torch.equal(stock.rng, ours.rng), "torch's generator is in another state"


def explain(case: Case, number: int, stock: torch.Tensor, ours: torch.Tensor) -> None:
    """Raise for other tokens, unless they stem from a tie of two scores."""
    again = play(case, False, return_dict_in_generate=True, output_scores=True)[number].output
    found = first_difference(stock, ours, again.scores)
    if case.options[number]["do_sample"] or found.margin > TIE:
        raise MismatchError(found.text)


def reason(error: Exception) -> str:
    """The known reason of a refusal. Any other error is none."""
    text = str(error)
    if not isinstance(error, ValueError) or "\n" in text:
        raise MismatchError(f"not a refusal of one line: {type(error).__name__}: {one_line(error)}") from error
    for name, says in REFUSALS.items():
        if says in text:
            return name
    raise MismatchError(f"refused for a reason that is not known: {text}") from error


def run_cases(
    numbers: Sequence[int], family: str | None = None, told: bool = False
) -> tuple[Counter[str], list[str], float]:
    """Outcomes, failures (a line each, which says how to repeat the case), and tokens per step.

    With a `family`, the cases are made with models of this type and no other.
    """
    outcomes, failures, tokens, steps = Counter[str](), list[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("LOOKAHEAD_CACHE", folder)
        warnings.simplefilter("ignore")
        for number in numbers:
            case, name = random_case(number), f"{number}"
            if family is not None:
                case.family, name = family, f"--family {family} {number}"
            try:
                result = outcome(case)
            except MismatchError as error:
                result = Outcome("MISMATCH")
                failures.append(f"python tests/helpers/random_calls.py {name}  # {error} ({case})")
            outcomes[result.name] += 1
            tokens, steps = tokens + result.tokens, steps + result.steps
            if told:
                print(failures[-1] if result.name == "MISMATCH" else f"{number}: {result.name} ({case})", flush=True)
    return outcomes, failures, tokens / max(1, steps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make random calls of generate, stock and with the hook.")
    parser.add_argument("cases", nargs="+", metavar="NUMBER[-NUMBER]", help="which ones")
    parser.add_argument(
        "--family", metavar="MODEL_TYPE", help="with a model of this type or class, whatever the case says"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    numbers: list[int] = []
    for text in options.cases:
        first, _, last = text.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    outcomes, failures, compression = run_cases(numbers, options.family, told=True)
    for name, count in outcomes.most_common():
        print(f"{count:5d} {name}")
    print(f"{compression:.2f} tokens per step", *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
