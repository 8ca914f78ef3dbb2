"""What the verbs share: the host they run on, the model's shape as they see it, and how mistakes are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from typing import Any, Protocol

import typer
from rich.console import Console
from typer.core import TyperGroup

from lookahead.config import LookaheadConfig
from lookahead.stats import Stats

FAILED, USAGE, INTERRUPTED = 1, 2, 130  # exit codes; 130 is what a shell reports for Ctrl-C


class Completion(Protocol):
    """What a generation gave; `finish_reason` is eos, stop, length or interrupted."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    method: str
    config: LookaheadConfig
    seed: int


class Stream(Protocol):
    """An iterator of pieces of text. `completion` is there when it is exhausted or closed."""

    @property
    def completion(self) -> Completion: ...

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None: ...


class Model(Protocol):
    """What `lookahead.load` returns, as far as the command line uses it."""

    name: str
    dtype: Any
    default_config: LookaheadConfig

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
    """`lookahead.load`, which brings torch and transformers, imported only now."""
    import lookahead

    model: Any = lookahead.load(name, dtype=dtype, device=device, backend=backend, log=log, config=config)
    return model


@dataclass
class Host:
    """Where a verb runs: the model loader and the two consoles. Tests hand in their own as typer's `obj`.

    Results go to `out`, everything else to `err`. `interactive` is whether a person types; None asks stdin.
    `arguments` are the command line, for who has to run it again.
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
        if self.interactive is None:
            return sys.stdin is not None and sys.stdin.isatty()
        return self.interactive

    def write(self, text: str) -> None:
        """Text to stdout as it is: no markup, no wrapping, at once."""
        self.out.file.write(text)
        self.out.file.flush()

    def say(self, message: str, style: str = "dim") -> None:
        """A line to stderr."""
        self.err.print(message, style=style, markup=False, emoji=False, soft_wrap=True)

    def fail(self, error: Exception | str) -> None:
        """The one line that a mistake gets."""
        self.say(f"error: {' '.join(str(error).split()) or type(error).__name__}", style="red")


class Verbs(TyperGroup):
    """Runs a verb; what the user can mend is one line on stderr and exit code 2, never a traceback.

    A broken pipe ends the command quietly: that is typer's own doing.
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
        except RuntimeError as error:
            if host.debug or type(error).__name__ != "OutOfMemoryError":
                raise
            host.fail(f"the device's memory is full: {str(error).splitlines()[0]}; use a smaller model or --device cpu")
            raise typer.Exit(USAGE) from error
        except KeyboardInterrupt as stopped:
            host.say("interrupted")
            raise typer.Exit(INTERRUPTED) from stopped


def choice(option: str, value: str, known: Sequence[str]) -> str:
    """`value`, when it is one of `known`; else an error that names the nearest and all of them."""
    if value in known:
        return value
    near = get_close_matches(value, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{option} does not know {value!r}: {hint}choose from {', '.join(known)}")


def package_version(name: str) -> str | None:
    """The installed version of a distribution, found without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
