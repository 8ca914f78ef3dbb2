"""The command line, on a model that is only a script: what goes where, and how mistakes are told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lookahead.cli import app
from lookahead.cli.answer import COLOURS, RESET, summary
from lookahead.cli.common import Host
from lookahead.cli.compare import StockAnswer
from lookahead.cli.settings import parse_sources, unescape
from lookahead.config import LookaheadConfig
from lookahead.loading.embedded import EMBEDDED, EMBEDDED_MODELS, MANIFEST, ModelError
from lookahead.machine import processor
from lookahead.stats import Stats

WORDS = ("Once", " upon", " a", " time", ",", " there", " was", " a", " mouse", ".")
BLOCKS = (1, 2, 4, 3)  # how many of the words each step accepts
TEXT = "".join(WORDS)
INTERRUPT = -1  # in `blocks`: Ctrl-C arrives here


class Piece(str):
    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: Sequence[int]) -> Piece:
        piece = super().__new__(cls, text)
        piece.token_ids = tuple(token_ids)
        return piece


@dataclass
class FakeCompletion:
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    method: str
    config: LookaheadConfig
    seed: int = 3


class FakeStream:
    def __init__(self, blocks: Sequence[int], ids: Sequence[int], seconds: float, completion: FakeCompletion):
        self._blocks, self._ids, self._seconds, self._made = blocks, ids, seconds, completion
        self._done = False

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        for block in self._blocks:
            if block == INTERRUPT:
                raise KeyboardInterrupt
            ids = list(self._ids[at : at + block])
            at += block
            if not ids:
                break
            text = "".join(WORDS[token % 100] for token in ids)
            self._made.text += text
            self._made.token_ids += ids
            self._made.stats.count_step(8, len(ids), ["suffix"] * (len(ids) - 1))
            self._made.stats.seconds += self._seconds
            yield Piece(text, ids)
        self._done = True

    def close(self) -> None:
        if not self._done:
            self._made.finish_reason = "interrupted"
            self._done = True

    @property
    def completion(self) -> FakeCompletion:
        assert self._done, "asked before the end"
        return self._made


@dataclass
class FakeModel:
    """Says WORDS, in BLOCKS with lookahead and one by one without. `differs`: the baseline's odd token."""

    name: str = "fake"
    dtype: Any = "torch.float32"
    default_config: LookaheadConfig = field(default_factory=LookaheadConfig)
    blocks: tuple[int, ...] = BLOCKS
    step_seconds: float = 0.5
    rounding: str | None = None
    differs: int | None = None
    refuse: str | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def load(self, name: str | None, *, dtype: str, device: str, backend: str, log: Callable[[str], None]) -> FakeModel:
        log("loading")
        self.loaded = {"name": name, "dtype": dtype, "device": device, "backend": backend}
        return self

    def stream(self, prompt: Any, **settings: Any) -> FakeStream:
        self.requests.append((prompt, settings))
        if self.refuse is not None:
            raise ValueError(self.refuse)
        plain = settings["method"] == "autoregressive"
        ids = list(range(min(len(WORDS), settings["max_tokens"])))
        if plain and self.differs is not None and self.differs < len(ids):
            ids[self.differs] += 100
        config = settings["config"] or LookaheadConfig.for_method(settings["method"])
        completion = FakeCompletion("", [], "eos", Stats(prompt_tokens=7), settings["method"], config)
        blocks = (1,) * len(ids) if plain else self.blocks
        return FakeStream(blocks, ids, 0.25 if plain else self.step_seconds, completion)


def run(*args: str, model: FakeModel | None = None, input: str = "", env: Any = None, **host: Any) -> Any:
    load = (model or FakeModel()).load
    return CliRunner().invoke(app, list(args), input=input, env=env, obj=Host(load=load, **host), prog_name="lookahead")


def terminal(**options: Any) -> Console:
    """A console that takes itself for a colour terminal, whatever the tests run in."""
    environment = {"TERM": "xterm-256color", **options}
    return Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False, _environ=environment)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# generate


def test_text_goes_to_stdout_and_the_rest_to_stderr() -> None:
    model = FakeModel()
    result = run("generate", "-p", "Tell me", model=model)
    assert result.exit_code == 0
    assert result.stdout == TEXT + "\n"
    assert result.stderr.splitlines() == ["loading", "10 tokens in 4 steps, S = 2.50, 2.00 s, 5.0 tok/s"]
    assert model.loaded == {"name": None, "dtype": "auto", "device": "auto", "backend": "auto"}


