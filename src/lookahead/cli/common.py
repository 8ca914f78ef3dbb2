"""Shared by all verbs: the host they run on, the model's interface, and error messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

import typer
from rich.console import Console
from typer.core import TyperGroup

from lookahead.config import LookaheadConfig
from lookahead.stats import Stats

FAILED, USAGE, DEVICE_LOST, INTERRUPTED = 1, 2, 70, 130
"""Exit codes. 70 is `EX_SOFTWARE` of sysexits.h: start the command again. 130 is what a shell reports for Ctrl-C."""


class Completion(Protocol):
    """The result of one request. `finish_reason` is eos, stop, length or interrupted."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    method: str
    config: LookaheadConfig
    seed: int


class Stream(Protocol):
    """An iterator over pieces of text. It has a `completion` once it is exhausted or closed."""

    @property
    def completion(self) -> Completion: ...

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None: ...


class Model(Protocol):
    """The part of `lookahead.load`'s result that the command line uses."""

    name: str
    dtype: Any
    default_config: LookaheadConfig

    @property
    def rounding(self) -> str | None: ...

    def stream(self, prompt: Any, **settings: Any) -> Stream: ...


def load_model(
    name: str | None,
    *,
    dtype: str,
    device: str,
    backend: str,
    log: Callable[[str], None],
    config: LookaheadConfig | None = None,
) -> Model:
    """Call `lookahead.load`, which imports torch and transformers."""
    import lookahead

    model: Any = lookahead.load(name, dtype=dtype, device=device, backend=backend, log=log, config=config)
    return model


@dataclass
class Host:
    """The environment of a verb: the model loader and the two consoles. Tests pass their own as typer's `obj`.

    Results go to `out`, everything else to `err`. `interactive` overrides the check whether stdin is a terminal.
    `arguments` are those of the command line, with which `--ranks` starts every rank.
    """

    load: Callable[..., Model] = load_model
    out: Console = field(default_factory=lambda: Console(highlight=False))
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    ask: Callable[[str], str] = input
    interactive: bool | None = None
    arguments: Sequence[str] = field(default_factory=lambda: sys.argv[1:])
    debug: bool = False

    @property
    def person(self) -> bool:
        """Whether stdin is interactive."""
        if self.interactive is None:
            return sys.stdin is not None and sys.stdin.isatty()
        return self.interactive

    def write(self, text: str) -> None:
        """Write text to stdout unchanged and flush it, without markup or wrapping."""
        self.out.file.write(text)
        self.out.file.flush()

    def say(self, message: str, style: str = "dim") -> None:
        """Write a line to stderr."""
        self.err.print(message, style=style, markup=False, emoji=False, soft_wrap=True)

    def fail(self, error: Exception | str) -> None:
        """Show an error as one line on stderr."""
        self.say(f"error: {' '.join(str(error).split()) or type(error).__name__}", style="red")


class Verbs(TyperGroup):
    """Runs a verb. A user error is shown as one line on stderr, with exit code 2, and a lost device with exit code
    70.

    typer itself exits quietly if stdout is a broken pipe.
    """

    def invoke(self, ctx: Any) -> Any:
        from lookahead.loading.embedded import ModelError

        host = ctx.ensure_object(Host)
        try:
            return super().invoke(ctx)
        except (ModelError, ValueError) as error:
            if host.debug:
                raise
            host.fail(error)
            raise typer.Exit(USAGE) from error
        except (typer.Exit, typer.Abort):  # RuntimeErrors, too
            raise
        except RuntimeError as error:
            if host.debug:
                raise
            from lookahead.backends.failures import DeviceError, brief, out_of_memory

            if isinstance(error, DeviceError):
                host.fail(error)
                raise typer.Exit(DEVICE_LOST) from error
            if not out_of_memory(error):
                raise
            host.fail(f"the device's memory is full: {brief(error)}; use a smaller model or --device cpu")
            raise typer.Exit(USAGE) from error
        except KeyboardInterrupt as stopped:
            host.say("interrupted")
            raise typer.Exit(INTERRUPTED) from stopped


def choice(option: str, value: str, known: Sequence[str]) -> str:
    """Return `value` if it is one of `known`; otherwise raise a ValueError that suggests the nearest and lists all."""
    if value in known:
        return value
    near = get_close_matches(value, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{option} does not know {value!r}: {hint}choose from {', '.join(known)}")
