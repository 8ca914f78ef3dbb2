"""`lookahead chat`: a conversation. The prompt of each turn is everything said so far."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from lookahead.cli.answer import answer, interrupted, legend, summary
from lookahead.cli.common import INTERRUPTED, Host, Model, choice
from lookahead.cli.settings import Settings, takes_settings
from lookahead.loading.embedded import ModelError
from lookahead.stats import Stats

COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "totals of all answers",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does",
}


@takes_settings
def chat(
    ctx: typer.Context,
    settings: Settings,
    system: Annotated[str | None, typer.Option("--system", help="A system message before the first turn.")] = None,
) -> None:
    """Talk with a model; /help lists the commands. From a pipe, every line is one turn."""
    host = ctx.ensure_object(Host)
    model = settings.load(host)
    talk = Conversation(host, model, settings.request(model), system)
    if host.person:
        host.say(f"{model.name}: /help lists the commands, Ctrl-D leaves")
        legend(host)
    for line in lines(host):
        if line == "/exit":
            break
        if re.fullmatch(r"/[a-z]+", line):
            talk.command(line)
        else:
            talk.turn(line)


class Conversation:
    """The messages so far, and totals over all answers, which survive a reset."""

    def __init__(self, host: Host, model: Model, request: dict[str, Any], system: str | None = None) -> None:
        self._host = host
        self._model = model
        self._request = request
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._totals = Stats()
        self._answers = 0

    def turn(self, text: str) -> None:
        """Answer one question. If a person types, an error or Ctrl-C ends this turn; otherwise it ends the command."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            completion = answer(self._host, self._model.stream(messages, **self._request))
        except (ModelError, ValueError) as error:
            if not self._host.person or self._host.debug:
                raise
            self._host.fail(error)
            return
        self._count(completion.stats)
        self._host.say(summary(completion.stats, completion.finish_reason))
        if completion.text:
            self._messages = [*messages, {"role": "assistant", "content": completion.text}]
        if interrupted(completion) and not self._host.person:
            raise typer.Exit(INTERRUPTED)

    def command(self, name: str) -> None:
        """Run a command such as /stats."""
        try:
            choice("chat", name, tuple(COMMANDS))
        except ValueError as error:
            self._host.fail(error)
            return
        if name == "/reset":
            self._messages = list(self._system)
            self._host.say("the conversation was reset")
        elif name == "/stats":
            noun = "answer" if self._answers == 1 else "answers"
            self._host.say(f"{self._answers} {noun}: {summary(self._totals)}")
        else:
            for command, meaning in COMMANDS.items():
                self._host.say(f"{command:<8}{meaning}")

    def _count(self, stats: Stats) -> None:
        self._answers += 1
        self._totals = Stats.total((self._totals, stats))


def lines(host: Host) -> Iterator[str]:
    """The lines typed or piped in, stripped, without blank ones."""
    for line in typed(host) if host.person else piped():
        if stripped := line.strip():
            yield stripped


def piped() -> Iterator[str]:
    return iter(sys.stdin.readline, "") if sys.stdin is not None else iter(())


def typed(host: Host) -> Iterator[str]:
    """Prompt for lines until Ctrl-D. Ctrl-C discards the line."""
    with contextlib.suppress(ImportError):  # not on Windows. Once imported, input() has editing and a history
        import readline  # noqa: F401
    while True:
        try:
            if host.out.is_terminal:
                yield host.ask("> ")
            else:  # stdout is not the terminal: it gets answers only
                host.err.file.write("> ")
                host.err.file.flush()
                yield host.ask("")
        except KeyboardInterrupt:
            host.say("\nCtrl-D or /exit leaves")
        except EOFError:
            host.say("")
            return