def test_options_reach_the_model() -> None:
    model = FakeModel()
    options = "--model m --dtype float32 --device cuda:1 --max-tokens 9 --temperature 0.8 --top-k 5 --top-p 0.9"
    more = ["--min-p", "0.1", "--seed", "3", "--raw", "--backend", "eager", "--repetition-penalty", "1.2"]
    more += ["--presence-penalty", "0.5", "--frequency-penalty", "-0.25"]
    result = run("generate", "-p", "x", *options.split(), *more, model=model)
    assert result.exit_code == 0, result.stderr
    assert model.loaded == {"name": "m", "dtype": "float32", "device": "cuda:1", "backend": "eager"}
    assert model.requests == [
        (
            "x",
            {
                "method": "lookahead",
                "config": LookaheadConfig(),
                "max_tokens": 9,
                "temperature": 0.8,
                "top_k": 5,
                "top_p": 0.9,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.25,
                "seed": 3,
                "stop": (),
                "raw": True,
            },
        )
    ]


def test_lookahead_options_change_the_models_own_config() -> None:
    model = FakeModel(default_config=LookaheadConfig(window=3, ngram=4, guesses=2, budget=32))
    given = ["--window", "5", "--guesses", "7", "--sources", "jacobi,prompt"]
    assert run("generate", "-p", "x", *given, model=model).exit_code == 0
    expected = LookaheadConfig(window=5, ngram=4, guesses=7, budget=37, sources=("jacobi", "prompt"))
    assert model.requests[0][1]["config"] == expected


@pytest.mark.parametrize("args", [("generate",), ("generate", "-p", "-"), ("generate", "--prompt", "-")])
def test_the_prompt_from_stdin(args: tuple[str, ...]) -> None:
    model = FakeModel()
    assert run(*args, model=model, input="two\nlines\n").exit_code == 0
    assert model.requests[0][0] == "two\nlines"


def test_a_given_prompt_leaves_stdin_alone() -> None:
    model = FakeModel()
    assert run("generate", "-p", "mine", model=model, input="piped").exit_code == 0
    assert model.requests[0][0] == "mine"


def test_stop_strings_with_escapes() -> None:
    model = FakeModel()
    stops = ["--stop", r"\n\n", "--stop", r"a\tb", "--stop", r"C:\\new"]
    assert run("generate", "-p", "x", *stops, model=model).exit_code == 0
    assert model.requests[0][1]["stop"] == ("\n\n", "a\tb", "C:\\new")
    assert unescape(r"\d+") == r"\d+"


def test_top_p_without_a_temperature_is_pointed_out() -> None:
    assert "do nothing at temperature 0" in run("generate", "-p", "x", "--top-p", "0.5").stderr
    assert "note" not in run("generate", "-p", "x", "--top-p", "0.5", "--temperature", "1").stderr


def test_json_is_all_there_is_on_stdout() -> None:
    result = run("generate", "-p", "x", "--json", "--window", "4")
    printed = json.loads(result.stdout)
    assert list(printed) == [
        "text",
        "token_ids",
        "prompt_tokens",
        "generated_tokens",
        "steps",
        "compression",
        "seconds",
        "tokens_per_second",
        "method",
        "model",
        "finish_reason",
        "config",
        "accepted_by_depth",
        "accepted_by_source",
        "seed",
    ]
    assert printed["text"] == TEXT
    assert printed["token_ids"] == list(range(10))
    assert (printed["prompt_tokens"], printed["generated_tokens"], printed["steps"]) == (7, 10, 4)
    assert (printed["compression"], printed["tokens_per_second"]) == (2.5, 5.0)
    assert (printed["method"], printed["model"], printed["finish_reason"]) == ("lookahead", "fake", "eos")
    default = LookaheadConfig()
    assert printed["config"] == {
        "window": 4,
        "ngram": default.ngram,
        "guesses": default.guesses,
        "budget": default.budget,
        "sources": list(default.sources),
    }
    assert (printed["accepted_by_depth"], printed["accepted_by_source"]) == ([3, 2, 1], {"suffix": 6})
    assert printed["seed"] == 3


# colours


