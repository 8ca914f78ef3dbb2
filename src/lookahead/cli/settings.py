"""The options of every verb that generates: model, method, sampling and stopping."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from lookahead.cli.common import Host, Model, choice
from lookahead.config import BACKENDS, METHODS, SOURCES, LookaheadConfig, SamplingParams, StopRules, new_seed

DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_dynamic", "int8", "int4", "mxfp4")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def _option(panel: str, *names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)


@dataclass
class Settings:
    """One field per option, with its type, names and help for typer. None means not given."""

    model: Annotated[
        str | None,
        _option("Model", "--model", help="Embedded model, short name, hub id, folder or .gguf.", metavar="NAME"),
    ] = None
    dtype: Annotated[str, _option("Model", "--dtype", help=f"One of {', '.join(DTYPES)}.", metavar="NAME")] = "auto"
    device: Annotated[str, _option("Model", "--device", help="auto, cpu, cuda or cuda:N.", metavar="NAME")] = "auto"
    backend: Annotated[str, _option("Model", "--backend", help=f"One of {', '.join(BACKENDS)}.", metavar="NAME")] = (
        "auto"
    )
    method: Annotated[str, _option("Method", "--method", help=f"One of {', '.join(METHODS)}.", metavar="NAME")] = (
        "lookahead"
    )
    window: Annotated[
        int | None, _option("Method", "--window", help="W: future positions in the window; 0 for no window.")
    ] = None
    ngram: Annotated[int | None, _option("Method", "--ngram", help="N: length of the n-grams.")] = None
    guesses: Annotated[
        int | None, _option("Method", "--guesses", help="G: the most pool n-grams verified in a step.")
    ] = None
    budget: Annotated[int | None, _option("Method", "--budget", help="K: the most tokens in a step.")] = None
    sources: Annotated[
        str | None,
        _option("Method", "--sources", help=f"Draft sources, of {','.join(SOURCES)}.", metavar="A,B,..."),
    ] = None
    exact: Annotated[
        bool,
        _option("Method", "--exact/--inexact", help="Whether half-precision steps are limited to exact sizes."),
    ] = True
    max_tokens: Annotated[int, _option("Output", "--max-tokens", help="The most tokens to generate.")] = 256
    stop: Annotated[
        list[str] | None,
        _option("Output", "--stop", help=r"End before this text; \n and \t are understood. Repeatable."),
    ] = None
    temperature: Annotated[
        float, _option("Sampling", "--temperature", help="0 is greedy: always the likeliest token.")
    ] = 0.0
    top_k: Annotated[int, _option("Sampling", "--top-k", help="Draw from the K likeliest tokens; 0 for all.")] = 0
    top_p: Annotated[float, _option("Sampling", "--top-p", help="Draw from the likeliest tokens that sum to this.")] = (
        1.0
    )
    min_p: Annotated[
        float,
        _option("Sampling", "--min-p", help="Drop tokens less likely than this share of the likeliest."),
    ] = 0.0
    repetition_penalty: Annotated[
        float | None,
        _option("Sampling", "--repetition-penalty", help="Above 1: fewer tokens of prompt and output again."),
    ] = None
    presence_penalty: Annotated[
        float,
        _option("Sampling", "--presence-penalty", help="Taken from the score of every token of the output."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        _option("Sampling", "--frequency-penalty", help="The same, once for each time the token occurs."),
    ] = 0.0
    seed: Annotated[
        int | None, _option("Sampling", "--seed", help="The same seed draws the same text; without one, a new one.")
    ] = None

    def validate(self) -> SamplingParams:
        """Check everything that can be checked before the model is loaded."""
        check_device(self.dtype, self.device, self.backend)
        choice("--method", self.method, METHODS)
        changes = self.changes()
        LookaheadConfig.for_method(self.method, **changes)
        sampling = SamplingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed or 0,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        StopRules(self.max_tokens)
        if "" in (self.stop or ()):
            raise ValueError("--stop is empty: give the text to end before, or leave it out")
        return sampling

    def load(self, host: Host) -> Model:
        """Check the settings and load the model."""
        sampling = self.validate()
        if sampling.greedy and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            host.say("note: top-k, top-p and min-p do nothing at temperature 0; add --temperature 0.8 to sample")
        return host.load(self.model, dtype=self.dtype, device=self.device, backend=self.backend, log=host.say)

    def changes(self) -> dict[str, Any]:
        """The fields of `LookaheadConfig` that were given."""
        given = {
            "window": self.window,
            "ngram": self.ngram,
            "guesses": self.guesses,
            "budget": self.budget,
            "sources": None if self.sources is None else parse_sources(self.sources),
            "exact": None if self.exact else False,
        }
        return {name: value for name, value in given.items() if value is not None}

    def request(self, model: Model) -> dict[str, Any]:
        """The keyword arguments of `model.generate` and `model.stream`."""
        lookahead = self.method == "lookahead"
        return {
            "method": self.method,
            "config": model.default_config.adapted(**self.changes()) if lookahead else None,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": new_seed() if self.seed is None else self.seed,
            "stop": tuple(unescape(stop) for stop in self.stop or ()),
        }


def check_device(dtype: str, device: str, backend: str) -> None:
    """Check the options for dtype, device and backend."""
    choice("--dtype", dtype, DTYPES)
    choice("--backend", backend, BACKENDS)
    if not DEVICE.fullmatch(device):
        raise ValueError(f"--device does not know {device!r}: choose from auto, cpu, cuda, cuda:N")


def takes_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace a verb's `settings` parameter with one option per field of `Settings`.

    typer reads options from a function's signature. This rewrites the signature, so that all verbs share the options.
    """
    own = inspect.signature(verb, eval_str=True).parameters
    types = get_type_hints(Settings, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in fields(Settings)
    ]

    @wraps(verb)
    def spread(**given: Any) -> None:
        settings = Settings(**{option.name: given.pop(option.name) for option in shared})
        verb(settings=settings, **given)

    others = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values() if p.name != "settings"]
    described: Any = spread
    described.__signature__ = inspect.Signature([*others, *shared])
    described.__annotations__ = {option.name: option.annotation for option in (*others, *shared)}
    return spread


def parse_sources(text: str) -> tuple[str, ...]:
    """Parse and check source names in `a,b,c`."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"--sources names none: choose from {', '.join(SOURCES)}, or use --method autoregressive")
    return tuple(choice("--sources", name, SOURCES) for name in names)


def unescape(text: str) -> str:
    r"""Turn `\n`, `\t` and `\\` into newline, tab and backslash, which are hard to type in a shell."""
    return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], text)