def test_blocks_are_coloured_by_length_on_a_terminal() -> None:
    out, err = terminal(), terminal()
    assert run("generate", "-p", "x", model=FakeModel(blocks=(1, 2, 7)), out=out, err=err).exit_code == 0
    five, _, two, _ = (code for _, _, _, code in COLOURS)
    assert shown(out) == f"Once{two} upon a{RESET}{five} time, there was a mouse.{RESET}{RESET}\n"
    assert len({code for _, _, _, code in COLOURS}) == 4
    legend = next(line for line in shown(err).splitlines() if "accepted" in line)
    assert re.sub(r"\x1b\[[0-9;]*m", "", legend) == "tokens accepted per step:  1  2  3-4  5 or more"
    assert all(f"{code}{name}" in legend for _, name, _, code in COLOURS)


@pytest.mark.parametrize(
    "out",
    [
        Console(file=io.StringIO(), force_terminal=False),
        Console(file=io.StringIO(), force_terminal=True, no_color=True),
        terminal(TERM="dumb"),
    ],
    ids=["pipe", "NO_COLOR", "dumb"],
)
def test_no_colours_elsewhere(out: Console) -> None:
    err = terminal()
    assert run("generate", "-p", "x", out=out, err=err).exit_code == 0
    assert shown(out) == TEXT + "\n"
    assert "accepted per step" not in shown(err)


def test_no_colours_in_json() -> None:
    out = terminal()
    assert run("generate", "-p", "x", "--json", out=out).exit_code == 0
    assert json.loads(shown(out))["text"] == TEXT


# compare


@pytest.mark.parametrize(
    ("step_seconds", "words"),
    [
        (0.25, "same tokens: all 10 of them; lookahead is 2.50x: faster here"),
        (0.625, "same tokens: all 10 of them; lookahead is 1.00x: even here"),
        (0.672, "same tokens: all 10 of them; lookahead is 0.93x: slower here"),
    ],
)
def test_compare_says_which_is_faster(step_seconds: float, words: str) -> None:
    result = run("generate", "-p", "x", "--compare", model=FakeModel(step_seconds=step_seconds))
    assert result.exit_code == 0
    assert result.stdout == TEXT + "\n"
    assert result.stderr.splitlines()[-1] == words
    rows = [line.split() for line in result.stderr.splitlines() if "x │" in line]
    assert [row[1] for row in rows] == ["autoregressive", "lookahead"]


def test_compare_warms_both_up_and_runs_the_same_request() -> None:
    model = FakeModel()
    given = ["--temperature", "0.7", "--seed", "4", "--max-tokens", "10", "--raw"]
    assert run("generate", "-p", "x", "--compare", *given, model=model).exit_code == 0
    requests = [settings for _, settings in model.requests]
    assert [(r["method"], r["max_tokens"]) for r in requests] == [
        ("lookahead", 8),
        ("autoregressive", 8),
        ("lookahead", 10),
        ("autoregressive", 10),
    ]
    shared = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "raw")
    assert all([r[name] for name in shared] == [0.7, 0, 1.0, 0.0, 4, (), True] for r in requests)
    # What the warm-up sees must not be there for the timed run to guess from.
    assert [r["config"] and r["config"].recycle_scope for r in requests] == ["request", None, "model", None]


def test_compare_of_different_tokens_in_float32_is_a_fault() -> None:
    result = run("generate", "-p", "x", "--compare", model=FakeModel(differs=5))
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: lookahead and autoregressive first differ at token 6, after 5 equal: ")
    assert "id 5 against id 105; in float32 only a near tie" in last


def test_compare_of_different_tokens_in_half_precision_is_explained() -> None:
    result = run("generate", "-p", "x", "--compare", model=FakeModel(differs=5, dtype="torch.bfloat16"))
    assert result.exit_code == 0
    assert "note: lookahead and autoregressive first differ at token 6" in result.stderr
    assert "bfloat16 rounds" in result.stderr


def test_compare_of_different_tokens_with_rounded_activations_is_explained() -> None:
    result = run("generate", "-p", "x", "--compare", model=FakeModel(differs=5, rounding="int8"))
    assert result.exit_code == 0
    assert "int8 rounds a step of several tokens differently" in result.stderr
    assert run("generate", "-p", "x", "--compare", model=FakeModel(differs=5, dtype="torch.int8")).exit_code == 1


def test_compare_counts_a_shorter_text_as_different() -> None:
    result = run("generate", "-p", "x", "--compare", model=FakeModel(blocks=(1, 2)))
    assert result.exit_code == 1
    assert "first differ at token 4, after 3 equal: the end (eos) against id 3" in result.stderr


def test_compare_in_json() -> None:
    result = run("generate", "-p", "x", "--compare", "--json", model=FakeModel(step_seconds=0.25))
    assert json.loads(result.stdout)["compare"] == {
        "method": "autoregressive",
        "generated_tokens": 10,
        "steps": 10,
        "compression": 1.0,
        "seconds": 2.5,
        "tokens_per_second": 4.0,
        "ratio": 2.5,
        "identical": True,
        "equal_tokens": 10,
    }


@pytest.mark.parametrize("tokens", [list(range(10)), [0, 1, 2, 99]])
def test_compare_stock_has_a_line_of_transformers(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios of the table are to transformers' speed; other tokens of its kernels are noted, and no fault."""
    stats = Stats(generated_tokens=10, steps=10, seconds=5.0)
    asked: list[Any] = []
    monkeypatch.setattr(
        "lookahead.cli.generate.stock_answer", lambda *args: asked.append(args) or StockAnswer(tokens, stats)
    )
    result = run("generate", "-p", "x", "--compare-stock", model=FakeModel(step_seconds=0.25))
    assert result.exit_code == 0, result.output
    last = "same tokens: all 10 of them; lookahead is 2.50x: faster here, and 5.00x transformers' generate"
    assert result.stderr.splitlines()[-1] == last
    rows = [line.split("│") for line in result.stderr.splitlines() if "x │" in line]
    assert [row[1].strip() for row in rows] == ["transformers' generate", "autoregressive", "lookahead"]
    assert [row[-2].strip() for row in rows] == ["1.00x", "2.00x", "5.00x"]
    assert ("has other tokens after 3 equal ones" in result.stderr) == (tokens[-1] == 99)
    ((_, prompt, request),) = asked
    assert (prompt, request["max_tokens"], request["raw"]) == ("x", 256, False)


# mistakes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "the prompt is empty"),
        (("-p", ""), "the prompt is empty"),
        (("-p", "x", "--ngram", "1"), "ngram=1 must be a whole number of at least 2"),
        (("-p", "x", "--window", "-1"), "window=-1"),
        (("-p", "x", "--window", "9", "--budget", "4"), "lower the window or raise the budget"),
        (("-p", "x", "--temperature", "-1"), "temperature=-1.0"),
        (("-p", "x", "--top-p", "0"), "top_p=0.0"),
        (("-p", "x", "--max-tokens", "0"), "max_tokens=0"),
        (("-p", "x", "--stop", ""), "--stop is empty"),
        (
            ("-p", "x", "--method", "lookahed"),
            "did you mean 'lookahead'? choose from lookahead, autoregressive",
        ),
        (("-p", "x", "--method", "jacobi", "--window", "3"), "window=3 belongs to method 'lookahead'"),
        (("-p", "x", "--method", "autoregressive", "--compare"), "choose another --method"),
        (("-p", "x", "--compare-stock", "--temperature", "0.5"), "--compare-stock is greedy, not --temperature 0.5"),
        (("-p", "x", "--compare-stock", "--ranks", "2"), "--compare-stock runs in one process"),
        (
            ("-p", "x", "--sources", "jacobi,sufix"),
            "'sufix': did you mean 'suffix'? choose from jacobi, prompt",
        ),
        (("-p", "x", "--sources", ","), "--sources names none"),
        (("-p", "x", "--sources", "prompt,prompt"), "twice"),
        (("-p", "x", "--dtype", "float31"), "did you mean 'float32'?"),
        (
            ("-p", "x", "--dtype", "int5"),
            "choose from auto, float32, bfloat16, float16, fp8, fp8_dynamic, int8, int4, mxfp4",
        ),
        (("-p", "x", "--device", "gpu"), "choose from auto, cpu, cuda, cuda:N"),
    ],
)
@pytest.mark.thinned(1, most=8)
def test_a_mistake_is_one_line_told_before_the_model_is_loaded(args: tuple[str, ...], words: str) -> None:
    model = FakeModel()
    result = run("generate", *args, model=model)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not model.loaded


def test_no_prompt_at_a_terminal() -> None:
    result = run("generate", interactive=True)
    assert (result.exit_code, result.stderr.splitlines()) == (
        2,
        ["error: no prompt: give one with -p TEXT, or pipe it to stdin"],
    )


def test_a_prompt_that_is_not_text() -> None:
    result = CliRunner().invoke(app, ["generate"], input=b"\xff\xfe", obj=Host(load=FakeModel().load))
    assert (result.exit_code, result.stderr) == (
        2,
        "error: the prompt on stdin is not utf-8 text: invalid start byte\n",
    )


@pytest.mark.parametrize("error", [ModelError("no such\n  model"), ValueError("no such model")])
def test_the_librarys_errors_are_one_line(error: Exception) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    result = CliRunner().invoke(app, ["generate", "-p", "x"], obj=Host(load=load))
    assert (result.exit_code, result.stderr) == (2, "error: no such model\n")
    debug = CliRunner().invoke(app, ["--debug", "generate", "-p", "x"], obj=Host(load=load))
    assert debug.exception is error


def test_a_config_only_the_model_can_refuse() -> None:
    model = FakeModel(default_config=LookaheadConfig(window=8, ngram=3, budget=16))
    result = run("generate", "-p", "x", "--ngram", "6", model=model)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: window=8 with ngram=6")


def test_sources_may_have_spaces() -> None:
    assert parse_sources(" jacobi, suffix ,") == ("jacobi", "suffix")


# Ctrl-C and broken pipes


def test_ctrl_c_keeps_the_text() -> None:
    result = run("generate", "-p", "x", model=FakeModel(blocks=(1, 2, INTERRUPT)))
    assert result.exit_code == 130
    assert result.stdout == "Once upon a\n"
    last = result.stderr.splitlines()[-1]
    assert last == "3 tokens in 2 steps, S = 1.50, 1.00 s, 3.0 tok/s (interrupted)"


def test_ctrl_c_with_json_and_compare() -> None:
    model = FakeModel(blocks=(1, INTERRUPT))
    result = run("generate", "-p", "x", "--json", model=model)
    assert (result.exit_code, json.loads(result.stdout)["finish_reason"]) == (130, "interrupted")
    model.requests.clear()
    result = run("generate", "-p", "x", "--compare", model=model)
    assert (result.exit_code, result.stdout, len(model.requests)) == (130, "", 1)


def test_ctrl_c_while_loading() -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    result = CliRunner().invoke(app, ["generate", "-p", "x"], obj=Host(load=load))
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


SLOW = """
import sys, time
from types import SimpleNamespace
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.config import LookaheadConfig
from lookahead.stats import Stats

class Slow:
    name, dtype, rounding, default_config = "slow", "float32", None, LookaheadConfig()
    completion = SimpleNamespace(text="", token_ids=[], finish_reason="interrupted", stats=Stats())
    def stream(self, prompt, **settings): return self
    def close(self): pass
    def __iter__(self):
        for _ in range(500):
            yield "word "
            time.sleep(0.01)

app(["generate", "-p", "x"], obj=Host(load=lambda *a, **k: Slow()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")
@pytest.mark.parametrize("cause", ["ctrl-c", "broken pipe"])
@pytest.mark.thinned(1, most=1)
def test_a_process_ends_without_a_traceback(cause: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"word "
        if cause == "ctrl-c":
            process.send_signal(signal.SIGINT)
            assert process.stdout.read().endswith(b"\n")
        else:
            process.stdout.close()
        told = process.stderr.read().decode()
        code = process.wait(timeout=10)
    if cause == "ctrl-c":
        assert (code, told) == (130, summary(Stats(), "interrupted") + "\n")
    else:
        assert (code, told) == (1, "")


# chat


def test_chat_from_a_pipe_keeps_the_history() -> None:
    model = FakeModel()
    result = run("chat", "--system", "Be brief.", model=model, input="hello\n\nand then?\n")
    assert result.exit_code == 0
    assert result.stdout == f"{TEXT}\n{TEXT}\n"
    assert [prompt for prompt, _ in model.requests][1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "and then?"},
    ]
    assert "raw" not in model.requests[0][1]


def test_chat_commands() -> None:
    model = FakeModel()
    script = "hello\nagain\n/stats\n/reset\nanew\n/stat\n/help\n/usr/bin is what?\n/exit\nnever\n"
    result = run("chat", model=model, input=script)
    assert result.exit_code == 0
    assert "2 answers: 20 tokens in 8 steps, S = 2.50, 4.00 s, 5.0 tok/s" in result.stderr
    assert "error: chat does not know '/stat': did you mean '/stats'?" in result.stderr
    assert "/reset  forget the conversation" in result.stderr
    asked = [[m["content"] for m in prompt if m["role"] == "user"] for prompt, _ in model.requests]
    assert asked == [["hello"], ["hello", "again"], ["anew"], ["anew", "/usr/bin is what?"]]


def test_chat_takes_the_settings() -> None:
    model = FakeModel()
    assert run("chat", "--method", "jacobi", "--max-tokens", "3", model=model, input="hello\n").exit_code == 0
    assert (model.requests[0][1]["method"], model.requests[0][1]["max_tokens"]) == ("jacobi", 3)
    assert run("chat", "--ngram", "1", model=model).exit_code == 2


def typist(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Someone at the keyboard, who may press Ctrl-C or Ctrl-D."""
    script = iter((*lines, EOFError))

    def ask(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    return ask


def test_chat_at_a_terminal() -> None:
    asked: list[str] = []
    out, err, reply = terminal(), terminal(), typist("hello")

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return reply(prompt)

    assert run("chat", interactive=True, ask=ask, out=out, err=err).exit_code == 0
    assert asked == ["> ", "> "]
    assert "accepted per step" in shown(err)
    assert RESET in shown(out)


def test_chat_ctrl_c_stops_the_answer_only() -> None:
    model = FakeModel(blocks=(1, 2, INTERRUPT))
    ask = typist("hello", KeyboardInterrupt, "go on")
    result = run("chat", model=model, interactive=True, ask=ask)
    assert result.exit_code == 0
    assert result.stdout == "Once upon a\nOnce upon a\n"
    assert "Ctrl-D or /exit leaves" in result.stderr
    assert [m["content"] for m in model.requests[1][0]] == ["hello", "Once upon a", "go on"]


def test_chat_ctrl_c_ends_a_pipe() -> None:
    result = run("chat", model=FakeModel(blocks=(1, INTERRUPT)), input="hello\nagain\n")
    assert (result.exit_code, result.stdout) == (130, "Once\n")


def test_chat_goes_on_after_a_mistake_only_with_a_person() -> None:
    model = FakeModel(refuse="too long")
    result = run("chat", model=model, interactive=True, ask=typist("hello", "shorter"))
    assert (result.exit_code, result.stderr.count("error: too long")) == (0, 2)
    assert [len(prompt) for prompt, _ in model.requests] == [1, 1]
    result = run("chat", model=model, input="hello\nshorter\n")
    assert (result.exit_code, result.stderr.count("error: too long")) == (2, 1)


# the other verbs


def test_env(tmp_path: Path) -> None:
    cache = {"LOOKAHEAD_CACHE": str(tmp_path)}
    result = run("env", env=cache)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"cache         {tmp_path}\n" in result.stdout
    assert "absent: `lookahead pull` fetches it" in result.stdout
    found = json.loads(run("env", "--json", env=cache).stdout)
    assert list(found) == ["versions", "platform", "cores", "devices", "cache", "embedded_model"]
    assert set(found["versions"]) == {"python", "lookahead", "torch", "transformers", "triton", "onnxruntime"}
    assert found["devices"][0] == {"name": "cpu", "description": processor()}


def test_pull_prints_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / EMBEDDED
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"sha256": EMBEDDED_MODELS[EMBEDDED].sha256}), encoding="utf-8")
    cache = {"LOOKAHEAD_CACHE": str(tmp_path)}
    result = run("pull", env=cache)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{folder}\n", "")
    assert json.loads(run("env", "--json", env=cache).stdout)["embedded_model"]["present"]
    result = run("pull", "smolm2", env=cache)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: unknown model 'smolm2': did you mean")


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "lookahead")


def test_help_needs_no_torch() -> None:
    """Help, and every mistake in the options, is answered before the heavy imports."""
    code = (
        "import sys, lookahead.cli, lookahead.__main__\n"
        "try: lookahead.cli.main(['generate', '--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--compare" in done.stdout
